"""Runs plans on one worker's device: inputs, forward pass, sampling."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from ...adapters.adapter import EMBEDDING, END_MODULES, EXPERT_MODULES, HEAD
from ...adapters.packing.layout import AdapterLayout, EndOffsets
from ...kernels.attention import AttentionBatch, PagedAttention, split_batch
from ...kernels.backend import Kernels
from ...kernels.lora import ABSENT, LoraSegment, ModuleSlice, PagedAdapter, PagedEnd, PagedEnds
from ...kernels.pages import copy_slabs
from ...kernels.recurrence import RecurrentKernel, StateBatch
from ..decoding.mask_source import MaskSource, NoMasks, TokenMask
from ..decoding.prompt_scoring import PoolingUnderWay, ScoredRows, ScoresUnderWay, most_rows
from ..decoding.token_choice import begin_sample, sample
from ..decoding.token_counts import PenalisedSequences, TokenCounts
from ..memory.page_arrays import PoolGeometry, kv_layers, layer_states
from ..models.decoder import Decoder
from ..models.layers import Attention, ForwardContext, RecurrentMixer
from ..models.passes import in_turn
from ..models.step_adapters import AdapterTables, StepAdapters
from ..models.step_program import prepare_step
from ..parallel import Parallel
from ..plan import Residence, SampledToken, SeenTokens, StepPlan, packed
from ..wire.prompt_scores import PromptScores
from .begun_step import BegunStep
from .device_rows import MOST_ROWS, DeviceInputs, DeviceRows, PageTables, StepInputs, make_inputs
from .graphs import DecodeGraphs, MixedGraphs, Record, RecordedAdapters, Widths
from .warm_up import ALL_WAYS, WarmUpLimits, as_plan, largest_steps, warm_up_steps

# A step's rows in two nano-batches, which are computed in turn (`models/passes.py`).


@dataclass(frozen=True)
class NanoBatch:
    token_ids: torch.Tensor  # [num_rows] int64
    attention: AttentionBatch
    segments: tuple[LoraSegment, ...]


def split_rows(
    token_ids: torch.Tensor, attention: AttentionBatch, segments: Sequence[LoraSegment], row: int
) -> tuple[NanoBatch, NanoBatch]:
    """The rows before `row`, and the others. A prompt's chunk may be in both, its earlier tokens in the first."""
    first, second = split_batch(attention, row)
    return (
        NanoBatch(token_ids[:row], first, _moved(segments, 0, row)),
        NanoBatch(token_ids[row:], second, _moved(segments, row, len(token_ids))),
    )


def _moved(segments: Sequence[LoraSegment], start: int, stop: int) -> tuple[LoraSegment, ...]:
    """What segments have of these rows, which are numbered from 0 then."""
    return tuple(
        LoraSegment(max(segment.start, start) - start, min(segment.end, stop) - start, segment.adapter)
        for segment in segments
        if segment.start < stop and segment.end > start
    )


_MASK_GRACE = 0.02  # of a forward pass on a CPU, that masks may take longer
_MOST_COPIED = 128  # pages that are copied within the pool at once, by way of memory that is not the pool's
_STATE_GRACE_S = 0.02  # at least, where a late mask preempts its sequence, as the state has gone on


class StepOutput(NamedTuple):
    """What the gang's first worker computes beside KV, by sequence id. None: the numbers are not finite."""

    tokens: dict[int, SampledToken | None]
    scores: dict[int, PromptScores | None]
    pooled: dict[int, bytes | None]


class _Launched(NamedTuple):
    """What a forward pass gives, while the device computes it."""

    logits: torch.Tensor  # of the rows after which a token is chosen
    scores: ScoresUnderWay | None = None  # None: no prompt is scored
    pooling: PoolingUnderWay | None = None  # None: none is pooled


class Runner:
    """Executes plans and decides nothing. Its only state of a sequence are KV pages and token counts for penalties."""

    def __init__(
        self,
        decoder: Decoder,
        kernels: Kernels,
        parallel: Parallel,
        pool: torch.Tensor,
        geometry: PoolGeometry,
        layout: AdapterLayout,
        rotary: tuple[torch.Tensor, ...],
        most_pages: int,
    ) -> None:
        """`most_pages`: capacity for a recorded step's adapters."""
        self._decoder, self._kernels, self._parallel = decoder, kernels, parallel
        self._pool, self._geometry = pool, geometry
        self._layout, self._rotary, self._kv = layout, rotary, kv_layers(pool, geometry)
        self._tables = AdapterTables(kernels, layout, most_pages, pool.device)
        self._states = layer_states(geometry)
        self._step = prepare_step(decoder, kernels, parallel, pool, rotary, self._kv, self._states)  # None: one by one
        self._paged_adapters: dict[str, tuple[Residence, PagedAdapter]] = {}  # adapters of the last plan, by digest
        # Of the last step with any, or of its two nano-batches.
        self._adapters: list[tuple[tuple[LoraSegment, ...], StepAdapters | None]] = [((), None)] * 2
        self.nano_batches: Mapping[int, int] = {}  # rows of steps to split: of these, the first nano-batch's
        self._rows: DeviceRows | None = None  # None: a step's tensors are made from its plan alone
        self._recorded_adapters: RecordedAdapters | None = None  # None: nothing is recorded yet
        self._graphs: DecodeGraphs | None = None
        self._mixed_graphs: MixedGraphs | None = None
        self.penalised = PenalisedSequences()  # of the gang's first worker, which chooses the tokens
        self.masks: MaskSource = NoMasks()  # likewise

    @property
    def pool(self) -> torch.Tensor:
        return self._pool

    @property
    def step_note(self) -> str:
        """What `motet status` adds to the kernels: whether a step is one call, where that can be."""
        if self._kernels.step is None:
            return ""
        return "; a step at once" if self._step is not None else "; a step kernel by kernel"

    @property
    def hidden_size(self) -> int:
        return len(self._decoder.norm)

    @property
    def num_pages(self) -> int:
        """Of the pool."""
        return self._geometry.num_pages

    @property
    def geometry(self) -> PoolGeometry:
        """Of its pool."""
        return self._geometry

    @torch.inference_mode()
    def keep_tables(self, max_num_sequences: int, max_model_len: int) -> None:
        """Keeps tables of pages on the device; see `DeviceRows`. `max_num_sequences`: of a plan."""
        tables = PageTables(max_num_sequences, -(-max_model_len // self._geometry.block_size), self._pool.device)
        self._rows = DeviceRows(tables, self._geometry.block_size, self._geometry.state.num_pages)

    @torch.inference_mode()
    def record_decodes(self, max_tokens: int, record: Record) -> None:
        """Records the decodes of all numbers of sequences that a plan can have; see `graphs.DecodeGraphs`.

        Records nothing with kernels that need the host. The workers of a gang record the same steps in the same order:
        what they exchange is in the graphs.
        """
        assert self._rows is not None, "what a recorded pass reads must stay where it is: keep_tables comes first"
        if not self._can_be_recorded:
            return
        self._graphs = DecodeGraphs(
            self._forward,
            self._adapters_of_recordings(self._rows),
            self._rows,
            min(max_tokens, self._rows.tables.num_sequences),
            self._decoder.vocab_size,
            self._pool.device,
            record,
        )

    @torch.inference_mode()
    def record_mixed(self, max_tokens: int, record: Record) -> None:
        """Records steps with prompts, up to a size; see `mixed_graphs.MixedGraphs`. `max_tokens`: of a plan.

        All else is as in `record_decodes`.
        """
        assert self._rows is not None, "what a recorded pass reads must stay where it is: keep_tables comes first"
        if not self._can_be_recorded:
            return
        mixers = [layer.attention for layer in self._decoder.layers]
        if len({(mixer.num_heads, mixer.head_dim) for mixer in mixers if isinstance(mixer, Attention)}) > 1:
            return  # what lies between two graphs has one width
        attention = next(mixer for mixer in mixers if isinstance(mixer, Attention))
        maybe = [mixer.beside if isinstance(mixer, Attention) else mixer for mixer in mixers]
        rules = [mixer.rule for mixer in maybe if isinstance(mixer, RecurrentMixer)]
        self._mixed_graphs = MixedGraphs(
            self._hidden_states,
            self._kernels.paged_attention,
            self._kernels.recur,
            Widths(
                attention.num_heads,
                attention.head_dim,
                self.hidden_size,
                (rules[0].width, rules[0].num_out) if rules else (0, 0),
            ),
            self._pool.dtype,  # of activations between layers; norms may have another
            self._adapters_of_recordings(self._rows),
            self._rows,
            max_tokens,
            record,
        )

    @property
    def _can_be_recorded(self) -> bool:
        """Latent attention launches by lists."""
        return self._geometry.kv_sides == 2 and self._tables.can_be_recorded

    def _adapters_of_recordings(self, rows: DeviceRows) -> RecordedAdapters:
        if self._recorded_adapters is None:
            num_sequences = rows.tables.num_sequences
            self._recorded_adapters = RecordedAdapters(self._tables, max(num_sequences, MOST_ROWS), num_sequences)
        return self._recorded_adapters

    @torch.inference_mode()
    def warm_up(self, max_tokens: int, max_num_sequences: int) -> None:
        """Computes steps and discards them, so that no request waits for a compiler; see `warm_up.warm_up_steps`.

        The last steps are the largest that can be, and choose tokens in all ways, so that what they take is measured
        before requests come. May be called only before the first plan: it writes to pages, which are free then.
        """
        limits = WarmUpLimits(max_tokens, max_num_sequences, longest=len(self._rotary[0]))
        shape = self._layout.shape
        ranks = dict.fromkeys((*shape.modules, *(END_MODULES if shape.ends is not None else ())), 16)
        pages = (0,) * self._layout.num_pages(ranks)
        adapters = [Residence(f"warm-up {index}", ranks, pages) for index in range(max_num_sequences)]
        steps = (*(warm_up_steps(limits) if self._kernels.compiles else ()), *largest_steps(limits))
        num_scored = most_rows(self._decoder.vocab_size)
        for number, step in enumerate(steps):
            is_largest = number >= len(steps) - 2
            plan = as_plan(step, number, self._geometry.block_size, adapters, num_scored if is_largest else 0)
            logits = self._launch(self._inputs(plan)).logits
        if self._parallel.rank == 0:
            seen = TokenCounts(SeenTokens(packed([0]), packed([1])))
            anything = dict.fromkeys(range(len(logits)), b"\xff" * (4 * -(-logits.shape[1] // 32)))
            sample(logits, [ALL_WAYS] * len(logits), self._kernels.sampling, [seen] * len(logits), anything)

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepOutput:
        """Computes the plan's tokens; the gang's first worker chooses the next ones."""
        began_at = time.perf_counter()
        self._copy_pages(plan)
        if self._parallel.rank == 0:
            self.penalised.follow(plan)
            self.masks.follow(plan, {})
        if not plan.sequences:
            return StepOutput({}, {}, {})
        inputs = self._inputs(plan)
        logits, scores, pooling = self._launch(inputs)
        if self._parallel.rank > 0:
            return StepOutput({}, {}, {})
        counts = self.penalised.of(inputs.sample_ids) if plan.penalised else ()
        masks, late = self._take_masks(inputs, logits.device, began_at)
        chosen = sample(logits, inputs.samples, self._kernels.sampling, counts, masks)
        return StepOutput(
            {id: token for id, token in zip(inputs.sample_ids, chosen, strict=True) if id not in late},
            {} if scores is None else scores.read(),
            {} if pooling is None else pooling.read(),
        )

    @torch.inference_mode()
    def begin(self, plan: StepPlan, before: BegunStep) -> BegunStep:
        """Launches a plan on a GPU without a wait, unless it needs to know the tokens of the step before.

        `before`: the step that was begun before this one, which may still run: it chooses the tokens that are fed.
        """
        self._copy_pages(plan)
        if not plan.sequences:
            self.penalised.follow(plan)
            return BegunStep()
        inputs = self._inputs(plan, before)
        assert self._rows is not None and isinstance(inputs, DeviceInputs), "tokens are fed where tables are kept"
        before.settle()  # even if it does not feed this step, which overwrites recordings' logits that it may need
        if inputs.is_fed:
            self._rows.feed(before)
        logits, scores, pooling = self._launch(inputs)
        # The device computes this step while the host waits for the last step's tokens, for penalties and masks.
        has_masks = any(sample.is_constrained for sample in inputs.samples)
        last_tokens = before.tokens if plan.penalised or has_masks else {}
        self.penalised.follow(plan, last_tokens)
        if has_masks:
            self.masks.follow(plan, last_tokens)
        if not inputs.samples:
            return BegunStep(scores=scores, pooling=pooling)
        counts = self.penalised.of(inputs.sample_ids) if plan.penalised else ()
        masks, late = dict[int, TokenMask](), frozenset[int]()
        if has_masks:
            # Of sequences that this step was to be fed a token that the step before could not choose there are none.
            unfed = before.late and before.late.intersection(s.sequence_id for s in plan.sequences if s.is_fed)
            masks, late = self._take_masks(inputs, logits.device, time.perf_counter(), unfed)
        return BegunStep(inputs.sample_ids, begin_sample(logits, inputs.samples, counts, masks), scores, pooling, late)

    def _take_masks(
        self,
        inputs: StepInputs | DeviceInputs,
        device: torch.device,
        began_at: float,
        without: frozenset[int] = frozenset(),
    ) -> tuple[dict[int, TokenMask], frozenset[int]]:
        """Masks by row, and the sequences whose masks are late, which means not made when the forward pass ends. On a
        CPU that has ended already, so masks get a little more time than it took since `began_at`, and where layers
        have a recurrent state `_STATE_GRACE_S` at least. None are awaited of the sequences `without`.
        """
        each = enumerate(zip(inputs.sample_ids, inputs.samples, strict=True))
        rows = {sequence_id: (row, sample.index) for row, (sequence_id, sample) in each if sample.is_constrained}
        if not rows:
            return {}, frozenset()
        has_states, now = self._geometry.state.num_pages > 0, time.perf_counter()
        until = now + max(_STATE_GRACE_S if has_states else 0.0, _MASK_GRACE * (now - began_at))
        is_over: Callable[[], bool] = lambda: time.perf_counter() > until  # noqa: E731
        if device.type == "cuda" and not has_states:
            is_over = torch.cuda.current_stream(device).record_event().query
        positions = [(sequence_id, index) for sequence_id, (_, index) in rows.items() if sequence_id not in without]
        masks_by_id = self.masks.take(positions, is_over)
        late = frozenset(rows.keys() - masks_by_id.keys())
        return {rows[sequence_id][0]: mask for sequence_id, mask in masks_by_id.items()}, late

    @torch.inference_mode()
    def logits(self, plan: StepPlan) -> torch.Tensor:
        """Computes the plan's tokens; `[num_samples, vocab]` float32 of the sequences that sample, in batch order."""
        self._copy_pages(plan)
        return self._launch(self._inputs(plan)).logits

    def _copy_pages(self, plan: StepPlan) -> None:
        """Makes the plan's copies within the pool. Later steps may need them, even if no sequence of this one does."""
        for start in range(0, len(plan.copies), _MOST_COPIED):  # states of many sequences may take many pages
            copies = plan.copies[start : start + _MOST_COPIED]
            content = self._kernels.read_pages(self._pool, [copy.source for copy in copies])
            self._kernels.write_pages(self._pool, [copy.target for copy in copies], content)
        for dense in plan.full_copies:
            layers = self._geometry.full_layers
            assert layers is not None
            slabs = self._pool.view(len(self._pool), layers.num_slabs, -1)
            copy_slabs(slabs, dense.sources, dense.target, layers.num_full)

    def _inputs(self, plan: StepPlan, before: BegunStep | None = None) -> StepInputs | DeviceInputs:
        """Lays out the plan's tokens."""
        self._paged_adapters = {residence.digest: (residence, self._paged(residence)) for residence in plan.adapters}
        adapters = {digest: adapter for digest, (_, adapter) in self._paged_adapters.items()}
        if self._rows is not None:
            return self._rows.inputs(plan, adapters, before or BegunStep())
        geometry = self._geometry
        return make_inputs(plan, adapters, geometry.block_size, self._pool.device, geometry.state.num_pages)

    def _launch(self, inputs: StepInputs | DeviceInputs) -> _Launched:
        # A sequence's state goes on row by row, so a step with states is not split.
        if (first := self.nano_batches.get(inputs.num_rows)) is not None and inputs.states is None:
            ends = None if self._tables.ends is None else self._tables.ends.prepare(inputs.segments)
            context = replace(self._context(inputs.attention, None), ends=ends)
            return self._finish(inputs, self._in_nano_batches(inputs, first), context)
        adapters = self._adapters_of(inputs.segments)
        if isinstance(inputs, DeviceInputs) and inputs.is_decode and self._graphs is not None:
            recorded = self._graphs.logits(inputs, adapters)
            if recorded is not None:
                return _Launched(recorded)
        hidden = None
        if isinstance(inputs, DeviceInputs) and not inputs.is_decode and self._mixed_graphs is not None:
            hidden = self._mixed_graphs.hidden_states(inputs, adapters)
        context = self._context(inputs.attention, adapters, inputs.states)
        if hidden is None and self._step is not None:
            lora = (context.lora, context.expert_lora)
            embedded = None if context.ends is None else self._decoder.embed(inputs.token_ids, context)
            hidden = self._step.run(inputs.token_ids, inputs.attention, *lora, inputs.states, context.outputs, embedded)
        elif hidden is None:
            hidden = self._decoder.hidden_states(inputs.token_ids, context)
        return self._finish(inputs, hidden, context)

    def _in_nano_batches(self, inputs: StepInputs | DeviceInputs, num_first: int) -> torch.Tensor:
        """The last layer's states of all rows. `num_first`: rows of the first nano-batch."""
        parts = split_rows(inputs.token_ids, inputs.attention, inputs.segments, num_first)
        passes = [
            self._decoder.forward(
                part.token_ids, self._context(part.attention, self._adapters_of(part.segments, index))
            )
            for index, part in enumerate(parts)
        ]
        return torch.cat(in_turn(passes, self._parallel))

    def _finish(self, inputs: StepInputs | DeviceInputs, hidden: torch.Tensor, context: ForwardContext) -> _Launched:
        """What the step needs of the last layer's states."""
        scores = self._scores(hidden, context, inputs.scored) if inputs.scored else None
        sampled = hidden if inputs.sample_rows is None else hidden[inputs.sample_rows]
        pooling = PoolingUnderWay(hidden, inputs.pooled) if inputs.pooled else None
        if context.ends is not None:
            context = replace(context, ends=context.ends.at(inputs.sampled))
        return _Launched(self._decoder.logits(sampled, context), scores, pooling)

    def _scores(self, hidden: torch.Tensor, context: ForwardContext, scored: Sequence[ScoredRows]) -> ScoresUnderWay:
        def head(states: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
            ends = None if context.ends is None else context.ends.at(rows)
            return self._decoder.logits(states, replace(context, ends=ends))

        return ScoresUnderWay(hidden, head, scored, self._decoder.vocab_size)

    def _forward(
        self,
        token_ids: torch.Tensor,
        attention: AttentionBatch,
        adapters: StepAdapters | None,
        states: StateBatch | None,
    ) -> torch.Tensor:
        """The logits of all rows."""
        context = self._context(attention, adapters, states)
        return self._decoder.logits(self._decoder.hidden_states(token_ids, context), context)

    def _hidden_states(
        self,
        token_ids: torch.Tensor,
        attention: AttentionBatch,
        adapters: StepAdapters | None,
        attend: PagedAttention,
        recur: RecurrentKernel,
    ) -> torch.Tensor:
        """The last layer's states of all rows, with these for the kernels' own attention and recurrence."""
        assert self._rows is not None
        context = self._context(attention, adapters, self._rows.fixed_states(1))  # which this recurrence does not use
        kernels = replace(self._kernels, paged_attention=attend, recur=recur)
        return self._decoder.hidden_states(token_ids, replace(context, kernels=kernels))

    def _context(
        self, attention: AttentionBatch, adapters: StepAdapters | None, states: StateBatch | None = None
    ) -> ForwardContext:
        return ForwardContext(
            self._kernels,
            self._parallel,
            self._pool,
            attention,
            None if adapters is None else adapters.lora,
            None if adapters is None else adapters.experts,
            self._rotary,
            self._kv,
            states,
            self._states,
            adapters is not None and adapters.has_narrow,
            latent_lora=None if adapters is None else adapters.latent,
            outputs=None if adapters is None else adapters.outputs,
            ends=None if adapters is None else adapters.ends,
        )

    def _adapters_of(self, segments: tuple[LoraSegment, ...], part: int = 0) -> StepAdapters | None:
        """The segments as the kernels need them; reuses the last step's if they are the same, as in decode.

        `part`: index of the nano-batch that they are of.
        """
        if segments and self._adapters[part][0] != segments:
            self._adapters[part] = (segments, self._tables.prepare(segments))
        return self._adapters[part][1] if segments else None

    def _paged(self, residence: Residence) -> PagedAdapter:
        cache_entry = self._paged_adapters.get(residence.digest)
        if cache_entry is not None and cache_entry[0] == residence:
            return cache_entry[1]
        offsets, shape = self._layout.offsets(residence.module_ranks), self._layout.shape

        def slices(modules: Iterable[str]) -> tuple[ModuleSlice, ...]:
            module_offsets = (offsets.get(module) for module in modules)
            return tuple(ModuleSlice(at.rank, at.rank, at.a, at.b) if at else ABSENT for at in module_offsets)

        num_pages = self._layout.num_layer_pages(residence.module_ranks)
        pages, end_pages = residence.pages[:num_pages], residence.pages[num_pages:]
        experts: tuple[PagedAdapter, ...] = ()
        dense = shape.dense_modules
        if any(module not in dense for module in offsets):
            of_experts = zip(*(shape.members(module) for module in EXPERT_MODULES), strict=True)
            experts = tuple(PagedAdapter(pages, slices(modules)) for modules in of_experts)
        outputs = tuple(at.outputs if (at := offsets.get(module)) else None for module in dense)
        has_outputs = any(start is not None for start in outputs)
        ends = None
        if at_ends := self._layout.end_offsets(residence.module_ranks):
            ends = PagedEnds(end_pages, *(_paged_end(at_ends.get(module)) for module in (EMBEDDING, HEAD)))
        return PagedAdapter(pages, slices(dense), experts, outputs if has_outputs else (), ends)


def _paged_end(at: EndOffsets | None) -> PagedEnd:
    if at is None:
        return PagedEnd()
    return PagedEnd(ModuleSlice(at.rank, at.rank, at.a, at.b), at.num_rows, at.token_ids, at.rows)
