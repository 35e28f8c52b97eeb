"""pydantic-ai: an agent that calls a tool, and one that answers by a schema."""

from __future__ import annotations

import asyncio
from typing import Any

from demo import AGENT, ANSWER, BASE, FACT, JSON, KEY, QUESTION, RESULT, TOOL_ANSWER, TOOL_QUESTION, V1, Fact, same
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.messages import ModelResponse
from pydantic_ai.models import Model
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel, OpenAIResponsesModelSettings
from pydantic_ai.providers.openai import OpenAIProvider

provider = OpenAIProvider(base_url=V1, api_key=KEY)


def agent(kind: type[Model], name: str, **options: Any) -> Agent[None, Any]:
    model: Any = kind
    return Agent(model(name, provider=provider), model_settings={"temperature": 0}, **options)


def weather(country: str) -> str:
    """The weather in a country now."""
    return RESULT if country == "Peru" else "unknown"


def text() -> None:
    same(agent(OpenAIChatModel, BASE).run_sync(QUESTION).output, ANSWER)


def stream() -> None:
    same(streamed(agent(OpenAIChatModel, BASE)), ANSWER)


def streamed(asked: Agent[None, Any]) -> str:
    async def run() -> str:
        async with asked.run_stream(QUESTION) as running:
            return "".join([piece async for piece in running.stream_text(delta=True)])

    return asyncio.run(run())


def tools() -> None:
    same(agent(OpenAIChatModel, AGENT, tools=[weather]).run_sync(TOOL_QUESTION).output, TOOL_ANSWER)


def schema() -> None:
    same(agent(OpenAIChatModel, JSON, output_type=NativeOutput(Fact)).run_sync(QUESTION).output, Fact(**FACT))


def responses() -> None:
    same(agent(OpenAIResponsesModel, BASE).run_sync(QUESTION).output, ANSWER)


def responses_streamed() -> None:
    same(streamed(agent(OpenAIResponsesModel, BASE)), ANSWER)


def responses_tools() -> None:
    asked = agent(OpenAIResponsesModel, AGENT, tools=[weather])
    same(
        asked.run_sync(TOOL_QUESTION, model_settings=OpenAIResponsesModelSettings(openai_store=False)).output,
        TOOL_ANSWER,
    )


def responses_schema() -> None:
    same(agent(OpenAIResponsesModel, JSON, output_type=NativeOutput(Fact)).run_sync(QUESTION).output, Fact(**FACT))


def stored() -> None:
    settings = OpenAIResponsesModelSettings(openai_previous_response_id="auto")
    ended = agent(OpenAIResponsesModel, AGENT, tools=[weather]).run_sync(TOOL_QUESTION, model_settings=settings)
    same(ended.output, TOOL_ANSWER)
    called, last = (one.provider_response_id for one in ended.all_messages() if isinstance(one, ModelResponse))
    response = asyncio.run(provider.client.responses.retrieve(last or ""))
    same(response.previous_response_id, called)


CHECKS = (text, stream, tools, schema, responses, responses_streamed, responses_tools, responses_schema, stored)
