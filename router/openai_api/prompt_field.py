"""The field `prompt` of a completion request: a text, a list of texts, of token ids, or of lists of token ids."""

from __future__ import annotations

from typing import TypeVar

from .errors import invalid_value

T = TypeVar("T")


def same_kind(value: object, kind: type[T], position: int) -> T:
    """The value. Raises a 400 unless it is of the kind that the first one in the list is."""
    if not isinstance(value, kind):
        raise invalid_value(f"prompt[{position}]", "texts, token ids and lists of token ids cannot be mixed.")
    return value
