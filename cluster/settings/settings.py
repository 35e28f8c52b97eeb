"""All settings of motet: the one place for their names, types, bounds and defaults.

The options of `motet serve` and their help (`commands/serve_command.py`), the keys of its file, the rule of updates,
docs/settings.md (`tests/rigs/made_settings_page.py`) and every check of a single value are derived from here. A
part's own config dataclass repeats no default and no bound: `cluster/config.py` fills it, field by field, with the
settings of the same names. What must hold between two settings is checked in the part's config or in
`cluster/config.py`.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Self

import msgspec

from .access import Access
from .front_settings import Requests, Serving, Timeouts
from .gang_settings import Batching, Memory, Placement, Scaling
from .setting_field import ConfigError, Part, SettingField, fields_of, groups_of


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """All settings in their groups, in the order of the help: `settings.batching.max_num_sequences`."""

    serving: Serving = msgspec.field(default_factory=Serving)
    memory: Memory = msgspec.field(default_factory=Memory)
    batching: Batching = msgspec.field(default_factory=Batching)
    scaling: Scaling = msgspec.field(default_factory=Scaling)
    placement: Placement = msgspec.field(default_factory=Placement)
    access: Access = msgspec.field(default_factory=Access)
    requests: Requests = msgspec.field(default_factory=Requests)
    timeouts: Timeouts = msgspec.field(default_factory=Timeouts)

    @classmethod
    def of(cls, **values: Any) -> Self:
        """From values by the settings' names, without their groups: `Settings.of(max_num_sequences=64)`.

        Other fields of a subclass are accepted as well. Raises ConfigError, and TypeError for the name of a group.
        """
        by_group, other_fields = _by_group(cls, values)
        kinds = groups_of(cls)
        groups: dict[str, Any] = {name: kinds[name](**group_values) for name, group_values in by_group.items()}
        return cls(**other_fields, **groups)

    def replaced(self, **values: Any) -> Self:
        """A copy with other values, which are given as to `of`."""
        by_group, other_fields = _by_group(type(self), values)
        replace = msgspec.structs.replace
        return replace(
            self, **other_fields, **{name: replace(getattr(self, name), **by_group[name]) for name in by_group}
        )

    def value(self, name: str) -> Any:
        """The value of the setting with this name, or of another attribute of a subclass."""
        group = _groups_by_setting(type(self)).get(name)
        return getattr(self if group is None else getattr(self, group), name)


@cache
def _groups_by_setting(schema: type[Settings]) -> dict[str, str]:
    return {name: group for group, kind in groups_of(schema).items() for name in kind.__struct_fields__}


def _by_group(schema: type[Settings], values: dict[str, Any]) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    """The settings among `values` by their groups, and the rest."""
    groups = _groups_by_setting(schema)
    by_group: dict[str, dict[str, Any]] = {}
    other_fields: dict[str, Any] = {}
    if misplaced := values.keys() & groups_of(schema).keys():
        raise TypeError(f"{', '.join(sorted(misplaced))}: a group of settings, not a setting")
    for name, value in values.items():
        (by_group.setdefault(groups[name], {}) if name in groups else other_fields)[name] = value
    return by_group, other_fields


# What was a setting and is a constant, by its key: no operator had a reason for another value. One release still takes
# the key, with a warning. The values are defaults of parts' own configs.

CONSTANT_SINCE = "0.1.0"
CONSTANTS = {
    "adapter-loads-per-s": "4",
    "drain": "5 s",
    "finished-life": "10 s",
    "max-adapter-packed-bytes": "twice --max-upload-bytes",
    "max-file-bytes": "200MiB",
    "max-finished": "1024",
    "max-finished-values": "4194304",
    "max-held-body-bytes": "128MiB",
    "max-open-uploads": "8",
    "max-stored-responses": "20000",
    "max-tenant-uploads": "2",
    "max-waiting-tokens": "4194304",
    "orphan-life": "60 s",
    "ready-interval": "5 s",
    "ready-timeout": "10 s",
    "scale-down-share": "0.7",
    "start-deadline": "300 s",
    "step-deadline": "120 s",
    "store-deadline": "15 s",
    "upload-bytes-per-s": "65536",
    "upload-deadline": "3600 s",
    "upload-idle": "60 s",
}


def constant_warning(key: str) -> str | None:
    """What is said of a key that was a setting; None: it was none.

    >>> constant_warning("drain")
    'setting drain is a constant since 0.1.0: 5 s; remove it'
    """
    value = CONSTANTS.get(key)
    return None if value is None else f"setting {key} is a constant since {CONSTANT_SINCE}: {value}; remove it"


# Which settings a running motet may change, and in which way.
#
# `change` and `live_in` of each setting's mark decide it; this module enforces and explains it. `motet serve` has one
# way, its file, and rolls out what differs. An application that a Ray cluster deploys by itself has three:
# `user_config` of a deployment, which replaces no process; Serve's own options of a deployment; and the application's
# arguments, a change of which replaces every process, as Serve takes it for new code.

ONLY_RESTART = "only a restart changes this"

# Serve's own options of a deployment, in place of an argument.
SERVES_OPTIONS = {
    "min_gangs": "min_replicas in autoscaling_config of gang, or num_replicas of gang where it equals max-gangs",
    "max_gangs": "max_replicas in autoscaling_config of gang, or num_replicas of gang where it equals min-gangs",
    "num_routers": "num_replicas of router",
}


def check_update(running: Settings, target: Settings) -> None:
    """Raises ConfigError for the first difference that only a restart makes.

    Marked "restart" is what says where motet listens, whose it is, how its adapters are packed, or what Ray was started
    with. A field that is no setting is the same.
    """
    for field in fields_of(type(target)):
        value = target.value(field.name)
        if field.mark.change == "restart" and value != running.value(field.name):
            raise ConfigError(field.option, field.display_text(value), ONLY_RESTART)
    for name in target.__struct_fields__:
        if name not in groups_of(type(target)) and getattr(target, name) != getattr(running, name):
            raise ConfigError(name, getattr(target, name), ONLY_RESTART)


def why_not_live(part: Part, field: SettingField) -> str | None:
    """What changes the setting instead, if replicas of `part` cannot take another value over; None: they can."""
    return None if field.mark.live_in == part else f"replicas of {part} do not take this over: {way_to_change(field)}"


def way_to_change(field: SettingField) -> str:
    """Where another value of the setting is given to an application that serves."""
    if field.mark.not_in_args:
        return field.mark.not_in_args
    if field.mark.live_in is not None:
        return f"it belongs into user_config of {field.mark.live_in}"
    if field.name in SERVES_OPTIONS:
        return f"Serve's own options set it: {SERVES_OPTIONS[field.name]}"
    return "it belongs into args, and a change there replaces all replicas"
