"""Names that match a module's name, or its last dotted parts, found without looking at each of them."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from typing import Final

_PLAIN: Final = re.compile(r"(?:[A-Za-z0-9_.-]|\\\.)+")
_TOKEN: Final = re.compile(r"\\\.|.")
_ANY: Final = "."  # matches any character, as in a regular expression; names mean dots by it


def suffixes(key: str) -> Iterator[str]:
    """The key, and its last dotted parts."""
    yield key
    at = key.find(".")
    while at >= 0:
        yield key[at + 1 :]
        at = key.find(".", at + 1)


def named_in(keys: Collection[str], names: frozenset[str]) -> list[str]:
    """The keys that have one of the names, or end with it after a dot."""
    ends = frozenset(map(_end, names))  # few keys have one of these
    return [key for key in keys if _end(key) in ends and any(name in names for name in suffixes(key))]


def names_found(keys: Collection[str], names: frozenset[str]) -> frozenset[str]:
    """The names that a key has, or ends with after a dot."""
    return frozenset(name for key in named_in(keys, names) for name in suffixes(key) if name in names)


def _end(key: str) -> str:
    return key[key.rfind(".") + 1 :]


class PlainNames:
    r"""Finds the first of some names that matches a key as the regular expression `(.*\.)?(name)$` does.

    Names of one length with their dots at the same places differ only in text, so that a dictionary has them.
    """

    def __init__(self, names: Sequence[str]) -> None:
        """Each is plain."""
        # By length, then by the places where any character matches: indices by text.
        self._forms: dict[int, dict[tuple[int, ...], dict[str, int]]] = {}
        for index, name in enumerate(names):
            tokens = _TOKEN.findall(name)
            places = tuple(place for place, token in enumerate(tokens) if token == _ANY)
            text = "".join(token[-1] for token in tokens)
            self._forms.setdefault(len(text), {}).setdefault(places, {}).setdefault(text, index)

    @staticmethod
    def is_plain(name: str) -> bool:
        """Whether dots are all that it has of a regular expression."""
        return _PLAIN.fullmatch(name) is not None

    def first(self, key: str) -> int | None:
        """The index of the first name that matches; None: no name does. `key` has no line breaks."""
        return min(self._matches(key), default=None)

    def _matches(self, key: str) -> Iterator[int]:
        for part in suffixes(key):
            for places, indices in self._forms.get(len(part), {}).items():
                text = part
                for place in places:
                    if text[place] != _ANY:
                        text = f"{text[:place]}{_ANY}{text[place + 1 :]}"
                if text in indices:
                    yield indices[text]
