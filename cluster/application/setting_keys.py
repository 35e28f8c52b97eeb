"""Settings by the keys that people write: those of the configuration file, in arguments and in `user_config`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import Any

from ..settings.config_error import ConfigError
from ..settings.setting_field import SettingField, fields_of
from ..settings.settings import Settings

WhyNot = Callable[[SettingField], str | None]  # what is accepted instead of this setting; None: it belongs here


def values_of(given: Mapping[str, Any], place: str, why_not: WhyNot) -> dict[str, Any]:
    """The values by the names of their fields, checked one by one. `place`: what the keys stand in, for messages.

    Raises ConfigError for a key that is not a setting, does not belong here, or has an invalid value.
    """
    fields = {flag: field for field in fields_of(Settings) for flag in field.flags}
    values: dict[str, Any] = {}
    keys: dict[str, str] = {}
    for key, value in given.items():
        field = fields.get(key)
        if field is None:
            raise ConfigError(f"{place}: {key}", _shown(value), _why_no_setting(key, fields))
        if (refusal := why_not(field)) is not None:
            raise ConfigError(f"{place}: {key}", field.shown(value), refusal)
        if field.name in keys:
            raise ConfigError(f"{place}: {key}", field.shown(value), f"{keys[field.name]} is the same setting")
        try:
            values[field.name] = field.converted(value)
        except ConfigError as error:
            raise ConfigError(f"{place}: {key}", error.value, error.accepted) from None
        keys[field.name] = key
    return values


def written_value(value: Any) -> Any:
    """A setting's value as JSON and YAML have it, of which `values_of` makes the same again."""
    if isinstance(value, tuple):
        return ["=".join(map(str, pair)) for pair in value]
    return value


def _shown(value: object) -> object:
    """The error for a key that is not a setting: it may be a secret in the wrong place."""
    return value if isinstance(value, bool | int | float) else "…"


def _why_no_setting(key: object, fields: Mapping[str, SettingField]) -> str:
    written = str(key)
    if written.removeprefix("no-") in fields and fields[written.removeprefix("no-")].is_switch:
        return f"there is no such setting: write {written.removeprefix('no-')}: false"
    close = get_close_matches(written.replace("_", "-"), fields, n=1)
    meant = f"did you mean {close[0]}? " if close else ""
    return f"there is no such setting. {meant}docs/settings.md lists all"
