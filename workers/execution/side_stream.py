"""Copies beside the steps: on a GPU on a stream of their own, on the CPU in their own thread alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

Mark = torch.cuda.Event | None  # None: nothing runs but what is waited for


class SideStream:
    """One for each thread that copies."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def mark(self) -> Mark:
        """A point after all that the calling thread has launched.

        Kernels of steps that were launched may still read and write pages that their plans gave away since.
        """
        return None if self._stream is None else torch.cuda.current_stream(self._device).record_event()

    @contextmanager
    def after(self, mark: Mark) -> Iterator[None]:
        """What is launched within runs after the mark, and is done, for any stream, when the context ends."""
        if self._stream is None or mark is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(mark)
            yield
        self._stream.synchronize()
