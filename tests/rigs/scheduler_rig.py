"""Requests for a scheduler, and a worker that computes nothing but knows the content of every page."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import msgspec
import numpy as np

from motet.workers.decoding.token_counts import PenalisedSequences
from motet.workers.execution.gang_executor import DeltaDecoder, DeltaEncoder, Execute
from motet.workers.memory.paged_memory import AdapterState
from motet.workers.plan import (
    INT32_BYTES,
    AdapterFailure,
    MoveEnd,
    PageMove,
    Residence,
    SampledToken,
    SequencePlan,
    StepPlan,
    StepResult,
    unpacked,
)
from motet.workers.scheduling.growing_sequence import GrowingSequence
from motet.workers.scheduling.scheduler import Scheduler
from motet.workers.scheduling.tier_traffic import TierSizes
from motet.workers.window_pages import GangLimits
from motet.workers.wire.messages import AdapterRef, SamplingParams, SequenceRequest, SequenceUpdate, TokenLogprobs
from motet.workers.wire.page_keys import KeyChain, PageKey, dense_key, state_key
from motet.workers.wire.prompt_scores import PromptScores, packed_vector, row_bytes

EOS = 99
INVOCATIONS = {"x": (1,), "y": (0, 1), "z": (0, 0, 0)}  # of activated LoRA, by the letter that digests begin with


def limits(
    num_pages: int, budget: int = 16, num_sequences: int = 8, window: int | None = None, num_state_pages: int = 0
) -> GangLimits:
    return GangLimits(64, 100, 4, num_pages, budget, num_sequences, window, num_state_pages=num_state_pages)


def request(
    sequence_id: int, num_prompt: int = 3, max_tokens: int | None = 4, adapter: str | None = None, **sampling: Any
) -> SequenceRequest:
    """A request whose prompt differs from all others."""
    return asking(sequence_id, [sequence_id % 98] * num_prompt, max_tokens, adapter, **sampling)


def asking(
    sequence_id: int,
    prompt: list[int],
    max_tokens: int | None = 4,
    adapter: str | None = None,
    tenant: str = "t",
    **sampling: object,
) -> SequenceRequest:
    ref = None
    if adapter is not None:
        ref = AdapterRef(adapter, {"q_proj": int(adapter[1:])}, INVOCATIONS.get(adapter[0], ()))
    params = SamplingParams(max_tokens=max_tokens, **sampling)  # type: ignore[arg-type]
    return SequenceRequest(
        sequence_id=sequence_id, prompt_token_ids=prompt, sampling=params, tenant=tenant, adapter=ref
    )


def scheduler(of: GangLimits, tiers: TierSizes | None = None) -> Scheduler:
    return Scheduler(of, frozenset({EOS}), lambda ref: max(ref.module_ranks.values()), tiers=tiers)


Owner = tuple[str, str | None, int]  # tenant, adapter, and the first token that this computes


class Owners:
    """Whose the KV of each of a sequence's tokens is."""

    def __init__(self, request: SequenceRequest) -> None:
        ref, prompt, start = request.adapter, request.prompt_token_ids, 0
        if ref is not None and (invocation := [*ref.invocation_token_ids]):
            start = max(at for at in range(len(prompt)) if prompt[at : at + len(invocation)] == invocation)
        self._last: Owner = (request.tenant, None if ref is None else ref.digest, start)

    def of(self, position: int) -> Owner:
        return _at(self._last, position)


def _at(last: Owner, position: int) -> Owner:
    """Of a token of a sequence whose last tokens have this owner."""
    return last if position >= last[2] else (last[0], None, 0)


class Worker:
    """Executes plans without computing: token n of a sequence is n. Checks that a real worker could execute the plan.

    It keeps what every page holds: KV of a token is its tenant's and adapter's, and follows from all tokens before it.
    Of an activated LoRA it also follows from where that begins, and before it is the base's.
    It gets each plan as a worker in another process does, and checks that it is the scheduler's.
    """

    def __init__(self, of: GangLimits, slow_loads: random.Random | None = None) -> None:
        self.limits, self.slow_loads = of, slow_loads
        self.coming: list[str] = []
        self.there: dict[str, tuple[int, ...]] = {}
        self.num_computed = self.num_copies = 0
        self.sequence_of: Callable[[int], GrowingSequence] | None = None  # to know whose KV a plan means
        self._kv: dict[tuple[int, int], Any] = {}  # by page and place in it
        self._full: dict[tuple[int, int], object] = {}  # of full layers, by entry of a page table and place
        self._tiers: dict[tuple[str, int], list[Any]] = {}  # what each page of a tier behind the pool holds
        self._moving: list[PageMove] = []
        self._keys: dict[tuple[object, ...], PageKey] = {}  # by a page's last KV
        self.failing_tiers: set[str] = set()
        self.failing_adapters: set[str] = set()  # digests whose load comes to nothing
        self._leader, self.deltas = DeltaEncoder(), DeltaDecoder()
        self.penalised = PenalisedSequences()
        self.broken: set[int] = set()  # sequences whose logits are not finite
        self._chosen: dict[int, SampledToken | None] = {}  # by the last plan
        self.num_fed = 0  # tokens
        self.copies_early = False  # a page may be copied before the step that needs it

    def execute(self, plan: StepPlan, failing: Iterable[str] = ()) -> StepResult:
        assert sum(len(s.token_ids) for s in plan.sequences) <= self.limits.max_tokens_per_step
        assert len(plan.sequences) <= self.limits.max_num_sequences
        plan = self._received(plan)
        self.penalised.follow(plan, self._chosen)
        self.penalised.check_integrity(plan)
        plan = self._fed(plan)
        for load in plan.loads:
            self._write_adapter(load.residence)
        self._moving += plan.moves
        self.num_copies += len(plan.copies)
        own = {page for s in plan.sequences for page in self._needed(s)}
        targets = {copy.target for copy in plan.copies}
        assert len(targets) == len(plan.copies), "two copies into one page"
        # With full layers a sequence may begin with more kept pages than it needs later, and take one for its next
        # token only in the next step. A beam that joins its search may get its first tokens later.
        # So may a state that is there before the step that keeps it.
        may_be_early = self.limits.full_layers is not None or self.copies_early or self.limits.num_state_pages > 0
        assert targets <= own or may_be_early, "a copy that no sequence needs"
        assert not targets & {copy.source for copy in plan.copies}
        for copy in plan.copies:
            # A page of beams may be copied before it is full: what follows is written later.
            content = [self._kv.get((copy.source, place)) for place in range(self.limits.block_size)]
            self._write_page("device", copy.target, content)
        for dense in plan.full_copies:
            self._fill_dense(dense.sources, dense.target)
        written = [self._compute(s) for s in plan.sequences]
        written += [{(page, 0) for page in a.pages} for a in plan.adapters]
        assert len(set().union(*written)) == sum(map(len, written)), "two write to the same place"
        known = {a.digest: a.pages for a in plan.adapters}
        tokens: dict[int, SampledToken | None] = {}
        for s in plan.sequences:
            assert s.adapter is None or known[s.adapter] == self.there[s.adapter]
            if s.sample is not None:
                token = SampledToken(s.sample.index % 90, self._logprobs(s))
                tokens[s.sequence_id] = None if s.sequence_id in self.broken else token
        for a in plan.adapters:
            assert {self._kv[page, place] for page in a.pages for place in range(self.limits.block_size)} == {a.digest}
        self._chosen = tokens
        self.coming += [load.residence.digest for load in plan.loads]
        ended = [d for d in self.coming if self.slow_loads is None or self.slow_loads.random() < 0.4]
        self.coming = [d for d in self.coming if d not in ended]
        failed = [d for d in ended if d in failing or d in self.failing_adapters]
        return StepResult(
            plan.step,
            tokens,
            tuple(d for d in ended if d not in failed),
            tuple(AdapterFailure(d, "bad") for d in failed),
            tuple(self._move()),
        )

    def _logprobs(self, s: SequencePlan) -> TokenLogprobs | None:
        """Of a beam's next tokens; None: it is no beam."""
        assert s.sample is not None
        num_top = s.sample.params.num_logprobs
        if num_top is None or self.sequence_of is None:
            return None
        sequence = self.sequence_of(s.sequence_id)
        token_ids = sequence.token_ids[sequence.num_prompt_tokens : s.start + len(s.token_ids)]
        top_ids, top_logprobs = next_of(token_ids)
        return TokenLogprobs(0.0, top_ids[:num_top], top_logprobs[:num_top])

    def _received(self, plan: StepPlan) -> StepPlan:
        sent = msgspec.msgpack.encode(self._leader.encode(plan))
        received = self.deltas.decode(msgspec.msgpack.decode(sent, type=Execute))
        assert received == plan, "a worker in another process gets another plan"
        return received

    def _fed(self, plan: StepPlan) -> StepPlan:
        """The plan with the tokens that it is fed. Sequences without one drop out."""
        parts = []
        for part in plan.sequences:
            if part.is_fed:
                self.num_fed += 1
                if (token := self._chosen[part.sequence_id]) is None:
                    continue
                part = msgspec.structs.replace(part, token_ids=(token.token_id,))
            parts.append(part)
        return msgspec.structs.replace(plan, sequences=tuple(parts))

    def check_residence(self, s: Scheduler) -> None:
        """Checks that pages which the scheduler calls resident, in any tier, hold the content of their keys."""
        resident: list[tuple[PageKey, list[Any]]] = []
        layers = self.limits.full_layers
        filling = {*s._prefixes._copied_from}  # dense pages among these: by a plan that has not ended
        for key, page in s.memory.prefixes._pages.items():
            if self.limits.num_state_pages and self._kv[page, 0][0] == "state":
                pages = (page, *s.memory.prefixes._entries[page].more_pages)
                self._check_state(key, [self._read_page("device", one) for one in pages])
            elif layers is None or s.memory.prefixes._entries[page].num_blocks == 1:
                resident.append((key, self._read_page("device", page)))
            elif page not in filling:
                blocks = [self._read_full(entry) for entry in layers.dense_entries((page,))]
                assert dense_key(self._key_of(blocks[-1])) == key, "a dense page that is kept holds something else"
                resident += [(self._key_of(block), block) for block in blocks]
        for tier, slots in s._tiers._tiers.items():
            for key, numbers in slots._slots.items():
                contents = [self._read_page(tier, slot) for slot in numbers]
                if self.limits.num_state_pages and contents[0][0][0] == "state":
                    self._check_state(key, contents)
                else:
                    (content,) = contents
                    resident.append((key, content))
        for key, content in resident:
            assert self._key_of(content) == key, "a page that is kept holds something else"
        for digest, entry in s._adapters._entries.items():
            if entry.state is AdapterState.RESIDENT:
                for page in entry.residence.pages:
                    assert set(self._read_page("device", page)) == {digest}, "an adapter's page holds something else"

    def _check_state(self, key: PageKey, contents: Sequence[Sequence[Any]]) -> None:
        """Checks that a state that is kept is whole, and that of the tokens of its key."""
        assert len(contents) == self.limits.num_state_pages
        _, owner, token_ids, _ = contents[0][0]
        assert len(token_ids) % self.limits.block_size == 0, "a state of a part of a page is kept"
        assert state_key(self._last_key(owner, token_ids)) == key, "a state of other tokens is kept"
        self._check_state_pages(contents, owner, token_ids)

    def _check_state_pages(self, contents: Sequence[Sequence[Any]], owner: Owner, token_ids: Sequence[int]) -> None:
        for number, content in enumerate(contents):
            expected = ("state", owner, tuple(token_ids), number)
            assert [*content] == [expected] * self.limits.block_size, "not the state before it"

    def _go_on(self, s: SequencePlan, owners: Owners, token_ids: Sequence[int]) -> None:
        """Writes a sequence's recurrent state, on top of what its earlier tokens must have left."""
        state, size = s.state, self.limits.num_state_pages
        assert state is not None and bool(state.source) == (s.start > 0)
        assert [*state.snapshot_rows] == sorted({*state.snapshot_rows}) and all(
            0 < row < len(s.token_ids) for row in state.snapshot_rows
        )
        source = [self._read_page("device", page) for page in unpacked(state.source)]
        self._check_state_pages(source, owners.of(s.start - 1), token_ids[: s.start])
        pages = [*unpacked(state.snapshots), *unpacked(state.target)]
        assert len(pages) == len({*pages}) == size * (len(state.snapshot_rows) + 1)
        assert not {*pages} & {*unpacked(s.pages)[self.limits.num_unseen_pages(s.start) :]}
        for index, row in enumerate((*state.snapshot_rows, len(s.token_ids))):
            owner = owners.of(s.start + row - 1)
            for number, page in enumerate(pages[index * size : (index + 1) * size]):
                for place in range(self.limits.block_size):
                    self._write(page, place, ("state", owner, tuple(token_ids[: s.start + row]), number))

    def _key_of(self, content: list[Any]) -> PageKey:
        owner, token_ids = content[-1]
        before = len(token_ids) - len(content)
        parts = [(_at(owner, before + place), token_ids[: before + place + 1]) for place in range(len(content))]
        assert content == parts, "a page holds parts of several"
        return self._last_key(owner, token_ids)

    def _last_key(self, owner: Owner, token_ids: Sequence[int]) -> PageKey:
        """Of the page that ends with these tokens."""
        whole, block_size = (owner, tuple(token_ids)), self.limits.block_size
        if whole not in self._keys:
            tenant, adapter, start = owner
            prompt = [*token_ids[:start], *INVOCATIONS.get(adapter[0] if adapter else "", ())]
            chain = KeyChain.of(asking(0, prompt, adapter=adapter, tenant=tenant), block_size)
            keys: list[PageKey] = []
            chain.extend(keys, token_ids, len(token_ids) // block_size)
            self._keys[whole] = keys[-1]
        return self._keys[whole]

    def _move(self) -> Iterator[MoveEnd]:
        """Makes some of the copies that were requested, oldest first."""
        while self._moving and (self.slow_loads is None or self.slow_loads.random() < 0.5):
            move = self._moving.pop(0)
            if self.failing_tiers & {move.source, move.target}:
                yield MoveEnd(move.number, 0.0, "as the test wants")
                continue
            for source, target in zip(move.source_pages, move.target_pages, strict=True):
                self._write_page(move.target, target, self._read_page(move.source, source))
            yield MoveEnd(move.number, 0.0, None)

    def _read_page(self, tier: str, page: int) -> list[Any]:
        if tier == "device":
            return [self._kv[page, place] for place in range(self.limits.block_size)]
        return self._tiers[tier, page]

    def _write_page(self, tier: str, page: int, content: list[Any]) -> None:
        if tier == "device":
            for place, kv in enumerate(content):
                self._write(page, place, kv)
        else:
            self._tiers[tier, page] = content

    def _compute(self, s: SequencePlan) -> set[tuple[int, int]]:
        """Writes a sequence's KV, on top of what its earlier tokens must have left; the places written."""
        pages = self._needed(s)
        assert len(pages) == len(set(pages))
        if self.sequence_of is not None:
            sequence = self.sequence_of(s.sequence_id)
            owners, token_ids = Owners(sequence.request), sequence.token_ids
            assert s.token_ids == tuple(token_ids[s.start : s.start + len(s.token_ids)])
            assert {owners.of(s.start + row)[1] for row in range(len(s.token_ids))} == {s.adapter}
            if s.sample is not None and sequence.has_penalty:  # it sees all that came before
                (counts,) = self.penalised.of([s.sequence_id])
                assert counts is not None
                split = sequence.num_prompt_tokens
                prompt = token_ids[:split] if s.sample.params.repetition_penalty != 1 else []
                counts.check_integrity(prompt, token_ids[split : s.start + len(s.token_ids)])
            window, layers = self.limits.window, self.limits.full_layers
            for position in range(0 if window is None else max(0, s.start + 1 - window), s.start):
                kv = self._kv[self._place(s, position)]
                assert kv == (owners.of(position), tuple(token_ids[: position + 1])), (
                    "not the KV of this sequence's token"
                )
            for position in range(s.start if layers is not None else 0):
                block, place = divmod(position, self.limits.block_size)
                kv = self._full[unpacked(s.pages)[block], place]
                assert kv == (owners.of(position), tuple(token_ids[: position + 1])), (
                    "not the KV of this sequence's token"
                )
            for position in range(s.start, s.start + len(s.token_ids)):
                self._write(*self._place(s, position), (owners.of(position), tuple(token_ids[: position + 1])))
            if self.limits.num_state_pages:
                self._go_on(s, owners, token_ids)
        places = {self._place(s, position) for position in range(s.start, s.start + len(s.token_ids))}
        if s.state is not None:
            state_pages = [*unpacked(s.state.snapshots), *unpacked(s.state.target)]
            places |= {(page, place) for page in state_pages for place in range(self.limits.block_size)}
        self.num_computed += len(s.token_ids)
        return places

    def _needed(self, s: SequencePlan) -> list[int]:
        """Its pages without those that no layer sees any more."""
        num_slabs = self._num_slabs
        return [entry // num_slabs for entry in unpacked(s.pages)[self.limits.num_unseen_pages(s.start) :]]

    def _place(self, s: SequencePlan, position: int) -> tuple[int, int]:
        block, place = divmod(position, self.limits.block_size)
        page, slab = divmod(unpacked(s.pages)[block], self._num_slabs)
        assert slab == 0, "all layers are needed, and a dense page has some"
        return page, place

    @property
    def _num_slabs(self) -> int:
        """Of a page, as page tables count."""
        return 1 if self.limits.full_layers is None else self.limits.full_layers.num_slabs

    def _write(self, page: int, place: int, kv: object) -> None:
        self._kv[page, place] = kv
        if (layers := self.limits.full_layers) is not None:
            for entry in layers.dense_entries((page,)):
                self._full.pop((entry, place), None)
            self._full[page * layers.num_slabs, place] = kv

    def _fill_dense(self, sources: tuple[int, ...], target: int) -> None:
        layers = self.limits.full_layers
        assert layers is not None and len(sources) == layers.num_blocks and target not in sources
        for place in range(self.limits.block_size):
            self._kv.pop((target, place), None)
        for source, entry in zip(sources, layers.dense_entries((target,)), strict=True):
            for place in range(self.limits.block_size):
                self._full[entry, place] = self._full[source * layers.num_slabs, place]

    def _read_full(self, entry: int) -> list[Any]:
        return [self._full[entry, place] for place in range(self.limits.block_size)]

    def _write_adapter(self, residence: Residence) -> None:
        for page in residence.pages:
            for place in range(self.limits.block_size):
                self._write(page, place, residence.digest)
        self.there[residence.digest] = residence.pages


class WorkerExecutor:
    """An `Executor` that executes each plan as late as possible: when the plan after it is made."""

    feeds_tokens = False

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._plan: StepPlan | None = None

    def begin(self, plan: StepPlan) -> None:
        assert self._plan is None, "a plan begins before the last one is finished"
        self._plan = plan

    def finish(self) -> StepResult:
        assert self._plan is not None
        plan, self._plan = self._plan, None
        return self._worker.execute(plan)

    def wake_on_copy_end(self, wake: Callable[[], None]) -> None: ...

    def close(self) -> None: ...


class FeedingExecutor(WorkerExecutor):
    """One that may have another plan begun while it has not finished one."""

    feeds_tokens = True

    def __init__(self, worker: Worker) -> None:
        super().__init__(worker)
        self._begun: list[StepPlan] = []

    def begin(self, plan: StepPlan) -> None:
        self._begun.append(plan)
        assert len(self._begun) <= 2

    def finish(self) -> StepResult:
        return self._worker.execute(self._begun.pop(0))


def next_of(token_ids: Sequence[int]) -> tuple[list[int], list[float]]:
    """What follows the generated tokens of a beam: some likely ones, the likeliest first."""
    generator = random.Random(str([*token_ids]))
    ranked = sorted(((-3 * generator.random(), token) for token in range(1, 13)), reverse=True)
    return [token for _, token in ranked], [logprob for logprob, _ in ranked]


def quick_result(plan: StepPlan) -> StepResult:
    """The result of a plan whose sequences all choose token 7 and whose moves end, for tests of thousands.

    All states are 1, and scores 0.
    """
    chosen = SampledToken(7, None)
    tokens: dict[int, SampledToken | None] = {s.sequence_id: chosen for s in plan.sequences if s.sample is not None}
    pooled = {s.sequence_id: packed_vector(np.array([s.pool.num_rows])) for s in plan.sequences if s.pool is not None}
    scores: dict[int, PromptScores | None] = {}
    for one in plan.sequences:
        if one.scores is not None:
            num_rows = len(one.scores.targets) // INT32_BYTES
            scores[one.sequence_id] = PromptScores(one.scores.num_top, bytes(num_rows * row_bytes(one.scores.num_top)))
    moved = tuple(MoveEnd(move.number, 0.0, None) for move in plan.moves)
    return StepResult(plan.step, tokens, (), (), moved, scores=scores, pooled=pooled)


def run(s: Scheduler, worker: Worker, max_steps: int = 2000) -> list[SequenceUpdate]:
    updates: list[SequenceUpdate] = []
    for _ in range(max_steps):
        if not s.has_work():
            return updates
        plan = s.schedule()
        result = worker.execute(plan)
        assert worker.deltas.tables.keys() <= s._running.by_id.keys(), "a table is kept of a sequence that does not run"
        updates += s.commit(plan, result)
        s.check_integrity()
    raise AssertionError("the scheduler made no end")
