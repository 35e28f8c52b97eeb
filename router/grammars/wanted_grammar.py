"""The form that a request wants its answer to have, before it is translated for llguidance."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from .call_grammar import WantedCalls
from .lark_pieces import SPACES


class WantedGrammar(msgspec.Struct, frozen=True):
    """Travels to the process that translates it."""

    param: str  # the field that asks for it
    form: Literal["json", "regex", "choice", "grammar", "structural_tag", "any"]
    value: Any  # as the field has it
    spaces: str | None = SPACES  # between the tokens of JSON: a regular expression; None: there are none
    # Marks of what may come first, the first of them empty where it has begun, and what must stand behind both.
    thought: tuple[str, str, str] | None = None
    opening: str = ""  # of an answer that is not a call
    calls: WantedCalls | None = None  # that may or must be there, beside text or in its place
