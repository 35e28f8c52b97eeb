"""How the processes of a motet log."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

LogFormat = Literal["text", "json"]
LogLevel = Literal["debug", "info", "warning", "error"]


@dataclass(frozen=True, kw_only=True)
class LogConfig:
    """What routers, gangs and workers need to know of it. Whether there is an access log is the routers' business."""

    log_format: LogFormat
    log_level: LogLevel
