"""The limits of this machine's device, measured in a second or two: a large product and a large copy."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import psutil
import torch

from .devices import Device

_REPETITIONS = 5
_SIDES = {"cuda": 8192, "cpu": 1024}  # of square matrices
_COPIED_BYTES = {"cuda": 1 << 31, "cpu": 1 << 28}


def measured_device(device: torch.device) -> Device:
    """Medians of a few repetitions, with as many threads as torch has. The network is not measured."""
    side = _SIDES[device.type]
    a, b = (torch.randn(side, side, device=device).bfloat16() for _ in range(2))
    source = torch.ones(_COPIED_BYTES[device.type], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    product_s = _seconds(lambda: torch.mm(a, b), device)
    copy_s = _seconds(lambda: target.copy_(source), device)
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        name, memory_bytes = properties.name, properties.total_memory
    else:
        name, memory_bytes = f"this machine, {torch.get_num_threads()} threads", psutil.virtual_memory().total
    return Device(name, 2 * side**3 / product_s, 2 * source.nbytes / copy_s, memory_bytes)


def _seconds(call: Callable[[], object], device: torch.device) -> float:
    times = []
    for _ in range(_REPETITIONS + 1):
        started = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - started)
    return statistics.median(times[1:])  # the first allocates
