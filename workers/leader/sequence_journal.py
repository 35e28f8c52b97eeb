"""What a leader remembers of sequences with a key: the request, and all tokens that it led to.

A sequence with a key belongs to the router stream that it was submitted on. When that stream ends, its sequences become
orphans: they go on for a while, and those that ended a moment before are kept, as their last frame may not have reached
the router. A router that then submits the same request under the same key gets what is there and what is still to come.

A sequence that was begun at another gang came here with its tokens, but without their log-probabilities; and there is
a bound on log-probabilities. If a sequence is requested with them, it is given only to a router that already has the
tokens whose log-probabilities are not here.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from ..wire.kept_logprobs import KeptLogprobs
from ..wire.messages import FinishReason, SequenceError, SequenceRequest, SequenceUpdate, SequenceUsage
from ..wire.unread_update import UnreadUpdate
from .served_engine import LeaderConfig

# What a leader remembers of one sequence with a key, and how a router that asks for it again gets it.


@dataclass(eq=False, slots=True)
class KeptSequence:
    engine_id: int
    request: SequenceRequest
    owner: int | None  # number of the router stream that receives its updates; None: an orphan
    token_ids: list[int]  # all generated ones, including those that came with the request
    num_without_logprobs: int  # of the first tokens: those it came with, or all whose log-probabilities were dropped
    logprobs: KeptLogprobs = field(default_factory=KeptLogprobs)  # of the other tokens, if requested
    finish_reason: FinishReason | None = None
    error: SequenceError | None = None
    num_cached_tokens: int | None = None
    usage: SequenceUsage | None = None  # as last reported
    expires_at: float | None = None  # None: it has an owner and goes on
    left_by: str = ""  # the router's connection that left it as an orphan last

    @property
    def name(self) -> tuple[str, str]:
        return self.request.tenant, self.request.key

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None or self.error is not None

    @property
    def num_values(self) -> int:
        return len(self.token_ids) + self.logprobs.num_values

    def answers(self, request: SequenceRequest) -> bool:
        """Whether this sequence is what a request with its name asks for."""
        original, so_far = self.request, request.generated_token_ids
        return (
            original.prompt_token_ids == request.prompt_token_ids
            and original.sampling == request.sampling
            and (original.adapter and original.adapter.digest) == (request.adapter and request.adapter.digest)
            and self.token_ids[: len(so_far)] == so_far
            and (original.sampling.num_logprobs is None or len(so_far) >= self.num_without_logprobs)
        )

    def drop_logprobs(self) -> None:
        """Only a router that has all tokens so far can ask for it from now on."""
        self.logprobs, self.num_without_logprobs = KeptLogprobs(), len(self.token_ids)

    def rest_for(self, request: SequenceRequest) -> UnreadUpdate:
        """What the sequence has beyond the tokens that come with the request, under the request's id."""
        num_had = len(request.generated_token_ids)
        state = SequenceUpdate(
            request.sequence_id,
            [],
            None,
            self.finish_reason,
            self.error,
            self.num_cached_tokens,
            usage=self.usage,
        )
        logprobs = None
        if self.request.sampling.num_logprobs is not None:
            logprobs = self.logprobs.copy_from(num_had - self.num_without_logprobs)
        return UnreadUpdate(state, array("I", self.token_ids[num_had:]), logprobs)


# Of all sequences, finished or not; some 9 bytes each. Over it, the sequences with the most lose theirs.
MAX_LOGPROB_VALUES: Final = 16 << 20


class Attachment(NamedTuple):
    """A sequence that is here already. `unread`: what it has beyond the request's tokens, under the request's id."""

    engine_id: int
    unread: UnreadUpdate
    is_finished: bool


class SequenceJournal:
    """Sequences with keys, by the engine's id. It decides which stream may have them; the caller commands the engine.

    `now`: seconds of any clock that never goes back. It holds the tokens of unfinished sequences, as the engine does
    too, and of finished ones as much as the config says.
    """

    def __init__(self, config: LeaderConfig) -> None:
        self._config = config
        self._entries: dict[int, KeptSequence] = {}
        self._by_name: dict[tuple[str, str], KeptSequence] = {}
        self._finished: dict[int, int] = {}  # number of values of each finished sequence; the oldest end first
        self._num_finished_values = 0
        self._num_logprob_values = 0
        self._changed: set[str] = set()  # keys of orphans that came or went; not yet taken

    def change(self, config: LeaderConfig) -> None:
        """What ends from now on is kept as this config says, and what is too much by it goes."""
        self._config = config
        self._drop_finished()

    @property
    def orphans(self) -> list[str]:
        """Keys that any router may ask for."""
        return sorted({entry.request.key for entry in self._entries.values() if entry.owner is None})

    def take_changed(self) -> set[str]:
        """Keys that became an orphan's, or ceased to be, since the last call."""
        changed, self._changed = self._changed, set()
        return changed

    def begin(self, engine_id: int, request: SequenceRequest, owner: int) -> list[int]:
        """Adds a new sequence with a key. Returns ids of orphans that cannot be requested any more: to be cancelled.

        A sequence of the same name that a router reads goes on there, but loses its name.
        """
        assert request.key and engine_id not in self._entries
        unreachable = []
        old = self._by_name.get((request.tenant, request.key))
        if old is not None:
            self._remove(old)
            if old.owner is None and not old.is_finished:
                unreachable.append(old.engine_id)
        token_ids = [*request.generated_token_ids]
        entry = KeptSequence(engine_id, request, owner, token_ids, len(token_ids), usage=request.usage)
        self._entries[engine_id] = self._by_name[entry.name] = entry
        return unreachable

    def attach(self, request: SequenceRequest, owner: int, now: float) -> Attachment | None:
        """Gives the request's sequence to `owner`, even if another stream has it; None: no sequence fits."""
        entry = self._by_name.get((request.tenant, request.key))
        if entry is None or not entry.answers(request):
            return None
        if entry.owner is None:
            self._changed.add(request.key)
        entry.owner = owner
        entry.expires_at = now + self._config.finished_s if entry.is_finished else None
        return Attachment(entry.engine_id, entry.rest_for(request), entry.is_finished)

    def is_read(self, request: SequenceRequest) -> bool:
        """A stream has the request's sequence, which goes on."""
        entry = self._by_name.get((request.tenant, request.key))
        return entry is not None and entry.owner is not None and not entry.is_finished and entry.answers(request)

    def record(self, update: SequenceUpdate, now: float) -> None:
        """Adds what a step brought. Sequences without a key, and those that have ended, are ignored."""
        entry = self._entries.get(update.sequence_id)
        if entry is None or entry.is_finished:
            return
        if update.error is not None and update.error.kind == "store_unavailable":
            self._remove(entry)  # its router sends it again, here or elsewhere, and would meet this error for ever
            return
        entry.token_ids += update.token_ids
        if update.logprobs is not None:
            num_before = entry.logprobs.num_values
            entry.logprobs.extend(update.logprobs)
            self._num_logprob_values += entry.logprobs.num_values - num_before
            while self._num_logprob_values > MAX_LOGPROB_VALUES:
                self._drop_logprobs()
        if update.num_cached_tokens is not None:
            entry.num_cached_tokens = update.num_cached_tokens
        if update.usage is not None:
            entry.usage = update.usage
        if update.finish_reason is None and update.error is None:
            return
        entry.finish_reason, entry.error = update.finish_reason, update.error
        if entry.expires_at is None:
            entry.expires_at = now + self._config.finished_s
        self._finished[entry.engine_id] = entry.num_values
        self._num_finished_values += self._finished[entry.engine_id]
        self._drop_finished()

    def forget(self, engine_id: int) -> None:
        """The sequence's owner has cancelled it. Unknown ids are ignored."""
        entry = self._entries.get(engine_id)
        if entry is not None:
            self._remove(entry)

    def abandon(self, owner: int, now: float, router: str = "") -> set[int]:
        """The owner's stream has ended. Returns ids of its unfinished sequences, which go on as orphans.

        `router`: the connection that the stream belonged to, which may come back with another stream.
        """
        orphan_ids = set()
        for entry in self._entries.values():
            if entry.owner == owner:
                entry.owner, entry.left_by = None, router
                entry.expires_at = now + self._config.orphan_s
                self._changed.add(entry.request.key)
                if not entry.is_finished:
                    orphan_ids.add(entry.engine_id)
        return orphan_ids

    def disown(self, router: str) -> list[int]:
        """Forgets the unfinished orphans that a router's connection has left. Returns their ids: to be cancelled."""
        return self._drop_unfinished(entry for entry in self._entries.values() if router and entry.left_by == router)

    def disown_named(self, names: Iterable[tuple[str, str]]) -> list[int]:
        """Forgets those of these sequences that are unfinished orphans. Returns their ids: to be cancelled."""
        return self._drop_unfinished(self._by_name[name] for name in names if name in self._by_name)

    def expire(self, now: float) -> list[int]:
        """Forgets sequences whose time is over. Returns ids of the unfinished ones: to be cancelled."""
        return self._drop(
            [entry for entry in self._entries.values() if entry.expires_at is not None and entry.expires_at <= now]
        )

    def clear(self) -> list[int]:
        """Forgets all sequences. Returns ids of unfinished orphans: to be cancelled."""
        return self._drop(list(self._entries.values()))

    def check_integrity(self) -> None:
        """Raises AssertionError if something is lost or kept twice."""
        for engine_id, entry in self._entries.items():
            assert entry.engine_id == engine_id
            assert self._by_name[entry.name] is entry, "a sequence that cannot be requested"
            assert (entry.expires_at is None) == (entry.owner is not None and not entry.is_finished)
            assert (engine_id in self._finished) == entry.is_finished
            num_logprobs = len(entry.token_ids) - entry.num_without_logprobs
            assert len(entry.logprobs) == (0 if entry.request.sampling.num_logprobs is None else num_logprobs)
        num_values = sum(entry.logprobs.num_values for entry in self._entries.values())
        assert num_values == self._num_logprob_values <= MAX_LOGPROB_VALUES
        assert len(self._by_name) == len(self._entries)
        assert self._finished.keys() <= self._entries.keys()
        assert self._num_finished_values == sum(self._finished.values())
        assert len(self._finished) <= self._config.max_finished
        assert self._num_finished_values <= self._config.max_finished_values

    def _drop_logprobs(self) -> None:
        """Drops those of the sequence that has the most."""
        largest = max(self._entries.values(), key=lambda entry: entry.logprobs.num_values)
        num_values = largest.logprobs.num_values
        self._num_logprob_values -= num_values
        if largest.engine_id in self._finished:
            self._finished[largest.engine_id] -= num_values
            self._num_finished_values -= num_values
        largest.drop_logprobs()

    def _drop_unfinished(self, entries: Iterable[KeptSequence]) -> list[int]:
        """Orphans that have ended stay: they cost no time, and a client may still come for their last tokens."""
        return self._drop([entry for entry in entries if entry.owner is None and not entry.is_finished])

    def _drop(self, entries: Iterable[KeptSequence]) -> list[int]:
        unfinished = []
        for entry in entries:
            self._remove(entry)
            if entry.owner is None and not entry.is_finished:
                unfinished.append(entry.engine_id)
        return unfinished

    def _drop_finished(self) -> None:
        """The oldest end first, as far as there are too many."""
        while (
            len(self._finished) > self._config.max_finished
            or self._num_finished_values > self._config.max_finished_values
        ):
            self._remove(self._entries[next(iter(self._finished))])

    def _remove(self, entry: KeptSequence) -> None:
        del self._entries[entry.engine_id]
        del self._by_name[entry.name]
        self._num_finished_values -= self._finished.pop(entry.engine_id, 0)
        self._num_logprob_values -= entry.logprobs.num_values
        if entry.owner is None:
            self._changed.add(entry.request.key)
