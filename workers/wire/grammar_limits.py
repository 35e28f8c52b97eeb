"""What llguidance may take for one grammar: a router tries it within the same as a gang compiles it."""

from __future__ import annotations

from typing import Final

from llguidance import LLParserLimits

GRAMMAR_LIMITS: Final = LLParserLimits(  # the library's own, but for memory, and without the grammar in messages
    max_lexer_states=20_000, verbose_errors=False
)
