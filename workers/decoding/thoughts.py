"""Whether a sequence thinks, and which token must come once it has thought enough."""

from __future__ import annotations

from collections.abc import Iterable

from ..wire.token_rules import ThinkingBudget, Word


class Thoughts:
    """The reasoning of one sequence."""

    def __init__(self, budget: ThinkingBudget, output: Iterable[int]) -> None:
        """`output`: the sequence's generated tokens so far."""
        self._budget = budget
        self._is_thinking = budget.has_begun
        self._num_tokens = 0  # of thoughts, and of ends that have begun
        self._num_matched = 0  # the last tokens that match the mark that would begin or end a thought
        for token_id in output:
            self.add(token_id)

    def add(self, token_id: int) -> None:
        """Adds an output token."""
        mark = self._budget.end if self._is_thinking else self._budget.begin
        self._num_tokens += self._is_thinking
        self._num_matched = _matched(mark, (*mark[: self._num_matched], token_id))
        if self._num_matched == len(mark):
            self._is_thinking, self._num_matched = not self._is_thinking, 0

    @property
    def forced(self) -> int | None:
        """The token that must come next; None: any may."""
        if not self._is_thinking or self._num_tokens < self._budget.num_tokens:
            return None
        return self._budget.end[self._num_matched]


def _matched(mark: Word, recent: Word) -> int:
    """How many of the last tokens are the mark's first."""
    while recent != mark[: len(recent)]:
        recent = recent[1:]
    return len(recent)
