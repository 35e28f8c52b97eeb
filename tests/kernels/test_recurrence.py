"""The plain twins of short convolutions and of Mamba-2 against their definitions, written out in float64."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch.nn.functional import silu, softplus

from motet.kernels.mamba import Mamba
from motet.kernels.plain.recurrence import recur
from motet.tests.rigs.recurrence_cases import Case, MambaShape, floats, make_convolution, make_mamba

SEQUENCES = [[3], [1, 2], [5], [1], [2, 1, 4]]
TOLERANCE = 1e-5  # float32


def test_a_short_convolution_is_its_definition() -> None:
    case = make_convolution(20, 3, SEQUENCES, torch.float32)
    before, pool = case.pool.clone(), case.pool
    found = recur(case.x, case.layer, pool, case.state, case.batch)
    x, offset = case.x.double(), case.state.conv_offset
    inputs_of = {page: before.flatten(1)[page, offset : offset + 40].double().view(2, 20) for page in range(len(pool))}
    for segment, (start, end) in enumerate(pairwise(case.batch.segment_rows.tolist())):
        source, target = int(case.batch.source[segment, 0]), int(case.batch.target[segment, 0])
        inputs = torch.zeros(2, 20).double() if case.batch.is_fresh[segment] else inputs_of[source]
        for row in range(start, end):
            first, gate, u = x[row].chunk(3)
            inputs = torch.cat([inputs[-2:], (first * u)[None]])
            expected = gate * ((inputs * case.layer.conv.double().T).sum(0) + case.layer.bias.double())
            torch.testing.assert_close(found[row].double(), expected, atol=TOLERANCE, rtol=TOLERANCE)
        inputs_of[target] = inputs[-2:]
        kept = pool.flatten(1)[target, offset : offset + 40].double().view(2, 20)
        if segment + 1 in case.batch.sequence_segments:
            torch.testing.assert_close(kept, inputs[-2:], atol=TOLERANCE, rtol=TOLERANCE)


SHAPES = (
    MambaShape(2, 3, 8, 5),
    MambaShape(2, 3, 8, 5, norm="before the gate"),
    MambaShape(1, 2, 8, 5, norm="none"),
)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("seed", [0, 1])
def test_mamba_is_its_definition(shape: MambaShape, seed: int) -> None:
    """Each sequence alone and from its start on."""
    case = make_mamba(shape, [[7]] * 3, torch.float32, seed)
    case = replace(case, batch=replace(case.batch, is_fresh=torch.ones(3, dtype=torch.bool)))
    found = recur(case.x, case.layer, case.pool, case.state, case.batch)
    for sequence in range(3):
        rows = slice(7 * sequence, 7 * sequence + 7)
        expected, states = _defined(case, case.x[rows].double())
        torch.testing.assert_close(found[rows].double(), expected, atol=TOLERANCE, rtol=TOLERANCE)
        pages = case.batch.target[sequence].tolist()
        for (page, at), head in zip(case.state.heads, states, strict=True):
            kept = floats(case.pool)[pages[page], at : at + head.numel()].double()
            torch.testing.assert_close(kept, head.flatten(), atol=TOLERANCE, rtol=TOLERANCE)


def _defined(case: Case[Mamba], x: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Results and states of a sequence, one row and head after the other."""
    layer = case.layer
    width, all_states = layer.num_out, layer.num_groups * layer.state_size
    z, mixed, dt = x.split([width, layer.num_channels, layer.num_heads], dim=1)
    padded = torch.cat([torch.zeros(layer.num_kept, layer.num_channels).double(), mixed])
    states = [torch.zeros(layer.head_shape).double() for _ in range(layer.num_heads)]
    rows = []
    for row in range(len(x)):
        window = padded[row : row + layer.num_kept + 1]
        convolved = silu((window * layer.conv.double().T).sum(0) + layer.conv_bias.double())
        u, b, c = convolved.split([width, all_states, all_states])
        y = torch.empty(layer.num_heads, layer.head_dim).double()
        for head in range(layer.num_heads):
            group = head // (layer.num_heads // layer.num_groups)
            own = slice(group * layer.state_size, (group + 1) * layer.state_size)
            own_u = u[head * layer.head_dim : (head + 1) * layer.head_dim]
            step = softplus(dt[row, head] + layer.dt_bias[head].double()).clamp(*layer.step_limits)
            decayed = states[head] * (layer.decay[head].double() * step).exp()
            states[head] = decayed + step * torch.outer(b[own], own_u)
            y[head] = states[head].T @ c[own] + layer.skip[head].double() * own_u
        result, gate = y.flatten(), silu(z[row])
        if layer.norm is None:
            rows.append(result * gate)
            continue
        result = result * gate if layer.gates_first else result
        grouped = result.view(layer.num_groups, -1)
        normed = (grouped / (grouped.square().mean(1, keepdim=True) + layer.eps).sqrt()).flatten()
        rows.append(normed * layer.norm.double() * (1 if layer.gates_first else gate))
    return torch.stack(rows), states
