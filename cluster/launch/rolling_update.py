"""What a running motet can change without a restart."""

from __future__ import annotations

from dataclasses import fields, replace

from ..config import ConfigError, MotetConfig

# The others say where it listens, whose it is, how its adapters are packed, or what Ray was started with.
CHANGEABLE = frozenset(
    {
        "pool_bytes",
        "host_bytes",
        "max_tokens_per_step",
        "max_num_sequences",
        "max_waiting_sequences",
        "max_waiting_tokens",
        "max_queue_wait_s",
        "latency_objectives_s",
        "max_model_len",
        "prefix_cache",
        "kv_host_bytes",
        "kv_disk_bytes",
        "num_threads",
        "min_gangs",
        "max_gangs",
        "queued_tokens_per_gang",
        "pool_pressure",
        "adapter_loads_per_s",
        "scale_down_after_s",
        "scale_to_zero_after_s",
        "scaling_window_s",
        "gang_wait_s",
        "cold_start_wait_s",
        "drain_s",
        "orphan_s",
        "router_drain_s",
        "max_upload_bytes",
        "max_body_bytes",
    }
)


def updated(running: MotetConfig, wanted: MotetConfig, max_gangs: int | None) -> MotetConfig:
    """What is to run instead of `running`. `max_gangs`: so many there is room for until a restart; None: it grows.

    Raises ConfigError for a setting that only a restart can change.
    """
    if wanted.redis_url is None:
        wanted = replace(wanted, redis_url=running.redis_url)  # the embedded server goes on
    for field in fields(MotetConfig):
        if field.name not in CHANGEABLE and getattr(wanted, field.name) != getattr(running, field.name):
            shown = "…" if field.name in ("keys", "redis_url") else getattr(wanted, field.name)
            raise ConfigError(field.name, shown, "only a restart changes this")
    if max_gangs is not None and wanted.scaling.max_gangs > max_gangs:
        accepted = f"at most {max_gangs} is accepted until a restart, as Ray was started with room for so many"
        raise ConfigError("max_gangs", wanted.scaling.max_gangs, accepted)
    return wanted
