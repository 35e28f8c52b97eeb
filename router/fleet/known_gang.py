"""What one router knows of one gang: what the gang's frames reported, and what this router has sent since."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Literal, Self

from ...workers.wire.engine_load import EngineLoad
from ...workers.wire.messages import Frame, Hello
from ...workers.wire.page_keys import short_digest
from .adapter_uses import AdapterUses, asker_of
from .affinity import GangCosts, GangView, RoutingConfig, RoutingRequest
from .fair_queue import FairQueue

# What a gang's work costs, measured by how its counters grow from one frame to the next.

# How much must be observed to weigh as much as the initial belief, and to halve the weight of earlier observations.
_BELIEF_TOKENS, _HALF_LIFE_TOKENS = 500, 50_000
_BELIEF_PAGES, _HALF_LIFE_PAGES = 50, 5_000
_BELIEF_LOADS, _HALF_LIFE_LOADS = 5, 100
_BELIEF_SPREAD, _HALF_LIFE_STEPS = 10_000, 2_000  # spread: as of a hundred steps, each ten tokens off their mean


class ObservedCosts:
    """Begins with a belief, which fades as more is observed."""

    def __init__(self, belief: GangCosts) -> None:
        self._queued = _FadingRatio(belief.s_per_queued_token, _BELIEF_TOKENS, _HALF_LIFE_TOKENS)
        self._waiting = _FadingRatio(belief.s_per_waiting_token, _BELIEF_TOKENS, _HALF_LIFE_TOKENS)
        self._steps = _StepCost(belief.s_per_token)
        self._loaded = _FadingRatio(belief.s_per_page, _BELIEF_PAGES, _HALF_LIFE_PAGES)
        self._evicted = _FadingRatio(belief.num_evictions_per_load, _BELIEF_LOADS, _HALF_LIFE_LOADS)

    @property
    def costs(self) -> GangCosts:
        return GangCosts(
            self._queued.value,
            self._steps.s_per_token,
            self._loaded.value,
            self._evicted.value,
            self._steps.s_per_step,
            self._waiting.value,
        )

    def observe(self, before: EngineLoad, after: EngineLoad) -> None:
        """Takes in what happened between two loads of one engine."""
        then, now = before.counters, after.counters
        busy_s = now.busy_s - then.busy_s
        if busy_s < 0:  # of a gang of an earlier version, whose last load had no times: a cost is never negative
            return
        num_computed = now.num_computed_tokens - then.num_computed_tokens
        num_loads = now.num_adapter_loads - then.num_adapter_loads
        self._steps.add(now.num_steps - then.num_steps, num_computed, busy_s)
        self._loaded.add(now.loading_s - then.loading_s, now.num_loaded_pages - then.num_loaded_pages)
        self._evicted.add(now.num_adapter_evictions - then.num_adapter_evictions, num_loads)
        # While no sequence waits for compute, time says nothing of a queue: a prompt that comes alone takes a whole
        # step, however short it is. With a queue all time counts, whatever it is spent on.
        if before.gauges.num_waiting > before.gauges.num_waiting_for_adapters:
            # A decoding sequence computes the token that it generated last; all other computed tokens were queued.
            num_generated = now.num_generated_tokens - then.num_generated_tokens
            num_queued = max(0, num_computed - num_generated)
            self._queued.add(busy_s, num_queued)
            self._waiting.add(busy_s, num_queued + now.num_cached_tokens - then.num_cached_tokens)


class _FadingRatio:
    """The ratio of two sums, in which older amounts count less."""

    def __init__(self, belief: float, weight: float, half_life: float) -> None:
        """`weight`, of the belief, and `half_life` are amounts of the denominator."""
        self._numerator, self._denominator, self._half_life = belief * weight, weight, half_life

    @property
    def value(self) -> float:
        return self._numerator / self._denominator

    def add(self, numerator: float, denominator: float) -> None:
        fade = 0.5 ** (denominator / self._half_life)
        self._numerator = fade * self._numerator + numerator
        self._denominator = fade * self._denominator + denominator


class _StepCost:
    """By how many seconds one more token makes a step longer: least squares, in which older steps count less."""

    def __init__(self, belief: float) -> None:
        self._belief = belief
        self._num_steps = self._mean_tokens = self._mean_s = 0.0
        self._tokens_tokens = self._tokens_s = 0.0  # sums of products of deviations from the means

    @property
    def s_per_token(self) -> float:
        # This belief does not fade: steps that are all alike say nothing of the slope, and only noise would be left.
        spread = self._tokens_tokens + _BELIEF_SPREAD
        return max(0.0, (self._tokens_s + _BELIEF_SPREAD * self._belief) / spread)

    @property
    def s_per_step(self) -> float:
        """The mean; 0 before the first step."""
        return self._mean_s

    def add(self, num_steps: int, num_tokens: int, seconds: float) -> None:
        """Several steps that are reported together count as that many steps of their mean."""
        if num_steps <= 0:
            return
        fade = 0.5 ** (num_steps / _HALF_LIFE_STEPS)
        self._num_steps = fade * self._num_steps + num_steps
        share = num_steps / self._num_steps
        off_tokens, off_s = num_tokens / num_steps - self._mean_tokens, seconds / num_steps - self._mean_s
        self._mean_tokens += share * off_tokens
        self._mean_s += share * off_s
        weight = num_steps * (1 - share)
        self._tokens_tokens = fade * self._tokens_tokens + weight * off_tokens * off_tokens
        self._tokens_s = fade * self._tokens_s + weight * off_tokens * off_s


_MAX_EXPECTED_PAGES = 1 << 14
AdapterTier = Literal["device", "host"]


class KnownGang:
    """The connection to the gang feeds it, and makes a new one at each greeting, as that may come from a new engine."""

    def __init__(
        self,
        config: RoutingConfig,
        resident: Iterable[str] = (),
        resident_pages: Iterable[int] = (),
        orphans: Iterable[str] = (),
        is_fair: bool = False,
        hosted: Iterable[int] = (),
    ) -> None:
        """Contents of the greeting: digests of adapters, short keys of full pages of KV, keys of orphans, whether the
        gang schedules by fair shares, and short digests of adapters in host memory.
        """
        self.load = EngineLoad()  # as of the last frame
        self._resident = set(resident)  # digests, those that are coming included
        self._hosted = set(hosted)
        self._failed_pins: dict[int, str] = {}  # reasons, by short digest
        self._pages = set(resident_pages)
        # Of sequences that were sent there, and that may not be computed yet.
        self._expected_pages: dict[int, None] = {}
        self._orphans = set(orphans)
        self._open: Counter[str] = Counter()  # unfinished sequences of this router, by digest
        self._open_keys: Counter[str] = Counter()  # of these sequences, those with a key
        self._num_unseen = self._num_unseen_tokens = 0  # sent, and not yet counted in `load`
        self._num_unseen_background_tokens = 0  # of these
        self.fair_queue = FairQueue(is_fair=is_fair)
        self._unseen_of: Counter[str] = Counter()  # by tenant: tokens sent, and not yet counted in its share
        self._observed = ObservedCosts(config.belief)
        self._uses = AdapterUses()

    @classmethod
    def greeted(cls, config: RoutingConfig, hello: Hello) -> Self:
        return cls(config, hello.resident, hello.resident_pages, hello.orphans, hello.info.is_fair, hello.hosted)

    def receive(self, frame: Frame) -> None:
        self._resident.difference_update(frame.residency.went)
        self._resident.update(frame.residency.came)
        if frame.residency.hosted_came or frame.residency.hosted_went:
            self._hosted.difference_update(frame.residency.hosted_went)
            self._hosted.update(frame.residency.hosted_came)
        for short, reason in frame.residency.pin_news.items():
            if reason:
                self._failed_pins[short] = reason
            else:
                self._failed_pins.pop(short, None)
        for digest in (*frame.residency.went, *self._uses.used(frame.residency.hosted_went)):
            self._forget_uses(digest)
        for digest in frame.residency.went:
            self._uses.leave_pool(digest)
        self._pages.difference_update(frame.residency.pages_went)
        self._pages.update(frame.residency.pages_came)
        for page_key in (*frame.residency.pages_came, *frame.residency.pages_went):
            self._expected_pages.pop(page_key, None)
        if frame.orphans is not None:
            self._orphans.difference_update(frame.orphans.went)
            self._orphans.update(frame.orphans.came)
        self.fair_queue.receive(frame.shares)
        if frame.shares or not (self.fair_queue.has_shares and frame.load.gauges.num_waiting):
            self._unseen_of.clear()
        if frame.load != self.load:  # else no step was made since, and the load cannot count what was sent
            self._observed.observe(self.load, frame.load)
            self.load = frame.load
            self._num_unseen = self._num_unseen_tokens = self._num_unseen_background_tokens = 0

    def add_sequence(self, request: RoutingRequest, page_keys: Sequence[int] = (), sequence_key: str = "") -> None:
        """A sequence of this router is on its way there. Its adapter counts as coming until `ended`.

        `page_keys`: short keys of its full pages. They count as there too, for sequences that begin alike.
        `sequence_key`: its own.
        """
        if sequence_key:
            self._open_keys[sequence_key] += 1
        self._num_unseen += 1
        self._num_unseen_tokens += request.num_tokens
        if request.is_background:
            self._num_unseen_background_tokens += request.num_tokens
        else:
            self._unseen_of[request.tenant] += request.num_tokens
        self._expected_pages.update(dict.fromkeys(key for key in page_keys if key not in self._pages))
        while len(self._expected_pages) > _MAX_EXPECTED_PAGES:  # some never come, as their sequence was cancelled
            del self._expected_pages[next(iter(self._expected_pages))]
        if request.digest is not None:
            self._open[request.digest] += 1
            self._uses.begin(request.digest, asker_of(request.tenant, request.owner))

    def ended(self, digest: str | None, sequence_key: str = "", asker: str = "") -> None:
        """A sequence of this asker, with this adapter and key, that was sent to the gang has ended."""
        if sequence_key:
            self._open_keys[sequence_key] -= 1
            if not self._open_keys[sequence_key]:
                del self._open_keys[sequence_key]
        if digest is not None:
            self._open[digest] -= 1
            self._uses.ended(digest, asker)
            if not self._open[digest]:
                del self._open[digest]
                self._forget_uses(digest)

    def has(self, digest: str) -> bool:
        """The adapter is there, or coming as far as this router can know."""
        return digest in self._resident or digest in self._open

    def tier_of(self, digest: str) -> AdapterTier | None:
        """The fastest that has the adapter, or is getting it; None: it would come from the store."""
        if self.has(digest):
            return "device"
        return "host" if self._hosted and short_digest(digest) in self._hosted else None

    def is_hosted(self, digest: str) -> bool:
        """The adapter is in the gang's host memory."""
        return short_digest(digest) in self._hosted

    def pin_failure(self, digest: str) -> str | None:
        """Why the gang cannot keep a pinned adapter in host memory; None: it has reported no failure."""
        return self._failed_pins.get(short_digest(digest))

    def tier_for(self, asker: str, digest: str, *, is_known: bool = False) -> AdapterTier | None:
        """As `tier_of`, but only what follows from the asker's own sequences that this router sent lately.

        `is_known`: another router has sent some. An adapter that has left the pool may be back because of other
        tenants.
        """
        tier = self.tier_of(digest)
        if tier is None or is_known or self._uses.is_lately_by(digest, asker):
            return tier
        return "host" if self._uses.is_lately_by(digest, asker, has_left_pool=True) else None

    def num_cached_pages(self, page_keys: Iterable[int]) -> int:
        """How many of a sequence's first full pages are there, or coming as far as this router can know."""
        num_pages = 0
        for page_key in page_keys:
            if page_key not in self._pages and page_key not in self._expected_pages:
                break
            num_pages += 1
        return num_pages

    def holds(self, sequence_key: str) -> bool:
        """The gang keeps the sequence with this key for any router that asks, or computes it for this one."""
        return sequence_key in self._orphans or sequence_key in self._open_keys

    def _forget_uses(self, digest: str) -> None:
        if self.tier_of(digest) is None:
            self._uses.forget(digest)

    @property
    def num_queued_tokens(self) -> int:
        """Tokens to compute there, of all tenants."""
        return self.load.gauges.num_queued_tokens + self._num_unseen_tokens

    @property
    def num_background_tokens(self) -> int:
        """Queued tokens of background sequences that have not begun, which yield to all others."""
        return self.load.gauges.num_queued_background_tokens + self._num_unseen_background_tokens

    def num_tokens_before(
        self,
        tenant: str,
        weight: float = 1.0,
        num_more: int = 0,
        num_more_of_all: int = 0,
        *,
        is_background: bool = False,
    ) -> int:
        """Tokens that are computed before the turn of a sequence of the tenant that comes now, in the fair order.

        A background sequence comes after all that is there. `num_more`: of its tenant, beside what was reported and
        sent; `num_more_of_all`: of all tenants. Negative: fewer.
        """
        queued = max(0, self.num_queued_tokens + num_more_of_all)
        if is_background:
            return queued
        queued = max(0, queued - self.num_background_tokens)
        return self.fair_queue.num_tokens_before(tenant, queued, weight, self._unseen_of, num_more)

    def view(
        self,
        key: str,
        digest: str | None,
        num_cached_tokens: int = 0,
        sequence_key: str = "",
        tenant: str = "",
        weight: float = 1.0,
        is_background: bool = False,
    ) -> GangView:
        """The gang, called `key`, as a choice for one request sees it.

        `digest`: of the request's adapter. `num_cached_tokens`: of its first tokens, those whose KV is there.
        `sequence_key`: the request's. `tenant`, `weight`, `is_background`: whose it is, that tenant's
        weight, and whether it yields to all others.
        """
        now = self.load.gauges
        return GangView(
            key,
            has_adapter=digest is not None and self.has(digest),
            num_queued_tokens=self.num_tokens_before(tenant, weight, is_background=is_background),
            num_sequences=now.num_running + now.num_waiting + self._num_unseen,
            costs=self._observed.costs,
            num_cached_tokens=num_cached_tokens,
            has_sequence=self.holds(sequence_key),
            num_waiting=max(0, now.num_waiting - now.num_waiting_for_adapters),
        )
