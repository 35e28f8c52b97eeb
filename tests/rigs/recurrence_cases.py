"""Random layers with a recurrent state with steps of them, and what they compute, written out in float64."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from typing import Generic, Literal, TypeVar

import torch
from torch.nn.functional import softplus

from motet.kernels.gated_delta import GatedDelta
from motet.kernels.mamba import Mamba
from motet.kernels.recurrence import LayerState, Rule, StateBatch
from motet.kernels.short_convolution import ShortConvolution

HEADS_OF_A_PAGE = 2


@dataclass(frozen=True)
class Shape:
    key_heads: int
    per_key: int  # value heads of a key head
    key_dim: int
    value_dim: int
    kernel: int = 4


R = TypeVar("R", bound=Rule)


@dataclass(frozen=True)
class Case(Generic[R]):
    x: torch.Tensor
    layer: R
    pool: torch.Tensor
    state: LayerState
    batch: StateBatch


DeltaCase = Case[GatedDelta]


def make_case(
    shape: Shape, sequences: Sequence[Sequence[int]], dtype: torch.dtype, seed: int = 0, *, in_place: bool = False
) -> DeltaCase:
    """Steps of Gated DeltaNet, as `steps_of` makes them."""
    generator = torch.Generator().manual_seed(seed)
    draw = partial(torch.randn, generator=generator)
    value_heads = shape.key_heads * shape.per_key
    num_channels = 2 * shape.key_heads * shape.key_dim + value_heads * shape.value_dim
    layer = GatedDelta(
        conv=(0.5 * draw(num_channels, shape.kernel)).to(dtype),
        decay=-16 * torch.rand(value_heads, generator=generator) ** 3,
        dt_bias=draw(value_heads),
        norm=1 + 0.1 * draw(shape.value_dim),
        eps=1e-6,
        num_key_heads=shape.key_heads,
        num_value_heads=value_heads,
        key_dim=shape.key_dim,
        value_dim=shape.value_dim,
    )
    return steps_of(layer, value_heads, sequences, dtype, generator, in_place=in_place)


def make_convolution(
    num_channels: int, kernel: int, sequences: Sequence[Sequence[int]], dtype: torch.dtype, *, in_place: bool = False
) -> Case[ShortConvolution]:
    """Steps of a short convolution, as `steps_of` makes them."""
    generator = torch.Generator().manual_seed(num_channels + kernel)
    draw = partial(torch.randn, generator=generator)
    rule = ShortConvolution(draw(num_channels, kernel).to(dtype), 0.3 * draw(num_channels))
    return steps_of(rule, 0, sequences, dtype, generator, in_place=in_place)


@dataclass(frozen=True)
class MambaShape:
    groups: int
    per_group: int  # heads of a group
    head_dim: int
    state_size: int
    kernel: int = 4
    norm: Literal["after the gate", "before the gate", "none"] = "after the gate"


def make_mamba(
    shape: MambaShape, sequences: Sequence[Sequence[int]], dtype: torch.dtype, seed: int = 0, *, in_place: bool = False
) -> Case[Mamba]:
    """Steps of Mamba-2, as `steps_of` makes them."""
    generator = torch.Generator().manual_seed(seed)
    draw = partial(torch.randn, generator=generator)
    num_heads = shape.groups * shape.per_group
    num_channels = num_heads * shape.head_dim + 2 * shape.groups * shape.state_size
    rule = Mamba(
        conv=(0.5 * draw(num_channels, shape.kernel)).to(dtype),
        conv_bias=0.3 * draw(num_channels),
        decay=-4 * torch.rand(num_heads, generator=generator) ** 3,
        dt_bias=draw(num_heads),
        skip=draw(num_heads),
        norm=None if shape.norm == "none" else 1 + 0.1 * draw(num_heads * shape.head_dim),
        eps=1e-5,
        num_heads=num_heads,
        num_groups=shape.groups,
        head_dim=shape.head_dim,
        state_size=shape.state_size,
        step_limits=(0.1, 1.5) if seed % 2 else (0.0, math.inf),
        gates_first=shape.norm == "after the gate",
    )
    return steps_of(rule, num_heads, sequences, dtype, generator, in_place=in_place)


def steps_of(
    layer: R,
    num_heads: int,
    sequences: Sequence[Sequence[int]],
    dtype: torch.dtype,
    generator: torch.Generator,
    *,
    in_place: bool,
) -> Case[R]:
    """Sequences of segments of these lengths; every third one is fresh, the others have a state.

    A segment's state comes from the one before. Pages are in random order, and NaN where nothing has to be
    read. `in_place`: each segment's target is its source.
    """
    draw = partial(torch.randn, generator=generator)
    # Each page has some heads, with gaps between them, and the convolution's inputs lie behind those of the last one.
    size, gap = layer.head_shape[0] * layer.head_shape[1], 3
    places = [(head // HEADS_OF_A_PAGE, 5 + head % HEADS_OF_A_PAGE * (size + gap)) for head in range(num_heads)]
    order = torch.randperm(num_heads, generator=generator).tolist()
    places = [places[at] for at in order]
    num_state_pages = max((page for page, _ in places), default=0) + 1
    elements = 4 // dtype.itemsize  # of the pool, for each float32
    conv_offset = elements * (5 + HEADS_OF_A_PAGE * (size + gap)) + 1
    slab = -(-(conv_offset + layer.num_kept * layer.num_channels + 7) // 4) * 4
    state = LayerState(
        head_pages=torch.tensor([page for page, _ in places], dtype=torch.int32),
        head_offsets=torch.tensor([offset for _, offset in places], dtype=torch.int32),
        conv_page=num_state_pages - 1,
        conv_offset=conv_offset,
    )

    lengths = [length for sequence in sequences for length in sequence]
    num_pages = 2 * num_state_pages * (len(lengths) + len(sequences)) + 1
    pool = torch.full((num_pages, 2, slab // 2), torch.nan, dtype=dtype)
    free = torch.randperm(num_pages, generator=generator).tolist()
    source, target, is_fresh = [], [], []
    for number, sequence in enumerate(sequences):
        before = [free.pop() for _ in range(num_state_pages)]
        for turn in range(len(sequence)):
            after = before if in_place else [free.pop() for _ in range(num_state_pages)]
            fresh = turn == 0 and number % 3 == 2
            source.append([-1] * num_state_pages if fresh and not in_place else before)
            target.append(after)
            is_fresh.append(fresh)
            if turn == 0 and not fresh:
                for page, offset in places:
                    floats(pool)[before[page], offset : offset + size] = 0.3 * draw(size)
                count = layer.num_kept * layer.num_channels
                pool.flatten(1)[before[-1], conv_offset : conv_offset + count] = draw(count).to(dtype)
            before = after
    batch = StateBatch(
        segment_rows=torch.tensor([0, *accumulate(lengths)], dtype=torch.int32),
        sequence_segments=torch.tensor([0, *accumulate(map(len, sequences))], dtype=torch.int32),
        source=torch.tensor(source, dtype=torch.int32),
        target=torch.tensor(target, dtype=torch.int32),
        is_fresh=torch.tensor(is_fresh),
    )
    x = draw(sum(lengths), layer.width).to(dtype)
    return Case(x, layer, pool, state, batch)


def floats(pool: torch.Tensor) -> torch.Tensor:
    """The pool's pages as float32, `[num_pages, floats of a page]`."""
    return pool.flatten(1).view(torch.float32)


def defined(case: DeltaCase) -> tuple[torch.Tensor, torch.Tensor]:
    """What the step gives, and the pool after it: one row and head after the other, in float64.

    Rounded to x's dtype where the contract says so.
    """
    layer, state, batch, x = case.layer, case.state, case.batch, case.x
    pool, out = case.pool.clone(), torch.empty(len(x), layer.num_value_heads, layer.value_dim, dtype=torch.float64)

    def rounded(value: torch.Tensor) -> torch.Tensor:
        return value if x.dtype == torch.float32 else value.to(x.dtype).double()

    def silu(value: torch.Tensor) -> torch.Tensor:
        return value * value.sigmoid()

    dims = (layer.key_dim, layer.value_dim)
    count, size = layer.num_kept * layer.num_channels, dims[0] * dims[1]
    places = list(zip(state.head_pages.tolist(), state.head_offsets.tolist(), strict=True))
    for segment, (start, end) in enumerate(pairwise(batch.segment_rows.tolist())):
        if batch.is_fresh[segment]:
            kept = torch.zeros(layer.num_kept, layer.num_channels, dtype=x.dtype)
            heads = [torch.zeros(dims, dtype=torch.float64) for _ in places]
        else:
            pages = batch.source[segment].tolist()
            kept = pool.flatten(1)[pages[state.conv_page], state.conv_offset :][:count].clone()
            kept = kept.view(layer.num_kept, layer.num_channels)
            heads = [floats(pool)[pages[page], at : at + size].double().view(dims) for page, at in places]
        inputs = torch.cat([kept, x[start:end, : layer.num_channels]])
        for row in range(start, end):
            window = inputs[row - start : row - start + layer.num_kept + 1].double()
            mixed = rounded(silu(rounded((window * layer.conv.double().T).sum(0))))
            num_keys = layer.num_key_heads * layer.key_dim
            q, k, v = mixed.split([num_keys, num_keys, layer.num_value_heads * layer.value_dim])
            rest = x[row, layer.num_channels :].double()
            z, b, a = rest.split([len(v), layer.num_value_heads, layer.num_value_heads])
            for head in range(layer.num_value_heads):
                key_head = head // (layer.num_value_heads // layer.num_key_heads)
                own = slice(key_head * layer.key_dim, (key_head + 1) * layer.key_dim)
                columns = slice(head * layer.value_dim, (head + 1) * layer.value_dim)
                unit_q = q[own] / (q[own].square().sum() + 1e-6).sqrt() / layer.key_dim**0.5
                unit_k = k[own] / (k[own].square().sum() + 1e-6).sqrt()
                step = softplus(a[head] + layer.dt_bias[head].double())
                heads[head] = heads[head] * (layer.decay[head].double() * step).exp()
                d = (v[columns] - heads[head].T @ unit_k) * rounded(b[head].sigmoid())
                heads[head] = heads[head] + unit_k[:, None] * d
                o = rounded(heads[head].T @ unit_q)
                normed = rounded(o / (o.square().mean() + layer.eps).sqrt())
                out[row, head] = rounded(normed * layer.norm.double()) * silu(z[columns])
        pages = batch.target[segment].tolist()
        for (page, at), content in zip(places, heads, strict=True):
            floats(pool)[pages[page], at : at + size] = content.flatten().float()
        kept = inputs[len(inputs) - layer.num_kept :]
        pool.flatten(1)[pages[state.conv_page], state.conv_offset :][:count] = kept.flatten()
    return out.flatten(1), pool
