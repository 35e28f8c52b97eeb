"""Settings of what each process shows to Prometheus."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Access = Literal["operators", "all"]


@dataclass(frozen=True, kw_only=True)
class ExpositionConfig:
    """For both routers and gangs. Defaults and bounds are in `cluster/settings/`."""

    name: str  # the base's, a label of everything
    data_dir: Path  # has the operators' key if none was given
    metrics_port: int  # of each node; 0: there is no page
    metrics_access: Access  # holders of the operators' key, or every client that reaches the port
