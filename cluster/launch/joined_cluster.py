"""A running Ray cluster as motet finds it: this process joins it, and may start Serve there, but nothing else.

Serve reads its flags from the environment of each of its processes. Where motet starts Serve, the flags travel with the
job to every node; a Serve that runs already must have been started with them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from ..config import ALL_ADDRESSES
from ..edge.edge_config import EdgeLimits
from ..edge.haproxy import is_edge_program
from ..edge.serve_variables import HUGE_PAGES, LASTING_STARTS, LASTING_STREAMS, SERVE_FLAGS
from .cluster_nodes import CannotJoin, addresses_of_nodes

CALL_TIMEOUT_S = 30.0
ENOUGH_MISSED = 3  # fewer may mean that Serve's controller is just starting again

_log = logging.getLogger(__name__)


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
        self._num_missed = 0  # times in a row that it was not there

    def join(self, address: str, limits: EdgeLimits) -> None:
        """Raises CannotJoin if there is no cluster, or this machine is no node of it. `limits`: of a Serve of ours."""
        import ray

        try:
            ray.init(
                address=address,
                log_to_driver=False,
                logging_level="error",
                runtime_env={
                    "env_vars": SERVE_FLAGS | LASTING_STREAMS | LASTING_STARTS | HUGE_PAGES,
                    "worker_process_setup_hook": _edge_of_nodes(limits),
                },
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

    def start_serve(self, application: str, host: str, port: int, *, replace_application: bool) -> Front:
        """Starts Serve if none runs, and deletes an old `application` if it may be replaced. Returns Serve's front.

        Raises CannotJoin if the Serve that runs has other settings, if the application runs there and is not to be
        replaced, or if another application has the route /.
        """
        import ray
        from ray import serve
        from ray.serve.config import HTTPOptions
        from ray.serve.context import _get_global_client

        _check_own_flags()
        logging.getLogger("ray.serve").setLevel(logging.ERROR)
        client = _get_global_client(raise_if_no_controller_running=False)
        if client is None:
            self._serve_is_ours = True
            try:
                serve.start(
                    proxy_location="EveryNode",  # of those with a router
                    http_options=HTTPOptions(host=host, port=port),
                    logging_config={"log_level": "WARNING", "enable_access_log": False},
                )
            except (RuntimeError, TimeoutError, ray.exceptions.RayError) as error:
                raise CannotJoin(f"Serve could not be started; is port {port} free on all nodes? ({error})") from error
            return Front(host=host, port=port)
        running = Front(host=client.http_config.host or "127.0.0.1", port=client.http_config.port)
        missing_flags, has_edge = _found_in_serve()
        check_running(running, Front(host=host, port=port), missing_flags, len(addresses_of_nodes()))
        if not has_edge:
            _log.warning(
                "the Serve that runs was not started with motet's edge: its HAProxy bounds nothing and lets Serve's "
                "control headers in. Let only a proxy that does so reach its port, or shut that Serve down (serve "
                "shutdown) and motet starts its own"
            )
        applications = serve.status().applications
        if application in applications:
            if not replace_application:
                raise CannotJoin(
                    f"an application {application} runs on this cluster already. If its motet serve was killed, "
                    "--replace deletes it first; its streams end"
                )
            serve.delete(application)
        elif conflicts := [name for name in applications if _route_of(client, name) == "/"]:
            raise CannotJoin(
                f"the application {conflicts[0]} has the route / of this cluster's Serve, which motet needs"
            )
        return running

    def deployed(self, application: str) -> None:
        """The application is ours from now on: `delete` ends it."""
        self._application = application

    def delete(self) -> None:
        """Ends what we started: the application, and Serve if no other application runs there by now. Idempotent.

        If the cluster does not answer, the log names what could not be ended.
        """
        import ray
        from ray import serve
        from ray.serve.exceptions import RayServeException

        application, self._application = self._application, ""
        serve_is_ours, self._serve_is_ours = self._serve_is_ours, False
        try:
            if application:
                serve.delete(application)
            if serve_is_ours and not serve.status().applications:
                serve.shutdown()
        except (ray.exceptions.RayError, RayServeException, TimeoutError) as error:
            _log.error("the cluster did not let go of the application %s; --replace will: %s", application, error)

    def url(self, front: Front) -> str:
        """The URL of this node if it has a healthy proxy, else of the first node by address that has one."""
        from ray import serve

        by_id = addresses_of_nodes()
        addresses = sorted(
            by_id[node] for node, state in serve.status().proxies.items() if node in by_id and state == "HEALTHY"
        )
        if not addresses:
            raise CannotJoin("Serve has no healthy HTTP proxy on any node")
        address = self.node_ip if self.node_ip in addresses else addresses[0]
        host = address if front.host in (ALL_ADDRESSES, "::") else front.host
        return f"http://{f'[{host}]' if ':' in host else host}:{front.port}"

    def problem(self) -> str | None:
        """Why the application does not run any more; None: it runs, or Serve's controller does not answer for now."""
        import ray
        from ray import serve
        from ray.serve.exceptions import RayServeException

        try:
            is_there = self._application in serve.status().applications
        except RayServeException:  # there is no Serve
            is_there = False
        except (ray.exceptions.RayError, TimeoutError) as error:
            _log.warning("the state of the application is unknown: %s", error)
            return None
        self._num_missed = 0 if is_there else self._num_missed + 1
        if self._num_missed < ENOUGH_MISSED:
            return None
        self._application = ""
        return "the application was deleted by another process"


def _edge_of_nodes(limits: EdgeLimits) -> Callable[[], None]:
    """What each process of ours on the cluster does first: a Serve among them then runs HAProxy with motet's edge.

    It is nested, so Ray sends its code: it can be run, and does nothing, on nodes without motet.
    """
    text = limits.to_json()

    def put_edge_in() -> None:
        try:
            from ..edge.edge_config import EdgeLimits
            from ..edge.haproxy import offer_haproxy
        except ImportError:  # the check of the nodes reports it
            return
        offer_haproxy(EdgeLimits.from_json(text))

    return put_edge_in


def _check_own_flags() -> None:
    from ray.serve._private import constants

    if not (constants.RAY_SERVE_ENABLE_HA_PROXY and constants.RAY_SERVE_THROUGHPUT_OPTIMIZED):
        raise RuntimeError("ray.serve was imported before SERVE_FLAGS were set: it reads its flags only then")


def _found_in_serve() -> tuple[Sequence[str], bool]:
    """The flags that the running Serve lacks, and whether motet's edge is what it runs for HAProxy."""
    import ray
    from ray.serve._private.constants import SERVE_CONTROLLER_NAME, SERVE_NAMESPACE

    controller = ray.get_actor(SERVE_CONTROLLER_NAME, namespace=SERVE_NAMESPACE)
    flags_and_edge: tuple[Sequence[str], bool] = ray.get(
        controller.__ray_call__.remote(_serve_constants), timeout=CALL_TIMEOUT_S
    )
    return flags_and_edge


def _serve_constants(_controller: Any) -> tuple[list[str], bool]:
    from ray.serve._private import constants

    missing = [name for name in SERVE_FLAGS if not getattr(constants, name)]
    return missing, is_edge_program(constants.RAY_SERVE_HAPROXY_BINARY_PATH)


def check_running(running: Front, target: Front, missing_flags: Sequence[str], num_nodes: int) -> None:
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
    if running.port != target.port:
        raise CannotJoin(
            f"the Serve that runs on this cluster listens at port {running.port}: give --port {running.port}"
        )


def _route_of(client: Any, application: str) -> str | None:
    with suppress(KeyError):
        route: str | None = client.get_serve_details()["applications"][application]["route_prefix"]
        return route
    return None
