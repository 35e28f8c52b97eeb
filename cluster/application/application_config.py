"""The settings of motet as a Serve application: its arguments, which Serve shows to every client of its API.

The arguments have the keys of the file of `motet serve --config`, and `model`. What others say in Serve's place, and
secrets, are refused (`not_in_args` of `Setting`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..config import MotetConfig
from ..settings.config_error import ConfigError
from ..settings.setting_field import SettingField, fields_of
from ..settings.settings import Settings
from .model_source import folder_of_hub_id, is_hub_id
from .setting_keys import values_of

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
    """
    environ = os.environ if environ is None else environ
    secret_variables = {field.mark.env for field in fields_of(Settings) if field.mark.secret}
    given = values_of({key: value for key, value in args.items() if key != MODEL}, PLACE, _why_not)
    data_dir = given.get("data_dir")
    if data_dir is None:
        field = next(field for field in fields_of(Settings) if field.name == "data_dir")
        data_dir = field.converted(environ.get(field.mark.env) or field.default)
    hub_id, model_path = _model(args, data_dir / MODELS_FOLDER)
    return ApplicationConfig.from_environment(
        {name: value for name, value in environ.items() if name not in secret_variables},
        model_path=model_path,
        hub_id=hub_id,
        address=THIS_CLUSTER,
        **given,
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
