"""Gangs of worker processes for tests: real processes, gloo between them, a leader in the test's own process."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from unittest import mock

from motet.tests.rigs.patience import PATIENCE_S
from motet.workers import worker_builder
from motet.workers.config import EngineConfig
from motet.workers.engine import Engine
from motet.workers.engine_builder import build_engine
from motet.workers.execution import runner
from motet.workers.models.passes import in_turn
from motet.workers.worker import WorkerSettings, run_worker

# Steps that are split somewhere: by their rows, those of the first part.
ANYWHERE = {num_rows: 1 + 7 * num_rows % (num_rows - 1) for num_rows in range(2, 129)}


def run_worker_in_nano_batches(settings: WorkerSettings) -> None:
    """Splits each step of 2 to 128 rows, and fails if few were."""
    with mock.patch.object(runner, "in_turn", wraps=in_turn) as split:

        def anywhere(*_: object) -> dict[int, int]:
            split.reset_mock()  # not counting those that were measured at the start
            return ANYWHERE

        with (
            mock.patch.object(worker_builder, "LEAST_ROWS", 8),
            mock.patch.object(worker_builder, "first_rows_of", side_effect=anywhere),
        ):
            run_worker(settings)
    assert split.call_count > 3


@contextmanager
def worker_processes(
    run: Callable[[WorkerSettings], None] = run_worker,
) -> Iterator[tuple[Callable[[WorkerSettings], None], list[BaseProcess]]]:
    """What starts a worker in a process that calls `run`, and the processes. They have ended when the block ends."""
    context = multiprocessing.get_context("forkserver")
    # Imported once, and not by every worker. The second comes with any operation on a stand-in of a GPU.
    context.set_forkserver_preload(["motet.workers.worker", "torch._dynamo"])
    processes: list[BaseProcess] = []

    def spawn(settings: WorkerSettings) -> None:
        processes.append(context.Process(target=run, args=(settings,), daemon=True))
        processes[-1].start()

    try:
        yield spawn, processes
    finally:
        for process in processes:
            process.join(timeout=PATIENCE_S)
            if process.is_alive():
                process.kill()
                process.join()


@contextmanager
def gang(
    config: EngineConfig, run: Callable[[WorkerSettings], None] = run_worker
) -> Iterator[tuple[Engine, list[BaseProcess]]]:
    """An engine with `config.tensor_parallel` worker processes, each of which calls `run`.

    They have ended when the block ends.
    """
    with worker_processes(run) as (spawn, processes):
        engine = build_engine(config, spawn=spawn)
        try:
            yield engine, processes
        finally:
            engine.close()
