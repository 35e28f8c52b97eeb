"""A device that computes nothing: each pass takes a stated time, and what it idles between two passes is noted."""

from __future__ import annotations

import time
from typing import Any

import torch

from motet.kernels.staging import Arriving


class SleepingDevice:
    """Passes run one after the other, in the order of their launches, as on a stream. Used from one thread.

    It has no thread of its own, which would compete with those that it measures: when a pass begins and ends follows
    from when it was launched.
    """

    def __init__(self, pass_s: float) -> None:
        self.pass_s = pass_s
        self._busy_until_s = time.perf_counter()
        self.idle_s: list[float] = []  # before each pass, and within it for want of launches

    def launch(self, began_s: float | None = None) -> None:
        """A pass whose first kernel was launched at `began_s`, and its last one now; None: it is one launch."""
        now_s = time.perf_counter()
        first_s = now_s if began_s is None else began_s
        begins_s = max(first_s, self._busy_until_s)
        ends_s = max(begins_s + self.pass_s, now_s)
        self.idle_s.append(max(0.0, ends_s - self._busy_until_s - self.pass_s))  # not -0.0, as rounded
        self._busy_until_s = ends_s

    def mark(self) -> float:
        """The moment after all that was launched."""
        return self._busy_until_s

    @staticmethod
    def wait(mark: float) -> None:
        """Sleeps until the mark, as a thread does that waits for a GPU: others may have the interpreter meanwhile."""
        left_s = mark - time.perf_counter()
        if left_s > 0:
            time.sleep(left_s)


def late_arriving(device: SleepingDevice) -> type[Arriving]:
    """In place of `Arriving`: what it reads is there once the device has done all that was launched before."""

    class LateArriving(Arriving):
        def __init__(self, parts: Any) -> None:
            super().__init__(parts)
            self._mark = device.mark()

        def read(self) -> list[torch.Tensor]:
            device.wait(self._mark)
            return super().read()

    return LateArriving


class Replays:
    """In place of a recorded pass: `graphs.Recording`."""

    def __init__(self, device: SleepingDevice, logits: torch.Tensor) -> None:
        self._device, self._logits = device, logits

    def replay(self) -> torch.Tensor:
        self._device.launch()
        return self._logits


def copied(device: torch.device, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """`kernels.staging.staged` with its cost: tensors are put together, and copied twice, as through pinned memory."""
    together = torch.cat([x.reshape(-1).view(torch.uint8) for x in tensors]).clone().clone()
    pieces = torch.split(together, [x.nbytes for x in tensors])
    return tuple(piece.view(x.dtype).view(x.shape) for piece, x in zip(pieces, tensors, strict=True))
