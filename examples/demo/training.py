"""The training loop of the demo model and of its adapters."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from .conversations import Batch

_NUM_WARMUP_STEPS = 50
_FINAL_RATE = 0.05  # of the peak learning rate
_MAX_GRADIENT_NORM = 1.0
_STEPS_PER_REPORT = 100


@dataclass(frozen=True)
class Schedule:
    """The number of steps, the learning rate and the other parameters of a training run."""

    num_steps: int
    learning_rate: float  # the peak
    weight_decay: float
    seed: int
    batch_size: int = 32
    in_bfloat16: bool = True  # arithmetic; False: in float32

    def rate_at(self, step: int) -> float:
        """Linear warm-up times a cosine that ends at a small share of the peak."""
        warm_up = min(1.0, (step + 1) / _NUM_WARMUP_STEPS)
        cosine = 0.5 * (1 + math.cos(math.pi * step / self.num_steps))
        return self.learning_rate * warm_up * (cosine * (1 - _FINAL_RATE) + _FINAL_RATE)


Sample = Callable[[random.Random, int], Batch]  # so many conversations


def fit(model: Any, sample: Sample, schedule: Schedule, report: Callable[[str], None]) -> None:
    """Trains the parameters of `model` that require gradients: float32 weights, the arithmetic as scheduled."""
    rng = random.Random(schedule.seed)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(
        parameters, lr=schedule.learning_rate, betas=(0.9, 0.98), weight_decay=schedule.weight_decay
    )
    model.train()
    started_s = time.perf_counter()
    for step in range(schedule.num_steps):
        for group in optimizer.param_groups:
            group["lr"] = schedule.rate_at(step)
        batch = sample(rng, schedule.batch_size)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=schedule.in_bfloat16):
            loss = model(input_ids=batch.token_ids, attention_mask=batch.attention_mask, labels=batch.labels).loss
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, _MAX_GRADIENT_NORM)
        optimizer.step()
        if step % _STEPS_PER_REPORT == 0 or step == schedule.num_steps - 1:
            report(f"step {step:5d}  loss {loss.item():.4f}  {time.perf_counter() - started_s:5.0f} s")
