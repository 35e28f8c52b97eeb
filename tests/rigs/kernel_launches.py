"""What the product launches of Triton's kernels, at the sizes of real models, on tensors without memory.

By case: what computes it, and the kernels that it launches.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from motet.kernels.attention import AttentionBatch, LayerKV
from motet.kernels.backend import Kernels, triton_kernels, with_float8_kv
from motet.kernels.experts import ExpertGroups
from motet.kernels.float8_kv import Float8KV, float8_view
from motet.kernels.gated_delta import GatedDelta
from motet.kernels.gpu.float8 import ScaledFloat8
from motet.kernels.lora import LoraGeometry, LoraSegment, ModuleSlice, PagedAdapter
from motet.kernels.mamba import Mamba
from motet.kernels.norms import ACTIVATIONS, Activation, ClampedSwiglu
from motet.kernels.recurrence import LayerState, Rule, StateBatch
from motet.kernels.short_convolution import ShortConvolution

META = torch.device("meta")  # shapes and strides, no memory: real sizes cost nothing
KERNELS = triton_kernels(META, torch.bfloat16)
FLOAT8_KV = with_float8_kv(KERNELS)
# Llama-3-8B, as its engine holds it.
NUM_LAYERS, HEADS, KV_HEADS, HEAD_DIM, SLAB = 32, 32, 8, 128, 32768
SLAB_OF_FLOAT8 = 16896  # with KV of eight bits
SIDES = ((4096, 4096), (4096, 1024), (4096, 1024), (4096, 4096), (4096, 14336), (4096, 14336), (14336, 4096))


def bf16(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.bfloat16, device=META)


def batch(counts: tuple[int, ...], context: int) -> AttentionBatch:
    """A batch with this number of new rows of each sequence, and this context."""
    starts = tuple(sum(counts[:i]) for i in range(len(counts) + 1))

    def ints(size: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device=META)

    pages, rows = ints(len(counts) * context // 16, torch.int32), starts[-1]
    lens = (context,) * len(counts)
    return AttentionBatch(starts, lens, pages, ints(len(counts)), context // 16, ints(rows), ints(rows), ints(rows))


def attend(counts: tuple[int, ...], window: int | None = None, softcap: float | None = None) -> None:
    kv = bf16(2000, NUM_LAYERS, 2, 16, KV_HEADS, HEAD_DIM)[:, 5]
    KERNELS.paged_attention(bf16(sum(counts), HEADS, HEAD_DIM), kv, batch(counts, 4096), 0.088, window, softcap)


def attend_wide() -> None:
    """Gemma 2 9B: heads of 256, a window and a cap."""
    kv = bf16(2000, 42, 2, 16, 8, 256)[:, 5]
    KERNELS.paged_attention(bf16(2049, 16, 256), kv, batch((2048, 1), 4096), 0.0625, 4096, 50.0)


def attend_heads(heads: int, kv_heads: int, head_dim: int, window: int | None = None) -> None:
    """A chunk and a decode of other families' heads."""
    kv = bf16(2000, 24, 2, 16, kv_heads, head_dim)[:, 5]
    q = bf16(2049, heads, head_dim)
    KERNELS.paged_attention(q, kv, batch((2048, 1), 4096), head_dim**-0.5, window, None)


def attend_with_sinks() -> None:
    """A chunk and a decode of gpt-oss, in layers that do not slide."""
    q, kv = bf16(2049, 64, 64), bf16(2000, 24, 2, 16, 8, 64)[:, 5]
    KERNELS.paged_attention(q, kv, batch((2048, 1), 4096), 0.125, None, None, torch.empty(64, device=META))


def attend_in_float32() -> None:
    """Only checks are computed in it."""
    kv = torch.empty(2000, 32, 2, 16, 8, 128, device=META)[:, 5]
    KERNELS.paged_attention(torch.empty(2049, 32, 128, device=META), kv, batch((2048, 1), 4096), 0.088, None, None)


def float8_kv(kv_heads: int, head_dim: int) -> Float8KV:
    slab = 16 * kv_heads * (head_dim + 4)
    return float8_view(bf16(2000, NUM_LAYERS, slab)[:, 5], 16, kv_heads, head_dim)


def attend_float8(heads: int, kv_heads: int, head_dim: int, window: int | None = None) -> None:
    """A chunk and a decode of KV of eight bits."""
    q, kv = bf16(2049, heads, head_dim), float8_kv(kv_heads, head_dim)
    FLOAT8_KV.paged_attention(q, kv, batch((2048, 1), 4096), head_dim**-0.5, window, None)


def write_kv(kernels: Kernels, kv: LayerKV) -> None:
    rows = bf16(64, HEADS + 2 * KV_HEADS, HEAD_DIM)
    q, k, v = rows.split([HEADS, KV_HEADS, KV_HEADS], dim=1)
    rotary = torch.empty(8192, 2, HEAD_DIM // 2, device=META)
    kernels.write_kv(q, k, v, rotary, kv, batch((1,) * 64, 4096))


def lora(num_adapters: int, rows_each: int, modules: tuple[int, ...] = (0, 1, 2), slab: int = SLAB) -> None:
    """Rank 16, on q, k and v if nothing else is said."""
    geometry = LoraGeometry(NUM_LAYERS, slab, math.gcd(slab, 1024), SIDES)
    adapter = PagedAdapter(tuple(range(40)), (ModuleSlice(16, 16, 0, 0),) * 7)
    segments = [LoraSegment(i * rows_each, (i + 1) * rows_each, adapter) for i in range(num_adapters)]
    prepared = KERNELS.lora.prepare(segments, geometry, META)
    pool, num_rows = bf16(2000, NUM_LAYERS, slab), num_adapters * rows_each
    shrunk = KERNELS.lora.shrink(bf16(num_rows, 4096), pool, 3, prepared, modules)
    y = bf16(num_rows, sum(SIDES[module][1] for module in modules))
    KERNELS.lora.expand(y, shrunk.unsqueeze(0), pool, 3, prepared, modules)


def rows() -> None:
    KERNELS.add_rms_norm(bf16(64, 4096), bf16(64, 4096), bf16(4096), 1e-5)
    KERNELS.add_layer_norm(bf16(64, 4096), bf16(64, 4096), torch.empty(4096, device=META), 1e-5)
    KERNELS.rms_norm(bf16(64, HEADS, HEAD_DIM), torch.empty(HEAD_DIM, device=META), 1e-5)
    activations: tuple[Activation, ...] = (*ACTIVATIONS, ClampedSwiglu(1.702, 7.0))
    for activation in activations:
        KERNELS.gated(bf16(64, 28672), activation)


def float8() -> None:
    """Inputs of q, k, v and of down."""
    for width in (4096, 14336):
        ScaledFloat8().quantise(bf16(64, width))


def experts(num_pairs: int, weights: tuple[int, int, int] = (8, 28672, 4096), has_bias: bool = False) -> None:
    """Mixtral 8x7B, if nothing else is said."""
    num_experts, num_out, num_in = weights
    offsets = torch.empty(num_experts + 1, dtype=torch.int64, device=META)
    groups = ExpertGroups(torch.empty(0, dtype=torch.int64, device=META), torch.empty(0, device=META), offsets)
    bias = bf16(num_experts, num_out) if has_bias else None
    KERNELS.experts.linear(bf16(num_pairs, num_in), bf16(*weights), groups, bias)


def expert_pairs(num_rows: int) -> None:
    """Qwen3-30B-A3B, every row with an adapter of all experts."""
    chosen = torch.empty(num_rows, 8, dtype=torch.int64, device=META)
    groups = KERNELS.experts.group(chosen, torch.empty(num_rows, 8, device=META), 0, 128)
    KERNELS.experts.combine(bf16(8 * num_rows, 2048), groups, num_rows)
    geometry = LoraGeometry(48, 16384, 256, ((2048, 768), (2048, 768), (768, 2048)))
    expert = PagedAdapter(tuple(range(40)), (ModuleSlice(16, 16, 0, 0),) * 3)
    segments = [LoraSegment(0, num_rows, PagedAdapter(expert.pages, (), (expert,) * 128))]
    prepared = KERNELS.expert_lora.prepare(segments, geometry, META)
    KERNELS.expert_lora.of_pairs(prepared, groups, 0)


def recur(rule: Rule, num_rows: int, num_sequences: int) -> None:
    """A layer with a state, whose matrices lie in 4 pages."""
    num_heads = getattr(rule, "num_value_heads", getattr(rule, "num_heads", 0))
    size = rule.head_shape[0] * rule.head_shape[1]
    places = [(head % 4, head // 4 * size) for head in range(num_heads)]
    pages, offsets = (torch.tensor(each, dtype=torch.int32) for each in zip(*places or [(0, 0)], strict=True))
    state = LayerState(pages[:num_heads], offsets[:num_heads], 3, num_heads * size)
    pool = bf16(2000, 8, 131_072)

    def ints(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int32, device=META)

    tables = (ints(num_sequences + 1), ints(num_sequences + 1), ints(num_sequences, 4), ints(num_sequences, 4))
    fresh = torch.empty(num_sequences, dtype=torch.bool, device=META)
    KERNELS.recur(bf16(num_rows, rule.width), rule, pool, state, StateBatch(*tables, fresh))


def floats(*shape: int) -> torch.Tensor:
    return torch.empty(shape, device=META)


def delta(key_heads: int, value_heads: int) -> GatedDelta:
    """Qwen3.5 and Qwen3-Next."""
    conv = bf16(128 * (2 * key_heads + value_heads), 4)
    of_heads = floats(value_heads), floats(value_heads)
    return GatedDelta(conv, *of_heads, floats(128), 1e-6, key_heads, value_heads, 128, 128)


def mamba(num_heads: int, num_groups: int, head_dim: int, state_size: int, has_norm: bool = True) -> Mamba:
    num_out = num_heads * head_dim
    conv, of_heads = bf16(num_out + 2 * num_groups * state_size, 4), floats(num_heads)
    norm, limits = floats(num_out) if has_norm else None, (0.0, math.inf)
    shape = (num_heads, num_groups, head_dim, state_size)
    return Mamba(conv, floats(len(conv)), of_heads, of_heads, of_heads, norm, 1e-5, *shape, limits)


RECURRENCE = {"convolution_kernel", "recurrence_kernel", "gated_norm_kernel"}
PAIRS = {"group_kernel", "combine_pairs_kernel", "pair_tiles_kernel"}
ATTENTION = {"split_kernel", "decode_kernel", "combine_kernel", "chunk_kernel"}
CASES: dict[str, tuple[Callable[[], None], set[str]]] = {
    "decode": (lambda: attend((1,) * 64), {"split_kernel", "decode_kernel", "combine_kernel"}),
    "chunk": (lambda: attend((2048,)), {"chunk_kernel"}),
    "wide heads": (attend_wide, ATTENTION),
    "9/3 heads of 64": (lambda: attend_heads(9, 3, 64), ATTENTION),
    "32/8 heads of 64": (lambda: attend_heads(32, 8, 64), ATTENTION),
    "32/32 heads of 80": (lambda: attend_heads(32, 32, 80), ATTENTION),
    "16/16 heads of 96": (lambda: attend_heads(16, 16, 96), ATTENTION),
    "28/4 heads of 128": (lambda: attend_heads(28, 4, 128), ATTENTION),
    "32/8 heads of 128, window": (lambda: attend_heads(32, 8, 128, 4096), ATTENTION),
    "64/8 heads of 64, sinks": (attend_with_sinks, ATTENTION),
    "32/8 heads of 128, float32": (attend_in_float32, ATTENTION),
    "32/8 heads of 128, KV in float8": (lambda: attend_float8(32, 8, 128), ATTENTION),
    "32/8 heads of 64, KV in float8": (lambda: attend_float8(32, 8, 64), ATTENTION),
    "16/8 heads of 256, KV in float8": (lambda: attend_float8(16, 8, 256, 4096), ATTENTION),
    "write KV": (
        lambda: write_kv(KERNELS, bf16(2000, NUM_LAYERS, 2, 16, KV_HEADS, HEAD_DIM)[:, 5]),
        {"write_kv_kernel"},
    ),
    "write KV in float8": (lambda: write_kv(FLOAT8_KV, float8_kv(KV_HEADS, HEAD_DIM)), {"write_kv_kernel"}),
    "64 adapters": (lambda: lora(64, 1), {"shrink_kernel", "expand_kernel"}),
    "64 adapters, KV in float8": (
        lambda: lora(64, 1, slab=SLAB_OF_FLOAT8),
        {"shrink_kernel", "expand_kernel"},
    ),
    "four modules": (lambda: lora(64, 1, (0, 1, 2, 4)), {"shrink_kernel", "expand_kernel"}),
    "one adapter": (lambda: lora(1, 2048), {"shrink_kernel", "expand_kernel"}),
    "rows": (rows, {"norm_kernel", "gated_kernel"}),
    "float8": (float8, {"quantise_kernel"}),
    "Gated DeltaNet": (lambda: recur(delta(16, 32), 64, 64), RECURRENCE),
    "Mamba-2, states of 128": (lambda: recur(mamba(128, 1, 64, 128), 64, 64), RECURRENCE),
    "Mamba-2, states of 256": (lambda: recur(mamba(24, 1, 128, 256, has_norm=False), 64, 64), RECURRENCE),
    "short convolutions": (
        lambda: recur(ShortConvolution(bf16(2048, 3), floats(2048)), 64, 64),
        {"convolution_kernel"},
    ),
    "pairs of decodes": (lambda: expert_pairs(64), PAIRS),
    "pairs of a chunk": (lambda: expert_pairs(2048), PAIRS),
    "few pairs": (lambda: experts(64), {"grouped_linear_kernel"}),
    "many pairs": (lambda: experts(4096), {"grouped_linear_kernel"}),
    "few pairs, bias": (lambda: experts(256, (32, 5760, 2880), True), {"grouped_linear_kernel"}),
    "many pairs, bias": (lambda: experts(8192, (32, 5760, 2880), True), {"grouped_linear_kernel"}),
}
