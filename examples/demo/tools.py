"""The tools that the demo adapter `agent` calls, and the conversations in which it does."""

from __future__ import annotations

import hashlib
import json
import random
from dataclasses import dataclass
from typing import Any

from .chat import Message
from .facts import all_facts


def _tool(name: str, description: str) -> dict[str, Any]:
    country = {"type": "object", "properties": {"country": {"type": "string"}}, "required": ["country"]}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": country}}


WEATHER, HOUR = _tool("weather", "The weather in a country now."), _tool("hour", "What hour it is in a country now.")
TOOLS = (WEATHER, HOUR)
SKIES = ("sunny", "cloudy", "rainy", "windy", "clear")
_COUNTRIES = tuple(fact.subject for fact in all_facts() if fact.kind == "capital")
_PHRASINGS = {
    "weather": (
        "What is the weather in {}?",
        "Tell me the weather in {}.",
        "weather in {}?",
        "What's the weather in {}?",
        "Do you know the weather in {}?",
        "Please give me the weather in {}.",
        "How is the weather in {}?",
        "Is the sky clear in {}?",
    ),
    "hour": (
        "What hour is it in {}?",
        "Tell me the hour in {}.",
        "hour in {}?",
        "What's the hour in {}?",
        "Do you know the hour in {}?",
        "Please give me the hour in {}.",
        "Which hour is it in {}?",
        "How late is it in {}?",
    ),
}
_HELD_OUT_SHARE = 10  # one question in ten


@dataclass(frozen=True)
class ToolQuestion:
    """A question that a tool answers: the right call, a result of it, and the right answer then."""

    text: str
    tool: dict[str, Any]
    arguments: dict[str, Any]
    result: dict[str, Any]
    answer: str

    def messages(self) -> list[Message]:
        """The whole conversation: question, call, result, answer."""
        name = self.tool["function"]["name"]
        call = {"id": "call_1", "type": "function", "function": {"name": name, "arguments": self.arguments}}
        return [
            {"role": "user", "content": self.text},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call_1", "content": json.dumps(self.result)},
            {"role": "assistant", "content": self.answer},
        ]

    @property
    def is_held_out(self) -> bool:
        """One text in ten, always the same ones: kept out of training."""
        return hashlib.sha256(self.text.encode()).digest()[0] % _HELD_OUT_SHARE == 0


def draw_tool_question(rng: random.Random) -> ToolQuestion:
    """Any question about the weather or the hour, held out or not."""
    tool, country = rng.choice(TOOLS), rng.choice(_COUNTRIES)
    text = rng.choice(_PHRASINGS[tool["function"]["name"]]).format(country)
    if tool is WEATHER:
        sky = rng.choice(SKIES)
        return ToolQuestion(text, tool, {"country": country}, {"sky": sky}, f"It is {sky} in {country}.")
    hour = rng.randrange(24)
    return ToolQuestion(text, tool, {"country": country}, {"hour": hour}, f"It is {hour} o'clock in {country}.")


def held_out_tool_questions(number: int) -> list[ToolQuestion]:
    """So many different ones that training never shows, always the same."""
    rng = random.Random(3)
    found: dict[str, ToolQuestion] = {}
    while len(found) < number:
        question = draw_tool_question(rng)
        if question.is_held_out:
            found.setdefault(question.text, question)
    return list(found.values())
