"""Streams and events of a stand-in GPU, as `torch.cuda` shows them."""

from __future__ import annotations

import threading
import weakref
from typing import Any

import torch

from motet.tests.rigs.stand_in_gpu.tally import Tally, Wait, product_line, thread_name
from motet.tests.rigs.stand_in_gpu.timeline import Clock, Timeline
from motet.tests.rigs.stand_in_gpu.watched_memory import Lease, WatchedMemory

TOTAL_BYTES = 80 << 30


class Streams:
    """Each thread's current stream, and what is allocated."""

    def __init__(self, timeline: Timeline, tally: Tally) -> None:
        self.timeline, self.tally = timeline, tally
        self._default = Stream(self)
        self._local = threading.local()
        self.total_bytes = TOTAL_BYTES
        self.num_allocated_bytes = self.num_peak_bytes = 0
        self.warns_of_waits = False  # torch.cuda.set_sync_debug_mode

    @property
    def current(self) -> Stream:
        return getattr(self._local, "stream", self._default)

    def set_current(self, stream: Stream) -> None:
        self._local.stream = stream

    def wait_for_host(self, why: str, mark: Clock, stream: int | None = None) -> None:
        """The host waits for the mark, of `stream` or of all."""
        self.timeline.finish(mark)
        leaves_idle = stream is not None and self.timeline.is_idle(stream)
        self.tally.waits.append(Wait(why, product_line(), thread_name(), leaves_idle))

    def watch_lease(self, lease: Lease, memory: WatchedMemory, stream: int) -> weakref.ref[Lease]:
        """Its memory goes back to the stream that it was allocated in, which may use it at once.

        Raises torch.OutOfMemoryError if the device has no room for it.
        """
        if self.num_allocated_bytes + memory.num_bytes > self.total_bytes:
            raise torch.OutOfMemoryError(f"{memory.num_bytes} bytes of {self.total_bytes}")
        self.num_allocated_bytes += memory.num_bytes
        self.num_peak_bytes = max(self.num_peak_bytes, self.num_allocated_bytes)

        def freed(_: object) -> None:
            self.num_allocated_bytes -= memory.num_bytes
            line = memory.unfinished(stream)
            if line is not None:
                self.timeline.problems.append(
                    f"{memory.what} is freed while {line}, in another stream, may still use it"
                )

        return weakref.ref(lease, freed)


class Stream:
    """`torch.cuda.Stream`."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self.number = streams.timeline.new_stream()

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event(self._streams)
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        event.wait(self)

    def wait_stream(self, stream: Stream) -> None:
        self._streams.timeline.wait(self.number, self._streams.timeline.mark(stream.number))

    def synchronize(self) -> None:
        self._streams.wait_for_host("stream.synchronize()", self._streams.timeline.mark(self.number), self.number)

    def query(self) -> bool:
        self._streams.timeline.finish(self._streams.timeline.mark(self.number))
        return True


class Event:
    """`torch.cuda.Event`."""

    def __init__(self, streams: Streams, **_: Any) -> None:
        self._streams = streams
        self._mark: Clock | None = None
        self._stream: int | None = None

    def record(self, stream: Stream | None = None) -> None:
        self._stream = (stream or self._streams.current).number
        self._mark = self._streams.timeline.mark(self._stream)

    def wait(self, stream: Stream | None = None) -> None:
        if self._mark is not None:  # CUDA takes an event that was not recorded for done
            self._streams.timeline.wait((stream or self._streams.current).number, self._mark)

    def synchronize(self) -> None:
        self._streams.wait_for_host("event.synchronize()", self._mark or {}, self._stream)

    def query(self) -> bool:
        self._streams.timeline.finish(self._mark or {})
        return True
