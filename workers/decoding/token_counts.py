"""Counts of each sequence's tokens, for penalties and rules that look back, kept by the worker that chooses tokens."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

import numpy as np

from ..plan import SampledToken, SamplePlan, SeenTokens, StepPlan, unpacked
from ..wire.messages import ThinkingBudget, Word

# Matches a sequence's output against bad words of several tokens.


class BadWords:
    """The bad words of one sequence."""

    def __init__(self, words: Iterable[Word], output: Sequence[int]) -> None:
        """`words`: with at least two tokens each. `output`: the sequence's generated tokens so far."""
        self._by_last: dict[int, list[Word]] = {}  # by the last token before the one that would complete it
        for word in words:
            self._by_last.setdefault(word[-2], []).append(word)
        max_prefix_len = max((len(word) - 1 for words in self._by_last.values() for word in words), default=0)
        self._recent = deque(output[max(len(output) - max_prefix_len, 0) :], maxlen=max_prefix_len)

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


# Whether a sequence thinks, and which token must come once it has thought enough.


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


class TokenCounts:
    """The distinct tokens of one sequence, as `kernels.sampling.Penalty` takes them.

    Each takes 8 bytes, and one that was added later some 100 more. A table over the vocabulary would be faster, but
    takes a megabyte for each sequence.
    """

    def __init__(self, seen: SeenTokens) -> None:
        prompt, output = (np.frombuffer(part, np.int32) for part in (seen.prompt, seen.output))
        used, counts = np.unique(output, return_counts=True)
        token_ids = np.union1d(prompt, used)
        filled = np.zeros(len(token_ids), np.int32)
        filled[np.searchsorted(token_ids, used)] = counts
        self.token_ids = array("i", token_ids.tobytes())
        self.counts = array("i", filled.tobytes())  # how often each is in the output
        self._num_sorted = len(token_ids)
        self._later: dict[int, int] = {}  # indices of tokens added later
        self.bad_words: BadWords | None = None  # None: the sequence has none of several tokens
        self.thoughts: Thoughts | None = None  # None: the reasoning has no budget

    @classmethod
    def of(cls, plan: SamplePlan) -> TokenCounts:
        """The counts of a sequence whose plan carries its tokens."""
        assert plan.seen is not None
        counts, rules = cls(plan.seen), plan.params.rules
        if rules is None or not rules.looks_back:
            return counts
        output = unpacked(plan.seen.output)
        if words := [word for word in rules.bad_words if len(word) > 1]:
            counts.bad_words = BadWords(words, output)
        if rules.thinking is not None:
            counts.thoughts = Thoughts(rules.thinking, output)
        return counts

    def add(self, token_id: int) -> None:
        """Counts one more output token."""
        place = bisect_left(self.token_ids, token_id, 0, self._num_sorted)
        if place == self._num_sorted or self.token_ids[place] != token_id:
            place = self._later.setdefault(token_id, len(self.token_ids))
        if place == len(self.token_ids):
            self.token_ids.append(token_id)
            self.counts.append(0)
        self.counts[place] += 1
        if self.bad_words is not None:
            self.bad_words.add(token_id)
        if self.thoughts is not None:
            self.thoughts.add(token_id)

    def check_integrity(self, prompt: Iterable[int], output: Iterable[int]) -> None:
        """Raises AssertionError unless these are the tokens that were counted."""
        assert len(self.token_ids) == len(self.counts) == len(set(self.token_ids)), "a token is there twice"
        assert set(self.token_ids) == {*prompt, *output}, "a token is missing, or was not counted"
        counted = {token: count for token, count in zip(self.token_ids, self.counts, strict=True) if count}
        assert counted == Counter(output), "a token of the output is miscounted"


class PenalisedSequences:
    """Token counts of all running sequences with penalties, from the tokens in plans."""

    def __init__(self) -> None:
        self._counts: dict[int, TokenCounts] = {}  # by sequence id

    def follow(self, plan: StepPlan, fed: Mapping[int, SampledToken | None] = MappingProxyType({})) -> None:
        """Adds the tokens that the plan carries or computes, and drops sequences that have stopped running.

        `fed`: by sequence id, the tokens that the step before has chosen.
        """
        running = set(plan.penalised)
        for sequence_id in self._counts.keys() - running:
            del self._counts[sequence_id]
        for part in plan.sequences if running else ():
            if part.sample is None or part.sequence_id not in running:
                continue
            if part.sample.seen is not None:
                self._counts[part.sequence_id] = TokenCounts.of(part.sample)
                continue
            token_ids = part.token_ids
            if part.is_fed:
                chosen = fed.get(part.sequence_id)  # empty if its mask was late
                token_ids = () if chosen is None else (chosen.token_id,)
            for token_id in token_ids:
                self._counts[part.sequence_id].add(token_id)

    def of(self, sequence_ids: Iterable[int]) -> list[TokenCounts | None]:
        """Each sequence's counts, tokens of the followed plan included; None: it has no penalties."""
        return [self._counts.get(sequence_id) for sequence_id in sequence_ids]

    def check_integrity(self, plan: StepPlan) -> None:
        """Raises AssertionError if counts are kept of a sequence that the followed plan does not name."""
        assert self._counts.keys() <= set(plan.penalised), "counts of a sequence that does not run are kept"
