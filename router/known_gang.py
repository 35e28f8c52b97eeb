"""What one router knows of one gang: what the gang's frames tell, and what this router sent since."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from ..workers.messages import EngineLoad, Frame
from .affinity import GangView, RoutingConfig, RoutingRequest
from .observed_costs import ObservedCosts


class KnownGang:
    """Fed by the connection to the gang, and made anew with each greeting: another engine may answer then."""

    def __init__(self, config: RoutingConfig, resident: Iterable[str] = (), orphans: Iterable[str] = ()) -> None:
        """What the gang greeted with: `resident`, digests of adapters, and `orphans`, keys of sequences."""
        self.load = EngineLoad()  # as of the last frame
        self._resident = set(resident)  # coming ones too, as the gang told
        self._orphans = set(orphans)
        self._open: Counter[str] = Counter()  # unfinished sequences of this router, by digest
        self._num_unseen = self._num_unseen_tokens = 0  # sent since the last frame, whose load may not count them
        self._observed = ObservedCosts(config.belief)

    def receive(self, frame: Frame) -> None:
        self._resident.difference_update(frame.residency.went)
        self._resident.update(frame.residency.came)
        if frame.orphans is not None:
            self._orphans.difference_update(frame.orphans.went)
            self._orphans.update(frame.orphans.came)
        if frame.load != self.load:  # else no step was made since, and it cannot count what was sent
            self._observed.observe(self.load, frame.load)
            self.load = frame.load
            self._num_unseen = self._num_unseen_tokens = 0

    def sent(self, request: RoutingRequest) -> None:
        """A sequence of this router is on its way there. Its adapter counts as coming until `ended`."""
        self._num_unseen += 1
        self._num_unseen_tokens += request.num_tokens
        if request.digest is not None:
            self._open[request.digest] += 1

    def ended(self, digest: str | None) -> None:
        """A sequence that was sent there, with this adapter, is finished or forgotten."""
        if digest is not None:
            self._open[digest] -= 1
            if not self._open[digest]:
                del self._open[digest]

    def has(self, digest: str) -> bool:
        """The adapter is there, or coming as far as this router can know."""
        return digest in self._resident or digest in self._open

    def holds(self, sequence_key: str) -> bool:
        """A sequence with this key is there for whoever asks."""
        return sequence_key in self._orphans

    def view(self, key: str, digest: str | None, sequence_key: str = "") -> GangView:
        """The gang, called `key`, as a request for this adapter, with this key, sees it."""
        load = self.load
        return GangView(
            key,
            has_adapter=digest is not None and self.has(digest),
            num_queued_tokens=load.num_queued_tokens + self._num_unseen_tokens,
            num_sequences=load.num_running + load.num_waiting + self._num_unseen,
            costs=self._observed.costs,
            has_sequence=sequence_key in self._orphans,
        )
