"""GPU memory of each part of a worker, measured as the parts are built."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from .config import LATER_BYTES as LATER_BYTES

_log = logging.getLogger(__name__)
_GIB = 1 << 30


class DeviceMemory:
    """Measures nothing on a CPU, where the system allocates memory when it is touched."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._on_gpu = device, device.type == "cuda"
        self._parts: dict[str, int] = {}  # bytes by part
        self._notes: dict[str, str] = {}  # by part, for logs and errors
        self._most_allocated_bytes = 0
        self._transient_bytes = 0  # the most that a recurring part takes while it runs

    @property
    def total_bytes(self) -> int:
        """Memory of the GPU."""
        return int(torch.cuda.mem_get_info(self._device)[1])

    @contextmanager
    def part(self, name: str, *, recurs: bool = False) -> Iterator[None]:
        """Counts memory that is allocated in this context and kept. Raises ValueError if it does not fit.

        `recurs`: requests run it again, in addition to all other parts.
        """
        if not self._on_gpu:
            yield
            return
        before = torch.cuda.memory_allocated(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        try:
            yield
        except torch.OutOfMemoryError as problem:
            raise ValueError(
                f"the GPU has no room for {name}: {self._summary()}, and {self._gib(self.total_bytes)} in all; "
                "a smaller pool_bytes or, where that is unset, a smaller device_memory_share leaves more"
            ) from problem
        kept = torch.cuda.memory_allocated(self._device) - before
        self._parts[name] = kept
        most = torch.cuda.max_memory_allocated(self._device)
        self._most_allocated_bytes = max(self._most_allocated_bytes, most)
        transient = most - before - kept
        if recurs:
            self._transient_bytes = max(self._transient_bytes, transient)
        if transient > kept:
            self._parts[f"{name}, while it ran"] = transient

    def note(self, name: str, note: str) -> None:
        """Adds a note to a part, for logs and errors."""
        self._notes[name] = note

    def room_for_pool(self, share: float, trial_bytes: int) -> int:
        """Bytes for a pool, so that the whole GPU is filled up to `share`. 0 or less: none are left.

        Call it when all parts are there and have run their largest step, with a pool of `trial_bytes`. Memory of the
        driver's context, of NCCL and of other processes counts as taken.
        """
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self._device)
        # Reserved memory includes that of graphs, which nothing else can use; transient memory is added to it.
        reserved = torch.cuda.memory_reserved(self._device)
        most = max(reserved + self._transient_bytes, self._most_allocated_bytes)
        taken = total - free - reserved + most - trial_bytes
        room = int(share * total) - taken - LATER_BYTES
        if room > 0:
            _log.info(
                "the GPU's memory: %s of %s may be used, %s are used, %s are reserved for later: the pool gets %s",
                *map(self._gib, (int(share * total), total, taken, LATER_BYTES, room)),
            )
        return room

    def refuse_pool(self, share: float) -> ValueError:
        """The error to raise if no page fits."""
        return ValueError(
            f"the GPU has no room for a pool: device_memory_share = {share:g} of {self._gib(self.total_bytes)} are "
            f"{self._gib(int(share * self.total_bytes))}, and in use are: {self._summary()}, and "
            f"{self._gib(LATER_BYTES)} reserved for later; a larger share, a smaller max_tokens_per_step or "
            "max_num_sequences, or more workers (tensor_parallel) leave more"
        )

    def release(self) -> None:
        """Frees unused memory."""
        gc.collect()
        torch.cuda.empty_cache()

    def log(self) -> None:
        """Logs how the memory is divided."""
        if self._on_gpu:
            free = torch.cuda.mem_get_info(self._device)[0]
            _log.info(
                "the GPU's memory: %s; %s of %s free", self._summary(), self._gib(free), self._gib(self.total_bytes)
            )

    def _summary(self) -> str:
        parts = [
            f"{name} {self._gib(taken)}" + (f" ({self._notes[name]})" if name in self._notes else "")
            for name, taken in self._parts.items()
        ]
        return ", ".join(parts) or "nothing yet"

    @staticmethod
    def _gib(num_bytes: int) -> str:
        return f"{num_bytes / _GIB:.2f} GiB"
