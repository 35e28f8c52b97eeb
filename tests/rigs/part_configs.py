"""Configs of single parts, of which a test says only what it is about: the rest has the settings' defaults."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from motet.cluster.config import part_config
from motet.cluster.edge.edge_config import EdgeLimits
from motet.cluster.scaling import ScalingConfig
from motet.cluster.settings.settings import Settings
from motet.router.config import RouterConfig
from motet.router.fleet.admission import AdmissionConfig
from motet.workers.config import EngineConfig
from motet.workers.costs.step_defaults import step_limits
from motet.workers.leader.served_engine import LeaderConfig

DEFAULTS = Settings()
CPU_LIMITS = step_limits(False, None, None)
KV_HOST_BYTES = 16 << 20  # of tiny models: each integrity check goes through all slots of this tier
ONE_GANG = {"max_gangs": 1, "queued_tokens_per_gang": 8192}


def engine_config(model_path: Path, store_path: Path, **given: Any) -> EngineConfig:
    """With one thread, so that sums are made in one order, and a small tier of host memory."""
    places = {"model_path": model_path, "store_path": store_path, "kv_disk_path": store_path.parent / "kv"}
    own = {"num_threads": 1, "measures_threads": False, "kv_host_bytes": KV_HOST_BYTES, "pool_sharers": 1}
    return part_config(EngineConfig, DEFAULTS, **{**places, **own, **vars(CPU_LIMITS), **given})


def leader_config(**given: Any) -> LeaderConfig:
    limits = {"max_num_sequences": CPU_LIMITS.max_num_sequences}
    return part_config(LeaderConfig, DEFAULTS, **{**limits, **given})


def router_config(model_name: str, spool_path: Path, **given: Any) -> RouterConfig:
    fixed = {"model_name": model_name, "spool_path": spool_path, "scales_from_zero": False}
    return part_config(RouterConfig, DEFAULTS, **{**fixed, **given})


def admission_config(**given: Any) -> AdmissionConfig:
    """Of one gang, without autoscaling."""
    return part_config(AdmissionConfig, DEFAULTS, **{"max_gangs": 1, "queued_tokens_per_gang": 0, **given})


def edge_limits(**given: Any) -> EdgeLimits:
    return part_config(EdgeLimits, DEFAULTS, **given)


def scaling_config(**given: Any) -> ScalingConfig:
    times = {"start_grace_s": DEFAULTS.timeouts.cold_start_wait_s, "window_s": DEFAULTS.scaling.scaling_window_s}
    return part_config(ScalingConfig, DEFAULTS, **{**ONE_GANG, **times, **given})
