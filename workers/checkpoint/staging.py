"""Pinned memory through which numbers of the host come to a GPU, however many they are."""

from __future__ import annotations

import torch

from ...kernels.pinned_zeros import pinned_zeros

STAGING_BYTES = 64 << 20
_ALIGNMENT_BYTES = 512  # of what is copied: the GPU's own allocations have it, too


class Staging:
    """Two halves: while one is copied, on a stream of its own, the host fills the other.

    The host waits once for each half that it uses again.
    """

    def __init__(self, device: torch.device, num_bytes: int = STAGING_BYTES) -> None:
        """Raises ValueError if the driver does not pin this much memory."""
        self.half_bytes = num_bytes // 2 // _ALIGNMENT_BYTES * _ALIGNMENT_BYTES
        assert self.half_bytes > 0, f"{num_bytes} bytes have no two halves of {_ALIGNMENT_BYTES}"
        advice = "a base is loaded through it: the machine must have as much free memory"
        self._halves = pinned_zeros((2, self.half_bytes), torch.uint8, advice)
        self._device, self._stream = device, torch.cuda.Stream(device)
        self._copied: list[torch.cuda.Event | None] = [None, None]  # what was copied from each half
        self._half, self._num_used = 0, 0
        self._scratch: torch.Tensor | None = None  # [half_bytes] on the device: what is not yet as it is wanted

    def begin(self) -> None:
        """What is copied from now on comes after all that the calling thread has launched.

        That may still use the memory that a target was allocated in.
        """
        self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def end(self) -> None:
        """What the calling thread launches from now on comes after all copies."""
        torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def num_fitting(self, item_bytes: int, num_wanted: int) -> int:
        """How many of the wanted items to take next: those that fit into the rest of this half, or into a whole one.

        Raises ValueError if an item is larger than that.
        """
        if item_bytes > self.half_bytes:
            raise ValueError(f"a row of {item_bytes} bytes: {self.half_bytes} are the most that can be loaded")
        return min((self.half_bytes - self._num_used) // item_bytes or self.half_bytes // item_bytes, num_wanted)

    def take(self, num_bytes: int) -> torch.Tensor:
        """`[num_bytes]` uint8 to be filled and sent, at most `half_bytes`. Waits if copies are still to leave it."""
        assert 0 < num_bytes <= self.half_bytes, f"{num_bytes} of {self.half_bytes} bytes"
        if self._num_used + num_bytes > self.half_bytes:
            self._copied[self._half] = self._stream.record_event()
            self._half, self._num_used = 1 - self._half, 0
            copied = self._copied[self._half]
            if copied is not None:
                copied.synchronize()
        taken = self._halves[self._half, self._num_used : self._num_used + num_bytes]
        self._num_used += -(-num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        return taken

    def send(self, taken: torch.Tensor, target: torch.Tensor) -> None:
        """Copies to a contiguous target of the same size, unchanged."""
        with torch.cuda.stream(self._stream):
            target.view(-1).view(torch.uint8).copy_(taken, non_blocking=True)

    def send_changed(
        self, taken: torch.Tensor, dtype: torch.dtype, num_columns: int, own: slice, target: torch.Tensor
    ) -> None:
        """Copies rows of `num_columns` numbers of `dtype`, of which the target gets its `own` columns, in its dtype.

        The device picks and converts them: a copy from the host with gaps, or to another dtype, would have torch make
        the numbers in pageable memory first and wait for them.
        """
        if self._scratch is None:
            self._scratch = torch.empty(self.half_bytes, dtype=torch.uint8, device=self._device)
            self.begin()
        with torch.cuda.stream(self._stream):
            arrived = self._scratch[: len(taken)]
            arrived.copy_(taken, non_blocking=True)
            target.copy_(arrived.view(dtype).view(-1, num_columns)[:, own])

    def close(self) -> None:
        """Waits for all copies, and gives the memory back, here and on the device."""
        self._stream.synchronize()
        self.end()  # the scratch is the calling thread's stream's again
        del self._halves, self._scratch
