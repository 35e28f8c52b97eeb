"""What the parts of a worker take of its GPU's memory, measured as they are built."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_log = logging.getLogger(__name__)
_GIB = 1 << 30


class DeviceMemory:
    """Of a CPU nothing is measured: the system gives its memory as it is touched."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._on_gpu = device, device.type == "cuda"
        self._parts: dict[str, int] = {}  # bytes, by what took them

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """What is allocated within this context and kept is this part's. Raises ValueError if it does not fit."""
        if not self._on_gpu:
            yield
            return
        before = torch.cuda.memory_allocated(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        try:
            yield
        except torch.OutOfMemoryError as problem:
            raise ValueError(
                f"the GPU has no room for {name}: {self._told()}, and {self._gib(self._total())} in all; "
                "a smaller pool_bytes leaves more"
            ) from problem
        kept = torch.cuda.memory_allocated(self._device) - before
        self._parts[name] = kept
        passing = torch.cuda.max_memory_allocated(self._device) - before - kept
        if passing > kept:
            self._parts[f"{name}, while it ran"] = passing

    def tell(self) -> None:
        """Logs how the memory is divided."""
        if self._on_gpu:
            free = torch.cuda.mem_get_info(self._device)[0]
            _log.info("the GPU's memory: %s; %s of %s free", self._told(), self._gib(free), self._gib(self._total()))

    def _told(self) -> str:
        return ", ".join(f"{name} {self._gib(taken)}" for name, taken in self._parts.items()) or "nothing is there yet"

    def _total(self) -> int:
        return int(torch.cuda.mem_get_info(self._device)[1])

    @staticmethod
    def _gib(num_bytes: int) -> str:
        return f"{num_bytes / _GIB:.2f} GiB"
