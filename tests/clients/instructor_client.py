"""instructor, in its modes for tools and for schemas."""

from __future__ import annotations

from typing import Any

import instructor
from demo import AGENT, ARGUMENTS, FACT, JSON, KEY, QUESTION, TOOL_QUESTION, V1, same
from openai import OpenAI
from pydantic import BaseModel


class Fact(BaseModel):
    type: str
    query: str
    answer: str


class Weather(BaseModel):
    """The weather in a country now."""

    country: str


def ask(mode: instructor.Mode, model: str, question: str, kind: Any) -> Any:
    client: Any = instructor.from_openai(OpenAI(base_url=V1, api_key=KEY, max_retries=0), mode=mode)
    return client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": question}], response_model=kind, max_retries=0, temperature=0
    )


def schema() -> None:
    same(ask(instructor.Mode.JSON_SCHEMA, JSON, QUESTION, Fact).model_dump(), FACT)


def schema_streamed() -> None:
    client: Any = instructor.from_openai(OpenAI(base_url=V1, api_key=KEY), mode=instructor.Mode.JSON_SCHEMA)
    *_, last = client.chat.completions.create_partial(
        model=JSON, messages=[{"role": "user", "content": QUESTION}], response_model=Fact, max_retries=0, temperature=0
    )
    same(last.model_dump(), FACT)


def tools() -> None:
    """The mode names its tool, and requires it."""
    same(ask(instructor.Mode.TOOLS, AGENT, TOOL_QUESTION, Weather).model_dump(), ARGUMENTS)


CHECKS = (schema, schema_streamed, tools)
