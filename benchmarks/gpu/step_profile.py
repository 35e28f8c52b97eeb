"""What the kernels of a few decode steps took, as torch's profiler sees them."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from motet.benchmarks.gpu.roofline import KernelTime


class StepProfile:
    """Called after each decode step with the number of them, it watches `num_steps` after the first `num_before`."""

    def __init__(self, num_before: int, num_steps: int, on_gpu: bool) -> None:
        """`on_gpu`: a real one. Elsewhere torch's operations are watched, and there is no kernel in them."""
        self._num_before, self._num_steps = num_before, num_steps
        self._profiler: Any = profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU])
        self.is_over = False

    def __call__(self, num_decodes: int) -> None:
        if num_decodes == self._num_before:
            self._profiler.start()
        elif num_decodes == self._num_before + self._num_steps:
            self._profiler.stop()
            self.is_over = True

    def kernels(self) -> list[KernelTime]:
        """Of one step, those that took the most time first. Copies and fills of memory count as kernels."""
        assert self.is_over, "there were too few steps to watch"
        launches: Counter[str] = Counter()
        seconds: Counter[str] = Counter()
        for event in self._profiler.key_averages():
            if event.device_type == DeviceType.CUDA:
                launches[event.key] += event.count
                seconds[event.key] += event.self_device_time_total * 1e-6
        return [
            KernelTime(name, launches[name] / self._num_steps, taken / self._num_steps)
            for name, taken in seconds.most_common()
        ]
