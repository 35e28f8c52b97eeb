"""The seconds that pods and clusters must be given."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from motet.cluster.config import MotetConfig
from motet.cluster.replicas.application import ENDPOINT_LAG_S, PodEnds, gang_end_s, pod_ends
from motet.tests.rigs.ray_nodes import DEMO

ROUNDING_S = 1e-6
SECONDS = st.floats(0, 86_400, allow_nan=False)


def test_the_defaults() -> None:
    config = MotetConfig.of(model_path=DEMO / "base")
    assert pod_ends(
        router_drain_s=config.timeouts.router_drain_s, drain_s=config.leader.drain_s, start_s=60
    ) == PodEnds(cluster_deletion_delay_s=630, node_drain_s=660, termination_grace_s=690)


@given(router_drain_s=SECONDS, drain_s=SECONDS, start_s=SECONDS)
def test_each_time_has_room_for_what_happens_in_it(router_drain_s: float, drain_s: float, start_s: float) -> None:
    ends = pod_ends(router_drain_s=router_drain_s, drain_s=drain_s, start_s=start_s)
    assert ends.cluster_deletion_delay_s >= router_drain_s + ENDPOINT_LAG_S - ROUNDING_S
    for own_s in (router_drain_s, gang_end_s(drain_s)):  # of replicas, before which Serve must have another one
        assert ends.node_drain_s - own_s >= start_s - ROUNDING_S
    assert ends.termination_grace_s > ends.node_drain_s
    assert ends.node_drain_s < start_s + router_drain_s + gang_end_s(drain_s) + 1  # and not more
