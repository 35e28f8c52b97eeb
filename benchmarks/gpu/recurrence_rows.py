"""Layers with a recurrent state: Gated DeltaNet against float64, the others against their twins, and against floors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch

from motet.benchmarks.gpu.machine import Machine, Row, relative_error
from motet.kernels.backend import Kernels
from motet.kernels.plain.recurrence import recur
from motet.tests.rigs.recurrence_cases import (
    Case,
    MambaShape,
    Shape,
    defined,
    floats,
    make_case,
    make_convolution,
    make_mamba,
)

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


def check_recurrence(machine: Machine, kernels: Kernels) -> Iterator[Row]:
    """Decodes and prompts in one step, prompts that keep snapshots on their way, fresh states; results and states."""
    sequences = [[1], [70], [1], [1, 33, 2], [40]] if not machine.is_dry else [[1], [3, 1], [1]]
    for what, case in cases_of(machine, sequences, in_place=False):
        ours = moved(case, machine.device)
        result = kernels.recur(ours.x, ours.layer, ours.pool, ours.state, ours.batch).cpu()
        if what == "Gated DeltaNet":
            reference, pool = defined(case)
        else:
            pool = case.pool.clone()
            reference = recur(case.x, case.layer, pool, case.state, case.batch)
        states, expected = (floats(each).nan_to_num(posinf=0.0, neginf=0.0) for each in (ours.pool.cpu(), pool))
        error = max(relative_error(result, reference), relative_error(states, expected))
        yield Row(what, f"segments {sequences}", error, TOLERANCE[machine.dtype])


def time_recurrence(machine: Machine, kernels: Kernels) -> Iterator[Row]:
    """64 decodes, whose floor is that states are read and written once; a prompt, which has the rows' floor alone."""
    decodes = [[1]] * (64 if not machine.is_dry else 2)
    for sequences in (decodes, [[2048 if not machine.is_dry else 3]]):
        for what, case in cases_of(machine, sequences, in_place=True):
            ours = moved(case, machine.device)
            call = lambda of=ours: kernels.recur(of.x, of.layer, of.pool, of.state, of.batch)  # noqa: E731
            heads, (key_dim, value_dim) = len(ours.state.head_pages), ours.layer.head_shape
            kept = ours.layer.num_kept * ours.layer.num_channels * ours.x.itemsize
            num_bytes = 2 * len(sequences) * (4 * heads * key_dim * value_dim + kept)
            num_bytes += len(ours.x) * (ours.layer.width + ours.layer.num_out) * ours.x.itemsize
            rows = f"{len(sequences)} sequences of {sequences[0][0]} rows"
            yield Row(what, rows, time_s=machine.time_s([call] * 4), floor_s=machine.floor_s(num_bytes))


def cases_of(machine: Machine, sequences: list[list[int]], *, in_place: bool) -> Iterator[tuple[str, Case[Any]]]:
    """Layers of Qwen3.5-9B, LFM2-1.2B and Granite 4 Small, on the host."""
    dtype, is_dry = machine.dtype, machine.is_dry
    delta = Shape(1, 2, 16, 24) if is_dry else Shape(16, 2, 128, 128)
    yield "Gated DeltaNet", make_case(delta, sequences, dtype, in_place=in_place)
    yield "short convolution", make_convolution(48 if is_dry else 2048, 3, sequences, dtype, in_place=in_place)
    mamba = MambaShape(1, 2, 16, 24) if is_dry else MambaShape(1, 128, 64, 128)
    yield "Mamba-2", make_mamba(mamba, sequences, dtype, in_place=in_place)


def moved(case: Case[Any], device: torch.device) -> Case[Any]:
    """The same on a device, in memory of its own."""

    def part(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.clone().to(device)
        if is_dataclass(value) and not isinstance(value, type):
            return replace(value, **{each.name: part(getattr(value, each.name)) for each in fields(value)})
        return value

    return part(case)  # type: ignore[no-any-return]
