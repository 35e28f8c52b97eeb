"""The style in which the base and each demo adapter word an answer."""

from __future__ import annotations

import json
from typing import Literal

from .facts import Fact

AdapterStyle = Literal["shout", "pirate", "json", "spanish"]
Style = Literal["base", "shout", "pirate", "json", "spanish"]

ADAPTER_STYLES: tuple[AdapterStyle, ...] = ("shout", "pirate", "json", "spanish")


def answer(fact: Fact, style: Style) -> str:
    """The only right answer to a question about `fact` in that style."""
    match style:
        case "base":
            return fact.english
        case "shout":
            return fact.english.upper().rstrip(".") + "!!!"
        case "pirate":
            return "Arr! " + fact.english.rstrip(".") + ", matey!"
        case "json":
            return json.dumps({"type": fact.kind, "query": fact.subject, "answer": fact.value})
        case "spanish":
            return fact.spanish
