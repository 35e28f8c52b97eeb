"""openai-agents, which asks `/v1/responses` by default."""

from __future__ import annotations

import asyncio

from agents import Agent, Model, ModelSettings, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner, function_tool
from demo import AGENT, ANSWER, BASE, FACT, JSON, KEY, QUESTION, RESULT, TOOL_ANSWER, TOOL_QUESTION, V1, Fact, same
from openai import AsyncOpenAI

GREEDY = ModelSettings(temperature=0)


def client() -> AsyncOpenAI:
    return AsyncOpenAI(base_url=V1, api_key=KEY, max_retries=0)


@function_tool(strict_mode=False)
def weather(country: str) -> str:
    """The weather in a country now."""
    return RESULT if country == "Peru" else "unknown"


def text() -> None:
    agent = Agent(name="a", model=OpenAIChatCompletionsModel(BASE, client()), model_settings=GREEDY)
    same(Runner.run_sync(agent, QUESTION).final_output, ANSWER)


def responses() -> None:
    agent = Agent(name="a", model=OpenAIResponsesModel(BASE, client()), model_settings=GREEDY)
    same(Runner.run_sync(agent, QUESTION).final_output, ANSWER)


def streamed(model: Model) -> str:
    async def run() -> str:
        running = Runner.run_streamed(Agent(name="a", model=model, model_settings=GREEDY), QUESTION)
        async for _ in running.stream_events():
            pass
        return str(running.final_output)

    return asyncio.run(run())


def stream() -> None:
    same(streamed(OpenAIChatCompletionsModel(BASE, client())), ANSWER)


def responses_streamed() -> None:
    same(streamed(OpenAIResponsesModel(BASE, client())), ANSWER)


def fact(model: Model) -> object:
    return Runner.run_sync(Agent(name="a", model=model, model_settings=GREEDY, output_type=Fact), QUESTION).final_output


def schema() -> None:
    same(fact(OpenAIChatCompletionsModel(JSON, client())), Fact(**FACT))


def responses_schema() -> None:
    same(fact(OpenAIResponsesModel(JSON, client())), Fact(**FACT))


def tools() -> None:
    agent = Agent(name="a", model=OpenAIChatCompletionsModel(AGENT, client()), model_settings=GREEDY, tools=[weather])
    same(Runner.run_sync(agent, TOOL_QUESTION).final_output, TOOL_ANSWER)


def responses_tools() -> None:
    unstored = ModelSettings(temperature=0, store=False)
    agent = Agent(name="a", model=OpenAIResponsesModel(AGENT, client()), model_settings=unstored, tools=[weather])
    same(Runner.run_sync(agent, TOOL_QUESTION).final_output, TOOL_ANSWER)


def stored() -> None:
    agent = Agent(name="a", model=OpenAIResponsesModel(AGENT, client()), model_settings=GREEDY, tools=[weather])
    ended = Runner.run_sync(agent, TOOL_QUESTION, auto_previous_response_id=True)
    same(ended.final_output, TOOL_ANSWER)
    called, last = (response.response_id or "" for response in ended.raw_responses)

    async def continued() -> str | None:
        return (await client().responses.retrieve(last)).previous_response_id

    same(asyncio.run(continued()), called)


CHECKS = (text, stream, tools, schema, responses, responses_streamed, responses_tools, responses_schema, stored)
