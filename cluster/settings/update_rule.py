"""Which settings a running motet may change, and in which way.

`change` and `live_in` of each setting's mark decide it; this module enforces and explains it. `motet serve` has one
way, its file, and rolls out what differs. An application that a Ray cluster deploys by itself has three: `user_config`
of a deployment, which replaces no process; Serve's own options of a deployment; and the application's arguments, a
change of which replaces every process, as Serve takes it for new code.
"""

from __future__ import annotations

from .config_error import ConfigError
from .setting import Part
from .setting_field import SettingField, fields_of, groups_of
from .settings import Settings

ONLY_RESTART = "only a restart changes this"

# Serve's own options of a deployment, in place of an argument.
SERVES_OPTIONS = {
    "min_gangs": "min_replicas in autoscaling_config of gang, or num_replicas of gang where it equals max-gangs",
    "max_gangs": "max_replicas in autoscaling_config of gang, or num_replicas of gang where it equals min-gangs",
    "num_routers": "num_replicas of router",
}


def check_update(running: Settings, wanted: Settings) -> None:
    """Raises ConfigError for the first difference that only a restart makes.

    Marked "restart" is what says where motet listens, whose it is, how its adapters are packed, or what Ray was started
    with. A field that is no setting is the same.
    """
    for field in fields_of(type(wanted)):
        value = wanted.value(field.name)
        if field.mark.change == "restart" and value != running.value(field.name):
            raise ConfigError(field.option, field.shown(value), ONLY_RESTART)
    for name in wanted.__struct_fields__:
        if name not in groups_of(type(wanted)) and getattr(wanted, name) != getattr(running, name):
            raise ConfigError(name, getattr(wanted, name), ONLY_RESTART)


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
