"""The settings of motet as a Serve application: its arguments, which Serve shows to every client of its API.

The arguments have the keys of the file of `motet serve --config`, and `model`. What others say in Serve's place, and
secrets, are refused (`not_in_args` of `Setting`).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from ..config import MotetConfig
from ..settings.setting_field import ConfigError, Part, SettingField, fields_of
from ..settings.settings import Settings, constant_warning, why_not_live
from .model_source import folder_of_hub_id, is_hub_id

_log = logging.getLogger(__name__)

# Settings by the keys that people write: those of the configuration file, in arguments and in `user_config`.

WhyNot = Callable[[SettingField], str | None]  # what is accepted instead of this setting; None: it belongs here


def values_of(arguments: Mapping[str, Any], place: str, why_not: WhyNot) -> dict[str, Any]:
    """The values by the names of their fields, checked one by one. `place`: what the keys stand in, for messages.

    Raises ConfigError for a key that is not a setting, does not belong here, or has an invalid value.
    """
    fields = {flag: field for field in fields_of(Settings) for flag in field.flags}
    values: dict[str, Any] = {}
    keys: dict[str, str] = {}
    for key, value in arguments.items():
        if (warning := constant_warning(key)) is not None:
            _log.warning("%s: %s", place, warning)
            continue
        field = fields.get(key)
        if field is None:
            raise ConfigError(f"{place}: {key}", _display(value), _why_no_setting(key, fields))
        if (refusal := why_not(field)) is not None:
            raise ConfigError(f"{place}: {key}", field.display_text(value), refusal)
        if field.name in keys:
            raise ConfigError(f"{place}: {key}", field.display_text(value), f"{keys[field.name]} is the same setting")
        try:
            values[field.name] = field.converted(value)
        except ConfigError as error:
            raise ConfigError(f"{place}: {key}", error.value, error.accepted) from None
        keys[field.name] = key
    return values


def written_value(value: Any) -> Any:
    """A setting's value as JSON and YAML have it, of which `values_of` makes the same again.

    >>> written_value((("acme", 2.5), ("zoo", 1.0)))
    ['acme=2.5', 'zoo=1.0']
    """
    if isinstance(value, tuple):
        return ["=".join(map(str, pair)) for pair in value]
    return value


def _display(value: object) -> object:
    """The error for a key that is not a setting: it may be a secret in the wrong place."""
    return value if isinstance(value, bool | int | float) else "…"


def _why_no_setting(key: object, fields: Mapping[str, SettingField]) -> str:
    written = str(key)
    if written.removeprefix("no-") in fields and fields[written.removeprefix("no-")].is_switch:
        return f"there is no such setting: write {written.removeprefix('no-')}: false"
    close = get_close_matches(written.replace("_", "-"), fields, n=1)
    meant = f"did you mean {close[0]}? " if close else ""
    return f"there is no such setting. {meant}docs/settings.md lists all"


# Settings that replicas take over as they run: those that come in a deployment's `user_config`.
#
# A deployment's arguments say all settings, and its `user_config` says some of them otherwise, by the keys of the
# configuration file. What a later `user_config` leaves out is again as the arguments say.

C = TypeVar("C", bound=MotetConfig)


def live_values(part: Part, user_config: Mapping[str, Any]) -> dict[str, Any]:
    """Values by the names of their fields. Raises ConfigError for what the replicas of `part` cannot take over.

    >>> live_values("router", {"max-queue-wait": "2.5"})
    {'max_queue_wait_s': 2.5}
    >>> live_values("gang", {"max-queue-wait": 1})
    Traceback (most recent call last):
        ...
    motet.cluster.settings.setting_field.ConfigError: user_config of gang: max-queue-wait = 1: ...
    """
    return values_of(user_config, f"user_config of {part}", partial(why_not_live, part))


def user_config_of(part: Part, config: MotetConfig) -> dict[str, Any]:
    """All that the replicas of `part` can take over, as `config` has it."""
    live = [field for field in fields_of(Settings) if field.mark.live_in == part]
    return {field.flags[0]: written_value(config.value(field.name)) for field in live}


def without_live(config: C) -> C:
    """The same for two configs that differ in nothing but what replicas take over."""
    live = [field for field in fields_of(Settings) if field.mark.live_in is not None]
    return config.replaced(**{field.name: field.default for field in live})


PLACE = "args"
MODEL = "model"
MODELS_FOLDER = "models"  # in the data folder: what was downloaded
THIS_CLUSTER = "auto"


class ApplicationConfig(MotetConfig, frozen=True, kw_only=True):
    """The settings of an application, which is built where neither model nor data folder need be."""

    def _check_model(self) -> None:
        """Routers and gangs look, on their own nodes."""


def application_config(args: Mapping[str, Any], environ: Mapping[str, str] | None = None) -> ApplicationConfig:
    """The config that an application's arguments say. Reads no file. Raises ConfigError, or ValueError of a part's.

    Of the environment it takes what settings say of it, but no secret.

    >>> config = application_config({"model": "Qwen/Qwen3-8B", "data-dir": "/data", "pool-bytes": "2GiB"}, {})
    >>> config.serving.name, config.memory.pool_bytes, str(config.model_path)
    ('Qwen--Qwen3-8B', 2147483648, '/data/models/Qwen--Qwen3-8B')
    """
    environ = os.environ if environ is None else environ
    secret_variables = {field.mark.env for field in fields_of(Settings) if field.mark.secret}
    settings = values_of({key: value for key, value in args.items() if key != MODEL}, PLACE, _why_not)
    data_dir = settings.get("data_dir")
    if data_dir is None:
        field = next(field for field in fields_of(Settings) if field.name == "data_dir")
        data_dir = field.converted(environ.get(field.mark.env) or field.default)
    hub_id, model_path = _model(args, data_dir / MODELS_FOLDER)
    return ApplicationConfig.from_environment(
        {name: value for name, value in environ.items() if name not in secret_variables},
        model_path=model_path,
        hub_id=hub_id,
        address=THIS_CLUSTER,
        **settings,
    )


def _model(args: Mapping[str, Any], models_path: Path) -> tuple[str | None, Path]:
    accepted = "the path of a model folder, the same on all nodes, or a hub id is needed"
    model = args.get(MODEL)
    if not isinstance(model, str) or not model:
        raise ConfigError(f"{PLACE}: {MODEL}", model, accepted)
    path = Path(model)
    if path.is_absolute():
        return None, path
    if is_hub_id(model):
        return model, folder_of_hub_id(model, models_path)
    raise ConfigError(f"{PLACE}: {MODEL}", model, accepted)


def _why_not(field: SettingField) -> str | None:
    return field.mark.not_in_args or None
