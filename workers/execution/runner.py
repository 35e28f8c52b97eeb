"""Runs plans on one worker's device: inputs, forward pass, sampling."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ...adapters.adapter import EXPERT_MODULES, MODULES
from ...adapters.packing.layout import AdapterLayout
from ...kernels.attention import AttentionBatch
from ...kernels.backend import Kernels
from ...kernels.lora import ABSENT, LoraBatch, LoraGeometry, LoraSegment, ModuleSlice, PagedAdapter
from ..decoding.token_choice import begin_sample, sample
from ..decoding.token_counts import PenalisedSequences
from ..memory.pool import PoolGeometry, kv_view
from ..models.context import ForwardContext
from ..models.decoder import Decoder
from ..parallel import Parallel
from ..plan import Residence, SampledToken, SequencePlan, StepPlan, packed
from .begun_step import BegunStep
from .device_rows import DeviceInputs, DeviceRows
from .graphs import DecodeGraphs, Record
from .inputs import StepInputs, make_inputs
from .page_tables import PageTables


class Runner:
    """Executes plans and decides nothing. Keeps of a sequence the KV in its pages and what its penalties count."""

    def __init__(
        self,
        decoder: Decoder,
        kernels: Kernels,
        parallel: Parallel,
        pool: torch.Tensor,
        geometry: PoolGeometry,
        layout: AdapterLayout,
        rotary: tuple[torch.Tensor, ...],
    ) -> None:
        self._decoder, self._kernels, self._parallel = decoder, kernels, parallel
        self._pool, self._geometry = pool, geometry
        self._layout, self._rotary, self._kv = layout, rotary, kv_view(pool, geometry)
        widths = {module: layout.part(module).widths for module in layout.shape.modules}
        self._lora_geometry = LoraGeometry(
            geometry.num_layers, geometry.slab, layout.tile, tuple(widths.get(module, (0, 0)) for module in MODULES)
        )
        self._expert_geometry = None
        if layout.shape.experts is not None:
            sides = tuple(widths[module] for module in EXPERT_MODULES)
            self._expert_geometry = LoraGeometry(geometry.num_layers, geometry.slab, layout.tile, sides)
        self._known: dict[str, tuple[Residence, PagedAdapter]] = {}  # adapters of the last plan, by digest
        self._lora_batch: tuple[tuple[LoraSegment, ...], LoraBatch] = ((), None)
        self._rows: DeviceRows | None = None  # None: a step's tensors are made of its plan alone
        self._graphs: DecodeGraphs | None = None
        self.penalised = PenalisedSequences()  # of the gang's first worker, which chooses the tokens

    @torch.inference_mode()
    def keep_tables(self, max_num_sequences: int, max_model_len: int) -> None:
        """From now on tables of pages stay on the device; see `DeviceRows`. `max_num_sequences`: of a plan."""
        tables = PageTables(max_num_sequences, -(-max_model_len // self._geometry.block_size), self._pool.device)
        self._rows = DeviceRows(tables, self._geometry.block_size)

    @torch.inference_mode()
    def record_decodes(self, record: Record) -> None:
        """Records the decodes of all numbers of sequences that the tables have room for; see `graphs.DecodeGraphs`.

        Records nothing where a graph cannot be used: with kernels that need the host, with workers that exchange, and
        with experts, whose adapters are sorted on the host.
        """
        assert self._rows is not None, "what a recorded pass reads must stay where it is: keep_tables comes first"
        lora = self._kernels.capturable_lora
        if lora is None or self._parallel.degree > 1 or self._expert_geometry is not None:
            return
        self._graphs = DecodeGraphs(
            lambda token_ids, attention, batch: self._forward(token_ids, attention, batch, (), None),
            lora,
            self._lora_geometry,
            self._geometry.num_pages,
            self._rows,
            self._decoder.vocab_size,
            self._pool.device,
            record,
        )

    @torch.inference_mode()
    def warm_up(self, most_tokens: int) -> None:
        """Computes prompt chunks of a few lengths and throws them away, so that no request waits for a compiler.

        The last step has `most_tokens`, as large as one can be, so that what it takes is measured before requests come.
        May be called only before the first plan: the pages that it writes to are free then.
        """
        block_size = self._geometry.block_size
        longest = min(len(self._rotary[0]), self._geometry.num_pages * block_size)  # tokens of a sequence
        few = [[num_tokens] for num_tokens in (2, 16, 128) if num_tokens <= min(longest, most_tokens)]
        if self._rows is not None:
            most_tokens = min(most_tokens, longest * self._rows.tables.num_sequences)
        full, rest = divmod(most_tokens, longest)
        for lengths in (*few, [longest] * full + [rest] * (rest > 0)):  # kernels choose their tiles by length
            chunks = tuple(
                SequencePlan(index, (0,) * length, 0, packed(range(-(-length // block_size))), None, None)
                for index, length in enumerate(lengths)
            )
            self._logits(self._inputs(StepPlan(0, chunks, (), ())))

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> dict[int, SampledToken | None]:
        """Computes the plan's tokens; the gang's first worker chooses the next ones, by sequence id."""
        if self._parallel.rank == 0:
            self.penalised.follow(plan)
        if not plan.sequences:
            return {}
        inputs = self._inputs(plan)
        logits = self._logits(inputs)
        if self._parallel.rank > 0:
            return {}
        counts = self.penalised.of(inputs.sample_ids) if plan.penalised else ()
        return dict(zip(inputs.sample_ids, sample(logits, inputs.samples, self._kernels.sampling, counts), strict=True))

    @torch.inference_mode()
    def begin(self, plan: StepPlan, before: BegunStep) -> BegunStep:
        """Launches a plan on a GPU and waits for nothing, unless it must know which tokens the step before has chosen.

        `before`: the step that was begun before this one, which may still run: it chooses the tokens that are fed.
        """
        if not plan.sequences:
            self.penalised.follow(plan)
            return BegunStep()
        inputs = self._inputs(plan, before)
        assert self._rows is not None and isinstance(inputs, DeviceInputs), "tokens are fed where tables are kept"
        if inputs.is_fed:
            before.settle()
            self._rows.feed(before)
        logits = self._logits(inputs)
        # The device is busy with this step already when the host waits for what penalties must know of the last one.
        self.penalised.follow(plan, before.tokens if plan.penalised else {})
        if not inputs.samples:
            return BegunStep()
        counts = self.penalised.of(inputs.sample_ids) if plan.penalised else ()
        return BegunStep(inputs.sample_ids, begin_sample(logits, inputs.samples, counts))

    @torch.inference_mode()
    def logits(self, plan: StepPlan) -> torch.Tensor:
        """Computes the plan's tokens; `[num_samples, vocab]` float32 of the sequences that sample, in batch order."""
        return self._logits(self._inputs(plan))

    def _inputs(self, plan: StepPlan, before: BegunStep | None = None) -> StepInputs | DeviceInputs:
        """Copies pages within the pool as the plan says, and lays out its tokens."""
        if plan.copies:
            content = self._kernels.read_pages(self._pool, [copy.source for copy in plan.copies])
            self._kernels.write_pages(self._pool, [copy.target for copy in plan.copies], content)
        self._known = {residence.digest: (residence, self._paged(residence)) for residence in plan.adapters}
        adapters = {digest: adapter for digest, (_, adapter) in self._known.items()}
        if self._rows is not None:
            return self._rows.inputs(plan, adapters, before or BegunStep())
        return make_inputs(plan, adapters, self._geometry.block_size, self._pool.device)

    def _logits(self, inputs: StepInputs | DeviceInputs) -> torch.Tensor:
        lora = self._lora(inputs.segments)
        if self._graphs is not None and isinstance(inputs, DeviceInputs):
            recorded = self._graphs.logits(inputs, lora)
            if recorded is not None:
                return recorded
        return self._forward(inputs.token_ids, inputs.attention, lora, inputs.segments, inputs.sample_rows)

    def _forward(
        self,
        token_ids: torch.Tensor,
        attention: AttentionBatch,
        lora: LoraBatch | None,
        segments: tuple[LoraSegment, ...],
        sample_rows: torch.Tensor | None,
    ) -> torch.Tensor:
        """The logits of `sample_rows`; None: of all rows."""
        context = ForwardContext(
            self._kernels,
            self._parallel,
            self._pool,
            attention,
            lora,
            segments,
            self._expert_geometry,
            self._rotary,
            self._kv,
        )
        hidden = self._decoder.hidden_states(token_ids, context)
        return self._decoder.logits(hidden if sample_rows is None else hidden[sample_rows], context)

    def _lora(self, segments: tuple[LoraSegment, ...]) -> LoraBatch | None:
        """The segments as the kernels need them; the last step's are used again if they are the same, as in decode."""
        if not segments:
            return None
        if self._lora_batch[0] != segments:
            batch = self._kernels.lora.prepare(segments, self._lora_geometry, self._pool.device)
            self._lora_batch = (segments, batch)
        return self._lora_batch[1]

    def _paged(self, residence: Residence) -> PagedAdapter:
        known = self._known.get(residence.digest)
        if known is not None and known[0] == residence:
            return known[1]
        offsets, shape = self._layout.offsets(residence.module_ranks), self._layout.shape

        def slices(modules: Iterable[str], expert: int) -> tuple[ModuleSlice, ...]:
            found = (offsets.get(module) for module in modules)
            return tuple(
                ModuleSlice(at.rank, at.a_rows, at.a + expert * at.stride, at.b + expert * at.stride) if at else ABSENT
                for at in found
            )

        experts: tuple[PagedAdapter, ...] = ()
        if shape.experts is not None and any(module in offsets for module in EXPERT_MODULES):
            experts = tuple(
                PagedAdapter(residence.pages, slices(EXPERT_MODULES, expert))
                for expert in range(shape.experts.num_experts)
            )
        return PagedAdapter(residence.pages, slices(MODULES, 0), experts)
