"""The settings of one motet, resolved for this machine, and what each part gets of them.

A setting's environment variable (`env` of `Setting`) is read here, and by click where `motet serve` has the option;
XDG_CACHE_HOME is read here. No part reads the environment for a setting. The commands that talk to a running motet read
two variables of their own (`client/client_options.py`). Ray and other libraries read theirs; motet sets some of these
(`launch/local_serve.py`, `launch/joined_cluster.py`, `replicas/gang_workers.py`).
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, Self, TypeVar

from msgspec import structs

from ..router.config import RouterConfig
from ..router.fleet.admission import AdmissionConfig
from ..router.oidc.oidc_config import OidcConfig
from ..workers.config import EngineConfig
from ..workers.device_probe import probe_device
from ..workers.leader.leader_config import LeaderConfig
from .edge.edge_limits import EdgeLimits
from .exposition.exposition_config import ExpositionConfig
from .logs.log_config import LogConfig
from .resources import Resources
from .scaling import ScalingConfig
from .settings.config_error import ConfigError
from .settings.serving import check_base_name
from .settings.setting_field import fields_of
from .settings.settings import Settings
from .threads import threads_of_a_worker, usable_cores
from .worker_device import WorkerDevice

ALL_ADDRESSES = "0.0.0.0"
LOOPBACK = "127.0.0.1"
CACHE_VARIABLE = "XDG_CACHE_HOME"
LEADER_NUM_CPUS = 0.1  # of Ray's: a leader without a worker of its own plans, and mostly waits
STEPS_QUEUED_PER_GANG = 16  # a prompt that waits longer is worth another gang

P = TypeVar("P")


class MotetConfig(Settings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The settings, and what this machine adds to them. It checks what holds between two settings."""

    model_path: Path  # a complete model folder
    hub_id: str | None = None  # nodes download this to `model_path`; None: it is there
    gangs_beside: int | None = None  # gangs that share this machine's cores; None: max_gangs. An update keeps it

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.host is None:  # on a running cluster it is there for other machines too
            structs.force_setattr(self, "host", LOOPBACK if self.address is None else ALL_ADDRESSES)
        if not self.name:
            structs.force_setattr(self, "name", self.model_path.name)
            if not self.name:
                raise ConfigError("--name", self.name, "the base needs a name, and its folder has none")
            if (refusal := check_base_name(self.name)) is not None:
                raise ConfigError("--name", *refusal)
        self._check_model()
        if self.placement != "strict-pack" and self.tensor_parallel == 1:
            raise ConfigError("--placement", self.placement, "a gang of one worker is on one node: strict-pack is it")
        _ = self.worker_device  # which checks what holds between its settings, as those of the following do
        try:
            _ = self.scaling, self.oidc, part_config(EngineConfig, self, num_threads=1)
        except ValueError as error:
            raise ValueError(with_options(str(error))) from error

    def _check_model(self) -> None:
        if not (self.model_path / "config.json").is_file():
            raise ConfigError("model_path", str(self.model_path), "a folder that holds a config.json is needed")

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None, **given: Any) -> Self:
        """The config with `given` fields; what is not given, or None, comes from the environment, then the defaults.

        Beside the variables that settings name: `cache_path` lies in XDG_CACHE_HOME (XDG base directory specification).
        Raises ConfigError, or ValueError of a part's own config.
        """
        environ = os.environ if environ is None else environ
        for field in fields_of(cls):
            if field.mark.env and given.get(field.name) is None and environ.get(field.mark.env):
                value = environ[field.mark.env]
                given[field.name] = value.split() if field.is_list else value
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
    def kv_disk_path(self) -> Path:
        return self.data_dir / "kv"

    @property
    def spool_path(self) -> Path:
        return self.data_dir / "spool"

    @property
    def ledger_path(self) -> Path:
        """Of what routers have not sent to Redis yet."""
        return self.data_dir / "ledger"

    @property
    def ledger_archive_path(self) -> Path:
        return self.store_path / "ledger"

    @property
    def listen_host(self) -> str:
        """Where it listens."""
        assert self.host is not None
        return self.host

    @property
    def url(self) -> str:
        """Where a client on this machine reaches it."""
        host = {ALL_ADDRESSES: LOOPBACK, "::": LOOPBACK}.get(self.listen_host, self.listen_host)
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}"

    @property
    def engine(self) -> EngineConfig:
        """Settings of one gang's engine."""
        return part_config(EngineConfig, self, num_threads=self.num_worker_threads)

    @property
    def leader(self) -> LeaderConfig:
        """Settings of one gang's leader, beside its engine's."""
        return part_config(LeaderConfig, self)

    @property
    def router(self) -> RouterConfig:
        """Settings of one router."""
        return part_config(RouterConfig, self, model_name=self.name, scales_from_zero=self.min_gangs == 0)

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
        scaling = self.scaling
        return part_config(
            AdmissionConfig,
            self,
            max_gangs=scaling.max_gangs,
            queued_tokens_per_gang=scaling.queued_tokens_per_gang,
        )

    @property
    def scaling(self) -> ScalingConfig:
        """How many gangs there are, and when."""
        return scaling_of(self)

    @property
    def num_worker_threads(self) -> int:
        """`num_threads`, with what "auto" means here."""
        if self.num_threads != "auto":
            return self.num_threads
        if self.worker_resources.num_gpus or self.device == "cuda":
            return 1  # it computes on its GPU
        if self.address is not None:
            return max(1, int(self.gang_num_cpus))  # its share of whichever node it runs on
        num_gangs = self.gangs_beside or self.scaling.max_gangs
        return threads_of_a_worker(usable_cores(), num_gangs, self.tensor_parallel)

    @property
    def gang_bundles(self) -> tuple[dict[str, float], ...]:
        """What each process of a gang takes of its node: one that is leader and worker, or a leader, then workers."""
        worker = self.worker_resources.bundle
        if self.tensor_parallel == 1:
            return (worker,)
        return ({"CPU": LEADER_NUM_CPUS}, *(dict(worker) for _ in range(self.tensor_parallel)))

    @property
    def worker_device(self) -> WorkerDevice:
        """What each worker asks of its device."""
        return part_config(WorkerDevice, self)

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
    def sequence_wait_s(self) -> float:
        """How long a sequence waits while no gang is connected."""
        return max(self.gang_wait_s, self.cold_start_wait_s) if self.min_gangs == 0 else self.gang_wait_s

    @property
    def told(self) -> dict[str, Any]:
        """The settings as they are written, without secrets."""
        shown = [field for field in fields_of(Settings) if not field.mark.secret]
        return {field.flags[0]: _written(getattr(self, field.name)) for field in shown}

    def without_secrets(self) -> MotetConfig:
        """The same, without what nobody but this process may know: it may be sent where others look."""
        return structs.replace(
            self, **{field.name: field.default for field in fields_of(Settings) if field.mark.secret}
        )

    def with_redis_url(self, redis_url: str) -> MotetConfig:
        """The same, with the server that was started."""
        return structs.replace(self, redis_url=redis_url)


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


def part_config(kind: type[P], settings: Settings, **given: object) -> P:
    """A part's own config: each of its fields is `given`, or the setting of the same name."""
    names = {field.name for field in fields(kind)} - given.keys()  # type: ignore[arg-type]
    return kind(**{name: getattr(settings, name) for name in names}, **given)


def scaling_of(settings: Settings) -> ScalingConfig:
    """How many gangs there are, and when. Raises ValueError for bounds that do not go together."""
    queued_tokens_per_gang = settings.queued_tokens_per_gang
    if queued_tokens_per_gang is None:
        queued_tokens_per_gang = STEPS_QUEUED_PER_GANG * settings.max_tokens_per_step
    return part_config(
        ScalingConfig,
        settings,
        max_gangs=max(settings.min_gangs, 1) if settings.max_gangs is None else settings.max_gangs,
        queued_tokens_per_gang=queued_tokens_per_gang,
        start_grace_s=settings.cold_start_wait_s,
        window_s=settings.scaling_window_s,
    )
