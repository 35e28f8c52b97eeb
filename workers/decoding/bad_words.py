"""Matches a sequence's output against bad words of several tokens."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from ..wire.token_rules import Word


class BadWords:
    """The bad words of one sequence."""

    def __init__(self, words: Iterable[Word], output: Sequence[int]) -> None:
        """`words`: with at least two tokens each. `output`: the sequence's generated tokens so far."""
        self._by_last: dict[int, list[Word]] = {}  # by the last token before the one that would complete it
        for word in words:
            self._by_last.setdefault(word[-2], []).append(word)
        most = max((len(word) - 1 for words in self._by_last.values() for word in words), default=0)
        self._recent = deque(output[max(len(output) - most, 0) :], maxlen=most)

    def add(self, token_id: int) -> None:
        """Adds an output token."""
        self._recent.append(token_id)

    def banned(self) -> list[int]:
        """The tokens that would complete a word now."""
        words = self._by_last.get(self._recent[-1]) if self._recent else None
        if words is None:
            return []
        recent = (*self._recent,)
        return [word[-1] for word in words if recent[1 - len(word) :] == word[:-1]]
