"""What `motet doctor` says of facts: each check with one that is bad, and that it knows what to do then."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from motet.cluster.edge.serve_variables import LASTING_STARTS, LASTING_STREAMS, SERVE_FLAGS
from motet.cluster.tools.folder_checks import (
    FolderFacts,
    SecretFile,
    SecretsFacts,
    check_folder,
    check_locks_between,
    check_secrets,
    gather_secrets,
)
from motet.cluster.tools.machine_checks import Finding, Gpu, GpuFacts, RedisFacts, check_gpus, check_redis, parse_gpus
from motet.cluster.tools.node_facts import (
    KernelFacts,
    LimitFacts,
    check_clocks,
    check_kernels,
    check_limits,
    check_versions,
)
from motet.cluster.tools.serve_front import (
    NodeServeFacts,
    PortFacts,
    RunningServe,
    check_node_serve,
    check_port,
    check_running_serve,
)
from motet.workers.machine_memory import memory_limit

GIB = 1 << 30
REDIS = RedisFacts(
    address="redis://redis:6379",
    version="7.2.4",
    config={"maxmemory": "0", "maxmemory-policy": "noeviction", "appendonly": "yes", "appendfsync": "always"},
)


def worst(findings: list[Finding]) -> tuple[str, str]:
    """Level and text of what is worst; what is not right says why it matters and what to do."""
    order = ("error", "warning", "ok")
    assert all(one.level == "ok" or (one.why and one.do) for one in findings)
    found = min(findings, key=lambda one: order.index(one.level))
    return found.level, found.found


def redis_with(**config: str) -> RedisFacts:
    return replace(
        REDIS, config={**(REDIS.config or {}), **{key.replace("_", "-"): value for key, value in config.items()}}
    )


@pytest.mark.parametrize(
    ("facts", "level", "says"),
    [
        (REDIS, "ok", "Redis 7.2.4"),
        (RedisFacts(address=None, own_server="/usr/bin/valkey-server"), "ok", "motet starts its own"),
        (RedisFacts(address=None, problem="none was found"), "error", "no program to start one"),
        (replace(REDIS, problem="Connection refused"), "error", "does not answer: Connection refused"),
        (replace(REDIS, version="6.2.14"), "error", "speaks as Redis 6.2.14"),
        (replace(REDIS, version=""), "error", "an unknown version"),
        (replace(REDIS, round_trip_s=0.25), "warning", "takes 250 ms"),
        (replace(REDIS, config=None), "warning", "CONFIG GET"),
        (redis_with(maxmemory_policy="allkeys-lru"), "warning", "allkeys-lru, without a limit"),
        (redis_with(maxmemory_policy="allkeys-lru", maxmemory="1000"), "error", "allkeys-lru"),
        (redis_with(appendonly="no"), "error", "no append-only file"),
        (redis_with(appendfsync="everysec"), "warning", "appendfsync is everysec"),
        (replace(redis_with(maxmemory="1000"), used_bytes=900), "warning", "900 B of 1000 B"),
    ],
)
def test_redis(facts: RedisFacts, level: str, says: str) -> None:
    found = worst(check_redis(facts))
    assert found[0] == level and says in found[1]


@pytest.mark.parametrize(
    ("offsets_s", "level", "says"),
    [
        ({"Redis": 0.0, "a": 0.2, "b": -0.3}, "ok", "3 clocks are within 500 ms"),
        ({"Redis": 0.0, "a": 2.0}, "warning", "a is 2.00 s ahead of Redis"),
        ({"Redis": 0.0, "a": -100.0, "b": 100.0}, "error", "b is 200.00 s ahead of a"),
    ],
)
def test_clocks(offsets_s: dict[str, float], level: str, says: str) -> None:
    assert worst(check_clocks(offsets_s)) == (level, says)


def test_one_clock_is_compared_with_nothing() -> None:
    assert check_clocks({"a": 5.0}) == []


LIMITS = LimitFacts(
    max_files=65_536,
    memory_bytes=64 * GIB,
    memory_limit_bytes=16 * GIB,
    num_cores=16,
    num_usable_cores=4,
    shared_memory_bytes=GIB,
)


@pytest.mark.parametrize(
    ("facts", "level", "says"),
    [
        (LIMITS, "ok", "65536 files"),
        (replace(LIMITS, max_files=None), "ok", "any number of files"),
        (replace(LIMITS, max_files=20_000), "warning", "enough for 9744 of 16384 connections"),
        (replace(LIMITS, max_files=1024), "error", "enough for 256 of 16384 connections"),
        (replace(LIMITS, memory_limit_bytes=GIB), "error", "this container may use 1 GiB"),
        (replace(LIMITS, memory_limit_bytes=None, memory_bytes=GIB), "error", "this machine may use 1 GiB"),
        (replace(LIMITS, shared_memory_bytes=64 << 20), "warning", "/dev/shm has 64 MiB"),
        (replace(LIMITS, shared_memory_bytes=None), "ok", "files"),
    ],
)
def test_limits(facts: LimitFacts, level: str, says: str) -> None:
    expected = {"max_connections": 16_384, "pool_bytes": 8 * GIB, "object_store_bytes": 100 << 20}
    found = worst(check_limits(facts, computes_on_cpu=True, **expected))
    assert found[0] == level and says in found[1]


def test_a_pool_on_a_gpu_takes_no_memory_of_the_container() -> None:
    facts = replace(LIMITS, memory_limit_bytes=GIB)
    found = check_limits(facts, max_connections=64, pool_bytes=8 * GIB, computes_on_cpu=False, object_store_bytes=0)
    assert worst(found)[0] == "ok"


@pytest.mark.parametrize(
    ("file", "text", "limit"),
    [
        ("memory.max", "1073741824\n", GIB),
        ("memory.max", "max\n", None),
        ("memory/memory.limit_in_bytes", "1073741824\n", GIB),
        ("memory/memory.limit_in_bytes", "9223372036854771712\n", None),
    ],
)
def test_the_containers_limit_is_read(tmp_path: Path, file: str, text: str, limit: int | None) -> None:
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text(text)
    assert memory_limit(tmp_path, tmp_path / "none") == limit
    assert memory_limit(tmp_path / "none", tmp_path / "none") is None


def test_the_limit_of_a_service_is_the_least_of_its_groups(tmp_path: Path) -> None:
    """As systemd's MemoryMax of a slice, above a service without a limit."""
    (tmp_path / "cgroup").write_text("0::/motet.slice/gang.service\n")
    group = tmp_path / "motet.slice" / "gang.service"
    group.mkdir(parents=True)
    (group / "memory.max").write_text("max\n")
    assert memory_limit(tmp_path, tmp_path / "cgroup") is None
    (group.parent / "memory.max").write_text(f"{4 * GIB}\n")
    assert memory_limit(tmp_path, tmp_path / "cgroup") == 4 * GIB
    (group / "memory.max").write_text(f"{GIB}\n")
    assert memory_limit(tmp_path, tmp_path / "cgroup") == GIB


FOLDER = FolderFacts(path="/data", free_bytes=50 * GIB, total_bytes=100 * GIB, locks_hold=True, replaces=True)


@pytest.mark.parametrize(
    ("facts", "level", "says"),
    [
        (FOLDER, "ok", "50 GiB free"),
        (replace(FOLDER, problem="Permission denied"), "error", "cannot be used: Permission denied"),
        (replace(FOLDER, free_bytes=GIB - 1), "error", "free of 100 GiB"),
        (replace(FOLDER, free_bytes=5 * GIB), "warning", "5 GiB free"),
        (replace(FOLDER, free_bytes=0, is_full=True), "error", "no more can be written: /data has 0 B free"),
        (replace(FOLDER, locks_hold=False), "error", "does not keep a second process out"),
        (replace(FOLDER, locks_hold=None), "error", "refuses locks"),
        (replace(FOLDER, replaces=False), "error", "does not replace a file in one step"),
    ],
)
def test_the_data_folder(facts: FolderFacts, level: str, says: str) -> None:
    found = worst(check_folder(facts))
    assert found[0] == level and says in found[1]


@pytest.mark.parametrize(
    ("held", "locked_out", "level", "says"),
    [
        (True, True, "ok", "holds on b"),
        (True, False, "error", "a lock of a does not hold on b"),
        (True, None, "error", "b does not see what a writes"),
        (False, None, "error", "b does not see what a writes"),
    ],
)
def test_locks_between_nodes(held: bool, locked_out: bool | None, level: str, says: str) -> None:
    found = worst(check_locks_between("a", "b", held, locked_out))
    assert found[0] == level and says in found[1]


KERNELS = KernelFacts(
    compiler="/usr/bin/c++",
    cache=Path("/cache"),
    cache_is_writable=True,
    instructions="AVX512-BF16",
    has_gpu_driver=False,
    has_triton=False,
)


@pytest.mark.parametrize(
    ("facts", "level", "says"),
    [
        (KERNELS, "ok", "/usr/bin/c++ compiles for this CPU (AVX512-BF16)"),
        (replace(KERNELS, compiler=None), "error", "no C++ compiler"),
        (replace(KERNELS, cache_is_writable=False), "error", "/cache cannot be written"),
        (replace(KERNELS, has_gpu_driver=True), "warning", "Triton is not installed"),
    ],
)
def test_kernels(facts: KernelFacts, level: str, says: str) -> None:
    found = worst(check_kernels(facts))
    assert found[0] == level and says in found[1]


GPU = Gpu(
    index=0,
    name="NVIDIA H100",
    driver="580.65",
    memory_bytes=80 * GIB,
    used_bytes=GIB,
    has_mig=False,
    compute_mode="Default",
)
GPUS = GpuFacts(has_driver=True, gpus=(GPU,), torch_cuda="13.0", torch_names=("NVIDIA H100",), nccl="2.29.7")


@pytest.mark.parametrize(
    ("facts", "level", "says"),
    [
        (GpuFacts(has_driver=False), "ok", "gangs compute on the CPU"),
        (GpuFacts(has_driver=False, wanted_by_ray=2), "error", "Ray counts 2 GPUs"),
        (GPUS, "ok", "1 × NVIDIA H100, driver 580.65"),
        (replace(GPUS, gpus=(), smi_problem="no such program"), "warning", "no such program"),
        (replace(GPUS, torch_names=(), torch_cuda=None), "error", "the build for CPUs"),
        (replace(GPUS, torch_names=()), "error", "built for CUDA 13.0"),
        (replace(GPUS, torch_names=(), torch_problem="out of memory"), "error", "out of memory"),
        (replace(GPUS, nccl=None), "error", "no NCCL"),
        (replace(GPUS, num_mig_devices=2), "error", "a gang of 2 workers on MIG slices"),
        (replace(GPUS, gpus=(replace(GPU, has_mig=True),)), "error", "MIG is on, and no slice"),
        (replace(GPUS, gpus=(replace(GPU, compute_mode="Exclusive_Process"),)), "warning", "Exclusive_Process"),
        (replace(GPUS, gpus=(replace(GPU, used_bytes=40 * GIB),)), "warning", "40 GiB of 80 GiB"),
    ],
)
def test_gpus(facts: GpuFacts, level: str, says: str) -> None:
    found = worst(check_gpus(facts, tensor_parallel=2))
    assert found[0] == level and says in found[1]


def test_nvidia_smi_is_read() -> None:
    listed = (
        "0, GPU-1, NVIDIA H100 80GB HBM3, 580.65.06, 81559, 1024, Enabled, Default\n"
        "1, GPU-2, NVIDIA T4, 580.65.06, [N/A], [N/A], [N/A], Prohibited\nNo devices were found\n"
    )
    first, second = parse_gpus(listed)
    assert first.memory_bytes == 81559 << 20 and first.used_bytes == GIB and first.has_mig
    assert second.memory_bytes == 0 and not second.has_mig and second.compute_mode == "Prohibited"


@pytest.mark.parametrize(
    ("facts", "level", "says"),
    [
        (PortFacts(port=8000, is_taken=False), "ok", "port 8000 is free"),
        (PortFacts(port=8000, is_taken=True, is_motet=True), "ok", "a motet serves at port 8000"),
        (PortFacts(port=8000, is_taken=True, owner="nginx, process 7"), "error", "another server (nginx, process 7)"),
    ],
)
def test_ports(facts: PortFacts, level: str, says: str) -> None:
    found = worst(check_port(facts))
    assert found[0] == level and says in found[1]


NODE = NodeServeFacts(
    variables=SERVE_FLAGS | LASTING_STREAMS | LASTING_STARTS,
    program="/opt/motet/bin/motet-haproxy",
    program_is_edge=True,
)


@pytest.mark.parametrize(
    ("facts", "level", "says"),
    [
        (NODE, "ok", "flags and edge are set"),
        (NodeServeFacts(), "ok", "sets nothing"),
        (replace(NODE, variables=LASTING_STREAMS), "error", "lacks RAY_SERVE_ENABLE_HA_PROXY=1 and"),
        (replace(NODE, variables={**NODE.variables, "RAY_SERVE_THROUGHPUT_OPTIMIZED": "0"}), "error", "THROUGHPUT"),
        (replace(NODE, program_is_edge=False), "error", "is not motet's edge"),
        (replace(NODE, program="", program_is_edge=False), "error", "RAY_SERVE_HAPROXY_BINARY_PATH is not set"),
        (replace(NODE, variables=SERVE_FLAGS), "warning", "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S=86400"),
        (replace(NODE, variables=SERVE_FLAGS | LASTING_STREAMS), "warning", "RAY_SERVE_MAX_PER_REPLICA_RETRY_COUNT"),
        (replace(NODE, limits_problem="--max-connections = 1"), "error", "--max-connections = 1"),
    ],
)
def test_what_serve_is_configured_with(facts: NodeServeFacts, level: str, says: str) -> None:
    found = worst(check_node_serve(facts))
    assert found[0] == level and says in found[1]


@pytest.mark.parametrize(
    ("running", "level", "says"),
    [
        (None, "ok", "no Serve runs"),
        (RunningServe(missing_flags=(), has_edge=True), "ok", "has its flags"),
        (RunningServe(missing_flags=("RAY_SERVE_ENABLE_HA_PROXY",), has_edge=True), "error", "lacks RAY_SERVE_ENABLE"),
        (RunningServe(missing_flags=(), has_edge=False), "error", "does not run motet's edge"),
    ],
)
def test_the_serve_that_runs(running: RunningServe | None, level: str, says: str) -> None:
    found = worst(check_running_serve(running))
    assert found[0] == level and says in found[1]


FINE = SecretFile(mode=0o440)


@pytest.mark.parametrize(
    ("facts", "level", "says"),
    [
        (SecretsFacts(folder="/s", files={"redis-url": FINE, "keys": FINE}), "ok", "redis-url, keys in /s"),
        (SecretsFacts(folder="/s", problem="No such file"), "error", "cannot be read: No such file"),
        (SecretsFacts(folder="/s", files={"keys": FINE}), "warning", "there is no redis-url"),
        (
            SecretsFacts(folder="/s", files={"redis-url": FINE, "redis_url": FINE}),
            "warning",
            "/s/redis_url is not used",
        ),
        (SecretsFacts(folder="/s", files={"redis-url": replace(FINE, problem="denied")}), "error", "denied"),
        (SecretsFacts(folder="/s", files={"redis-url": replace(FINE, is_empty=True)}), "error", "is empty"),
        (
            SecretsFacts(folder="/s", files={"redis-url": replace(FINE, differs=True)}),
            "error",
            "REDIS_URL have different",
        ),
        (SecretsFacts(folder="/s", files={"redis-url": replace(FINE, mode=0o644)}), "warning", "mode 0644"),
    ],
)
def test_secrets(facts: SecretsFacts, level: str, says: str) -> None:
    found = worst(check_secrets(facts))
    assert found[0] == level and says in found[1]


def test_secrets_are_looked_at_and_not_kept(tmp_path: Path) -> None:
    for name, text, mode in (("redis-url", "redis://:hidden@r", 0o644), ("keys", "", 0o600)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(mode)
    (tmp_path / "..data").mkdir()  # as Kubernetes mounts a Secret
    facts = gather_secrets({"MOTET_SECRETS_DIR": str(tmp_path), "REDIS_URL": "redis://other"})
    assert "hidden" not in repr(facts)
    assert facts.files == {
        "keys": SecretFile(mode=0o600, is_empty=True),
        "redis-url": SecretFile(mode=0o644, differs=True),
    }
    assert gather_secrets({}).folder == ""


def test_versions() -> None:
    node = {
        "motet": "1",
        "python": "3.11.7",
        "ray": "2.60.0",
        "torch": "2.13.0",
        "transformers": "5",
        "msgspec": "0",
        "grpcio": "1",
    }
    assert worst(check_versions({"a": node, "b": dict(node)}))[0] == "ok"
    level, found = worst(check_versions({"a": node, "b": {**node, "ray": "2.61.0"}}))
    assert level == "error" and found == "ray has several versions: 2.60.0 on a; 2.61.0 on b"
    without = {name: version for name, version in node.items() if name != "torch"}
    assert worst(check_versions({"a": node, "b": without})) == ("error", "torch is not installed on b")
