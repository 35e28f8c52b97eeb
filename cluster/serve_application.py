"""motet as an application that Ray Serve builds from its configuration: `motet.cluster.serve_application:build`.

A cluster deploys it by itself, without `motet serve`. Secrets come from each node (`application/secret_files.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .application.application_config import application_config
from .replicas.application import build_application


def build(args: Mapping[str, Any]) -> Any:
    """The application with the settings that `args` says: keys of the file of `motet serve --config`, and `model`.

    Serve calls it on the head node whenever `args` have changed. It starts nothing and reads no file, so it may be
    called any number of times. Raises ConfigError, or ValueError for settings that do not go together.
    """
    config = application_config(args)
    # With autoscaling the number of gangs is kept when `args` change; from none the first one must start.
    return build_application(config, None, is_update=config.scaling.min_gangs > 0)
