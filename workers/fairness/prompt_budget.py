"""How much of a step prompts take, how they share it, and which sequences go first: pure policies."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from ..wire.page_keys import PageKey
from .tenant_counters import TenantCounter

# Whether a waiting sequence starts before older ones of its tenant, since its prefix is in the pool: pure policies.

_LEAST_PASSED = 1
_PART_PASSED = 0.25
_LEAST_GAIN = 0.5  # of a sequence's tokens


class PrefixHere(NamedTuple):
    """What the pool has of a waiting sequence now, and may not have when its turn comes."""

    num_tokens: int  # of the sequence
    num_found: int  # its first tokens, whose KV is in the pool
    last_key: PageKey | None  # of the last page of these


def most_passed_over(num_before: int) -> int:
    """How many newer sequences of its tenant may start before a sequence that arrives behind `num_before`."""
    return _LEAST_PASSED + int(_PART_PASSED * num_before)


def to_promote(prefixes: Sequence[PrefixHere]) -> int | None:
    """Index of the sequence that should start before the first one; None: the first one should start.

    Only if that saves half of its tokens more than the first one would. Of several it is one of the prefix that the
    fewest of them share: once they have started, its pages can be evicted without loss.
    """
    first = prefixes[0]
    worth = [
        index
        for index, each in enumerate(prefixes)
        if each.num_found - first.num_found >= _LEAST_GAIN * each.num_tokens
    ]
    num_sharing = Counter([prefixes[index].last_key for index in worth])
    return min(worth, key=lambda index: num_sharing[prefixes[index].last_key], default=None)


# Which sequence is preempted, and for which: pure policies.

# Whether it is background work, its tenant's counter, its position in its tenant's order. The least goes first.
Rank = tuple[bool, float, int]


def may_grow_over(last: Rank, needy: Rank) -> bool:
    """Whether the last running sequence by rank is preempted for a running one that needs pages.

    Background work is preempted first, then sequences of the tenant that is furthest ahead, then the newest. Ranks are
    one order, so the first sequence is never preempted, and all are served in the end.
    """
    return last > needy


def should_preempt(running: Rank, waiting: Rank, slack: float) -> bool:
    """Whether a running sequence is preempted for one that waits.

    Only if the waiting one's tenant is behind by more than `slack`, or the running one is background work: otherwise
    the waiting one, of the same or an about equal tenant, waits until another sequence ends. `slack` is what several
    steps of the waiting tenant's own work add to its counter, so two tenants change places rarely, whatever their
    weights.
    """
    return (running[0], running[1] - slack) > waiting[:2]


# How many prompts the tenants have that decode: steps may take longer while each of these has a burst of its own.

_MAX_STRETCH = 5  # times the token interval
_MOST_COUNTED = 5  # prompts of a tenant


class PromptBursts:
    """Counts of each tenant's prompts and decodes. A change takes constant time."""

    def __init__(self) -> None:
        self._counts: dict[TenantCounter, list[int]] = {}  # sequences that decode, and prompts that wait or run
        # Tenants that decode, by their number of prompts; in the last place those that have as many or more.
        self._tenants = [0] * (_MOST_COUNTED + 1)

    def change(self, counter: TenantCounter, num_prompts: int, num_decodes: int = 0) -> None:
        """Adds to a tenant's numbers of prompts to be computed, and of sequences that decode; may be negative."""
        if counter.is_background:
            return
        counts = self._counts.setdefault(counter, [0, 0])
        if counts[0]:
            self._tenants[min(counts[1], _MOST_COUNTED)] -= 1
        counts[0] += num_decodes
        counts[1] += num_prompts
        if counts[0]:
            self._tenants[min(counts[1], _MOST_COUNTED)] += 1
        elif not counts[1]:
            del self._counts[counter]

    @property
    def stretch(self) -> int:
        """Times the token interval that a step may take while prompts burst in; at least 1.

        Where each tenant whose sequences decode has several prompts, they all gain more by an early first token than
        they lose by a late next one. A tenant whose answers decode without that waits for no other's burst, and a
        single long prompt stretches nothing. Background work counts for nothing.
        """
        for number, num_tenants in enumerate(self._tenants):
            if num_tenants:
                return min(_MAX_STRETCH, max(1, number))
        return _MAX_STRETCH

    def num_coming(self) -> int:
        """How many more sequences decode once these bursts are computed. Takes time for each tenant.

        Each tenant counts with as many prompts as the one with the fewest: a longer burst of another makes no step
        longer for that one.
        """
        bursts = [num_prompts for num_decodes, num_prompts in self._counts.values() if num_decodes]
        return len(bursts) * min(bursts, default=0)

    def check_integrity(self, counts: Mapping[TenantCounter, tuple[int, int]]) -> None:
        """Raises AssertionError if a tenant is miscounted. `counts`: decodes and prompts of each."""
        foreground = {counter: [*each] for counter, each in counts.items() if not counter.is_background}
        assert self._counts == foreground, "a tenant's prompts or decodes are miscounted"
        tenants = [0] * (_MOST_COUNTED + 1)
        for num_decodes, num_prompts in foreground.values():
            tenants[min(num_prompts, _MOST_COUNTED)] += num_decodes > 0
        assert self._tenants == tenants, "tenants that decode are miscounted"


_LEAST_PART = 0.25  # prompts get at least this part of the time of a step's decodes
_LEAST_PART_OF_BURST = 0.5  # the same while they burst in
_NEAR_ENOUGH = 1.05  # times the seconds that prompts may take

_CPU_INTERVAL_S, _GPU_INTERVAL_S = 0.1, 0.05  # faster than most people read


def token_interval_of(interval_s: float | Literal["auto"], device: str) -> float:
    """Target time of a step with decodes; "auto" depends on the device."""
    if interval_s != "auto":
        return interval_s
    return _CPU_INTERVAL_S if device == "cpu" else _GPU_INTERVAL_S


def prompt_seconds(interval_s: float, decode_s: float, stretch: int = 1, later_decode_s: float = 0.0) -> float:
    """Time of a step that prompts may take, so that decoding sequences get their next tokens in time.

    `interval_s`: target time of the step. `decode_s`: expected time of its decodes. Where decodes leave hardly any
    time, prompts get a part of the decodes' time in addition. Sarathi-Serve (arXiv 2403.02310) bounds chunks for the
    same reason.

    `stretch`: the step may take so many times as long (`PromptBursts`). `later_decode_s`: expected time of decodes once
    the bursts decode as well. On a slow device all steps then take longer than the target; stretched ones are measured
    by these, so that first tokens are as close to each other as on a faster one.
    """
    if stretch == 1:
        return max(interval_s - decode_s, _LEAST_PART * decode_s)
    return stretch * max(interval_s, (1 + _LEAST_PART_OF_BURST) * max(decode_s, later_decode_s)) - decode_s


@dataclass
class PromptBudget:
    """Tokens and seconds that the prompts of a step may still take; chunks take from both.

    The first `min_tokens` tokens are granted however long they take, so that prompts always advance.
    """

    num_tokens: int
    seconds: float = math.inf
    token_s: Callable[[int], float] = lambda position: 0.0  # expected time of a token at this position
    min_tokens: int = 1

    def chunk_s(self, start: int, num_tokens: int) -> float:
        """Expected time of a chunk that begins at this position."""
        return num_tokens * self.token_s(start + num_tokens // 2)

    def total_that_fits(self, chunks: Collection[tuple[int, int]]) -> int | None:
        """Tokens in all to divide instead, as these chunks take too long; None: they fit.

        `chunks`: first position and number of tokens of each. The tokens that are fewer may be divided otherwise, so
        ask again. The result is at least `min_tokens`, and less than the sum of the chunks.
        """
        num_tokens = sum([number for _, number in chunks])
        seconds = 0.0 if self.seconds == math.inf else sum([self.chunk_s(*chunk) for chunk in chunks])
        if num_tokens <= self.min_tokens or seconds <= self.seconds * _NEAR_ENOUGH:
            return None
        return max(self.min_tokens, min(int(num_tokens * max(self.seconds, 0.0) / seconds), num_tokens - 1))

    def tokens_that_fit(self, start: int, max_tokens: int) -> int:
        """How many tokens a chunk at this position may have, at most `max_tokens`."""
        max_tokens = max(0, min(max_tokens, self.num_tokens))
        if not max_tokens or self.chunk_s(start, max_tokens) <= self.seconds:
            return max_tokens
        return min(max_tokens, max(self.min_tokens, int(self.seconds / self.token_s(start + max_tokens // 2))))

    def take(self, start: int, num_tokens: int) -> None:
        """A chunk is planned."""
        self.num_tokens -= num_tokens
        if self.seconds != math.inf:
            self.seconds -= self.chunk_s(start, num_tokens)
        self.min_tokens = max(0, self.min_tokens - num_tokens)


def divide_prompt_tokens(num_left: Sequence[int], budget: int) -> list[int]:
    """How many tokens of each prompt the step computes.

    `num_left`: tokens that each prompt has left, at least one each, the oldest prompt first. `budget`: tokens in all.

    A clearly shorter prompt goes first: it delays the others by a few steps, and they would delay it by hundreds.
    Prompts of about the same length go in the order of arrival. The oldest prompt gets at least half of the budget, so
    no prompt takes more than twice the steps of strict first come, first served. The whole budget is used as long as
    there are tokens.
    """
    granted = [0] * len(num_left)
    if not num_left or budget <= 0:
        return granted
    half = -(-budget // 2)
    granted[0] = min(num_left[0], half)
    budget -= granted[0]
    # Sorted by remaining halves of the budget, rounded up to a power of two: about equal lengths keep their order.
    for number in sorted(range(len(num_left)), key=lambda i: (-(-num_left[i] // half) - 1).bit_length()):
        more = min(num_left[number] - granted[number], budget)
        granted[number] += more
        budget -= more
    return granted
