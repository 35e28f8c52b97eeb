"""The nodes of a motet as targets of Prometheus' HTTP service discovery."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec


class MetricsTarget(msgspec.Struct, frozen=True, kw_only=True):
    """One node that shows the metrics of its processes."""

    address: str  # host and port
    base: str


class TargetGroup(msgspec.Struct, frozen=True):
    """Targets with the same labels, as Prometheus reads them."""

    targets: list[str]
    labels: dict[str, str]


def discovery(targets: Sequence[MetricsTarget]) -> bytes:
    """The answer to Prometheus' `http_sd_configs`: JSON, a group for each node.

    Its series get the label `node`. `__meta_motet_base` is for a configuration that chooses between motets.
    """
    groups = [
        TargetGroup(
            [target.address],
            {"node": target.address.rpartition(":")[0].strip("[]"), "__meta_motet_base": target.base},
        )
        for target in targets
    ]
    return msgspec.json.encode(groups)
