"""Layers with a recurrent state in plain torch: the plain twin, which the fast kernels are tested against.

It goes on row by row, for all heads at once, and for all sequences whose segments have equally many rows, as decodes
have.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch.nn.functional import silu, softplus

from ..gated_delta import GatedDelta
from ..mamba import Mamba
from ..recurrence import LayerState, Rule, StateBatch
from ..short_convolution import ShortConvolution


def recur(x: torch.Tensor, rule: Rule, pool: torch.Tensor, state: LayerState, batch: StateBatch) -> torch.Tensor:
    """See `recurrence.RecurrentKernel`."""
    assert x.shape[1] == rule.width, "x has the columns of the rule"
    states, advance = _States(pool, rule, state), _ADVANCE[type(rule)]
    starts = batch.segment_rows.tolist()
    out = x.new_empty(len(x), rule.num_out)
    sequences = list(pairwise(batch.sequence_segments.tolist()))
    for turn in range(max((end - start for start, end in sequences), default=0)):
        by_length: dict[int, list[int]] = {}
        for first, end in sequences:
            if (segment := first + turn) < end:
                by_length.setdefault(starts[segment + 1] - starts[segment], []).append(segment)
        for length, segments in by_length.items():
            chosen = torch.tensor(segments, device=x.device)
            rows = torch.tensor([starts[segment] for segment in segments], device=x.device)
            rows = rows[:, None] + torch.arange(length, device=x.device)
            source, is_fresh = batch.source[chosen].long(), batch.is_fresh[chosen]
            target = batch.target[chosen].long()  # a fresh one reads its own pages, which none else writes
            before = states.read(torch.where(is_fresh[:, None], target, source), is_fresh)
            outputs, after = advance(x[rows], rule, before)
            out[rows] = outputs
            states.write(target, after)
    return out


@dataclass(frozen=True)
class _State:
    """A layer's state of some sequences."""

    heads: torch.Tensor  # [num_sequences, num_heads, *head_shape] float32
    last_inputs: torch.Tensor  # [num_sequences, num_kept, channels] of the pool's dtype


class _States:
    """A layer's states in their pages."""

    def __init__(self, pool: torch.Tensor, rule: Rule, state: LayerState) -> None:
        assert pool.is_contiguous() and pool[0].nbytes % 4 == 0, "a page is a run of whole float32 elements"
        self._pages = pool.flatten(1)
        self._floats = self._pages.view(torch.float32)
        self._state, self._shape = state, rule.head_shape
        self._inputs_shape = (rule.num_kept, rule.num_channels)

    def read(self, pages: torch.Tensor, is_fresh: torch.Tensor) -> _State:
        """Of `pages` `[num_sequences, num_state_pages]`; zeros of fresh ones."""
        heads = [place.index_select(0, pages[:, page]) for page, place in self._heads()]
        all_heads = torch.stack(heads, 1) if heads else self._floats.new_empty(len(pages), 0, 0)
        all_heads = all_heads.masked_fill(is_fresh[:, None, None], 0).unflatten(2, self._shape)
        last_inputs = self._conv().index_select(0, pages[:, self._state.conv_page])
        return _State(all_heads, last_inputs.masked_fill(is_fresh[:, None], 0).unflatten(1, self._inputs_shape))

    def write(self, pages: torch.Tensor, state: _State) -> None:
        for (page, place), content in zip(self._heads(), state.heads.flatten(2).unbind(1), strict=True):
            place.index_copy_(0, pages[:, page], content)
        self._conv().index_copy_(0, pages[:, self._state.conv_page], state.last_inputs.flatten(1))

    def _heads(self) -> list[tuple[int, torch.Tensor]]:
        """For each head, which of a state's pages has it, and its place in all pages of the pool."""
        size = self._shape[0] * self._shape[1]
        return [(page, self._floats[:, offset : offset + size]) for page, offset in self._state.heads]

    def _conv(self) -> torch.Tensor:
        offset = self._state.conv_offset
        return self._pages[:, offset : offset + self._inputs_shape[0] * self._inputs_shape[1]]


def _convolved(inputs: torch.Tensor, taps: torch.Tensor, length: int) -> torch.Tensor:
    """`[num_sequences, length, channels]` float32, of `inputs` that begin with earlier ones."""
    wide = inputs.float()
    total = torch.zeros_like(wide[:, :length])
    for place, tap in enumerate(taps):
        total += wide[:, place : place + length] * tap
    return total


def _gated_delta(x: torch.Tensor, layer: GatedDelta, state: _State) -> tuple[torch.Tensor, _State]:
    """The results for x `[num_sequences, length, width]`, and the states after it."""
    length = x.shape[1]
    key_heads, value_heads = (layer.num_key_heads, layer.key_dim), (layer.num_value_heads, layer.value_dim)
    num_keys, num_values = layer.num_key_heads * layer.key_dim, layer.num_value_heads * layer.value_dim
    parts = [layer.num_channels, num_values, layer.num_value_heads, layer.num_value_heads]
    mixed, z, b, a = x.split(parts, dim=2)
    inputs = torch.cat([state.last_inputs, mixed], 1)
    convolved = _convolved(inputs, layer.taps, length)
    q, k, v = silu(convolved.to(x.dtype)).float().split([num_keys, num_keys, num_values], dim=2)
    per_key = layer.num_value_heads // layer.num_key_heads
    q = _unit(q.unflatten(2, key_heads)).repeat_interleave(per_key, 2) * layer.key_dim**-0.5
    k = _unit(k.unflatten(2, key_heads)).repeat_interleave(per_key, 2)
    v = v.unflatten(2, value_heads)
    beta = b.sigmoid().float()
    factor = (layer.decay * softplus(a.float() + layer.dt_bias)).exp()
    heads, outputs = state.heads, torch.empty_like(v)
    for row in range(length):
        heads = heads * factor[:, row, :, None, None]
        d = (v[:, row] - (heads * k[:, row, :, :, None]).sum(2)) * beta[:, row, :, None]
        heads = heads + k[:, row, :, :, None] * d[:, :, None]
        outputs[:, row] = (heads * q[:, row, :, :, None]).sum(2)
    wide = outputs.to(x.dtype).float()
    normed = (wide * (wide.square().mean(-1, keepdim=True) + layer.eps).rsqrt()).to(x.dtype)
    weighted = (normed.float() * layer.norm).to(x.dtype)
    gated = (weighted.float() * silu(z.unflatten(2, value_heads).float())).to(x.dtype)
    return gated.flatten(2), _State(heads, inputs[:, length:])


def _unit(x: torch.Tensor) -> torch.Tensor:
    return x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()


def _short_convolution(x: torch.Tensor, layer: ShortConvolution, state: _State) -> tuple[torch.Tensor, _State]:
    before, after, u = x.chunk(3, dim=2)
    inputs = torch.cat([state.last_inputs, before * u], 1)
    convolved = _convolved(inputs, layer.taps, x.shape[1]) + layer.bias
    return after * convolved.to(x.dtype), _State(state.heads, inputs[:, x.shape[1] :])


def _mamba(x: torch.Tensor, layer: Mamba, state: _State) -> tuple[torch.Tensor, _State]:
    length, groups = x.shape[1], (layer.num_groups, layer.state_size)
    z, mixed, dt = x.split([layer.num_out, layer.num_channels, layer.num_heads], dim=2)
    inputs = torch.cat([state.last_inputs, mixed], 1)
    convolved = (_convolved(inputs, layer.taps, length) + layer.conv_bias).to(x.dtype)
    num_states = layer.num_groups * layer.state_size
    u, b, c = silu(convolved).float().split([layer.num_out, num_states, num_states], dim=2)
    u = u.unflatten(2, (layer.num_heads, layer.head_dim))
    per_group = layer.num_heads // layer.num_groups
    b, c = (each.unflatten(2, groups).repeat_interleave(per_group, 2) for each in (b, c))
    step = softplus(dt.float() + layer.dt_bias).clamp(*layer.step_limits)
    factor = (layer.decay * step).exp()
    heads, outputs = state.heads, torch.empty_like(u)
    for row in range(length):
        change = b[:, row, :, :, None] * (step[:, row, :, None] * u[:, row])[:, :, None]
        heads = heads * factor[:, row, :, None, None] + change
        outputs[:, row] = (heads * c[:, row, :, :, None]).sum(2)
    y = (outputs + layer.skip[:, None] * u).to(x.dtype).float().flatten(2)
    gate = silu(z.float())
    if layer.gates_first or layer.norm is None:
        y = y * gate
    if layer.norm is not None:
        grouped = y.unflatten(2, (layer.num_groups, -1))
        y = (grouped * (grouped.square().mean(-1, keepdim=True) + layer.eps).rsqrt()).flatten(2) * layer.norm
        y = y if layer.gates_first else y * gate
    return y.to(x.dtype), _State(heads, inputs[:, length:])


_ADVANCE: Mapping[type, Callable[[torch.Tensor, Any, _State], tuple[torch.Tensor, _State]]] = {
    GatedDelta: _gated_delta,
    ShortConvolution: _short_convolution,
    Mamba: _mamba,
}
