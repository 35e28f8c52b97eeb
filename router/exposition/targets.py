"""The processes of a motet as targets of Prometheus' HTTP service discovery."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

Process = Literal["router", "gang"]


class MetricsTarget(msgspec.Struct, frozen=True, kw_only=True):
    """One process that shows its metrics."""

    process: Process
    name: str  # the value of the label `router` or `gang` in what it shows
    address: str  # host and port
    base: str


class TargetGroup(msgspec.Struct, frozen=True):
    """Targets with the same labels, as Prometheus reads them."""

    targets: list[str]
    labels: dict[str, str]


def discovery(targets: Sequence[MetricsTarget]) -> bytes:
    """The answer to Prometheus' `http_sd_configs`: JSON, a group for each process.

    Its series get the labels `process` and `node`. What they say themselves comes as `__meta_motet_…`, by which a
    configuration can choose between processes.
    """
    groups = [
        TargetGroup(
            [target.address],
            {
                "process": target.process,
                "node": target.address.rpartition(":")[0].strip("[]"),
                f"__meta_motet_{target.process}": target.name,
                "__meta_motet_base": target.base,
            },
        )
        for target in sorted(targets, key=lambda target: (target.process, target.address))
    ]
    return msgspec.json.encode(groups)
