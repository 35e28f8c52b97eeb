"""All settings of one motet, and the only place that reads the environment."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ..adapters.errors import AdapterInvalid
from ..adapters.names import check_name, check_tenant
from ..adapters.packing.layout import Dtype
from ..router.config import RouterConfig
from ..router.fleet.admission import AdmissionConfig
from ..workers.config import Device, EngineConfig, ExpertSharding
from ..workers.device_probe import probe_device
from .resources import PLACEMENTS, Placement, Resources, why_not_custom, why_not_labels, why_not_num_gpus
from .scaling import ScalingConfig

REDIS_URL_VARIABLE = "REDIS_URL"
ALL_ADDRESSES = "0.0.0.0"
CACHE_VARIABLE = "XDG_CACHE_HOME"
REDIS_SCHEMES = ("redis", "rediss", "unix")
LEADER_NUM_CPUS = 0.1  # of Ray's: a leader without a worker of its own plans, and mostly waits
STEPS_QUEUED_PER_GANG = 16  # a prompt that waits longer is worth another gang


class ConfigError(ValueError):
    """A setting is not acceptable; the message names the key, the value and what would be accepted."""

    def __init__(self, key: str, value: object, accepted: str) -> None:
        super().__init__(f"{key} = {value!r}: {accepted}")
        self.key = key


@dataclass(frozen=True, kw_only=True)
class MotetConfig:
    """What `motet serve` serves, and with what. Sizes are bytes; `pool_bytes` and `host_bytes` are of one gang."""

    model_path: Path  # a complete model folder
    data_dir: Path  # holds store/, redis/, models/ and uploads in flight
    name: str = ""  # the base's name in requests; empty: the name of the model's folder
    host: str = "127.0.0.1"
    port: int = 8000
    keys: tuple[tuple[str, str], ...] = ()  # (tenant, API key), registered at the start; for trials
    redis_url: str | None = None  # None: an embedded server
    address: str | None = None  # of a running Ray cluster to serve on; None: a private one on this machine

    device: Device = "auto"  # auto: an NVIDIA GPU for each worker where there is one
    dtype: Dtype = "bfloat16"
    pool_bytes: int = 1 << 30
    host_bytes: int = 4 << 30
    kv_host_bytes: int = 1 << 30  # 0: no KV in host memory
    kv_disk_bytes: int = 0  # 0: no KV on disk
    block_size: int = 16
    max_tokens_per_step: int = 512
    max_num_sequences: int = 128
    max_waiting_sequences: int = 4096  # in one gang, without a token yet; more are refused
    max_waiting_tokens: int = 4 << 20  # of their prompts
    max_queue_wait_s: float = 60.0  # what is expected to wait longer for its turn is refused; 0: nothing is
    latency_objectives_s: tuple[tuple[str, float], ...] = ()  # (tenant, until the first token): later ones are refused
    max_model_len: int | None = None
    prefix_cache: bool = True
    num_threads: int = 1  # of a gang's compute library
    cache_path: Path | None = None  # keeps compiled kernels; None: .cache/motet in the user's home

    min_gangs: int = 1  # 0: none while nobody asks, and the first request waits for a start
    max_gangs: int | None = None  # None: as many as min_gangs, but at least one
    queued_tokens_per_gang: int | None = None  # more waiting prompt tokens call for more gangs; None: 16 steps' worth
    pool_pressure: float = 0.8  # share of a gang's pages or places that may be taken before another gang is called for
    adapter_loads_per_s: float = 4.0  # loads into a full pool that one gang may make before another is called for
    scale_down_after_s: float = 60.0  # how long fewer gangs must have been enough
    scale_to_zero_after_s: float = 300.0  # how long nobody must have asked
    scaling_window_s: float = 5.0  # over which the load is averaged

    num_routers: int = 1
    tensor_parallel: int = 1  # workers of a gang
    expert_sharding: ExpertSharding = "tensor"  # what those share of a mixture of experts: "tensor" or "expert"
    gang_num_cpus: float = 1.0  # what each worker of a gang takes of Ray's CPUs
    gang_num_gpus: float = 0.0  # and of its GPUs: a share of one, or whole ones
    gang_resources: tuple[tuple[str, float], ...] = ()  # and of custom resources: (name, amount)
    gang_labels: tuple[tuple[str, str], ...] = ()  # that the nodes of a gang must have
    placement: Placement = "strict-pack"  # a gang on one node, on few if need be, or on many
    router_resources: tuple[tuple[str, float], ...] = ()  # custom resources that a router takes: (name, amount)
    gang_wait_s: float = 30.0  # how long a sequence waits while no gang is connected: long enough to replace one
    cold_start_wait_s: float = 600.0  # the same where min_gangs is 0: long enough to start one on a new machine
    drain_s: float = 5.0  # how long a gang that is told to stop goes on with what it serves, before it hands it over
    orphan_s: float = 60.0  # how long a gang goes on with sequences whose router was lost: long enough to replace it
    router_drain_s: float = 600.0  # how long a router that is told to stop goes on: its clients' streams end with it
    max_upload_bytes: int = 2 << 30
    max_body_bytes: int = 16 << 20

    def __post_init__(self) -> None:
        if not self.name:
            object.__setattr__(self, "name", self.model_path.name)
        if not self.name:
            raise ConfigError("name", self.name, "the base needs a name, and its folder has none")
        try:
            check_name(self.name)
        except AdapterInvalid as error:
            raise ConfigError("name", self.name, f"{error}; choose another with --name") from None
        if not (self.model_path / "config.json").is_file():
            raise ConfigError("model_path", str(self.model_path), "a folder that holds a config.json is needed")
        if not isinstance(self.port, int) or not 1 <= self.port <= 65535:
            raise ConfigError("port", self.port, "1 to 65535 is accepted")
        if not self.host:
            raise ConfigError("host", self.host, "an address of this machine is needed; 0.0.0.0 is all of them")
        if not isinstance(self.num_routers, int) or self.num_routers < 1:
            raise ConfigError("num_routers", self.num_routers, "a positive integer is needed")
        for key in ("gang_num_cpus", "gang_wait_s", "cold_start_wait_s", "drain_s", "orphan_s", "router_drain_s"):
            if not getattr(self, key) >= 0:
                raise ConfigError(key, getattr(self, key), "zero or a positive number is needed")
        self._check_resources()
        _check_keys(self.keys)
        _check_objectives(self.latency_objectives_s)
        _check_address(self.address)
        _check_redis_url(self.redis_url)
        _ = (self.engine, self.router, self.scaling, self.admission)  # the parts check what they are given

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None, **given: Any) -> MotetConfig:
        """The config with `given` fields; what is not given comes from the environment, then from the defaults.

        REDIS_URL: `redis_url`. XDG_CACHE_HOME: where `cache_path` lies (XDG base directory specification). `host` None:
        loopback, or on a running cluster all addresses. Raises ConfigError, or ValueError of a part's own config.
        """
        environ = os.environ if environ is None else environ
        if given.get("host") is None:
            given["host"] = "127.0.0.1" if given.get("address") is None else ALL_ADDRESSES
        if given.get("redis_url") is None and environ.get(REDIS_URL_VARIABLE):
            given["redis_url"] = environ[REDIS_URL_VARIABLE]
        cache_home = Path(environ.get(CACHE_VARIABLE, ""))
        if given.get("cache_path") is None and cache_home.is_absolute():  # the specification ignores relative ones
            given["cache_path"] = cache_home / "motet"
        return cls(**given)

    @property
    def store_path(self) -> Path:
        return self.data_dir / "store"

    @property
    def redis_path(self) -> Path:
        return self.data_dir / "redis"

    @property
    def url(self) -> str:
        """Where a client on this machine reaches it."""
        host = {"0.0.0.0": "127.0.0.1", "::": "127.0.0.1"}.get(self.host, self.host)
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}"

    @property
    def engine(self) -> EngineConfig:
        """Settings of one gang's engine."""
        return EngineConfig(
            model_path=self.model_path,
            store_path=self.store_path,
            device=self.device,
            dtype=self.dtype,
            pool_bytes=self.pool_bytes,
            host_bytes=self.host_bytes,
            kv_host_bytes=self.kv_host_bytes,
            kv_disk_bytes=self.kv_disk_bytes,
            kv_disk_path=self.data_dir / "kv",
            block_size=self.block_size,
            max_tokens_per_step=self.max_tokens_per_step,
            max_num_sequences=self.max_num_sequences,
            max_waiting_sequences=self.max_waiting_sequences,
            max_waiting_tokens=self.max_waiting_tokens,
            max_model_len=self.max_model_len,
            prefix_cache=self.prefix_cache,
            num_threads=self.num_threads,
            cache_path=self.cache_path,
            tensor_parallel=self.tensor_parallel,
            expert_sharding=self.expert_sharding,
        )

    @property
    def gang_bundles(self) -> tuple[dict[str, float], ...]:
        """What each process of a gang takes of its node: one that is leader and worker, or a leader, then workers."""
        worker = self.worker_resources.bundle
        if self.tensor_parallel == 1:
            return (worker,)
        return ({"CPU": LEADER_NUM_CPUS}, *(dict(worker) for _ in range(self.tensor_parallel)))

    @property
    def worker_resources(self) -> Resources:
        """What each worker takes: a GPU where this machine serves alone and has some, unless told otherwise."""
        num_gpus, has_custom = self.gang_num_gpus, bool(self.gang_resources)
        if not num_gpus and not has_custom and self.address is None and probe_device(self.device).kind == "cuda":
            num_gpus = 1.0
        return Resources(num_cpus=self.gang_num_cpus, num_gpus=num_gpus, custom=self.gang_resources)

    @property
    def num_cpus_of_a_gang(self) -> float:
        """What a gang takes of Ray's CPUs, its leader included."""
        return sum(bundle.get("CPU", 0.0) for bundle in self.gang_bundles)

    @property
    def router(self) -> RouterConfig:
        """Settings of one router."""
        return RouterConfig(
            model_name=self.name,
            spool_path=self.data_dir / "spool",
            max_upload_bytes=self.max_upload_bytes,
            max_body_bytes=self.max_body_bytes,
            scales_from_zero=self.scaling.min_gangs == 0,
        )

    @property
    def admission(self) -> AdmissionConfig:
        """Which requests are refused because they would be late."""
        scaling = self.scaling
        return AdmissionConfig(
            self.max_queue_wait_s, scaling.max_gangs, scaling.queued_tokens_per_gang, self.latency_objectives_s
        )

    @property
    def scaling(self) -> ScalingConfig:
        """How many gangs there are, and when."""
        queued_tokens_per_gang = self.queued_tokens_per_gang
        if queued_tokens_per_gang is None:
            queued_tokens_per_gang = STEPS_QUEUED_PER_GANG * self.max_tokens_per_step
        return ScalingConfig(
            min_gangs=self.min_gangs,
            max_gangs=max(self.min_gangs, 1) if self.max_gangs is None else self.max_gangs,
            queued_tokens_per_gang=queued_tokens_per_gang,
            pool_pressure=self.pool_pressure,
            adapter_loads_per_s=self.adapter_loads_per_s,
            scale_down_after_s=self.scale_down_after_s,
            scale_to_zero_after_s=self.scale_to_zero_after_s,
            start_grace_s=self.cold_start_wait_s,
            window_s=self.scaling_window_s,
        )

    @property
    def sequence_wait_s(self) -> float:
        """How long a sequence waits while no gang is connected."""
        return max(self.gang_wait_s, self.cold_start_wait_s) if self.min_gangs == 0 else self.gang_wait_s

    def _check_resources(self) -> None:
        if (accepted := why_not_num_gpus(self.gang_num_gpus)) is not None:
            raise ConfigError("gang_num_gpus", self.gang_num_gpus, accepted)
        for key in ("gang_resources", "router_resources"):
            if (problem := why_not_custom(getattr(self, key))) is not None:
                raise ConfigError(key, getattr(self, key), problem)
        if (problem := why_not_labels(self.gang_labels)) is not None:
            raise ConfigError("gang_labels", self.gang_labels, problem)
        if self.placement not in PLACEMENTS:
            raise ConfigError("placement", self.placement, f"{', '.join(PLACEMENTS)} are accepted")
        if self.placement != "strict-pack" and self.tensor_parallel == 1:
            raise ConfigError("placement", self.placement, "a gang of one worker is on one node: strict-pack is it")

    def with_redis_url(self, redis_url: str) -> MotetConfig:
        """The same, with the server that was started."""
        return replace(self, redis_url=redis_url)


def _check_keys(keys: tuple[tuple[str, str], ...]) -> None:
    seen: dict[str, str] = {}
    for tenant, key in keys:
        try:
            check_tenant(tenant)
        except AdapterInvalid as error:
            raise ConfigError("keys", tenant, str(error)) from None
        if not key or not key.isascii() or not key.isprintable() or " " in key:
            # The key itself is a secret: it is not repeated.
            raise ConfigError("keys", f"{tenant}=…", "a key is printable ASCII without spaces, and not empty")
        if seen.setdefault(key, tenant) != tenant:
            raise ConfigError("keys", f"{tenant}=…", f"the same key was given to {seen[key]}; each needs its own")


def _check_objectives(objectives_s: tuple[tuple[str, float], ...]) -> None:
    """Their seconds are AdmissionConfig's business, and whether there are such tenants the registry's."""
    seen: set[str] = set()
    for tenant, objective_s in objectives_s:
        given = f"{tenant}={objective_s:g}"
        try:
            check_tenant(tenant)
        except AdapterInvalid as error:
            raise ConfigError("latency_objectives_s", given, str(error)) from None
        if tenant in seen:
            raise ConfigError("latency_objectives_s", given, f"{tenant} has another one already; one is accepted")
        seen.add(tenant)


def _check_address(address: str | None) -> None:
    if address is None or address == "auto":
        return
    if address.startswith("ray://"):
        raise ConfigError(
            "address",
            address,
            "Ray Client is not supported, as motet must be on a node of the cluster: run motet serve there, with "
            "auto or HOST:PORT of the head (6379 unless it was started with another --port)",
        )
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 1 <= int(port) <= 65535:
        raise ConfigError("address", address, "auto, or HOST:PORT of the head of a running Ray cluster, is accepted")


def _check_redis_url(url: str | None) -> None:
    if url is None:
        return
    try:
        scheme = urlsplit(url).scheme
    except ValueError:
        scheme = ""
    if scheme not in REDIS_SCHEMES:
        raise ConfigError(
            "redis_url", _without_password(url), f"{', '.join(f'{scheme}://' for scheme in REDIS_SCHEMES)} are accepted"
        )


def _without_password(url: str) -> str:
    return re.sub(r"//[^@/]*@", "//…@", url)
