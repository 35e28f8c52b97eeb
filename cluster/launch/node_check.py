"""What a node of a running cluster must have before a part of motet can live on it, checked on the node itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
from redis import Redis
from redis.backoff import NoBackoff
from redis.exceptions import RedisError
from redis.retry import Retry

from ... import __version__
from ...workers.device_probe import probe_counted_device, probe_device
from ..application.base_fingerprint import identify_base
from ..byte_size import format_byte_size
from ..worker_device import WorkerDevice

REDIS_TIMEOUT_S = 5.0
_SET = "#!lua flags=allow-oom\nreturn redis.call('SET', KEYS[1], ARGV[1], 'EX', ARGV[2])"  # also where Redis is full


@dataclass(frozen=True, kw_only=True)
class NodeExpectations:
    """What a node must find. Plain data, because it travels to the node."""

    version: str  # of motet
    model_path: Path
    fingerprint: str  # of the base there
    marker_path: Path  # a file in the data folder, made for this check
    marker: str  # what it says
    redis_url: str
    redis_key: str  # made for this check as well; its value is `marker`
    worker: WorkerDevice | None  # of gangs that may come there; None: none may
    num_workers: int = 0  # that have room there at once

    @contextmanager
    def prepared(self, ttl_s: int) -> Iterator[None]:
        """Makes what nodes look for, and removes it. A launch that is killed leaves the key for `ttl_s`."""
        client = _client(self.redis_url)
        try:
            self.marker_path.write_text(self.marker)
            client.eval(_SET, 1, self.redis_key, self.marker, ttl_s)
            yield
        finally:
            self.marker_path.unlink(missing_ok=True)
            with suppress(RedisError):
                client.delete(self.redis_key)
            client.close()


def problems_of_this_node(expected: NodeExpectations) -> Sequence[str]:
    """What is wrong on this node, a sentence for each problem."""
    found = []
    if __version__ != expected.version:
        found.append(f"motet {__version__} is installed, and {expected.version} is needed")
    try:
        fingerprint = identify_base(expected.model_path, "").fingerprint
        if fingerprint != expected.fingerprint:
            found.append(f"the model in {expected.model_path} is another one")
    except (OSError, ValueError) as error:
        found.append(f"the model cannot be read from {expected.model_path}: {error}")
    folder = expected.marker_path.parent
    try:
        if expected.marker_path.read_text() != expected.marker:
            found.append(f"{folder} is another folder: all nodes must share the data folder")
    except OSError as error:
        found.append(f"{folder} is not the data folder, which all nodes must share at the same path: {error}")
    if (problem := _redis_problem(expected)) is not None:
        found.append(problem)
    if expected.worker is not None and (problem := _device_problem(expected.worker, expected.num_workers)) is not None:
        found.append(problem)
    return found


def _device_problem(worker: WorkerDevice, num_workers: int) -> str | None:
    """What keeps workers from computing here."""
    try:
        facts = (probe_counted_device if worker.gang_num_gpus else probe_device)(worker.device)
        worker.check(facts)
        worker.check_shared(facts, num_workers)
    except ValueError as error:
        return f"a gang could not start there: {error}"
    if facts.memory_bytes is None:
        memory_bytes, what, num_pools = psutil.virtual_memory().total, "it has", 1
        pool_bytes = worker.pool_bytes or 0  # None: a share
    else:
        memory_bytes, what, num_pools = facts.memory_bytes, "a GPU of it has", worker.num_pools_on_a_gpu(num_workers)
        pool_bytes = worker.pool_bytes or 0  # None: what is left
    if pool_bytes * num_pools > memory_bytes:
        pools = "the pool of one worker" if num_pools == 1 else f"the pools of the {num_pools} workers that share it"
        return f"{what} {format_byte_size(memory_bytes)} of memory, less than {pools}"
    return None


def _redis_problem(expected: NodeExpectations) -> str | None:
    client = _client(expected.redis_url)
    try:
        if client.get(expected.redis_key) != expected.marker:
            return (
                "what answers at the address of the Redis server is another one: give an address that all nodes reach"
            )
    except RedisError as error:
        return f"the Redis server cannot be reached: {error}"
    finally:
        client.close()
    return None


def _client(url: str) -> Redis:
    client: Redis = Redis.from_url(
        url,
        decode_responses=True,
        socket_timeout=REDIS_TIMEOUT_S,
        socket_connect_timeout=REDIS_TIMEOUT_S,
        retry=Retry(NoBackoff(), 0),
    )
    return client
