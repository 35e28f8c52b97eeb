"""One worker of a gang, in its own process: executes the leader's plans until the leader stops it."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from .config import EngineConfig
from .decoding.mask_source import TokenMask
from .device import resolve_device
from .execution.executor import LocalExecutor
from .execution.gang_executor import (
    Connection,
    ConnectionLostError,
    DeltaDecoder,
    Done,
    Execute,
    FromWorker,
    Join,
    LoadEnded,
    Masks,
    MoveEnded,
    Ready,
    ToWorker,
    WantMasks,
    WorkerFailed,
    WorkerProgress,
)
from .parallel import ProcessGroup
from .plan import SampledToken, StepPlan
from .worker_builder import build_executor, tier_sizes

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class WorkerSettings:
    """Settings of a worker's process. Plain data, since it travels to another node."""

    config: EngineConfig
    rank: int
    leader_host: str
    leader_port: int  # of the plans
    store_port: int  # of torch.distributed's rendezvous
    secret: str


def run_worker(settings: WorkerSettings) -> None:
    """Joins the gang, loads this worker's part of the base and executes plans, until the leader ends the connection."""
    address = (settings.leader_host, settings.leader_port)
    leader = _Leader(socket.create_connection(address, timeout=settings.config.step_deadline_s))
    leader.send(Join(settings.rank, settings.secret))
    try:
        executor = _build(settings, leader)
        executor.runner.masks = leader
        while (plan := leader.next_plan()) is not None:
            executor.begin_copies(plan)
            output = executor.runner.run(plan)
            stats = executor.loader.host_adapter_stats()
            leader.send(Done(plan.step, output.tokens, stats, output.scores, output.pooled))
        executor.close()
    except ConnectionLostError as error:
        _log.warning("the leader is gone, and this worker with it: %s", error)
    except Exception as error:
        _log.exception("worker %d failed", settings.rank)
        leader.send(WorkerFailed(f"{type(error).__name__}: {error}"))
        raise
    finally:
        leader.close()


_POLL_S = 0.0005


class _Leader:
    """The connection to the leader, in messages. As a `MaskSource`: the leader follows the plans, and has the masks."""

    def __init__(self, connected: socket.socket) -> None:
        self._connection = Connection(connected)
        self._connection.set_timeout(None)
        self._decoder = msgspec.msgpack.Decoder(ToWorker)
        self._deltas = DeltaDecoder()
        self.close = self._connection.close

    def send(self, message: FromWorker) -> None:
        """May be called from any thread."""
        self._connection.send(msgspec.msgpack.encode(message))

    def next_plan(self) -> StepPlan | None:
        """None: the leader stops the worker. Raises PlanMismatchError as `DeltaDecoder.decode` does."""
        message = self._decoder.decode(self._connection.receive())
        return self._deltas.decode(message) if isinstance(message, Execute) else None

    def follow(self, plan: StepPlan, fed: Mapping[int, SampledToken | None]) -> None: ...

    def take(self, positions: Sequence[tuple[int, int]], is_over: Callable[[], bool]) -> Mapping[int, TokenMask]:
        """Between two plans: the answer is the next message."""
        masks = dict[int, TokenMask]()
        while True:
            over = is_over()
            self.send(WantMasks([each for each in positions if each[0] not in masks]))
            answer = self._decoder.decode(self._connection.receive())
            if not isinstance(answer, Masks):
                raise ConnectionLostError("the leader stops the worker while it computes")
            masks |= answer.masks
            if over or len(masks) == len(positions):
                return masks
            time.sleep(_POLL_S)


def _build(settings: WorkerSettings, leader: _Leader) -> LocalExecutor:
    """Meets the other workers and loads the model. Reports that to the leader, and later each copy that ends."""
    config = settings.config
    store = TCPStore(settings.leader_host, settings.store_port, is_master=False)
    group = ProcessGroup(
        settings.rank,
        config.tensor_parallel,
        store,
        config.step_deadline_s,
        resolve_device(config.device),
        config.small_sums,
    )
    on_progress = (lambda *progress: leader.send(WorkerProgress(*progress))) if settings.rank == 0 else None
    executor = build_executor(config, group, on_progress)

    def send_ended() -> None:
        loaded, failed = executor.loader.take_ended()
        for digest in loaded:
            leader.send(LoadEnded(digest, None))
        for failure in failed:
            leader.send(LoadEnded(failure.digest, failure))
        for end in executor.mover.take_ended():
            leader.send(MoveEnded(end))

    executor.wake_on_copy_end(send_ended)
    geometry = executor.runner.geometry
    num_host_pages = tier_sizes(config, geometry).host
    leader.send(Ready(executor.kernels_name, executor.device.type, geometry.num_pages, num_host_pages))
    return executor
