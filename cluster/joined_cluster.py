"""A running Ray cluster as motet finds it: this process joins it, and may start Serve there, but nothing else.

Serve reads its flags from the environment of each of its processes. Where motet starts Serve, the flags travel with the
job to every node; a Serve that runs already must have been started with them.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from .. import __version__
from ..adapters.registry import PREFIX
from .base_fingerprint import identify_base
from .config import ALL_ADDRESSES, MotetConfig
from .feasibility import Demand, Node, can_host, why_no_place
from .node_check import NodeExpectations, problems_of_this_node

SERVE_FLAGS = {"RAY_SERVE_ENABLE_HA_PROXY": "1", "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1"}
NEW_SERVE_VARIABLES = {
    "RAY_SERVE_HAPROXY_TIMEOUT_CLIENT_S": str(24 * 3600),  # of a client that sends nothing
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "1",
}
CHECK_TIMEOUT_S = 120.0  # of all nodes together; a node may have to start a process, and that to import torch
CALL_TIMEOUT_S = 30.0
MARKER_TTL_S = 600

_log = logging.getLogger(__name__)


class CannotJoin(Exception):  # noqa: N818
    """The cluster cannot be used as it is; the message says why and what would help."""


@dataclass(frozen=True, kw_only=True)
class Front:
    """Where Serve's HTTP listens on each node that has a proxy."""

    host: str
    port: int


class JoinedCluster:
    """The connection of this process to the cluster, from `join` to `leave`. One a process."""

    def __init__(self) -> None:
        self.node_ip = ""  # of this process's node
        self._serve_is_ours = False
        self._application = ""  # deployed by us

    def join(self, address: str) -> None:
        """Raises CannotJoin if there is no cluster, or this machine is no node of it."""
        import ray

        try:
            ray.init(
                address=address,
                log_to_driver=False,
                logging_level="error",
                runtime_env={"env_vars": SERVE_FLAGS | NEW_SERVE_VARIABLES},
            )
        except (ConnectionError, RuntimeError, ValueError, TimeoutError, ray.exceptions.RayError) as error:
            raise CannotJoin(
                f"no running Ray cluster was joined at {address}: {error}. This machine must be a node of it "
                f"(ray start --address={'HOST:PORT' if address == 'auto' else address}), of the same versions of Ray "
                "and Python; where the cluster wants a token, this command needs RAY_AUTH_MODE and RAY_AUTH_TOKEN too"
            ) from error
        self.node_ip = ray.util.get_node_ip_address()

    def leave(self) -> None:
        """Ends the connection, and nothing of the cluster."""
        import ray

        ray.shutdown()

    def check_room(self, config: MotetConfig) -> None:
        """Raises CannotJoin if the nodes could not hold the first gangs and the routers even if they were empty."""
        nodes = alive_nodes()
        for demand, wanted in demands(config):
            if (problem := why_no_place(demand, wanted, nodes)) is not None:
                raise CannotJoin(
                    f"{wanted} {demand.what}{'s' * (wanted > 1)} cannot be placed: {problem}. Start nodes that have "
                    "it, ask for less, or, where the cluster grows by itself, add --wait-for-nodes"
                )

    def room_taken(self, config: MotetConfig) -> list[str]:
        """Warnings: what has room in the cluster, but not beside what others take of it at the moment."""
        nodes = free_nodes()
        found = [(demand, why_no_place(demand, wanted, nodes)) for demand, wanted in demands(config)]
        return [
            f"a {demand.what} must wait for others to leave: of what is free now, {problem}"
            for demand, problem in found
            if problem
        ]

    def check_nodes(self, config: MotetConfig) -> None:
        """Has every node that may get a part of motet look whether it can. Raises CannotJoin with all that is wrong."""
        assert config.redis_url is not None
        wanted = [demand for demand, _ in demands(config)]
        hosts = [node for node in alive_nodes() if any(can_host(demand, node) for demand in wanted)]
        marker = secrets.token_hex(8)
        expected = NodeExpectations(
            version=__version__,
            model_path=config.model_path,
            fingerprint=identify_base(config.model_path, config.name).fingerprint,
            marker_path=config.data_dir / f"joining-{marker}",
            marker=marker,
            redis_url=config.redis_url,
            redis_key=f"{PREFIX}joining:{marker}",
            memory_bytes=config.pool_bytes,
        )
        with expected.prepared(MARKER_TTL_S):
            problems = _ask_nodes(hosts, expected)
        if problems:
            raise CannotJoin("the cluster is not ready for motet:\n" + "\n".join(f"- {line}" for line in problems))

    def start_serve(self, application: str, host: str, port: int, *, replace_application: bool) -> Front:
        """Serve's front, with Serve started if none runs, and without such an application.

        Raises CannotJoin if the Serve that runs has other settings, or the application runs there and is not to be
        replaced, or another one has all routes.
        """
        from ray import serve
        from ray.serve.config import HTTPOptions
        from ray.serve.context import _get_global_client

        _check_own_flags()
        logging.getLogger("ray.serve").setLevel(logging.ERROR)
        client = _get_global_client(raise_if_no_controller_running=False)
        if client is None:
            serve.start(
                proxy_location="EveryNode",  # of those with a router
                http_options=HTTPOptions(host=host, port=port),
                logging_config={"log_level": "WARNING", "enable_access_log": False},
            )
            self._serve_is_ours = True
            return Front(host=host, port=port)
        running = Front(host=client.http_config.host or "127.0.0.1", port=client.http_config.port)
        _check_running(running, Front(host=host, port=port), _flags_of_serve(), len(alive_nodes()))
        applications = serve.status().applications
        if application in applications:
            if not replace_application:
                raise CannotJoin(
                    f"an application {application} runs on this cluster already. If its motet serve was killed, "
                    "--replace deletes it first; its streams end"
                )
            serve.delete(application)
        elif taken := [name for name in applications if _route_of(client, name) == "/"]:
            raise CannotJoin(f"the application {taken[0]} has the route / of this cluster's Serve, which motet needs")
        return running

    def deployed(self, application: str) -> None:
        """The application is ours from now on: `delete` ends it."""
        self._application = application

    def delete(self) -> None:
        """Ends what we started: the application, and Serve if nobody else has one there by now. Idempotent."""
        from ray import serve

        if self._application:
            application, self._application = self._application, ""
            serve.delete(application)
        if self._serve_is_ours:
            self._serve_is_ours = False
            if not serve.status().applications:
                serve.shutdown()

    def url(self, front: Front) -> str:
        """Of a node with a proxy: this one if it can be, else the first by its address."""
        from ray import serve

        by_id = {node["NodeID"]: node["NodeManagerAddress"] for node in _ray_nodes()}
        found = sorted(
            by_id[node] for node, state in serve.status().proxies.items() if node in by_id and state == "HEALTHY"
        )
        if not found:
            raise CannotJoin("Serve has no healthy HTTP proxy on any node")
        address = self.node_ip if self.node_ip in found else found[0]
        host = address if front.host in (ALL_ADDRESSES, "::") else front.host
        return f"http://{f'[{host}]' if ':' in host else host}:{front.port}"

    def problem(self) -> str | None:
        """Why the application does not run any more; None if it does, or Serve's controller does not say for now."""
        import ray
        from ray import serve

        try:
            applications = serve.status().applications
        except (ray.exceptions.RayError, TimeoutError) as error:
            _log.warning("the state of the application is unknown: %s", error)
            return None
        if self._application in applications:
            return None
        self._application = ""
        return "the application was deleted by somebody else"


def demands(config: MotetConfig) -> list[tuple[Demand, int]]:
    """What must have room at the start, and how often."""
    gang = Demand(
        what="gang", bundles=config.gang_bundles, labels=dict(config.gang_labels), placement=config.placement
    )
    router = Demand(what="router", bundles=(dict(config.router_resources),), labels={}, placement="strict-pack")
    return [(gang, max(1, config.scaling.min_gangs)), (router, config.num_routers)]


def alive_nodes() -> list[Node]:
    """With all that they have."""
    return [_node(node, node["Resources"]) for node in _ray_nodes()]


def free_nodes() -> list[Node]:
    """With what nobody has taken."""
    # There is no public call that says it by node.
    from ray._private.state import available_resources_per_node

    free = available_resources_per_node()
    return [_node(node, free.get(node["NodeID"], {})) for node in _ray_nodes()]


def _ray_nodes() -> list[Mapping[str, Any]]:
    import ray

    return sorted((node for node in ray.nodes() if node["Alive"]), key=lambda node: str(node["NodeManagerAddress"]))


def _node(node: Mapping[str, Any], resources: Mapping[str, float]) -> Node:
    labels = {**(node.get("Labels") or {}), "ray.io/node-id": node["NodeID"]}
    return Node(name=node["NodeManagerAddress"], resources=dict(resources), labels=labels)


def _ask_nodes(nodes: Sequence[Node], expected: NodeExpectations) -> list[str]:
    """What every node finds wrong with itself, after the node's name; a node that cannot be asked is wrong, too."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    ask = ray.remote(problems_of_this_node)
    asked = [
        ask.options(
            num_cpus=0,
            max_retries=0,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node.labels["ray.io/node-id"], soft=False),
        ).remote(expected)
        for node in nodes
    ]
    done, _ = ray.wait(asked, num_returns=len(asked), timeout=CHECK_TIMEOUT_S)
    found = []
    for node, answer in zip(nodes, asked, strict=True):
        if answer not in done:
            found.append(f"{node.name}: it did not answer within {CHECK_TIMEOUT_S:g} s")
            continue
        try:
            found += [f"{node.name}: {problem}" for problem in ray.get(answer)]
        except ray.exceptions.RayError as error:
            found.append(f"{node.name}: {_cause(error)}")
    return found


def _cause(error: Exception) -> str:
    text = str(error)
    if "No module named 'motet'" in text:
        return "motet is not installed there"
    return "it could not be checked: " + next((line for line in reversed(text.splitlines()) if line.strip()), text)


def _check_own_flags() -> None:
    from ray.serve._private import constants

    if not (constants.RAY_SERVE_ENABLE_HA_PROXY and constants.RAY_SERVE_THROUGHPUT_OPTIMIZED):
        raise RuntimeError("ray.serve was imported before SERVE_FLAGS were set: it reads its flags only then")


def _flags_of_serve() -> Sequence[str]:
    """The flags that the running Serve lacks."""
    import ray
    from ray.serve._private.constants import SERVE_CONTROLLER_NAME, SERVE_NAMESPACE

    controller = ray.get_actor(SERVE_CONTROLLER_NAME, namespace=SERVE_NAMESPACE)
    missing: Sequence[str] = ray.get(controller.__ray_call__.remote(_missing_flags), timeout=CALL_TIMEOUT_S)
    return missing


def _missing_flags(_controller: Any) -> list[str]:
    from ray.serve._private import constants

    return [name for name in SERVE_FLAGS if not getattr(constants, name)]


def _check_running(running: Front, wanted: Front, missing_flags: Sequence[str], num_nodes: int) -> None:
    """Raises CannotJoin unless motet can use the Serve that runs."""
    remedy = "shut that Serve down (serve shutdown) and motet starts its own, or start it"
    if missing_flags:
        flags = " and ".join(f"{name}=1" for name in missing_flags)
        raise CannotJoin(f"the Serve that runs on this cluster lacks {flags}: {remedy} with them on every node")
    if running.host in ("127.0.0.1", "localhost", "::1") and num_nodes > 1:
        raise CannotJoin(
            f"the Serve that runs on this cluster listens at {running.host}, where other nodes cannot reach it: "
            f"{remedy} with the HTTP host {ALL_ADDRESSES}"
        )
    if running.port != wanted.port:
        raise CannotJoin(
            f"the Serve that runs on this cluster listens at port {running.port}: give --port {running.port}"
        )


def _route_of(client: Any, application: str) -> str | None:
    with suppress(KeyError):
        route: str | None = client.get_serve_details()["applications"][application]["route_prefix"]
        return route
    return None
