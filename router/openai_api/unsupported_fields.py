"""Which fields of a request are refused, because an answer that ignores them would not be the one requested."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from types import MappingProxyType
from typing import Any, Final

from .errors import unsupported
from .request_schema import ChatRequest, GenerationFields, RefusedInCompletions, UnsupportedFields

# Values of these fields that are accepted, because they ask for what motet does anyway.
NEUTRAL: Final[Mapping[str, tuple[Any, ...]]] = MappingProxyType(
    {
        "tools": ([],),
        "tool_choice": ("none", "auto"),
        "parallel_tool_calls": (True,),
        "functions": ([],),
        "function_call": ("none", "auto"),
        "modalities": (["text"],),
        "documents": ([],),
        "suffix": ("",),
        "logits_processors": ([],),
        "early_stopping": (False, "never"),  # of beam search, which goes on until nothing better can come
        "spaces_between_special_tokens": (True,),
        "no_stop_trim": (False,),
        "separate_reasoning": (True,),
        "return_hidden_states": (False,),
        "detokenize": (True,),
        "vllm_xargs": ({},),
        "verbosity": ("medium",),
    }
)


@cache
def refused_fields(kind: type[GenerationFields]) -> tuple[str, ...]:
    """The fields of these requests of which only neutral values are accepted."""
    refused = set(UnsupportedFields.__struct_fields__)
    if issubclass(kind, RefusedInCompletions):
        refused |= RefusedInCompletions.__annotations__.keys()
    return tuple(field for field in kind.__struct_fields__ if field in refused)


def refuse_unsupported(request: GenerationFields) -> None:
    """Raises a 400 that names the first field with a value that is not supported."""
    for field in refused_fields(type(request)):
        value = getattr(request, field)
        # The type counts, because False == 0 in Python.
        if value is not None and not any(type(value) is type(one) and value == one for one in NEUTRAL.get(field, ())):
            raise unsupported(field, _advice(field))
    if isinstance(request, ChatRequest) and request.best_of is not None and request.best_of != (request.n or 1):
        raise unsupported("best_of", "a chat has none but one equal to n; leave it out.")


def _advice(field: str) -> str:
    accepted = NEUTRAL.get(field)
    if accepted is None:
        return "it is not supported here; leave it out."
    return f"of its values only {' or '.join(repr(value) for value in accepted)} is supported here, or leave it out."
