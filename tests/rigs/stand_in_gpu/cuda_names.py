"""`torch.cuda` for the time of a test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from motet.tests.rigs.stand_in_gpu.capture import Capture, Captures
from motet.tests.rigs.stand_in_gpu.operations import Operations
from motet.tests.rigs.stand_in_gpu.pinned_memory import PinnedMemory
from motet.tests.rigs.stand_in_gpu.streams import TOTAL_BYTES, Event, Stream, Streams
from motet.tests.rigs.stand_in_gpu.tally import Tally


class Graph:
    """`torch.cuda.CUDAGraph`, captured by `torch.cuda.graph`."""

    def __init__(self, captures: Captures, operations: Operations, tally: Tally) -> None:
        self._captures, self._operations, self._tally = captures, operations, tally
        self._capture: Capture | None = None
        self._pool: object = None

    def replay(self) -> None:
        assert self._capture is not None, "a graph is replayed that was not captured"
        self._tally.replays += 1
        for other in self._captures.others(self._pool, self._capture):
            other.spoil(self._capture.kept)
        self._capture.replay(self._operations.launch("graph"))

    def end_capture(self, pool: object) -> None:
        self._pool = pool
        self._capture = self._captures.end(pool)


def cuda_names(
    streams: Streams, captures: Captures, operations: Operations, pinned: PinnedMemory, tally: Tally
) -> dict[str, Any]:
    """What `torch.cuda` is made to hold, by name."""

    @contextmanager
    def stream(given: Stream | None) -> Iterator[None]:
        before = streams.current
        streams.set_current(given or before)
        try:
            yield
        finally:
            streams.set_current(before)

    @contextmanager
    def graph(
        cuda_graph: Graph, pool: object = None, stream: Stream | None = None, capture_error_mode: str = "global"
    ) -> Iterator[None]:
        before, beside = streams.current, stream or Stream(streams)
        synchronize()  # torch does, before it captures
        streams.set_current(beside)
        beside.wait_stream(before)
        captures.begin(pool)
        try:
            yield
        except BaseException:
            captures.end(object())
            raise
        else:
            cuda_graph.end_capture(pool)
        finally:
            streams.set_current(before)
        before.wait_stream(beside)

    def synchronize(device: object = None) -> None:
        captures.refuse("synchronize()")
        timeline = streams.timeline
        for number in range(len(timeline._clocks)):
            timeline.finish(timeline.mark(number))
        streams.wait_for_host("torch.cuda.synchronize()", {})

    def set_sync_debug_mode(mode: str) -> None:
        streams.warns_of_waits = mode == "warn"

    def reset_peak(device: object = None) -> None:
        streams.num_peak_bytes = streams.num_allocated_bytes

    def register(address: int, num_bytes: int, flags: int) -> int:
        pinned.register(address, num_bytes)
        return 0

    def unregister(address: int) -> int:
        captures.refuse("pinned memory is unpinned")
        pinned.unregister(address)
        return 0

    runtime = SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=unregister)
    properties = SimpleNamespace(name="stand-in", total_memory=TOTAL_BYTES, major=9, minor=0, multi_processor_count=132)
    always: Callable[..., Any] = lambda value: lambda *_, **__: value  # noqa: E731
    return {
        "_lazy_init": always(None),
        "is_available": always(True),
        "device_count": always(1),
        "current_device": always(0),
        "get_device_name": always("stand-in"),
        "get_device_capability": always((9, 0)),
        "get_device_properties": always(properties),
        "mem_get_info": lambda device=None: (streams.total_bytes - streams.num_allocated_bytes, streams.total_bytes),
        "memory_allocated": lambda device=None: streams.num_allocated_bytes,
        "memory_reserved": lambda device=None: streams.num_allocated_bytes,  # nothing is kept of what was freed
        "max_memory_allocated": lambda device=None: streams.num_peak_bytes,
        "reset_peak_memory_stats": reset_peak,
        "empty_cache": always(None),
        "set_device": always(None),
        "Stream": lambda device=None, **_: Stream(streams),
        "Event": lambda **kwargs: Event(streams, **kwargs),
        "current_stream": lambda device=None: streams.current,
        "default_stream": lambda device=None: streams._default,
        "stream": stream,
        "synchronize": synchronize,
        "set_sync_debug_mode": set_sync_debug_mode,
        "graph": graph,
        "CUDAGraph": lambda **_: Graph(captures, operations, tally),
        "graph_pool_handle": lambda: object(),
        "is_current_stream_capturing": lambda: captures.current is not None,
        "cudart": lambda: runtime,
        "check_error": always(None),
    }
