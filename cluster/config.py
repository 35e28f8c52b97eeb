"""The settings of one motet, resolved for this machine, and what each part gets of them.

A setting's environment variable (`env` of `Setting`) is read here, and by click where `motet serve` has the option;
XDG_CACHE_HOME is read here. No part reads the environment for a setting. The commands that talk to a running motet read
two variables of their own (`client/client_options.py`). Ray and other libraries read theirs; motet sets some of these
(`launch/local_serve.py`, `launch/joined_cluster.py`, `replicas/gang.py`).
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, Self, TypeVar

from msgspec import structs

from ..adapters.packing.layout import Dtype
from ..router.config import RouterConfig
from ..router.fleet.admission import AdmissionConfig
from ..router.tenancy.oidc_config import OidcConfig
from ..workers.config import EngineConfig, ExpertSharding, KVDtype
from ..workers.costs.step_defaults import CPU_TOKENS, StepLimits, step_limits
from ..workers.device_probe import probe_device
from ..workers.leader.served_engine import LeaderConfig
from .edge.edge_config import EdgeLimits
from .exposition.node_page import ExpositionConfig
from .process_log import LogConfig
from .resources import Resources, threads_of_a_worker, usable_cores
from .scaling import ScalingConfig
from .settings.setting_field import ConfigError, fields_of
from .settings.settings import Settings
from .worker_device import WorkerDevice

ALL_ADDRESSES = "0.0.0.0"
LOOPBACK = "127.0.0.1"
CACHE_VARIABLE = "XDG_CACHE_HOME"
LEADER_NUM_CPUS = 0.1  # of Ray's: a leader without a worker only plans, and mostly waits
STEPS_QUEUED_PER_GANG = 16  # a prompt that waits longer is worth another gang

P = TypeVar("P")


class MotetConfig(Settings, frozen=True, kw_only=True):
    """The settings, and what this machine adds to them. It checks what holds between two settings."""

    model_path: Path  # a complete model folder
    hub_id: str | None = None  # nodes download this to `model_path`; None: it is there
    gangs_beside: int | None = None  # gangs that share this machine's cores; None: max_gangs. An update keeps it

    def __post_init__(self) -> None:
        if self.access.host is None:  # routers on a running cluster are also for clients on other machines
            host = LOOPBACK if self.placement.address is None else ALL_ADDRESSES
            structs.force_setattr(self, "access", structs.replace(self.access, host=host))
        if not self.serving.name:
            if not self.model_path.name:
                raise ConfigError("--name", "", "the base needs a name, and its folder has none")
            structs.force_setattr(self, "serving", structs.replace(self.serving, name=self.model_path.name))
        self._check_model()
        strategy = self.placement.strategy
        if strategy != "strict-pack" and self.placement.tensor_parallel == 1:
            raise ConfigError("--placement", strategy, "a gang of one worker runs on one node: strict-pack is accepted")
        _ = self.worker_device  # which checks what holds between its settings, as those of the following do
        try:
            _ = self.scaling_policy, self.oidc, self._engine(1, step_limits(False, None, None), 1)
        except ValueError as error:
            raise ValueError(with_options(str(error))) from error

    def _check_model(self) -> None:
        if not (self.model_path / "config.json").is_file():
            raise ConfigError("model_path", str(self.model_path), "a folder that holds a config.json is needed")

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None, **values: Any) -> Self:
        """The config with these fields; one that is missing, or None, comes from the environment, then the defaults.

        Beside the variables that settings name: `cache_path` lies in XDG_CACHE_HOME (XDG base directory specification).
        Raises ConfigError, or ValueError of a part's own config.
        """
        environ = os.environ if environ is None else environ
        for field in fields_of(cls):
            if field.mark.env and values.get(field.name) is None and environ.get(field.mark.env):
                value = environ[field.mark.env]
                values[field.name] = value.split() if field.is_list else value
        cache_home = Path(environ.get(CACHE_VARIABLE, ""))
        if values.get("cache_path") is None and cache_home.is_absolute():  # the specification ignores relative ones
            values["cache_path"] = cache_home / "motet"
        return cls.of(**values)

    @property
    def store_path(self) -> Path:
        return self.serving.data_dir / "store"

    @property
    def redis_path(self) -> Path:
        return self.serving.data_dir / "redis"

    @property
    def kv_disk_path(self) -> Path:
        return self.serving.data_dir / "kv"

    @property
    def spool_path(self) -> Path:
        return self.serving.data_dir / "spool"

    @property
    def ledger_path(self) -> Path:
        """The folder for usage that routers have not sent to Redis yet."""
        return self.serving.data_dir / "ledger"

    @property
    def ledger_archive_path(self) -> Path:
        return self.store_path / "ledger"

    @property
    def files_path(self) -> Path:
        """The folder for tenants' files and the results of batches."""
        return self.store_path / "files"

    @property
    def listen_host(self) -> str:
        """Where it listens."""
        assert self.access.host is not None
        return self.access.host

    @property
    def url(self) -> str:
        """Where a client on this machine reaches it."""
        host = {ALL_ADDRESSES: LOOPBACK, "::": LOOPBACK}.get(self.listen_host, self.listen_host)
        return f"http://{f'[{host}]' if ':' in host else host}:{self.access.port}"

    @property
    def engine(self) -> EngineConfig:
        """Settings of one gang's engine."""
        return self._engine(self.num_worker_threads, self.step_limits, self._num_pool_sharers)

    def _engine(self, num_threads: int, limits: StepLimits, pool_sharers: int | None) -> EngineConfig:
        return part_config(
            EngineConfig,
            self,
            num_threads=num_threads,
            measures_threads=self.batching.num_threads == "auto",
            pool_sharers=pool_sharers,
            **vars(limits),
        )

    @property
    def step_limits(self) -> StepLimits:
        """Tokens and sequences of a step: from the settings, or defaults for the device."""
        device = self.serving.device
        on_gpu = device == "cuda" or (device == "auto" and self.worker_resources.num_gpus > 0)
        return step_limits(on_gpu, self.batching.max_tokens_per_step, self.batching.max_num_sequences)

    @property
    def _num_pool_sharers(self) -> int | None:
        """Workers that have pools in this machine's memory; None: on a cluster those of other gangs are not known."""
        if self.placement.address is not None:
            return None
        return (self.gangs_beside or self.scaling_policy.max_gangs) * self.placement.tensor_parallel

    @property
    def leader(self) -> LeaderConfig:
        """Settings of one gang's leader, beside its engine's."""
        return part_config(LeaderConfig, self, max_num_sequences=self.step_limits.max_num_sequences)

    @property
    def router(self) -> RouterConfig:
        """Settings of one router."""
        scales_from_zero = self.scaling.min_gangs == 0
        return part_config(RouterConfig, self, model_name=self.serving.name, scales_from_zero=scales_from_zero)

    @property
    def oidc(self) -> OidcConfig:
        """Whose tokens routers accept."""
        return part_config(OidcConfig, self)

    @property
    def exposition(self) -> ExpositionConfig:
        """What each process shows to Prometheus."""
        return part_config(ExpositionConfig, self)

    @property
    def logs(self) -> LogConfig:
        """How routers, gangs and workers log."""
        return part_config(LogConfig, self)

    @property
    def edge(self) -> EdgeLimits:
        """What the fronts let in."""
        return part_config(EdgeLimits, self)

    @property
    def admission(self) -> AdmissionConfig:
        """Which requests are refused because they would be late."""
        scaling = self.scaling_policy
        return part_config(
            AdmissionConfig,
            self,
            max_gangs=scaling.max_gangs,
            queued_tokens_per_gang=scaling.queued_tokens_per_gang,
        )

    @property
    def scaling_policy(self) -> ScalingConfig:
        """How many gangs there are, and when."""
        return scaling_of(self)

    @property
    def packing(self) -> tuple[int, int, Dtype, ExpertSharding, KVDtype]:
        """What adapters are packed for, as `layouts_of_gang` takes it."""
        serving, placement = self.serving, self.placement
        return (
            placement.tensor_parallel,
            self.memory.block_size,
            serving.dtype,
            placement.expert_sharding,
            serving.kv_dtype,
        )

    @property
    def num_worker_threads(self) -> int:
        """`num_threads`, with what "auto" means here."""
        if self.batching.num_threads != "auto":
            return self.batching.num_threads
        if self.worker_resources.num_gpus or self.serving.device == "cuda":
            return 1  # it computes on its GPU
        if self.placement.address is not None:
            return max(1, int(self.placement.gang_num_cpus))  # its share of whichever node it runs on
        num_gangs = self.gangs_beside or self.scaling_policy.max_gangs
        return threads_of_a_worker(usable_cores(), num_gangs, self.placement.tensor_parallel)

    @property
    def gang_bundles(self) -> tuple[dict[str, float], ...]:
        """What each process of a gang takes of its node: one that is leader and worker, or a leader, then workers."""
        worker = self.worker_resources.bundle
        if self.placement.tensor_parallel == 1:
            return (worker,)
        return ({"CPU": LEADER_NUM_CPUS}, *(dict(worker) for _ in range(self.placement.tensor_parallel)))

    @property
    def worker_device(self) -> WorkerDevice:
        """What each worker asks of its device."""
        return part_config(WorkerDevice, self)

    @property
    def worker_resources(self) -> Resources:
        """What each worker takes. By default it takes a GPU if motet serves on this machine only and there is one."""
        placement = self.placement
        num_gpus = placement.gang_num_gpus
        if not num_gpus and not placement.gang_resources and placement.address is None:
            num_gpus = 1.0 if probe_device(self.serving.device).kind == "cuda" else 0.0
        return Resources(num_cpus=placement.gang_num_cpus, num_gpus=num_gpus, custom=placement.gang_resources)

    @property
    def num_cpus_of_a_gang(self) -> float:
        """What a gang takes of Ray's CPUs, its leader included."""
        return sum(bundle.get("CPU", 0.0) for bundle in self.gang_bundles)

    @property
    def sequence_wait_s(self) -> float:
        """How long a sequence waits while no gang is connected."""
        timeouts = self.timeouts
        return timeouts.gang_wait_s if self.scaling.min_gangs else max(timeouts.gang_wait_s, timeouts.cold_start_wait_s)

    @property
    def written(self) -> dict[str, Any]:
        """The settings as text, without secrets."""
        public_fields = [field for field in fields_of(Settings) if not field.mark.secret]
        return {field.flags[0]: _written(self.value(field.name)) for field in public_fields}

    def without_secrets(self) -> MotetConfig:
        """The same without secrets, so that it may be stored where others can read it."""
        return self.replaced(**{field.name: field.default for field in fields_of(Settings) if field.mark.secret})

    def with_redis_url(self, redis_url: str) -> MotetConfig:
        """The same, with the server that was started."""
        return self.replaced(redis_url=redis_url)


def with_options(message: str) -> str:
    """A part's message with the options of its settings instead of the names of their fields."""
    for field in fields_of(Settings):
        if "_" in field.name:  # others are also plain words
            message = re.sub(rf"\b{field.name}\b", field.option, message)
    return message


def _written(value: object) -> object:
    if isinstance(value, tuple):
        return ["=".join(map(str, pair)) for pair in value]
    return value if isinstance(value, bool | int | float | str | None) else str(value)


def part_config(kind: type[P], settings: Settings, **overrides: object) -> P:
    """A part's own config: each of its fields is one of `overrides`, or the setting of the same name.

    A field with a default is a constant of the part, and no setting.
    """
    settable = {field.name for field in fields(kind) if field.default is MISSING}  # type: ignore[arg-type]
    names = settable - overrides.keys()
    return kind(**{name: settings.value(name) for name in names}, **overrides)


def scaling_of(settings: Settings) -> ScalingConfig:
    """How many gangs there are, and when. Raises ValueError for bounds that do not go together."""
    scaling = settings.scaling
    queued_tokens_per_gang = scaling.queued_tokens_per_gang
    if queued_tokens_per_gang is None:
        # Without a setting as on CPUs wherever gangs run: the autoscaler, which computes it elsewhere, knows no device.
        queued_tokens_per_gang = STEPS_QUEUED_PER_GANG * (settings.batching.max_tokens_per_step or CPU_TOKENS)
    return part_config(
        ScalingConfig,
        settings,
        max_gangs=max(scaling.min_gangs, 1) if scaling.max_gangs is None else scaling.max_gangs,
        queued_tokens_per_gang=queued_tokens_per_gang,
        start_grace_s=settings.timeouts.cold_start_wait_s,
        window_s=scaling.scaling_window_s,
    )
