"""Which running Serve instances motet can join."""

from __future__ import annotations

import pytest

from motet.cluster.launch.cluster_nodes import CannotJoin
from motet.cluster.launch.joined_cluster import Front, check_running

EVERYWHERE = Front(host="0.0.0.0", port=8000)


def test_one_with_the_right_settings_will_do() -> None:
    check_running(EVERYWHERE, EVERYWHERE, (), 5)
    check_running(Front(host="127.0.0.1", port=8000), EVERYWHERE, (), 1)


@pytest.mark.parametrize(
    ("running", "missing", "reason"),
    [
        (EVERYWHERE, ["RAY_SERVE_ENABLE_HA_PROXY"], "lacks RAY_SERVE_ENABLE_HA_PROXY=1: shut that Serve down"),
        (Front(host="127.0.0.1", port=8000), [], "listens at 127.0.0.1, where other nodes cannot reach it"),
        (Front(host="0.0.0.0", port=9000), [], "give --port 9000"),
    ],
)
def test_another_is_refused_with_what_would_help(running: Front, missing: list[str], reason: str) -> None:
    with pytest.raises(CannotJoin, match=reason):
        check_running(running, EVERYWHERE, missing, 2)
