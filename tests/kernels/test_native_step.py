"""A step as one native program against the same kernels called one by one, for this CPU and CPUs with fewer
instructions.

`tests/kernels/test_sanitizers.py` runs this file once more, with sanitizers compiled in.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle

import pytest
import torch

from motet.adapters.adapter import MODULES, BaseShape
from motet.adapters.packing.layout import AdapterLayout
from motet.kernels.attention import AttentionBatch
from motet.kernels.backend import Kernels, with_quantised_weights
from motet.kernels.experts import Routing, choose_experts
from motet.kernels.lora import ABSENT, LoraBatch, LoraGeometry, LoraSegment, ModuleSlice, PagedAdapter
from motet.kernels.norms import ACTIVATIONS, UNGATED, ClampedSwiglu, Ungated, activate, affine
from motet.kernels.quantised import QuantisedWeight
from motet.kernels.step import (
    Activate,
    Add,
    AddExpertLora,
    AddGated,
    AddLora,
    AddNorm,
    Affine,
    Attend,
    ChooseExperts,
    CombinePairs,
    Embed,
    ExpertLinear,
    Gated,
    Heads,
    Linear,
    Norm,
    Operation,
    Program,
    TakePairs,
    WriteKV,
)
from motet.tests.rigs.native_builds import TOLERANCE
from motet.workers.execution.device_rows import make_inputs
from motet.workers.models.rotary import rotary_table
from motet.workers.models.rotary_config import RotaryConfig
from motet.workers.plan import SequencePlan, StepPlan, packed

CPU = torch.device("cpu")
HIDDEN, INNER, VOCAB, BLOCK_SIZE, NUM_LAYERS = 48, 72, 40, 16, 2
HEADS = Heads(num_heads=4, num_kv_heads=2, head_dim=24)
SLAB = BLOCK_SIZE * 2 * HEADS.num_kv_heads * HEADS.head_dim
QUERY, KV = HEADS.num_heads * HEADS.head_dim, HEADS.num_kv_heads * HEADS.head_dim
WIDTHS = (HIDDEN, HIDDEN, HIDDEN, QUERY + 2 * KV, QUERY, QUERY, 2 * INNER, INNER)
RESIDUAL, NORMED, OUTPUT, QKV, ROTATED, ATTENDED, GATE_UP, PRODUCT = range(8)
SIDES = {
    **{"q_proj": (HIDDEN, QUERY), "k_proj": (HIDDEN, KV), "v_proj": (HIDDEN, KV), "o_proj": (QUERY, HIDDEN)},
    **{"gate_proj": (HIDDEN, INNER), "up_proj": (HIDDEN, INNER), "down_proj": (INNER, HIDDEN)},
}
LAYOUT = AdapterLayout(BaseShape(NUM_LAYERS, SIDES), SLAB, "float32")
GEOMETRY = LoraGeometry(NUM_LAYERS, SLAB, LAYOUT.tile, tuple(SIDES[module] for module in MODULES))


@dataclass(frozen=True)
class Base:
    """Two layers with all that families differ in: biases, norms of heads and of outputs, a half without a norm before
    it, a window, a softcap.
    """

    program: Program
    pool: torch.Tensor


def make_base(kernels: Kernels, dtype: torch.dtype, activation: str, wide_norms: bool) -> Base:
    generator = torch.Generator().manual_seed(0)
    draw = partial(torch.randn, generator=generator)
    pool = (draw(60, NUM_LAYERS, SLAB) * 0.1).to(dtype)

    def norm(width: int) -> torch.Tensor:
        weight = 1 + 0.1 * draw(width)
        return weight if wide_norms else weight.to(dtype)

    def linear(x: int, to: int, layer: int, modules: tuple[int, ...], has_bias: bool) -> list[Operation]:
        weight = (draw(WIDTHS[to], WIDTHS[x]) / WIDTHS[x] ** 0.5).to(dtype)
        bias = draw(WIDTHS[to]).to(dtype) if has_bias else None
        return [Linear(x, to, kernels.pack_linear(weight), bias), AddLora(x, to, layer, modules)]

    operations: list[Operation] = [Embed(RESIDUAL, draw(VOCAB, HIDDEN).to(dtype), 1.5 if wide_norms else 1.0)]
    rotary = rotary_table(RotaryConfig(10000.0, "default", {}), HEADS.head_dim, 512)
    for layer in range(NUM_LAYERS):
        kv = pool[:, layer].unflatten(1, (2, BLOCK_SIZE, HEADS.num_kv_heads, HEADS.head_dim))
        first = AddNorm(RESIDUAL, None, NORMED, norm(HIDDEN), 1e-5)
        operations.append(first if layer == 0 else replace(first, x=OUTPUT, residual=RESIDUAL))
        operations += linear(NORMED, QKV, layer, (0, 1, 2), has_bias=True)
        for column, number in ((0, HEADS.num_heads), (QUERY, HEADS.num_kv_heads)):
            count = number if layer == 0 else 1  # norms of each head, or over all
            operations.append(Norm(QKV, column, count, norm(number * HEADS.head_dim // count), 1e-5))
        operations.append(WriteKV(QKV, ROTATED, HEADS, rotary, kv))
        window, softcap = (None, 30.0) if layer == 0 else (20, None)
        sinks = None if layer == 0 else torch.linspace(-2.0, 2.0, HEADS.num_heads)
        operations.append(Attend(ROTATED, ATTENDED, HEADS, kv, 0.2, window, softcap, sinks))
        operations += linear(ATTENDED, OUTPUT, layer, (3,), has_bias=False)
        operations.append(Norm(OUTPUT, 0, 1, norm(HIDDEN), 1e-5))
        if layer == 0:
            operations.append(AddNorm(OUTPUT, RESIDUAL, NORMED, norm(HIDDEN), 1e-5))
        else:
            operations.append(Add(OUTPUT, RESIDUAL))
        operations += linear(NORMED if layer == 0 else RESIDUAL, GATE_UP, layer, (4, 5), has_bias=False)
        operations.append(Gated(GATE_UP, PRODUCT, activation))
        operations += linear(PRODUCT, OUTPUT, layer, (6,), has_bias=True)
    operations.append(AddNorm(OUTPUT, RESIDUAL, NORMED, norm(HIDDEN), 1e-5, is_centred=wide_norms))
    return Base(Program(WIDTHS, tuple(operations), NORMED), pool)


def one_by_one(
    base: Base, kernels: Kernels, token_ids: torch.Tensor, batch: AttentionBatch, lora: LoraBatch | None
) -> torch.Tensor:
    """The oracle."""
    registers: dict[int, torch.Tensor] = {}

    def heads_of(x: torch.Tensor, start: int, count: int, dim: int) -> torch.Tensor:
        part: torch.Tensor = x[:, start : start + count * dim].unflatten(1, (count, dim))
        return part

    for op in base.program.operations:
        if isinstance(op, Embed):
            registers[op.to] = op.table[token_ids] * op.scale
        elif isinstance(op, AddNorm):
            residual = None if op.residual is None else registers[op.residual]
            add_norm = kernels.add_norm(op.is_centred)
            registers[op.to], total = add_norm(registers[op.x], residual, op.weight, op.eps)
            if op.residual is not None:
                registers[op.residual] = total
        elif isinstance(op, Add):
            registers[op.to] = registers[op.to] + registers[op.x]
        elif isinstance(op, Norm):
            part = heads_of(registers[op.x], op.column, op.count, len(op.weight))
            part.copy_(kernels.rms_norm(part, op.weight, op.eps))
        elif isinstance(op, Linear):
            registers[op.to] = kernels.linear(registers[op.x], op.weight, op.bias)
        elif isinstance(op, AddLora):
            if lora is not None:
                kernels.lora.add(registers[op.to], registers[op.x], base.pool, op.layer, lora, op.modules)
        elif isinstance(op, WriteKV):
            q, k, v = (heads_of(registers[op.x], at, n, 24) for at, n in ((0, 4), (QUERY, 2), (QUERY + KV, 2)))
            registers[op.to] = kernels.write_kv(q, k, v, op.rotary, op.kv, batch)
        elif isinstance(op, Attend):
            found = kernels.paged_attention(registers[op.x], op.kv, batch, op.scale, op.window, op.softcap, op.sinks)
            registers[op.to] = found.flatten(1)
        else:
            assert isinstance(op, Gated), "experts have a test of their own"
            registers[op.to] = kernels.gated(registers[op.x], op.activation)
    return registers[base.program.output]


def adapter(ranks: dict[str, int], first_page: int) -> PagedAdapter:
    at = LAYOUT.offsets(ranks)
    places = (ModuleSlice(at[m].rank, at[m].rank, at[m].a, at[m].b) if m in at else ABSENT for m in MODULES)
    return PagedAdapter(tuple(range(first_page, first_page + LAYOUT.num_pages(ranks))), tuple(places))


@pytest.mark.parametrize(("activation", "wide_norms"), [*zip(ACTIVATIONS, cycle([False, True]))])
def test_a_step_is_what_its_kernels_compute(
    native: tuple[Kernels, torch.dtype], activation: str, wide_norms: bool
) -> None:
    """Prompts and decodes, with adapters and without, in steps of more and of fewer rows; KV is the same, too."""
    kernels, dtype = native
    if kernels.step is None:
        pytest.skip("oneDNN's linears serve")
    assert kernels.step.why_not([HEADS]) is None
    base = make_base(kernels, dtype, activation, wide_norms)
    step = kernels.step.prepare(base.program, base.pool)
    before = base.pool.clone()
    generator = torch.Generator().manual_seed(1)
    for number, lengths in enumerate([[1], [3, 40, 1], [1] * 20, [90, 17]]):
        plan, rows = [], 0
        segments = []
        for index, length in enumerate(lengths):
            tokens = tuple(torch.randint(VOCAB, (length,), generator=generator).tolist())
            start = 11 if length == 1 else 0
            first_page = index * 6 % 30
            pages = packed(range(first_page, first_page + 6))
            plan.append(SequencePlan(index, tokens, start, pages, None, None))
            if number != 2 or index % 2:
                segments.append(LoraSegment(rows, rows + length, adapter({"q_proj": 4, "down_proj": 8}, 40)))
            rows += length
        inputs = make_inputs(StepPlan(0, tuple(plan), (), ()), {}, BLOCK_SIZE, CPU)
        for lora in (None, kernels.lora.prepare(segments, GEOMETRY, CPU)):
            base.pool.copy_(before)
            expected = one_by_one(base, kernels, inputs.token_ids, inputs.attention, lora)
            kv = base.pool.clone()
            base.pool.copy_(before)
            found = step.run(inputs.token_ids, inputs.attention, lora)
            # The compiler may order sums of inlined kernels another way; steps of a program do not round otherwise.
            tolerance = TOLERANCE[dtype]
            torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)
            torch.testing.assert_close(base.pool, kv, atol=tolerance, rtol=tolerance)
    assert kernels.step.why_not([HEADS, replace(HEADS, head_dim=1024)]) is not None


EXPERTS, EXPERT_INNER = 6, 40
EXPERT_GEOMETRY = LoraGeometry(1, SLAB, 8, ((HIDDEN, EXPERT_INNER), (HIDDEN, EXPERT_INNER), (EXPERT_INNER, HIDDEN)))


def expert_adapter(ranks: tuple[int, int, int], first_page: int) -> PagedAdapter:
    """The same ranks for each expert but the second, which has none."""
    experts, at, pages = [], 0, tuple(range(first_page, first_page + 20))
    for expert in range(EXPERTS):
        places = []
        for rank, (num_in, num_out) in zip(ranks, EXPERT_GEOMETRY.sides, strict=True):
            places.append(ModuleSlice(rank, rank, at, at + rank * num_in) if rank and expert != 1 else ABSENT)
            at += rank * (num_in + num_out)
        experts.append(PagedAdapter(pages, tuple(places)))
    assert at <= SLAB * len(pages)
    return PagedAdapter(pages, (), tuple(experts))


ROUTINGS = (
    Routing(1),
    Routing(3, is_normalized=True),
    Routing(2, scoring="sigmoid", has_bias=True, scale=1.7),
    Routing(3, True, "sigmoid", has_bias=True, num_groups=EXPERTS // 2, top_groups=2, scale=0.6, eps=1e-20),
    Routing(3, True, has_bias=True, eps=0.1),
    Routing(2, has_bias=True, num_groups=EXPERTS // 2, top_groups=2, group_best=1, scale=1.3),
)


def experts_of_four_bits(num_out: int, num_in: int, generator: torch.Generator) -> list[QuantisedWeight]:
    experts = []
    for _ in range(EXPERTS):
        codes = torch.randint(0, 16, (num_out, num_in), generator=generator, dtype=torch.uint8)
        scales = torch.randint(-6, -3, (num_out, num_in // 8), generator=generator).float().exp2()
        experts.append(QuantisedWeight(codes, "float4", scales, None, 8))
    return experts


@pytest.mark.parametrize(
    ("routing", "num_bits"), [*((each, 16) for each in ROUTINGS), *((each, 4) for each in ROUTINGS[:2])], ids=str
)
def test_experts_in_a_step(native: tuple[Kernels, torch.dtype], routing: Routing, num_bits: int) -> None:
    """With adapters for experts and without, an expert that computes every row, and equal scores of all experts.

    Where several are chosen, they have biases and the clamped activation (gpt-oss).
    """
    kernels, dtype = native
    if kernels.step is None:
        pytest.skip("oneDNN's linears serve")
    kernels = with_quantised_weights(kernels, dtype, 2, rounds=False)
    assert kernels.step is not None and kernels.quantised is not None
    top_k = routing.top_k
    generator = torch.Generator().manual_seed(top_k)
    draw = partial(torch.randn, generator=generator)
    table, router = draw(VOCAB, HIDDEN).to(dtype), (draw(EXPERTS, HIDDEN) / HIDDEN**0.5).to(dtype)
    table[0] = 0  # all experts are equally likely: the first ones are chosen
    gate_up = kernels.pack_experts((draw(EXPERTS, 2 * EXPERT_INNER, HIDDEN) / HIDDEN**0.5).to(dtype))
    down = kernels.pack_experts((draw(EXPERTS, HIDDEN, EXPERT_INNER) / EXPERT_INNER**0.5).to(dtype))
    if num_bits == 4:
        sides = ((2 * EXPERT_INNER, HIDDEN), (HIDDEN, EXPERT_INNER))
        gate_up, down = (kernels.quantised.pack_experts(experts_of_four_bits(*side, generator)) for side in sides)
    activation = ClampedSwiglu(1.7, 1.5) if top_k > 1 else "silu"
    biases = [draw(EXPERTS, width).to(dtype) for width in (2 * EXPERT_INNER, HIDDEN)] if top_k > 1 else [None, None]
    router, gate = kernels.pack_linear(router), kernels.pack_linear(draw(1, HIDDEN).to(dtype))
    choice_bias = draw(EXPERTS) * 0.3 if routing.has_bias else None
    x, scores, pairs, both, inner, of_pairs, found, own_gate = range(8)
    widths = (HIDDEN, EXPERTS, *(top_k * n for n in (HIDDEN, 2 * EXPERT_INNER, EXPERT_INNER, HIDDEN)), HIDDEN, 1)
    operations = (
        Embed(x, table, 1.0),
        Linear(x, scores, router, None),
        ChooseExperts(scores, routing, choice_bias),
        TakePairs(x, pairs),
        ExpertLinear(pairs, both, gate_up, biases[0]),
        AddExpertLora(pairs, both, 0, (0, 1), 3, HIDDEN, EXPERT_INNER),
        Gated(both, inner, activation, top_k),
        ExpertLinear(inner, of_pairs, down, biases[1]),
        AddExpertLora(inner, of_pairs, 0, (2,), 3, EXPERT_INNER, HIDDEN),
        CombinePairs(of_pairs, found),
        Linear(x, own_gate, gate, None),
        AddGated(x, own_gate, found),
        Add(x, found),
    )
    pool = (draw(60, 1, SLAB) * 0.1).to(dtype)
    step = kernels.step.prepare(Program(widths, operations, found), pool)
    for num_rows in (1, 50, 7):
        tokens = torch.randint(VOCAB, (num_rows,), generator=generator)
        tokens[::6] = 0
        plan = [SequencePlan(0, tuple(tokens.tolist()), 0, packed(range(4)), None, None)]
        inputs = make_inputs(StepPlan(0, tuple(plan), (), ()), {}, BLOCK_SIZE, CPU)
        third = num_rows // 3
        segments = [
            LoraSegment(0, third, expert_adapter((4, 0, 8), 10)),
            LoraSegment(third, 2 * third + 1, expert_adapter((2, 16, 1), 30)),
        ]
        segments = [segment for segment in segments if segment.start < segment.end]
        for adapters in (None, kernels.expert_lora.prepare(segments, EXPERT_GEOMETRY, CPU)):
            rows = table[tokens]
            chosen, weights = choose_experts(kernels.linear(rows, router, None), routing, choice_bias)
            if routing.is_plain:
                equal = tokens == 0  # torch chooses any of them
                chosen[equal] = torch.arange(top_k)
            groups = kernels.experts.group(chosen, weights, 0, EXPERTS)
            lora = None if adapters is None else kernels.expert_lora.of_pairs(adapters, groups, 0)
            of_each = rows[groups.rows]
            y = kernels.expert_linear(of_each, gate_up, groups, biases[0])
            if lora is not None:
                kernels.lora.add(y, of_each, pool, 0, lora, (0, 1))
            between = kernels.gated(y, activation)
            y = kernels.expert_linear(between, down, groups, biases[1])
            if lora is not None:
                kernels.lora.add(y, between, pool, 0, lora, (2,))
            expected = kernels.experts.combine(y, groups, num_rows)
            expected = expected + kernels.linear(rows, gate, None).sigmoid() * rows + rows
            actual = step.run(inputs.token_ids, inputs.attention, None, adapters)
            tolerance = TOLERANCE[dtype]
            torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("has", [(True, False), (False, True), (True, True)])
def test_columns_with_weights_and_biases_in_a_step(native: tuple[Kernels, torch.dtype], has: tuple[bool, bool]) -> None:
    """Of norms: of some columns, and layer norms of heads."""
    kernels, dtype = native
    if kernels.step is None:
        pytest.skip("oneDNN's linears serve")
    generator = torch.Generator().manual_seed(3)
    table = torch.randn(5, 40, generator=generator).to(dtype)
    weight, bias = (torch.randn(36, generator=generator) if each else None for each in has)
    ones = torch.ones(9)
    operations = Embed(0, table, 1.0), Norm(0, 2, 4, ones, 1e-5, is_centred=True), Affine(0, 2, weight, bias)
    step = kernels.step.prepare(Program((40,), operations, 0), torch.zeros(1, 1, 1, dtype=dtype))
    plan = SequencePlan(0, tuple(range(5)), 0, packed([0]), None, None)
    inputs = make_inputs(StepPlan(0, (plan,), (), ()), {}, BLOCK_SIZE, CPU)
    output = step.run(inputs.token_ids, inputs.attention, None)
    expected = table.clone()
    normed = kernels.add_norm(True)(table[:, 2:38].reshape(-1, 9), None, ones, 1e-5)[0].view(5, 36)
    expected[:, 2:38] = affine(normed, weight, bias)
    torch.testing.assert_close(output, expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("name", UNGATED)
@pytest.mark.parametrize("width", [1, 16, 37])
def test_activations_without_a_gate_in_a_step(native: tuple[Kernels, torch.dtype], width: int, name: str) -> None:
    kernels, dtype = native
    if kernels.step is None:
        pytest.skip("oneDNN's linears serve")
    table = torch.randn(5, width, generator=torch.Generator().manual_seed(width)).to(dtype)
    table[2, 0], table[3, -1] = torch.nan, torch.inf
    if name == "relu2":  # others give no number, or a large one
        table[4, 0] = -torch.inf
    activation = Ungated(name, (0.7, 1.2, 0.4, -0.03) if name == "xielu" else ())
    operations = Embed(0, table, 1.0), Activate(0, 1, activation), Activate(1, 1, activation)
    step = kernels.step.prepare(Program((width, width), operations, 1), torch.zeros(1, 1, 1, dtype=dtype))
    plan = SequencePlan(0, tuple(range(5)), 0, packed([0]), None, None)
    inputs = make_inputs(StepPlan(0, (plan,), (), ()), {}, BLOCK_SIZE, CPU)
    output = step.run(inputs.token_ids, inputs.attention, None)
    expected = activate(activate(table, activation), activation)
    torch.testing.assert_close(output, expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype], equal_nan=True)
