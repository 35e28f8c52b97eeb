"""Anthropic's client, by `/v1/messages`."""

from __future__ import annotations

import json
from typing import Any

from anthropic import Anthropic
from demo import (
    AGENT,
    ANSWER,
    ARGUMENTS,
    BASE,
    FACT,
    JSON,
    KEY,
    MESSAGES,
    RESULT,
    SCHEMA,
    TOOL_ANSWER,
    TOOL_QUESTION,
    URL,
    WEATHER,
    same,
)

client = Anthropic(base_url=URL, api_key=KEY, max_retries=0)
GREEDY = {"temperature": 0}  # an argument of older clients
TOOL: Any = {"name": "weather", "description": "The weather in a country now.", "input_schema": WEATHER}


def text() -> None:
    found: Any = client.messages.create(model=BASE, messages=MESSAGES, max_tokens=50, extra_body=GREEDY)
    same(found.content[0].text, ANSWER)


def stream() -> None:
    with client.messages.stream(model=BASE, messages=MESSAGES, max_tokens=50, extra_body=GREEDY) as events:
        same("".join(events.text_stream), ANSWER)


def tools() -> None:
    messages: list[Any] = [{"role": "user", "content": TOOL_QUESTION}]
    found: Any = client.messages.create(model=AGENT, messages=messages, tools=[TOOL], max_tokens=100, extra_body=GREEDY)
    (call,) = (block for block in found.content if block.type == "tool_use")
    same((call.name, call.input, found.stop_reason), ("weather", ARGUMENTS, "tool_use"))
    messages += [
        {"role": "assistant", "content": found.content},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": RESULT}]},
    ]
    last: Any = client.messages.create(model=AGENT, messages=messages, tools=[TOOL], max_tokens=50, extra_body=GREEDY)
    same(last.content[0].text, TOOL_ANSWER)


def tools_streamed() -> None:
    asked: Any = {"model": AGENT, "messages": [{"role": "user", "content": TOOL_QUESTION}], "tools": [TOOL]}
    with client.messages.stream(**asked, max_tokens=100, extra_body=GREEDY) as events:
        (call,) = (block for block in events.get_final_message().content if block.type == "tool_use")
    same((call.name, call.input), ("weather", ARGUMENTS))


def schema() -> None:
    config: Any = {"format": {"type": "json_schema", "schema": SCHEMA}}
    found: Any = client.messages.create(
        model=JSON, messages=MESSAGES, max_tokens=80, output_config=config, extra_body=GREEDY
    )
    same(json.loads(found.content[0].text), FACT)


CHECKS = (text, stream, tools, tools_streamed, schema)
