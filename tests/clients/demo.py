"""The demo as its clients see it: its address, its models, a question of each kind and the right answer."""

from __future__ import annotations

import json
import os
from typing import Any

from pydantic import BaseModel

URL = os.environ["MOTET_URL"].rstrip("/")
V1 = f"{URL}/v1"
KEY = os.environ["MOTET_API_KEY"]
FOLDER = os.environ["MOTET_DEMO_BASE"]  # of the base's files
BASE, AGENT, JSON = "motet-demo", "agent", "json"
QUESTION, ANSWER = "What is the capital of Peru?", "The capital of Peru is Lima."
MESSAGES: list[Any] = [{"role": "user", "content": QUESTION}]
TOOL_QUESTION = "What is the weather in Peru?"
ARGUMENTS = {"country": "Peru"}
RESULT = json.dumps({"sky": "sunny"})
TOOL_ANSWER = "It is sunny in Peru."
WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {"country": {"type": "string"}},
    "required": ["country"],
}
TOOL: Any = {
    "type": "function",
    "function": {"name": "weather", "description": "The weather in a country now.", "parameters": WEATHER},
}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"type": {"type": "string"}, "query": {"type": "string"}, "answer": {"type": "string"}},
    "required": ["type", "query", "answer"],
    "additionalProperties": False,
}
FACT = {"type": "capital", "query": "Peru", "answer": "Lima"}


class Fact(BaseModel):
    """As `SCHEMA`."""

    type: str
    query: str
    answer: str


def same(found: object, right: object) -> None:
    if found != right:
        raise ValueError(f"{found!r} instead of {right!r}")
