"""What one router knows of one gang: what the gang's frames tell, and what this router sent since."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from ..workers.messages import EngineLoad, Frame
from .affinity import GangView, RoutingConfig, RoutingRequest

_BELIEF_TOKENS, _HALF_LIFE_TOKENS = 500, 50_000  # how soon what a gang shows outweighs the belief, and what it showed
_BELIEF_PAGES, _HALF_LIFE_PAGES = 50, 5_000
_BELIEF_LOADS, _HALF_LIFE_LOADS = 5, 100


class KnownGang:
    """Fed by the connection to the gang, and made anew with each greeting: another engine may answer then."""

    def __init__(self, config: RoutingConfig, resident: Iterable[str] = ()) -> None:
        """`resident`: digests of the adapters that the gang greeted with."""
        self.load = EngineLoad()  # as of the last frame
        self._resident = set(resident)  # coming ones too, as the gang told
        self._open: Counter[str] = Counter()  # unfinished sequences of this router, by digest
        self._num_unseen = self._num_unseen_tokens = 0  # sent since the last frame, whose load may not count them
        self._queued = _FadingRatio(config.s_per_queued_token, _BELIEF_TOKENS, _HALF_LIFE_TOKENS)
        self._loaded = _FadingRatio(config.s_per_page, _BELIEF_PAGES, _HALF_LIFE_PAGES)
        self._evicted = _FadingRatio(0.0, _BELIEF_LOADS, _HALF_LIFE_LOADS)

    def receive(self, frame: Frame) -> None:
        self._resident.difference_update(frame.residency.went)
        self._resident.update(frame.residency.came)
        self._learn_costs(self.load, frame.load)
        self.load = frame.load
        self._num_unseen = self._num_unseen_tokens = 0

    def sent(self, request: RoutingRequest) -> None:
        """A sequence of this router is on its way there. Its adapter counts as coming until `ended`."""
        self._num_unseen += 1
        self._num_unseen_tokens += request.num_tokens
        if request.digest is not None:
            self._open[request.digest] += 1

    def ended(self, digest: str | None) -> None:
        """A sequence that was sent there is finished or forgotten."""
        if digest is not None:
            self._open[digest] -= 1
            if not self._open[digest]:
                del self._open[digest]

    def has(self, digest: str) -> bool:
        """The adapter is there, or coming as far as this router can know."""
        return digest in self._resident or digest in self._open

    def view(self, key: str, digest: str | None) -> GangView:
        """The gang, called `key`, as a request for this adapter sees it."""
        load = self.load
        return GangView(
            key,
            digest is not None and self.has(digest),
            load.num_queued_tokens + self._num_unseen_tokens,
            load.num_running + load.num_waiting + self._num_unseen,
            self._queued.value,
            self._loaded.value,
            self._evicted.value,
        )

    def _learn_costs(self, before: EngineLoad, after: EngineLoad) -> None:
        """Takes in what queued tokens and cold loads cost between two frames."""
        self._loaded.add(after.loading_s - before.loading_s, after.num_loaded_pages - before.num_loaded_pages)
        self._evicted.add(
            after.num_adapter_evictions - before.num_adapter_evictions, after.num_adapter_loads - before.num_adapter_loads
        )
        # Time in which no sequence waits for compute says nothing of a queue: a prompt that arrives alone takes a whole
        # step, however short it is. With a queue all time counts, whatever holds it up.
        if before.num_waiting > before.num_waiting_for_adapters:
            # A decoding sequence computes the token that it generated last, so what is beyond that was queued.
            computed = after.num_computed_tokens - before.num_computed_tokens
            generated = after.num_generated_tokens - before.num_generated_tokens
            self._queued.add(after.busy_s - before.busy_s, max(0, computed - generated))


class _FadingRatio:
    """A sum over a sum, of which the older part counts less. Begins with a belief."""

    def __init__(self, belief: float, weight: float, half_life: float) -> None:
        """`weight` of the belief and `half_life` are amounts of the denominator."""
        self._numerator, self._denominator, self._half_life = belief * weight, weight, half_life

    @property
    def value(self) -> float:
        return self._numerator / self._denominator

    def add(self, numerator: float, denominator: float) -> None:
        fade = 0.5 ** (denominator / self._half_life)
        self._numerator = fade * self._numerator + numerator
        self._denominator = fade * self._denominator + denominator
