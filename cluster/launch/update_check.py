"""Checks that a running motet can change to a wanted config without a restart."""

from __future__ import annotations

from ..config import MotetConfig
from ..settings.config_error import ConfigError
from ..settings.update_rule import check_update


def updated(running: MotetConfig, wanted: MotetConfig, max_gangs: int | None) -> MotetConfig:
    """The config that is to run instead of `running`. `max_gangs`: that have room until a restart; None: any number.

    Raises ConfigError for a setting that only a restart can change.
    """
    # Cores are shared as at the start: a new number of gangs does not replace those that stay.
    wanted = wanted.replaced(gangs_beside=running.gangs_beside or running.scaling_policy.max_gangs)
    if wanted.access.redis_url is None:
        wanted = wanted.replaced(redis_url=running.access.redis_url)  # the embedded server goes on
    check_update(running.replaced(gangs_beside=wanted.gangs_beside), wanted)
    if max_gangs is not None and wanted.scaling_policy.max_gangs > max_gangs:
        accepted = f"at most {max_gangs} is accepted until a restart, as Ray was started with room for them"
        raise ConfigError("--max-gangs", wanted.scaling_policy.max_gangs, accepted)
    return wanted
