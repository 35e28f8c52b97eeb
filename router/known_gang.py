"""What one router knows of one gang: what the gang's frames tell, and what this router sent since."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from ..workers.messages import EngineLoad, Frame
from .affinity import GangView, RoutingConfig, RoutingRequest

_HALF_LIFE_S = 20.0  # of what a queue was seen to cost; seconds of the gang's own backlog
_BELIEF_TOKENS = 512  # queued tokens that weigh as much as the belief before the first of them was seen
_BELIEF_PAGES = 64


class KnownGang:
    """Fed by the connection to the gang, and made anew with each greeting: another engine may answer then."""

    def __init__(self, config: RoutingConfig, resident: Iterable[str] = ()) -> None:
        """`resident`: digests of the adapters that the gang greeted with."""
        self._config = config
        self.load = EngineLoad()  # as of the last frame
        self._resident = set(resident)  # coming ones too, as the gang told
        self._open: Counter[str] = Counter()  # unfinished sequences of this router, by digest
        self._num_unseen = self._num_unseen_tokens = 0  # sent since the last frame, whose load may not count them
        self._pace = _QueuePace(config.s_per_queued_token)

    def receive(self, frame: Frame) -> None:
        self._resident.difference_update(frame.residency.went)
        self._resident.update(frame.residency.came)
        self._pace.observe(self.load, frame.load)
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
            self._pace.s_per_token,
            (load.loading_s + _BELIEF_PAGES * self._config.s_per_page) / (load.num_loaded_pages + _BELIEF_PAGES),
        )


class _QueuePace:
    """How fast a gang takes queued tokens in while sequences wait for compute: whatever holds them up counts.

    Steps without such a queue say nothing of it: a prompt that arrives alone takes a whole step, however short it is.
    """

    def __init__(self, believed_s_per_token: float) -> None:
        self._seconds = believed_s_per_token * _BELIEF_TOKENS
        self._tokens = float(_BELIEF_TOKENS)

    @property
    def s_per_token(self) -> float:
        return self._seconds / max(self._tokens, 1.0)

    def observe(self, before: EngineLoad, after: EngineLoad) -> None:
        if before.num_waiting <= before.num_waiting_for_adapters:
            return
        seconds = after.busy_s - before.busy_s
        # A decoding sequence computes the token that it generated last, so what is beyond that was queued.
        computed = after.num_computed_tokens - before.num_computed_tokens
        generated = after.num_generated_tokens - before.num_generated_tokens
        fade = 0.5 ** (seconds / _HALF_LIFE_S)
        self._seconds = fade * self._seconds + seconds
        self._tokens = fade * self._tokens + max(0, computed - generated)
