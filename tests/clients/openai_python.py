"""The official client, also by its helpers that parse."""

from __future__ import annotations

import json
from typing import Any

from demo import (
    AGENT,
    ANSWER,
    ARGUMENTS,
    BASE,
    FACT,
    JSON,
    KEY,
    MESSAGES,
    QUESTION,
    RESULT,
    TOOL,
    TOOL_ANSWER,
    TOOL_QUESTION,
    V1,
    WEATHER,
    Fact,
    same,
)
from openai import NotFoundError, OpenAI

client = OpenAI(base_url=V1, api_key=KEY, max_retries=0)


def text() -> None:
    answer = client.chat.completions.create(model=BASE, messages=MESSAGES, temperature=0)
    same(answer.choices[0].message.content, ANSWER)


def stream() -> None:
    options: Any = {"include_usage": True}
    chunks = list(
        client.chat.completions.create(
            model=BASE, messages=MESSAGES, temperature=0, stream=True, stream_options=options
        )
    )
    same("".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices), ANSWER)
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens > 0


def tools() -> None:
    messages: list[Any] = [{"role": "user", "content": TOOL_QUESTION}]
    first = client.chat.completions.create(model=AGENT, messages=messages, tools=[TOOL], temperature=0).choices[0]
    same(first.finish_reason, "tool_calls")
    (call,) = first.message.tool_calls or ()
    same((call.function.name, json.loads(call.function.arguments)), ("weather", ARGUMENTS))
    messages += [first.message, {"role": "tool", "tool_call_id": call.id, "content": RESULT}]
    last = client.chat.completions.create(model=AGENT, messages=messages, tools=[TOOL], temperature=0).choices[0]
    same((last.finish_reason, last.message.content), ("stop", TOOL_ANSWER))


def tools_streamed() -> None:
    messages: list[Any] = [{"role": "user", "content": TOOL_QUESTION}]
    with client.chat.completions.stream(model=AGENT, messages=messages, tools=[TOOL], temperature=0) as events:
        for _ in events:
            pass
        (call,) = events.get_final_completion().choices[0].message.tool_calls or ()
    same((call.function.name, json.loads(call.function.arguments)), ("weather", ARGUMENTS))


def tool_required() -> None:
    """By the base, which was never taught to call."""
    found = client.chat.completions.create(
        model=BASE, messages=MESSAGES, tools=[TOOL], tool_choice="required", max_tokens=100
    ).choices[0]
    for call in found.message.tool_calls or ():
        if found.finish_reason == "tool_calls":
            assert "country" in json.loads(call.function.arguments)


def schema() -> None:
    answer = client.chat.completions.parse(model=JSON, messages=MESSAGES, response_format=Fact, temperature=0)
    same(answer.choices[0].message.parsed, Fact(**FACT))


def schema_streamed() -> None:
    with client.chat.completions.stream(model=JSON, messages=MESSAGES, response_format=Fact, temperature=0) as events:
        for _ in events:
            pass
        same(events.get_final_completion().choices[0].message.parsed, Fact(**FACT))


def responses() -> None:
    same(client.responses.create(model=BASE, input=QUESTION, temperature=0).output_text, ANSWER)


def responses_streamed() -> None:
    with client.responses.stream(model=BASE, input=QUESTION, temperature=0) as events:
        same("".join(event.delta for event in events if event.type == "response.output_text.delta"), ANSWER)
        same(events.get_final_response().output_text, ANSWER)


RESPONSE_TOOL: Any = {
    "type": "function",
    "name": "weather",
    "description": "The weather in a country now.",
    "parameters": WEATHER,
    "strict": False,
}


def responses_tools() -> None:
    tools = [RESPONSE_TOOL]
    found = client.responses.create(model=AGENT, input=TOOL_QUESTION, tools=tools, temperature=0, store=False)
    (call,) = (item for item in found.output if item.type == "function_call")
    same((call.name, json.loads(call.arguments)), ("weather", ARGUMENTS))
    items: Any = [
        {"role": "user", "content": TOOL_QUESTION},
        *found.output,
        {"type": "function_call_output", "call_id": call.call_id, "output": RESULT},
    ]
    last = client.responses.create(model=AGENT, input=items, tools=tools, temperature=0, store=False)
    same(last.output_text, TOOL_ANSWER)


def responses_schema() -> None:
    found = client.responses.parse(model=JSON, input=QUESTION, text_format=Fact, temperature=0)
    same(found.output_parsed, Fact(**FACT))


def stored() -> None:
    first = client.responses.create(model=AGENT, input=TOOL_QUESTION, tools=[RESPONSE_TOOL], temperature=0)
    (call,) = (item for item in client.responses.retrieve(first.id).output if item.type == "function_call")
    result: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": RESULT}]
    last = client.responses.create(
        model=AGENT, input=result, tools=[RESPONSE_TOOL], temperature=0, previous_response_id=first.id
    )
    same(last.output_text, TOOL_ANSWER)
    kinds = ["message", "function_call", "function_call_output"]
    same([item.type for item in client.responses.input_items.list(last.id, order="asc", limit=2)], kinds)
    for response in (first, last):
        client.responses.delete(response.id)
    try:
        client.responses.retrieve(last.id)
    except NotFoundError:
        return
    raise ValueError("a deleted response was found")


def embeddings() -> None:
    found = client.embeddings.create(model=BASE, input=[QUESTION, "hello"])
    same(len(found.data), 2)
    assert abs(sum(x * x for x in found.data[0].embedding) - 1) < 1e-3


def batches() -> None:
    line = {
        "custom_id": "one",
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {"model": BASE, "messages": MESSAGES, "temperature": 0},
    }
    file = client.files.create(file=("work.jsonl", json.dumps(line).encode() + b"\n"), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
    import time

    until = time.monotonic() + 60
    while batch.status not in ("completed", "failed", "expired", "cancelled") and time.monotonic() < until:
        time.sleep(0.2)
        batch = client.batches.retrieve(batch.id)
    same(batch.status, "completed")
    answer = json.loads(client.files.content(batch.output_file_id or "").text)
    same(answer["response"]["body"]["choices"][0]["message"]["content"], ANSWER)


CHECKS = (
    text,
    stream,
    tools,
    tools_streamed,
    tool_required,
    schema,
    schema_streamed,
    responses,
    responses_streamed,
    responses_tools,
    responses_schema,
    stored,
    embeddings,
    batches,
)
