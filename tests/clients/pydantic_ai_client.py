"""pydantic-ai: an agent that calls a tool, and one that answers by a schema."""

from __future__ import annotations

from demo import AGENT, ANSWER, BASE, FACT, JSON, KEY, QUESTION, RESULT, TOOL_ANSWER, TOOL_QUESTION, V1, same
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

provider = OpenAIProvider(base_url=V1, api_key=KEY)


class Fact(BaseModel):
    type: str
    query: str
    answer: str


def text() -> None:
    same(
        Agent(OpenAIChatModel(BASE, provider=provider)).run_sync(QUESTION, model_settings={"temperature": 0}).output,
        ANSWER,
    )


def tools() -> None:
    agent = Agent(OpenAIChatModel(AGENT, provider=provider))

    @agent.tool_plain
    def weather(country: str) -> str:
        """The weather in a country now."""
        return RESULT if country == "Peru" else "unknown"

    same(agent.run_sync(TOOL_QUESTION, model_settings={"temperature": 0}).output, TOOL_ANSWER)


def schema() -> None:
    agent = Agent(OpenAIChatModel(JSON, provider=provider), output_type=NativeOutput(Fact))
    same(agent.run_sync(QUESTION, model_settings={"temperature": 0}).output, Fact(**FACT))


def responses() -> None:
    same(
        Agent(OpenAIResponsesModel(BASE, provider=provider))
        .run_sync(QUESTION, model_settings={"temperature": 0})
        .output,
        ANSWER,
    )


CHECKS = (text, tools, schema, responses)
