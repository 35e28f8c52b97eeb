"""langchain-openai."""

from __future__ import annotations

from typing import Any

from demo import (
    AGENT,
    ANSWER,
    ARGUMENTS,
    BASE,
    FACT,
    JSON,
    KEY,
    QUESTION,
    RESULT,
    SCHEMA,
    TOOL,
    TOOL_ANSWER,
    TOOL_QUESTION,
    V1,
    same,
)
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from openai import OpenAI

client = OpenAI(base_url=V1, api_key=KEY, max_retries=0)


def chat(model: str, **options: Any) -> ChatOpenAI:
    return ChatOpenAI(model=model, base_url=V1, api_key=KEY, temperature=0, max_retries=0, **options)


def text() -> None:
    same(chat(BASE).invoke(QUESTION).content, ANSWER)


def stream() -> None:
    same("".join(str(part.content) for part in chat(BASE).stream(QUESTION)), ANSWER)


def tools() -> None:
    bound = chat(AGENT).bind_tools([TOOL])
    requested = HumanMessage(TOOL_QUESTION)
    called: Any = bound.invoke([requested])
    (call,) = called.tool_calls
    same((call["name"], call["args"]), ("weather", ARGUMENTS))
    same(bound.invoke([requested, called, ToolMessage(RESULT, tool_call_id=call["id"])]).content, TOOL_ANSWER)


def schema() -> None:
    named = {"title": "fact", **SCHEMA}
    same(chat(JSON).with_structured_output(named, method="json_schema").invoke(QUESTION), FACT)


def responses() -> None:
    same(chat(BASE, use_responses_api=True).invoke(QUESTION).text, ANSWER)


def stored() -> None:
    asked = chat(AGENT, use_responses_api=True, use_previous_response_id=True).bind_tools([TOOL])
    question = HumanMessage(TOOL_QUESTION)
    called: Any = asked.invoke([question])
    (call,) = called.tool_calls
    last: Any = asked.invoke([question, called, ToolMessage(RESULT, tool_call_id=call["id"])])
    same(last.text, TOOL_ANSWER)
    continued = client.responses.retrieve(last.response_metadata["id"]).previous_response_id
    same(continued, called.response_metadata["id"])


def embeddings() -> None:
    found = OpenAIEmbeddings(model=BASE, base_url=V1, api_key=KEY, check_embedding_ctx_length=False)
    same(len(found.embed_documents([QUESTION, "hello"])), 2)


CHECKS = (text, stream, tools, schema, responses, stored, embeddings)
