"""A gang that emits fixed tokens at a given rate, over the data plane and over a Serve handle."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Sequence

import ray

from motet.cluster.config import part_config
from motet.cluster.replicas.serve_watch import ADDRESS
from motet.cluster.settings.settings import Settings
from motet.workers.engine_messages import EngineMessage
from motet.workers.leader.frame_server import FrameServer
from motet.workers.leader.served_engine import LeaderConfig, OnStep, StepReport
from motet.workers.wire.engine_load import EngineGauges, EngineLoad
from motet.workers.wire.messages import (
    CANCELLED,
    Cancel,
    GangInfo,
    SequenceRequest,
    SequenceUpdate,
    Submit,
)


class ReadyEngine:
    """An engine whose every step gives each sequence the next token of a text, which repeats.

    `sampling.seed` of the sequences is the rate, in steps per second. If the engine falls behind, it does not catch up.
    """

    def __init__(self, text_token_ids: Sequence[int]) -> None:
        self._text = list(text_token_ids)
        self._running: dict[int, tuple[SequenceRequest, int]] = {}
        self._ended: list[SequenceUpdate] = []  # last updates of cancelled sequences
        self._changed = threading.Condition()
        self._stopping = False
        self._thread: threading.Thread | None = None

    def start(self, on_step: OnStep) -> None:
        self._thread = threading.Thread(target=self._run, args=(on_step,), daemon=True)
        self._thread.start()

    def receive(self, message: EngineMessage) -> None:
        """It has no adapters, serves all at once, and none ever waits: so only two messages mean anything to it."""
        with self._changed:
            match message:
                case Submit(request):
                    self._running[request.sequence_id] = (request, 0)
                    self._changed.notify()
                case Cancel(sequence_id):
                    if self._running.pop(sequence_id, None) is not None:
                        self._ended.append(SequenceUpdate(sequence_id, error=CANCELLED))
                        self._changed.notify()

    def stop(self) -> None:
        with self._changed:
            self._stopping = True
            self._changed.notify()

    @property
    def alive(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _run(self, on_step: OnStep) -> None:
        next_step_at = time.monotonic()
        while True:
            with self._changed:
                while not (self._running or self._ended or self._stopping):
                    self._changed.wait()
                if self._stopping:
                    return
                pace = max([request.sampling.seed or 1 for request, _ in self._running.values()], default=1000)
                ended, self._ended = self._ended, []
                updates = ended + [self._advance(*entry) for entry in list(self._running.values())]
                num_running = len(self._running)
            on_step(StepReport(updates, EngineLoad(EngineGauges(num_running=num_running))))
            next_step_at = max(next_step_at + 1 / pace, time.monotonic() - 1 / pace)
            time.sleep(max(0.0, next_step_at - time.monotonic()))

    def _advance(self, request: SequenceRequest, count: int) -> SequenceUpdate:
        sequence_id = request.sequence_id
        token = self._text[count % len(self._text)]
        if count + 1 == request.sampling.max_tokens:
            del self._running[sequence_id]
            return SequenceUpdate(sequence_id, [token], finish_reason="length")
        self._running[sequence_id] = (request, count + 1)
        return SequenceUpdate(sequence_id, [token])


class ReadyGang:
    """The replica. The baseline reads tokens from `stream`, a router from the frame server."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, text_token_ids: Sequence[int], vocab_size: int, token: str
    ) -> None:
        self._info = GangInfo(
            gang_id="ready",
            model="ready",
            device="none",
            dtype="none",
            kernels="none",
            max_model_len=1 << 20,
            block_size=16,
            num_pages=1,
            page_bytes=1,
            num_threads=1,
            vocab_size=vocab_size,
        )
        server = FrameServer(ReadyEngine(text_token_ids), self._info, token, part_config(LeaderConfig, Settings()))
        self._address = await server.start(ray.util.get_node_ip_address())
        self._queues: dict[int, asyncio.Queue[SequenceUpdate]] = {}
        self._engine = ReadyEngine(text_token_ids)
        loop = asyncio.get_running_loop()
        self._engine.start(lambda report: self._hand_over(loop, report.updates))

    def info(self) -> GangInfo:
        return self._info

    def record_replica_metadata(self) -> dict[str, str]:
        return {ADDRESS: self._address}

    async def stream(self, request: SequenceRequest) -> AsyncIterator[SequenceUpdate]:
        """The updates of one sequence, each a message of its own."""
        queue = self._queues[request.sequence_id] = asyncio.Queue()
        self._engine.receive(Submit(request))
        try:
            while True:
                update = await queue.get()
                yield update
                if update.finish_reason is not None:
                    return
        finally:
            self._engine.receive(Cancel(request.sequence_id))
            del self._queues[request.sequence_id]

    def _hand_over(self, loop: asyncio.AbstractEventLoop, updates: Sequence[SequenceUpdate]) -> None:
        loop.call_soon_threadsafe(self._sort, updates)

    def _sort(self, updates: Sequence[SequenceUpdate]) -> None:
        for update in updates:
            if update.sequence_id in self._queues:
                self._queues[update.sequence_id].put_nowait(update)
