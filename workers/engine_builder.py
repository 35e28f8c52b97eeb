"""Builds a gang's engine from its settings."""

from __future__ import annotations

import logging
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace

import msgspec
import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from .config import EngineConfig
from .decoding.constraints import Constraints
from .engine import Engine
from .execution.executor import Executor, LocalExecutor, WorkerLostError, compute_thread
from .execution.gang_executor import (
    Connection,
    ConnectionLostError,
    FromWorker,
    GangExecutor,
    Join,
    Ready,
    WorkerFailed,
    WorkerProgress,
)
from .fairness.prompt_budget import token_interval_of
from .loop import EngineLoop
from .memory.page_arrays import PoolGeometry, plan_pool, pool_of
from .models.config import ModelConfig, sampling_defaults
from .models.sharding import ModelSharding
from .models.stored_tensor import folder_lacks_head
from .models.weights import Progress
from .parallel import Alone
from .scheduling.scheduler import Scheduler
from .window_pages import GangLimits, kept_window
from .wire.messages import GangInfo
from .worker import WorkerSettings
from .worker_builder import build_executor, tier_sizes

_SLACK_S = 10.0
Spawn = Callable[[WorkerSettings], None]  # starts `run_worker` in a process of its own and returns at once


_log = logging.getLogger(__name__)


def build_engine_loop(
    config: EngineConfig, on_progress: Progress | None = None, spawn: Spawn | None = None, host: str = "127.0.0.1"
) -> EngineLoop:
    """An engine with its own thread, not yet started. See `build_engine`."""
    # In a gang of several workers the executor's deadline must fire first, as it names the worker that hangs.
    slack_s = 0.0 if config.tensor_parallel == 1 else _SLACK_S
    return EngineLoop(build_engine(config, on_progress, spawn, host), config.step_deadline_s + slack_s)


def build_engine(
    config: EngineConfig,
    on_progress: Progress | None = None,
    spawn: Spawn | None = None,
    host: str = "127.0.0.1",
    clock: Callable[[], float] = time.perf_counter,
) -> Engine:
    """Loads the base and lays out the pool, on as many workers as the config says.

    One worker lives in this process. Several are started by `spawn`, and reach this process at `host`. By `clock` the
    engine measures its steps. Raises ValueError if the model cannot be served with these settings, WorkerLostError if a
    worker does not come up.
    """
    model = ModelConfig.from_folder(config.model_path)
    _log_context(config, model)
    sharding = ModelSharding(model, config.tensor_parallel, expert_sharding=config.expert_sharding)
    dtype = getattr(torch, config.dtype)
    if config.pool_bytes is not None:  # refuses too small a pool before workers start
        plan_pool(sharding, config.block_size, dtype, config.pool_bytes, config.kv_dtype)
    executor: Executor
    constraints = Constraints(config.model_path, model.vocab_size, model.eos_token_ids)
    if config.tensor_parallel == 1:
        executor = alone = _build_alone(config, on_progress)
        kernels, device, num_pages = alone.kernels_name, alone.device.type, alone.runner.num_pages
        config = replace(config, num_threads=alone.num_threads)  # what was measured
        num_host_pages = tier_sizes(config, alone.runner.geometry).host
        alone.runner.masks = constraints
    else:
        if spawn is None:
            raise ValueError(f"tensor_parallel = {config.tensor_parallel}: `spawn` is needed to start workers, or 1")
        executor, kernels, device, num_pages, num_host_pages = _start_gang(config, on_progress, spawn, host)
        executor.masks = constraints
    return _engine_over(config, sharding, executor, kernels, device, num_pages, num_host_pages, constraints, clock)


def build_virtual_engine(
    config: EngineConfig, executor: Executor, clock: Callable[[], float], device: str = "cpu"
) -> Engine:
    """The engine that `build_engine` makes with these settings, over an executor that computes nothing, in its time.

    The folder needs a config.json alone, `config.pool_bytes` has to be given, and grammars are refused.
    """
    if config.pool_bytes is None:
        raise ValueError("pool_bytes: nothing is measured in virtual time, a size is needed")
    sharding = ModelSharding(
        ModelConfig.from_folder(config.model_path), config.tensor_parallel, expert_sharding=config.expert_sharding
    )
    geometry = plan_pool(sharding, config.block_size, getattr(torch, config.dtype), config.pool_bytes, config.kv_dtype)
    num_host_pages = tier_sizes(config, geometry).host
    return _engine_over(config, sharding, executor, "virtual", device, geometry.num_pages, num_host_pages, None, clock)


def _engine_over(
    config: EngineConfig,
    sharding: ModelSharding,
    executor: Executor,
    kernels: str,
    device: str,
    num_pages: int,
    num_host_pages: int,
    constraints: Constraints | None,
    clock: Callable[[], float] = time.perf_counter,
) -> Engine:
    model = sharding.config
    geometry = pool_of(sharding, config.block_size, getattr(torch, config.dtype), num_pages, config.kv_dtype)
    layout = sharding.layout(config.block_size, config.dtype, config.kv_dtype)
    scheduler = Scheduler(
        _limits(config, geometry, model, device),
        frozenset(model.eos_token_ids),
        lambda ref: layout.num_pages(ref.module_ranks),
        config.prefix_cache,
        replace(tier_sizes(config, geometry), host=num_host_pages),
        clock,
        token_interval_s=token_interval_of(config.token_interval_s, device),
        scheduling=config.scheduling,
        constraints=constraints,
    )
    return Engine(scheduler, executor, _info(config, geometry, kernels, device, model), clock=clock)


def _build_alone(config: EngineConfig, on_progress: Progress | None) -> LocalExecutor:
    """A worker in this process, built in the thread that it computes in."""
    thread = compute_thread()
    try:
        return thread.submit(build_executor, config, Alone(), on_progress, thread).result()
    except BaseException:
        thread.shutdown(wait=False)
        raise


def _start_gang(
    config: EngineConfig, on_progress: Progress | None, spawn: Spawn, host: str
) -> tuple[GangExecutor, str, str, int, int]:
    """Workers that have loaded their parts, the names of their kernels and of their device, and the pages of each.

    The last number: pages that all of them have room for in host memory.
    """
    secret = secrets.token_hex(16)
    with socket.create_server((host, 0)) as listener:
        store = rendezvous(host)
        for rank in range(config.tensor_parallel):
            spawn(WorkerSettings(config, rank, host, listener.getsockname()[1], store.port, secret))
        connections = _accept(listener, config, secret)
    ready = _await_all_ready(connections, on_progress)
    return (
        GangExecutor(connections, store, config.step_deadline_s),
        " and ".join(dict.fromkeys(of.kernels for of in ready)),
        ready[0].device,
        _pages_of_all(ready),
        min(of.num_host_pages for of in ready),
    )


def rendezvous(host: str) -> TCPStore:
    """The store in which workers meet. It has no authentication, so it listens at this address alone."""
    listener = socket.create_server((host, 0))
    port = listener.getsockname()[1]
    return TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


def _pages_of_all(ready: Sequence[Ready]) -> int:
    """Raises WorkerLostError if workers have pools of different sizes, as some on CPUs and others on GPUs would."""
    sizes = [of.num_pages for of in ready]
    if len(set(sizes)) > 1:
        raise WorkerLostError(f"the workers' pools have {sizes} pages: all must be of one size; set pool_bytes")
    return sizes[0]


def _accept(listener: socket.socket, config: EngineConfig, secret: str) -> list[Connection]:
    """A connection of each worker, by rank. Raises WorkerLostError if one does not come in time."""
    decoder = msgspec.msgpack.Decoder(FromWorker)
    by_rank: dict[int, Connection] = {}
    deadline = time.monotonic() + config.start_deadline_s
    while len(by_rank) < config.tensor_parallel:
        listener.settimeout(max(deadline - time.monotonic(), 0.01))
        try:
            connection = Connection(listener.accept()[0])
        except TimeoutError:
            missing = sorted(set(range(config.tensor_parallel)) - by_rank.keys())
            raise WorkerLostError(f"workers {missing} did not come within {config.start_deadline_s:g} s") from None
        connection.set_timeout(10.0)
        try:
            message = decoder.decode(connection.receive())
        except (ConnectionLostError, msgspec.MsgspecError):
            connection.close()
            continue
        if isinstance(message, Join) and secrets.compare_digest(message.secret, secret):
            connection.set_timeout(None)
            by_rank[message.rank] = connection
        else:
            connection.close()
    return [by_rank[rank] for rank in range(config.tensor_parallel)]


def _await_all_ready(connections: Sequence[Connection], on_progress: Progress | None) -> list[Ready]:
    """The workers' reports by rank. Raises WorkerLostError as soon as one is lost, since others may wait for it."""
    with ThreadPoolExecutor(len(connections), thread_name_prefix="gang-start") as threads:
        waits = [threads.submit(_await_ready, rank, each, on_progress) for rank, each in enumerate(connections)]
        try:
            for each in as_completed(waits):
                each.result()
        except BaseException:
            for connection in connections:
                connection.close()  # ends the other waits
            raise
    return [each.result() for each in waits]


def _await_ready(rank: int, connection: Connection, on_progress: Progress | None) -> Ready:
    decoder = msgspec.msgpack.Decoder(FromWorker)
    while True:
        try:
            message = decoder.decode(connection.receive())
        except ConnectionLostError as error:
            raise WorkerLostError(f"worker {rank} was lost while it loaded the model: {error}") from error
        if isinstance(message, Ready):
            return message
        if isinstance(message, WorkerFailed):
            raise WorkerLostError(f"worker {rank} could not load the model: {message.problem}")
        if isinstance(message, WorkerProgress) and on_progress is not None:
            on_progress(message.phase, message.done, message.total)


def _log_context(config: EngineConfig, model: ModelConfig) -> None:
    served, rotary = config.context_of(model.max_model_len), model.rotaries[0]
    _log.info(
        "context: %d tokens, of %d by max_position_embeddings in config.json; rotary embedding: %s %s",
        served,
        model.max_model_len,
        rotary.kind,
        dict(rotary.options),
    )


def _limits(config: EngineConfig, geometry: PoolGeometry, model: ModelConfig, device: str) -> GangLimits:
    return GangLimits(
        config.context_of(model.max_model_len),
        model.vocab_size,
        config.block_size,
        geometry.num_pages,
        config.max_tokens_per_step,
        config.max_num_sequences,
        kept_window(geometry.window, device),
        geometry.full_layers,
        geometry.state.num_pages,
        has_head=model.tie_word_embeddings or not folder_lacks_head(config.model_path),
    )


def _info(config: EngineConfig, geometry: PoolGeometry, kernels: str, device: str, model: ModelConfig) -> GangInfo:
    return GangInfo(
        gang_id="",  # the leader's replica names itself
        model=str(config.model_path),
        device=device,
        dtype=config.dtype,
        kernels=kernels,
        max_model_len=config.context_of(model.max_model_len),
        block_size=geometry.block_size,
        num_pages=geometry.num_pages,
        page_bytes=geometry.page_bytes,
        num_state_pages=geometry.state.num_pages,
        num_threads=config.num_threads,
        is_fair=config.scheduling == "fair",
        max_num_sequences=min(config.max_num_sequences, config.max_tokens_per_step),
        max_tokens_per_step=config.max_tokens_per_step,
        reasons={**config.reasons, "pool-bytes": _why_this_pool(config, device)},
        vocab_size=model.vocab_size,
        hidden_size=model.hidden_size,
        eos_token_ids=model.eos_token_ids,
        sampling_defaults=sampling_defaults(config.model_path) if config.sampling_defaults == "model" else {},
    )


def _why_this_pool(config: EngineConfig, device: str) -> str:
    if config.pool_bytes is not None:
        return "as the settings say"
    if device == "cpu":
        if config.pool_sharers is None:
            return "an eighth of the memory of the machine or container, at most 1 GiB as other gangs may be there"
        return f"an eighth of the memory of the machine or container, for {config.pool_sharers} workers"
    return f"what weights and the largest step leave of {config.device_memory_share:.0%} of the GPU"
