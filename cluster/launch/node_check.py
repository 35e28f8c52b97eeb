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
from ..application.base_fingerprint import identify_base
from ..byte_size import format_byte_size

REDIS_TIMEOUT_S = 5.0


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
    memory_bytes: int  # of one gang's worker

    @contextmanager
    def prepared(self, ttl_s: int) -> Iterator[None]:
        """Makes what nodes look for, and removes it. A launch that is killed leaves the key for `ttl_s`."""
        client = _client(self.redis_url)
        try:
            self.marker_path.write_text(self.marker)
            client.set(self.redis_key, self.marker, ex=ttl_s)
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
    if expected.memory_bytes > (memory_bytes := psutil.virtual_memory().total):
        found.append(f"it has {format_byte_size(memory_bytes)} of memory, less than the pool of one worker")
    return found


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
