"""What the parts of a worker take of its GPU's memory, measured as they are built."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_log = logging.getLogger(__name__)
_GIB = 1 << 30
# Stated, not measured: what tokens are chosen with, in all ways at once and for all sequences; copies of adapters and
# of KV on their way; buffers of cuBLAS, NCCL and Triton for shapes that a start does not run; what fragments.
LATER_BYTES = 1 << 30


class DeviceMemory:
    """Of a CPU nothing is measured: the system gives its memory as it is touched."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._on_gpu = device, device.type == "cuda"
        self._parts: dict[str, int] = {}  # bytes, by what took them
        self._said: dict[str, str] = {}  # what else is known of a part
        self._most_allocated_bytes = 0
        self._passing_bytes = 0  # the most that what recurs takes while it runs

    @property
    def total_bytes(self) -> int:
        """Of the GPU."""
        return int(torch.cuda.mem_get_info(self._device)[1])

    @contextmanager
    def part(self, name: str, *, recurs: bool = False) -> Iterator[None]:
        """What is allocated within this context and kept is this part's. Raises ValueError if it does not fit.

        `recurs`: requests let it run again, beside all other parts.
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
                f"the GPU has no room for {name}: {self._told()}, and {self._gib(self.total_bytes)} in all; "
                "a smaller pool_bytes or, where that is unset, a smaller device_memory_share leaves more"
            ) from problem
        kept = torch.cuda.memory_allocated(self._device) - before
        self._parts[name] = kept
        most = torch.cuda.max_memory_allocated(self._device)
        self._most_allocated_bytes = max(self._most_allocated_bytes, most)
        passing = most - before - kept
        if recurs:
            self._passing_bytes = max(self._passing_bytes, passing)
        if passing > kept:
            self._parts[f"{name}, while it ran"] = passing

    def tell_of(self, name: str, what: str) -> None:
        """Has `tell` and errors say this, too, of a part that is there."""
        self._said[name] = what

    def room_for_pool(self, share: float, trial_bytes: int) -> int:
        """Bytes that a pool may take, if all that is on the GPU is to take `share` of it. Not above 0: none are left.

        To be asked when all parts are there and have run their largest step, with a pool of `trial_bytes`. What others
        have on this GPU is theirs: the driver's context, NCCL's buffers, other processes.
        """
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self._device)
        # What stays, that of graphs included, which nothing else can use: what passes comes on top of both.
        reserved = torch.cuda.memory_reserved(self._device)
        most = max(reserved + self._passing_bytes, self._most_allocated_bytes)
        taken = total - free - reserved + most - trial_bytes
        room = int(share * total) - taken - LATER_BYTES
        if room > 0:
            _log.info(
                "the GPU's memory: %s of %s may be taken, %s are, %s are left for what comes later: the pool gets %s",
                *map(self._gib, (int(share * total), total, taken, LATER_BYTES, room)),
            )
        return room

    def refuse_pool(self, share: float) -> ValueError:
        """To be raised where no page has room."""
        return ValueError(
            f"the GPU has no room for a pool: device_memory_share = {share:g} of {self._gib(self.total_bytes)} are "
            f"{self._gib(int(share * self.total_bytes))}, and this is there already: {self._told()}, and "
            f"{self._gib(LATER_BYTES)} for what comes later; a larger share, a smaller max_tokens_per_step or "
            "max_num_sequences, or more workers (tensor_parallel) leave more"
        )

    def release(self) -> None:
        """Gives back what nobody uses any more."""
        gc.collect()
        torch.cuda.empty_cache()

    def tell(self) -> None:
        """Logs how the memory is divided."""
        if self._on_gpu:
            free = torch.cuda.mem_get_info(self._device)[0]
            _log.info("the GPU's memory: %s; %s of %s free", self._told(), self._gib(free), self._gib(self.total_bytes))

    def _told(self) -> str:
        parts = [
            f"{name} {self._gib(taken)}" + (f" ({self._said[name]})" if name in self._said else "")
            for name, taken in self._parts.items()
        ]
        return ", ".join(parts) or "nothing is there yet"

    @staticmethod
    def _gib(num_bytes: int) -> str:
        return f"{num_bytes / _GIB:.2f} GiB"
