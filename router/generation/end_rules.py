"""How a choice's text ends, and whether the end is shown."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class EndRules:
    min_tokens: int = 0  # no stop string ends the text with one of them
    stop_token_ids: frozenset[int] = frozenset()  # the one that stops the choice is its `stop_reason`
    shows_stop: bool = False  # the stop string or token is part of the text
    shows_special_tokens: bool = False


PLAIN_ENDS: Final = EndRules()
