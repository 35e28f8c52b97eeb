"""An engine that computes nothing: each step gives every sequence its last token plus one.

A sequence that was begun elsewhere goes on after the tokens it had there. A log-probability is minus its token's index.
"""

from __future__ import annotations

import math
import threading
import time

import msgspec

from motet.tests.rigs.engine_loads import engine_load
from motet.workers.engine_messages import End, EngineMessage, GiveUpWaiting, PinChanges
from motet.workers.leader.served_engine import OnStep, StepReport
from motet.workers.wire.engine_load import EngineLoad, ServedElsewhere, TenantShare
from motet.workers.wire.messages import (
    CANCELLED,
    AdapterRef,
    Cancel,
    GangInfo,
    Outdated,
    ResidencyChange,
    SequenceError,
    SequenceRequest,
    SequenceUpdate,
    SequenceUsage,
    Submit,
    TokenLogprobs,
)
from motet.workers.wire.page_keys import KeyChain, next_keys, short_digest, short_key

INFO = GangInfo(
    gang_id="stand-in",
    model="stand-in",
    device="none",
    dtype="float32",
    kernels="none",
    max_model_len=100_000,
    block_size=16,
    num_pages=1000,
    page_bytes=1,
    num_threads=1,
    vocab_size=1000,
)


def adapter_pages(adapter: AdapterRef) -> int:
    """A page for each rank."""
    return sum(adapter.module_ranks.values())


class StandInEngine:
    """Satisfies `ServedEngine`. `cancelled`, `submitted` and `outdated` have what reached it.

    While `paused`, no step is made. A sequence gets no more than `most_tokens`, and waits where it has as many: so a
    test can do something to it before it ends, however late it comes to that.
    Once it `fails`, the next step loses all sequences and is the last. While `cannot_read`, its sequences with adapters
    end because the store is unavailable.
    """

    def __init__(self, step_s: float = 0.001, num_places: int | None = None) -> None:
        """`num_places`: sequences that get tokens at once, the oldest; the others wait. None: all.

        Only an engine with places reports what its steps cost.
        """
        self._num_places = num_places
        self._num_computed = self._num_generated = 0
        self._busy_s = 0.0
        self._given_up: list[SequenceUpdate] = []  # not yet reported
        self.submitted: list[SequenceRequest] = []
        self.cancelled: list[int] = []
        self.outdated: list[str] = []
        self.pinned: set[str] = set()
        self.served_elsewhere: list[ServedElsewhere] = []
        self.shares: list[TenantShare] = []  # to be reported with the next step
        self.paused = False
        self.most_tokens = math.inf
        self.fails = self.cannot_read = False
        self.num_turns = 0  # of its loop, in which it may have had nothing to do
        self._residency = ResidencyChange()  # not yet reported
        self._pages: list[int] = []  # short keys of those that came
        self._step_s = step_s
        self._running: dict[int, tuple[SequenceRequest, int]] = {}
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._num_steps = 0

    def start(self, on_step: OnStep) -> None:
        self._thread = threading.Thread(target=self._run, args=(on_step,), daemon=True)
        self._thread.start()

    def receive(self, message: EngineMessage) -> None:
        with self._lock:
            match message:
                case Submit(request):
                    self._submit(request)
                case Cancel(sequence_id):
                    self._end(sequence_id, CANCELLED)
                case End(sequence_id, error):
                    self._end(sequence_id, error)
                case GiveUpWaiting(sequence_id, error):
                    if sequence_id in [*self._running][self._num_places or len(self._running) :]:
                        del self._running[sequence_id]
                        self._given_up.append(SequenceUpdate(sequence_id, error=error))
                case Outdated(digest):
                    self.outdated.append(digest)
                case PinChanges(changes):
                    self.pinned = {digest for digest in {*self.pinned, *changes} if changes.get(digest, True)}
                case ServedElsewhere():
                    self.served_elsewhere.append(message)

    def _submit(self, request: SequenceRequest) -> None:
        self.submitted.append(request)
        self._running[request.sequence_id] = (request, len(request.generated_token_ids))
        if request.adapter is not None:
            self._residency.came.append(request.adapter.digest)
        num_full = len(request.prompt_token_ids) // INFO.block_size
        keys = next_keys(KeyChain.of(request, 1).first_link, request.prompt_token_ids, 0, INFO.block_size, num_full)
        pages = [*map(short_key, keys)]
        self._pages += pages
        self._residency.pages_came.extend(pages)

    def _end(self, sequence_id: int, error: SequenceError) -> None:
        self.cancelled.append(sequence_id)
        if (ended := self._running.pop(sequence_id, None)) is not None:
            self._given_up.append(SequenceUpdate(sequence_id, error=error, usage=_usage(*ended)))

    def evict(self, digest: str) -> None:
        """Reports with the next step that the adapter was evicted."""
        with self._lock:
            self._residency.went.append(digest)

    def host(self, digest: str, is_here: bool = True) -> None:
        """Reports with the next step that the adapter came into host memory, or went."""
        with self._lock:
            moved = self._residency.hosted_came if is_here else self._residency.hosted_went
            moved.append(short_digest(digest))

    def forget_pages(self) -> None:
        """Reports with the next step that all full pages were evicted."""
        with self._lock:
            self._residency.pages_went.extend(self._pages)
            self._pages.clear()

    def stop(self) -> None:
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()

    @property
    def alive(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    @property
    def num_running(self) -> int:
        with self._lock:
            return len(self._running)

    def _run(self, on_step: OnStep) -> None:
        num_running = 0
        while not self._stopping.is_set():
            began_at = time.perf_counter()
            time.sleep(self._step_s)
            self.num_turns += 1
            if self.paused:
                continue
            if self.fails:
                on_step(StepReport(self._lose_all(), EngineLoad()))
                return
            with self._lock:
                placed = [*self._running.values()][: self._num_places]
                chosen = [(request, count) for request, count in placed if count < self.most_tokens]
                if self._num_places is not None:
                    self._num_computed += sum(1 if count else len(r.prompt_token_ids) for r, count in chosen)
                    self._num_generated += len(chosen)
                    self._busy_s += time.perf_counter() - began_at
                updates = [_with_usage(self._next(*one), *one) for one in chosen]
                waiting = [*self._running.values()][len(placed) :]
                num_queued_tokens = sum(len(r.prompt_token_ids) for r, _ in waiting)
                given_up, self._given_up = self._given_up, []
                for update in updates:
                    if update.finish_reason is not None or update.error is not None:
                        del self._running[update.sequence_id]
                    else:
                        request, count = self._running[update.sequence_id]
                        self._running[update.sequence_id] = (request, count + 1)
            if updates or num_running or given_up:
                num_running = len(updates)
                self._num_steps += 1
                load = engine_load(
                    num_running=num_running,
                    num_waiting=len(waiting),
                    num_queued_tokens=num_queued_tokens,
                    num_steps=self._num_steps,
                    num_computed_tokens=self._num_computed,
                    num_generated_tokens=self._num_generated,
                    busy_s=self._busy_s,
                )
                shares, self.shares = self.shares, []
                on_step(StepReport(given_up + updates, load, self._take_residency(), shares))

    def _lose_all(self) -> list[SequenceUpdate]:
        with self._lock:
            lost = SequenceError("gang_lost", "the engine failed: by the test")
            return [SequenceUpdate(sequence_id, error=lost) for sequence_id in self._running]

    def _take_residency(self) -> ResidencyChange:
        with self._lock:
            taken, self._residency = self._residency, ResidencyChange()
            return taken

    def _next(self, request: SequenceRequest, count: int) -> SequenceUpdate:
        if self.cannot_read and request.adapter is not None:
            return SequenceUpdate(request.sequence_id, error=SequenceError("store_unavailable", "Stale file handle"))
        token = (request.prompt_token_ids[-1] + count + 1) % INFO.vocab_size
        limit = request.sampling.max_tokens
        is_last = limit is not None and count + 1 >= limit
        logprobs = None if request.sampling.num_logprobs is None else [TokenLogprobs(-float(count), [], [])]
        return SequenceUpdate(request.sequence_id, [token], logprobs, "length" if is_last else None)


def _with_usage(update: SequenceUpdate, request: SequenceRequest, count: int) -> SequenceUpdate:
    """A gang reports the usage with a sequence's first and last token."""
    if update.finish_reason is None and count > len(request.generated_token_ids):
        return update
    return msgspec.structs.replace(update, usage=_usage(request, count + len(update.token_ids)))


def _usage(request: SequenceRequest, num_generated: int) -> SequenceUsage:
    """As if the whole prompt was computed with the first token."""
    num_computed = len(request.prompt_token_ids) if num_generated else 0
    return SequenceUsage(num_computed_prompt_tokens=num_computed, num_generated_tokens=num_generated)
