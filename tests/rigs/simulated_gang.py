"""A gang in simulated time: the real leader, engine and scheduler, over a worker that computes nothing.

A token follows from its sequence's seed and its index, so a test knows what each sequence must produce. The score of a
prompt's token is minus its position. The state of one is its position and 1.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from hashlib import blake2b

import msgspec
import numpy as np

from motet.tests.rigs.part_configs import leader_config
from motet.tests.rigs.stand_in_engine import INFO
from motet.workers.engine import Engine
from motet.workers.engine_messages import EngineMessage
from motet.workers.leader.frame_server import FrameServer
from motet.workers.leader.served_engine import OnStep, StepReport
from motet.workers.loop import EngineTimes
from motet.workers.plan import INT32_BYTES, SampledToken, ScorePlan, SequencePlan, StepPlan, StepResult
from motet.workers.scheduling.growing_sequence import GrowingSequence
from motet.workers.scheduling.scheduler import Scheduler
from motet.workers.window_pages import GangLimits
from motet.workers.wire.messages import (
    SequenceError,
    SequenceRequest,
    SequenceUpdate,
    SequenceUsage,
    Submit,
    TokenLogprobs,
)
from motet.workers.wire.prompt_scores import PromptScores, packed_scores, packed_vector

TOKEN = "a secret"
VOCAB_SIZE = 1000


def token_of(seed: int, index: int) -> int:
    return int.from_bytes(blake2b(f"{seed} {index}".encode(), digest_size=4).digest()) % VOCAB_SIZE


class _Executor:
    """Adapters come with the step after the one that asks for them."""

    feeds_tokens = False

    def __init__(self) -> None:
        self._plan: StepPlan | None = None
        self.on_plan: Callable[[], None] = lambda: None  # a step was planned
        self.on_part: Callable[[SequencePlan], None] = lambda part: None  # each part of a plan that is computed
        self.broken: set[int] = set()  # sequences, by the engine's ids, whose logits are not finite
        self._coming: tuple[str, ...] = ()

    def begin(self, plan: StepPlan) -> None:
        self._plan = plan
        self.on_plan()

    def finish(self) -> StepResult:
        plan, self._plan = self._plan, None
        assert plan is not None
        tokens: dict[int, SampledToken | None] = {}
        scores: dict[int, PromptScores | None] = {}
        pooled: dict[int, bytes | None] = {}
        for sequence in plan.sequences:
            self.on_part(sequence)
            if sequence.sample is not None and sequence.sequence_id in self.broken:
                tokens[sequence.sequence_id] = None
            elif (sample := sequence.sample) is not None:
                token, logprobs = token_of(sample.seed, sample.index), None
                if sample.params.num_logprobs is not None:
                    top = range(sample.params.num_logprobs)
                    top_ids, top_logprobs = [(token + i) % VOCAB_SIZE for i in top], [-1.0 - i for i in top]
                    logprobs = TokenLogprobs(-float(sample.index), top_ids, top_logprobs)
                tokens[sequence.sequence_id] = SampledToken(token, logprobs)
            is_broken = sequence.sequence_id in self.broken
            if (requested := sequence.scores) is not None:
                scores[sequence.sequence_id] = None if is_broken else _scores(requested, sequence.start)
            if (pool := sequence.pool) is not None:
                positions = range(sequence.start + pool.first_row, sequence.start + pool.first_row + pool.num_rows)
                total = packed_vector(np.array([sum(positions), len(positions)]))
                pooled[sequence.sequence_id] = None if is_broken else total
        loaded, self._coming = self._coming, tuple(load.residence.digest for load in plan.loads)
        return StepResult(plan.step, tokens, loaded, (), scores=scores, pooled=pooled)

    def wake_on_copy_end(self, wake: object) -> None: ...

    def close(self) -> None: ...


def _scores(plan: ScorePlan, start: int) -> PromptScores:
    first = start + plan.first_row + 1  # the token that the first row scores
    positions = np.arange(first, first + len(plan.targets) // INT32_BYTES)
    top = np.zeros((len(positions), plan.num_top))
    return packed_scores(-positions, np.ones_like(positions), top, top)


class SimulatedEngine:
    """A `ServedEngine` on the event loop: a step takes `step_s` of its time."""

    def __init__(self, limits: GangLimits, step_s: float) -> None:
        self._limits, self._step_s = limits, step_s
        loop = asyncio.get_running_loop()
        self.scheduler = Scheduler(limits, frozenset(), lambda ref: 2, clock=loop.time)
        self._executor = _Executor()
        self._executor.on_plan = self._note_beams
        self._executor.on_part = self._count
        self._engine = Engine(self.scheduler, self._executor, INFO, clock=loop.time)
        self.breaks = False  # no logits are finite any more
        self.computed: dict[int, set[int]] = {}  # positions, by the seed of their sequence
        self.generated: dict[int, set[int]] = {}  # tokens' indices, by the seed of their sequence
        self.num_computed = 0  # positions, each time that one is computed
        # All that was computed; True: it overflowed. Last, the tokens of a beam up to those: it has no seed of its own.
        self.parts: list[tuple[SequenceRequest, SequencePlan, bool, tuple[int, ...]]] = []
        self._beams: dict[int, GrowingSequence] = {}  # all that ever ran
        self.reports: list[tuple[float, SequenceRequest, SequenceUsage]] = []  # and when each was made
        self._times = EngineTimes(loop.time)
        self._inbox: list[EngineMessage] = []
        self._on_step: OnStep = lambda report: None
        self._timer: asyncio.TimerHandle | None = None
        self.requests: dict[int, SequenceRequest] = {}  # unfinished ones
        self._all_requests: dict[
            int, SequenceRequest
        ] = {}  # a step that is planned may compute more of one that failed
        self.alive = False

    def start(self, on_step: OnStep) -> None:
        self._on_step, self.alive = on_step, True

    def receive(self, message: EngineMessage) -> None:
        if isinstance(message, Submit):
            self.requests[message.request.sequence_id] = message.request
            self._all_requests[message.request.sequence_id] = message.request
        self._inbox.append(message)
        self._wake()

    def _note_beams(self) -> None:
        """Before the step is computed: a search may end meanwhile, and its beams are computed all the same."""
        for group in self.scheduler._beams._groups.values():
            self._beams |= {place.sequence_id: place for place in group.places}

    def _count(self, part: SequencePlan) -> None:
        beam = self._beams.get(part.sequence_id)
        content: tuple[int, ...] = ()
        if beam is not None and beam.beams is not None:
            request = self._all_requests[beam.beams.root.sequence_id]
            content = tuple(beam.token_ids[beam.num_prompt_tokens : part.start + len(part.token_ids)])
        else:
            request = self._all_requests[part.sequence_id]
        seed = request.sampling.seed or 0
        self.num_computed += len(part.token_ids)
        self.computed.setdefault(seed, set()).update(range(part.start, part.start + len(part.token_ids)))
        if self.breaks:
            self._executor.broken.add(part.sequence_id)
        elif part.sample is not None:
            self.generated.setdefault(seed, set()).add(part.sample.index)
        self.parts.append((request, part, part.sequence_id in self._executor.broken, content))

    def stop(self) -> None:
        self.alive = False
        self.requests.clear()
        if self._timer is not None:
            self._timer.cancel()

    def fail(self) -> None:
        """Ends all sequences, and those that still come, as an `EngineLoop` whose engine has raised."""
        self.alive = False
        self._wake()

    def check_idle(self) -> None:
        """Raises AssertionError if a sequence or a page is left."""
        assert not self.requests, f"{len(self.requests)} sequences are left in an engine"
        assert not self._engine.has_work() or self._timer is not None, "the engine has stopped with work to do"
        self._engine.check_integrity()
        if self._timer is None:
            now = self.scheduler.load().gauges
            assert now.num_running == now.num_waiting == 0
            assert now.num_free_pages + now.num_prefix_pages + now.num_adapter_pages == now.num_pages, "a page leaked"

    def _wake(self) -> None:
        if self._timer is None:
            self._times.begin_step()
            self._timer = asyncio.get_running_loop().call_later(self._step_s, self._step)

    def _step(self) -> None:
        self._timer = None
        inbox, self._inbox = self._inbox, []
        if not self.alive:
            failure = SequenceError("gang_lost", "the engine failed: by the test")
            failed, self.requests = [*self.requests], {}
            updates = [SequenceUpdate(sequence_id, error=failure) for sequence_id in failed]
            load = self._times.filled_in(self._engine.load())
            self._on_step(StepReport(updates, load, self._engine.take_residency_changes()))
            return
        for message in inbox:
            self._engine.receive(message)
        updates = self._engine.step()
        for update in updates:
            if update.usage is not None:
                now = asyncio.get_running_loop().time()
                self.reports.append((now, self.requests[update.sequence_id], update.usage))
            if update.finish_reason is not None or update.error is not None:
                self.requests.pop(update.sequence_id, None)
        load = self._times.end_step(self._engine.load())
        shares = self._engine.take_shares(512)
        self._on_step(StepReport(updates, load, self._engine.take_residency_changes(), shares))
        if self._engine.has_work():
            self._wake()


class SimulatedGang:
    """A leader that listens at `address`."""

    def __init__(self, address: str, limits: GangLimits, step_s: float, orphan_s: float, **leader: int) -> None:
        """`leader`: other settings of the leader than the default ones."""
        self.address = address
        self.engine = SimulatedEngine(limits, step_s)
        info = msgspec.structs.replace(
            INFO, gang_id=f"{address} {id(self)}", block_size=limits.block_size, num_pages=limits.num_pages
        )
        self.server = FrameServer(self.engine, info, TOKEN, leader_config(orphan_s=orphan_s, finished_s=1.0, **leader))

    async def start(self) -> None:
        host, _, port = self.address.rpartition(":")
        await self.server.start(host, int(port))

    async def stop(self) -> None:
        await self.server.stop()

    def check_idle(self) -> None:
        """Raises AssertionError if anything of a sequence is left here, but what may be requested again."""
        self.engine.check_idle()
        sequences = self.server._sequences
        assert not sequences._listeners and not len(sequences._timers) and not len(sequences._queue_limit)
        assert not any(stream.live or stream.unsent for stream in self.server._streams.values())
        assert all(entry.is_finished for entry in sequences._journal._entries.values())
        sequences._journal.check_integrity()
        sequences._queue_limit.check_integrity()
        sequences._running_limit.check_integrity()
        assert not sequences.num_held
