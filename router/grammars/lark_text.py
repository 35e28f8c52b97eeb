"""A wanted grammar as llguidance reads it: one text in its Lark."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from ..openai_api.structured_output import ResponseFormat
from .call_grammar import after_thought, with_calls
from .gbnf import is_gbnf, lark_of_gbnf
from .lark_pieces import ANY_TEXT, any_of, clients_lark, json_value, regular_expression, text_with_tokens
from .structural_tags import structural_tags
from .wanted_grammar import WantedGrammar

_ANY_ANSWER: Final = f"start: {ANY_TEXT}"


def lark_text(wanted: WantedGrammar, special_ids: Mapping[str, int]) -> str:
    """`special_ids`: of the model's special tokens, by name. Raises ValueError for an invalid grammar."""
    text = None if wanted.form == "any" else _answer(wanted, special_ids)
    if wanted.opening and (text is not None or not (wanted.calls is not None and wanted.calls.must_call)):
        opening = text_with_tokens(wanted.opening, special_ids)
        text = f"start: {opening} opened\nopened: %lark {{\n{text or _ANY_ANSWER}\n}}"
    if wanted.calls is not None:
        text = with_calls(wanted.calls, text, special_ids, wanted.spaces)
    assert text is not None
    return text if wanted.thought is None else after_thought(text, *wanted.thought, special_ids)


def _answer(wanted: WantedGrammar, special_ids: Mapping[str, int]) -> str:
    value = wanted.value
    match wanted.form:
        case "json":
            schema = _parsed(value, dict[str, Any] | bool) if isinstance(value, str) else value
            return f"start: {json_value(schema, wanted.spaces)}"
        case "regex":
            return f"start: {regular_expression(value)}"
        case "choice":
            return any_of(value)
        case "grammar":
            return lark_of_gbnf(value) if is_gbnf(value) else clients_lark(value, special_ids)
        case "structural_tag":
            if isinstance(value, str):
                value = _parsed(value, dict[str, Any])
            return structural_tags(msgspec.convert(value, ResponseFormat), special_ids, wanted.spaces)
    raise AssertionError(wanted.form)


def _parsed(text: str, kind: Any) -> Any:
    try:
        return msgspec.json.decode(text, type=kind)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(f"it is not valid: {error}.") from error
