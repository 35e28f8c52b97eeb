"""What it costs to lay out a step's tensors."""

from __future__ import annotations

import time

import torch

from motet.workers.execution.device_rows import make_inputs
from motet.workers.plan import SamplePlan, SequencePlan, StepPlan, packed
from motet.workers.wire.messages import SamplingParams

BLOCK_SIZE = 16
SHORT, LONG = 512, 131_072  # tokens
_NUM_CALLS = 20


def inputs_ms(num_short: int, num_long: int) -> float:
    """CPU milliseconds to lay out a step in which so many sequences decode."""
    lengths = [SHORT] * num_short + [LONG] * num_long
    plan = StepPlan(0, tuple(_decode(number, length) for number, length in enumerate(lengths)), (), ())
    began_s = time.thread_time()
    for _ in range(_NUM_CALLS):
        make_inputs(plan, {}, BLOCK_SIZE, torch.device("cpu"))
    return (time.thread_time() - began_s) / _NUM_CALLS * 1e3


def _decode(sequence_id: int, num_tokens: int) -> SequencePlan:
    sample = SamplePlan(SamplingParams(temperature=0.0), 0, 1)
    pages = packed(range(num_tokens // BLOCK_SIZE))
    return SequencePlan(sequence_id, (1,), num_tokens - 1, pages, None, sample)
