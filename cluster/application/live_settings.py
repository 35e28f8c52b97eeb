"""Settings that replicas take over as they run: those that come in a deployment's `user_config`.

A deployment's arguments say all settings, and its `user_config` says some of them otherwise, by the keys of the
configuration file. What a later `user_config` leaves out is again as the arguments say.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, TypeVar

from ..config import MotetConfig
from ..settings.setting import Part
from ..settings.setting_field import fields_of
from ..settings.settings import Settings
from ..settings.update_rule import why_not_live
from .setting_keys import values_of, written_value

C = TypeVar("C", bound=MotetConfig)


def live_values(part: Part, user_config: Mapping[str, Any]) -> dict[str, Any]:
    """Values by the names of their fields. Raises ConfigError for what the replicas of `part` cannot take over."""
    return values_of(user_config, f"user_config of {part}", partial(why_not_live, part))


def user_config_of(part: Part, config: MotetConfig) -> dict[str, Any]:
    """All that the replicas of `part` can take over, as `config` has it."""
    live = [field for field in fields_of(Settings) if field.mark.live_in == part]
    return {field.flags[0]: written_value(config.value(field.name)) for field in live}


def without_live(config: C) -> C:
    """The same for two configs that differ in nothing but what replicas take over."""
    live = [field for field in fields_of(Settings) if field.mark.live_in is not None]
    return config.replaced(**{field.name: field.default for field in live})
