"""LiteLLM, as an OpenAI-compatible provider and as vLLM's."""

from __future__ import annotations

import json
from typing import Any

import litellm
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
    SCHEMA,
    TOOL,
    TOOL_ANSWER,
    TOOL_QUESTION,
    V1,
    same,
)


def ask(model: str, **options: Any) -> Any:
    return litellm.completion(f"hosted_vllm/{model}", api_base=V1, api_key=KEY, temperature=0, num_retries=0, **options)


def text() -> None:
    same(ask(BASE, messages=MESSAGES).choices[0].message.content, ANSWER)


def stream() -> None:
    parts = ask(BASE, messages=MESSAGES, stream=True)
    same("".join(part.choices[0].delta.content or "" for part in parts), ANSWER)


def tools() -> None:
    found = ask(AGENT, messages=[{"role": "user", "content": TOOL_QUESTION}], tools=[TOOL]).choices[0].message
    (call,) = found.tool_calls
    same((call.function.name, json.loads(call.function.arguments)), ("weather", ARGUMENTS))


def schema() -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "fact", "schema": SCHEMA, "strict": True}}
    same(json.loads(ask(JSON, messages=MESSAGES, response_format=wanted).choices[0].message.content), FACT)


def responses() -> None:
    found: Any = litellm.responses(model=f"openai/{BASE}", input=QUESTION, api_base=V1, api_key=KEY, temperature=0)
    same(found.output[-1].content[0].text, ANSWER)


def stored() -> None:
    options: Any = {"model": f"openai/{AGENT}", "api_base": V1, "api_key": KEY, "temperature": 0}
    tools: Any = [{"type": "function", "strict": False, **TOOL["function"]}]
    first: Any = litellm.responses(input=TOOL_QUESTION, tools=tools, **options)
    (call,) = (item for item in first.output if item.type == "function_call")
    result: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": RESULT}]
    last: Any = litellm.responses(input=result, tools=tools, previous_response_id=first.id, **options)
    same(last.output[-1].content[0].text, TOOL_ANSWER)


def embeddings() -> None:
    found: Any = litellm.embedding(
        f"openai/{BASE}", input=[QUESTION, "hello"], api_base=V1, api_key=KEY, encoding_format="float"
    )
    same(len(found.data), 2)


CHECKS = (text, stream, tools, schema, responses, stored, embeddings)
