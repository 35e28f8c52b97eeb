"""What the edge lets in, as plain values that travel to where HAProxy is started."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields


@dataclass(frozen=True, kw_only=True)
class EdgeLimits:
    """Bounds of the front of one node. Defaults and bounds stand with motet's settings."""

    max_connections: int  # at once, however many sources there are
    max_connections_per_source: int  # 0: no bound; see `front_rules`
    max_requests_per_key: int  # under way at once; 0: no bound
    max_keyless_per_second: int  # requests of one source without a known key; 0: no bound
    trusted_proxies: str  # networks whose X-Forwarded-For is believed, with commas between them

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> EdgeLimits:
        return cls(**json.loads(text))


def limits_of_environment(environ: Mapping[str, str] = os.environ) -> EdgeLimits:
    """The limits that the variables of their settings say; the settings' defaults where they do not.

    Raises ConfigError for a value that the setting does not accept.
    """
    from ..settings.setting_field import fields_of  # not loaded where the limits are given
    from ..settings.settings import Settings

    names = {field.name for field in fields(EdgeLimits)}
    settings = [field for field in fields_of(Settings) if field.name in names]
    return EdgeLimits(
        **{
            setting.name: setting.converted(environ[setting.mark.env])
            if environ.get(setting.mark.env)
            else setting.default
            for setting in settings
        }
    )
