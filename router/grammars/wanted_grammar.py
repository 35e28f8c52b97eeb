"""The form that a request wants its answer to have, before it is translated for llguidance."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from .lark_pieces import SPACES


class WantedGrammar(msgspec.Struct, frozen=True):
    """Travels to the process that translates it."""

    param: str  # the field that asks for it
    form: Literal["json", "regex", "choice", "grammar", "structural_tag"]
    value: Any  # as the field has it
    spaces: str | None = SPACES  # between the tokens of JSON: a regular expression; None: there are none
    reasoning_end: str | None = None  # the grammar begins behind this text, or special token; None: with the answer
