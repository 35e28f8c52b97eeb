"""Copies while steps run: on a GPU on their own stream, on the CPU only in their own thread."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

Mark = torch.cuda.Event | None  # None: on the CPU, where nothing is asynchronous


class SideStream:
    """The stream of one thread that copies."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)

    def mark(self) -> Mark:
        """A point in time after all that the calling thread has launched.

        A copy waits for it: kernels of steps that were launched may still use pages that a later plan gave to the copy.
        """
        return None if self._stream is None else torch.cuda.current_stream(self._device).record_event()

    @contextmanager
    def after(self, mark: Mark) -> Iterator[None]:
        """What is launched within this context runs after the mark, and is done when the context ends."""
        if self._stream is None or mark is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(mark)
            try:
                yield
            finally:  # a copy that was launched goes on after an exception
                self._stream.synchronize()

    def finish(self) -> None:
        """Waits for all that was launched here."""
        if self._stream is not None:
            self._stream.synchronize()
