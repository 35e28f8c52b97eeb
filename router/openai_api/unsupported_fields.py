"""Which fields of a request are refused, because an answer that ignores them would not be the one asked for."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from .errors import unsupported
from .request_schema import ChatRequest, GenerationFields, UnsupportedFields

# Values of these fields that are accepted, because they ask for what motet does anyway.
NEUTRAL: Final[Mapping[str, tuple[Any, ...]]] = MappingProxyType(
    {
        "tools": ([],),
        "tool_choice": ("none", "auto"),  # "auto" without tools chooses none
        "functions": ([],),
        "function_call": ("none", "auto"),
        "response_format": ({"type": "text"},),
        "modalities": (["text"],),
        "documents": ([],),
        "suffix": ("",),
        "logits_processors": ([],),
        "early_stopping": (False, "never"),  # of beam search, which goes on until nothing better can come
        "min_tokens": (0,),
        "bad_words": ([],),
        "skip_special_tokens": (True,),
        "include_stop_str_in_output": (False,),
        "return_tokens_as_token_ids": (False,),
    }
)


def refuse_unsupported(request: GenerationFields) -> None:
    """Raises a 400 that names the first field with a value that is not supported."""
    no_tool_is_called = request.tool_choice == "none"
    for field in UnsupportedFields.__struct_fields__:
        value = getattr(request, field)
        if value is None or (field == "tools" and no_tool_is_called):
            continue
        # The type counts, because False == 0 in Python.
        if not any(type(value) is type(neutral) and value == neutral for neutral in NEUTRAL.get(field, ())):
            raise unsupported(field, _advice(field))
    if isinstance(request, ChatRequest) and request.best_of is not None and request.best_of != (request.n or 1):
        raise unsupported("best_of", "a chat has none but one equal to n; leave it out.")


def _advice(field: str) -> str:
    accepted = NEUTRAL.get(field)
    if field == "tools":
        return "tools are not called here; leave it out, or send tool_choice 'none'."
    if accepted is None:
        return "it is not supported here; leave it out."
    return f"of its values only {' or '.join(repr(value) for value in accepted)} is supported here, or leave it out."
