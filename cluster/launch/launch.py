"""A whole motet, on this machine or on a running Ray cluster: started, watched and ended from one process."""

from __future__ import annotations

import asyncio
import logging
import secrets
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import httpx
import psutil

from ...adapters.errors import RegistryUnavailable
from ...workers.models.config import ModelConfig
from ..application.registration import check_objectives, forget_launch_keys, register_launch
from ..config import MotetConfig
from ..edge.serve_variables import SERVE_FLAGS
from ..launch_secrets import SECRETS_FILE, LaunchSecrets, operator_key_in
from ..progress import OnEvent, ProgressReader, step
from ..replicas.disk_watch import full_disk_warning
from ..settings.setting_field import ConfigError
from ..settings.settings import check_update
from .cluster_nodes import CannotJoin, check_nodes, check_room, room_taken
from .janitor import Janitor, has_logs
from .joined_cluster import JoinedCluster
from .local_serve import (
    ServeNotStarted,
    check_port_is_free,
    make_session_folder,
    restore_environment,
    serve_environment,
    set_environment,
    start_serve,
)
from .redis_server import RedisServer

if TYPE_CHECKING:
    from ray.serve.schema import ApplicationStatusOverview


# Checks that a running motet can change to a wanted config without a restart.


def updated(running: MotetConfig, target: MotetConfig, max_gangs: int | None) -> MotetConfig:
    """The config that is to run instead of `running`. `max_gangs`: that have room until a restart; None: any number.

    Raises ConfigError for a setting that only a restart can change.
    """
    # Cores are shared as at the start: a new number of gangs does not replace those that stay.
    target = target.replaced(gangs_beside=running.gangs_beside or running.scaling_policy.max_gangs)
    if target.access.redis_url is None:
        target = target.replaced(redis_url=running.access.redis_url)  # the embedded server goes on
    check_update(running.replaced(gangs_beside=target.gangs_beside), target)
    if max_gangs is not None and target.scaling_policy.max_gangs > max_gangs:
        accepted = f"at most {max_gangs} is accepted until a restart, as Ray was started with room for them"
        raise ConfigError("--max-gangs", target.scaling_policy.max_gangs, accepted)
    return target


POLL_S = 0.1
STATUS_POLL_S = 0.5  # each look at what Serve says takes 25 ms of CPU, which the replicas need to start
CLUSTER_POLL_S = 2.0  # of a cluster that others run
DISK_POLL_S = 10.0
READY_TIMEOUT_S = 120.0  # from the application's being up to a token

_log = logging.getLogger(__name__)


class LaunchError(Exception):
    """The deployment could not be started, or broke; the message says why and where its logs are."""


class Deployment:
    """Redis, Ray, Serve, routers and gangs, from `start` to `stop`. One a process.

    Call `start` from a thread that lives as long as the deployment: the kernel ends the servers with it. In the main
    thread SIGTERM and SIGHUP raise SystemExit until `stop`, as SIGINT raises KeyboardInterrupt.
    """

    def __init__(self) -> None:
        self._config: MotetConfig | None = None  # of what runs
        self._url = ""
        self._secrets_path = Path()  # of what routers and gangs share
        self._max_gangs: int | None = None  # that have room; None: no limit but the cluster's
        self._on_hangup: Callable[[], None] | None = None
        self._has_hung_up = False
        self._parts = ExitStack()  # ends what was started, the last first, and all of it even if some of it fails
        self._session_path = Path()
        self._kept_path = Path()  # for the session's logs, once it has ended
        self._joined: JoinedCluster | None = None
        self._handlers: dict[int, Any] = {}
        self._servers: list[psutil.Process] = []  # of Ray; motet is broken once one of them has died

    @property
    def url(self) -> str:
        """Where clients reach it, once it was started."""
        return self._url

    def start(
        self, config: MotetConfig, on_event: OnEvent, *, replace: bool = False, wait_for_nodes: bool = False
    ) -> None:
        """Returns when a token was served over HTTP. On failure everything is stopped again.

        On a running cluster, `replace` deletes a motet that runs there first, and `wait_for_nodes` deploys even if no
        node has room yet. `on_event` gets the progress, from this or another thread. Raises LaunchError, ConfigError
        for a port that is in use or a name that an adapter has, ValueError for a model that cannot be served,
        RedisServerError, and the AdapterErrors of `register_launch`.
        """
        assert self._config is None, "a deployment is started once"
        if config.placement.address is None:
            check_port_is_free(config.listen_host, config.access.port)
        ModelConfig.from_folder(config.model_path)  # a model that cannot be served fails at once
        self._config = config
        try:
            self._parts.callback(self._restore_signals)
            self._catch_signals()
            if config.placement.address is None:
                self._start(config, on_event)
            else:
                self._start_joined(config, on_event, replace=replace, wait_for_nodes=wait_for_nodes)
        except BaseException:
            try:
                self.stop()
            except Exception:  # the caller must get the first error
                _log.exception("not everything could be stopped")
            raise

    def wait(self, on_hangup: Callable[[], None] | None = None) -> None:
        """Does not return: a signal raises as the class says, and a server of Ray that has gone raises LaunchError.

        On a running cluster it is the application that must not go. `on_hangup` is called at SIGHUP, which then ends
        nothing.
        """
        self._on_hangup = on_hangup
        threading.Thread(target=self._watch_disk, name="disk", daemon=True).start()
        checked_at = 0.0
        while True:
            if self._has_hung_up and on_hangup is not None:
                self._has_hung_up = False
                on_hangup()
            _, alive = psutil.wait_procs(self._servers, timeout=POLL_S)
            if len(alive) < len(self._servers):
                raise LaunchError("a server of Ray has died: motet must be started again")
            if self._joined is not None and time.monotonic() - checked_at > CLUSTER_POLL_S:
                if (problem := self._joined.problem()) is not None:
                    raise LaunchError(problem)
                checked_at = time.monotonic()
            time.sleep(POLL_S)

    def _watch_disk(self) -> None:
        """Warns each time that the disk of the data folder gets full. In its own thread: a volume may hang."""
        was_full = False
        while (config := self._config) is not None:
            with suppress(OSError):
                warning = full_disk_warning(config.serving.data_dir, config.requests.min_free_bytes)
                if warning is not None and not was_full:
                    _log.warning("%s", warning)
                was_full = warning is not None
            time.sleep(DISK_POLL_S)

    def update(self, config: MotetConfig) -> None:
        """Replaces routers and gangs one by one by those with another config, while they serve. Returns when done.

        Raises ConfigError for what only a restart changes and for a latency objective of an unknown tenant, and
        LaunchError when the new ones do not start: those before are brought back then.
        """
        assert self._config is not None, "it runs"
        running, target = self._config, updated(self._config, config, self._max_gangs)
        try:
            asyncio.run(check_objectives(target))
        except RegistryUnavailable as error:
            raise LaunchError(str(error)) from error
        try:
            _run_application(target, self._secrets_path, None, is_update=True)
        except LaunchError:
            _run_application(running, self._secrets_path, None, is_update=True)
            raise
        self._config = target

    def stop(self) -> None:
        """Ends every process and removes the session's folder; what is acknowledged is on the disk. Idempotent.

        A part that cannot be stopped keeps no other from being stopped; its error is raised then.
        """
        self._config = None
        self._parts.close()

    def forget_keys(self) -> None:
        """Deletes the keys of the config while motet runs: they are invalid from then on. Raises LaunchError."""
        assert self._config is not None, "it runs"
        try:
            asyncio.run(forget_launch_keys(self._config))
        except RegistryUnavailable as error:
            raise LaunchError(f"the keys of this launch could not be deleted: {error}") from error

    def _start(self, config: MotetConfig, on_event: OnEvent) -> None:
        with step(on_event, "starting the registry"):
            config = self._start_registry(config, None)
        self._start_ray(config, on_event)
        try:
            check_room(config)
            self._deploy(config, self._session_path / "progress", on_event)
            self._url = config.url
            with step(on_event, "waiting for the first token"):
                _wait_until_ready(self._url)
        except CannotJoin as error:
            raise LaunchError(str(error)) from error
        except LaunchError as error:
            raise LaunchError(f"{error}\nlogs: {self._kept_path}") from error  # the janitor puts them there

    def _deploy(self, config: MotetConfig, progress_path: Path, on_event: OnEvent) -> None:
        with step(on_event, "starting routers and gangs"), _followed(progress_path, on_event):
            _run_application(config, self._secrets_path, progress_path)

    def _start_joined(self, config: MotetConfig, on_event: OnEvent, *, replace: bool, wait_for_nodes: bool) -> None:
        """As `_start`, on a running cluster; `stop` leaves nothing there but what was there before."""
        assert config.placement.address is not None
        self._parts.callback(restore_environment, set_environment(SERVE_FLAGS))
        from ..replicas.application import APP  # brings ray.serve, which reads its flags then

        self._joined = joined = JoinedCluster()
        try:
            self._parts.callback(joined.leave)
            with step(on_event, f"joining the cluster at {config.placement.address}"):
                joined.join(config.placement.address, config.edge)
            self._catch_signals()  # see _start_ray
            if not wait_for_nodes:
                check_room(config)
            with step(on_event, "starting the registry"):
                config = self._start_registry(config, joined.node_ip)
            with step(on_event, "checking the nodes"):
                check_nodes(config)
            self._parts.callback(joined.delete)
            with step(on_event, "starting Ray Serve"):
                front = joined.start_serve(APP, config.listen_host, config.access.port, replace_application=replace)
            for warning in room_taken(config):
                _log.warning("%s", warning)
            progress_path = config.serving.data_dir / f"progress-{secrets.token_hex(8)}"
            self._parts.callback(progress_path.unlink, missing_ok=True)
            joined.deployed(APP)
            self._deploy(config, progress_path, on_event)
            self._url = joined.url(front)
            with step(on_event, "waiting for the first token"):
                _wait_until_ready(self._url)
        except CannotJoin as error:
            raise LaunchError(str(error)) from error

    def _start_registry(self, config: MotetConfig, host: str | None) -> MotetConfig:
        """Registers this launch in a Redis server, ours or another. Returns the config with that server's URL.

        `host`: an address of this machine at which other nodes reach a server of ours; None: no other node must.
        """
        config.serving.data_dir.mkdir(parents=True, exist_ok=True)
        embedded_redis = config.access.redis_url is None
        if embedded_redis:
            redis = RedisServer(config.redis_path, host=host, max_bytes=config.access.redis_max_bytes)
            self._parts.callback(redis.stop)
            self._config = config = config.with_redis_url(redis.start())
        asyncio.run(register_launch(config, embedded_redis=embedded_redis))
        self._write_secrets(config)
        return config

    def _write_secrets(self, config: MotetConfig) -> None:
        """They are there for replicas that start later, too, until the deployment has ended."""
        assert config.access.redis_url is not None
        self._secrets_path = config.serving.data_dir / SECRETS_FILE
        self._parts.callback(self._secrets_path.unlink, missing_ok=True)
        launch_secrets = LaunchSecrets(
            token=secrets.token_hex(32),
            redis_url=config.access.redis_url,
            operator_key=config.access.operator_key or operator_key_in(config.serving.data_dir),
        )
        launch_secrets.write(self._secrets_path)

    def _start_ray(self, config: MotetConfig, on_event: OnEvent) -> None:
        session = secrets.token_hex(8)
        self._session_path = make_session_folder()
        started_at = time.strftime("%Y-%m-%dT%H-%M-%SZ", time.gmtime())
        self._kept_path = config.serving.data_dir / "logs" / f"{started_at}-{session}"
        self._parts.callback(Janitor(session, self._session_path, self._kept_path).finish)
        variables = serve_environment(session, self._session_path, config.listen_host, config.edge)
        self._parts.callback(restore_environment, set_environment(variables))
        children = set(psutil.Process().children())
        self._parts.callback(_shut_ray_down)
        self._max_gangs = config.scaling_policy.max_gangs
        num_cpus = config.scaling_policy.max_gangs * config.num_cpus_of_a_gang
        # Ray puts a handler before Python's that aborts the process three seconds after a SIGTERM: too soon to stop.
        try:
            start_serve(self._session_path, config.access.port, num_cpus, on_event, self._catch_signals)
        except ServeNotStarted as error:
            logs = f"\nlogs: {self._kept_path}" if has_logs(self._session_path) else ""  # the janitor puts them there
            raise LaunchError(f"{error}{logs}") from error
        self._catch_signals()
        started = set(psutil.Process().children()) - children
        self._servers = [process for process in started if process.name() in ("gcs_server", "raylet")]

    def _catch_signals(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return

        def exit_by_signal(number: int, _frame: FrameType | None) -> None:
            if number == signal.SIGHUP and self._on_hangup is not None:
                self._has_hung_up = True
                return
            raise SystemExit(128 + number)

        for number in (signal.SIGTERM, signal.SIGHUP):
            self._handlers.setdefault(number, signal.signal(number, exit_by_signal))

    def _restore_signals(self) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._handlers = {}


def _shut_ray_down() -> None:
    import ray

    ray.shutdown()


def _run_application(
    config: MotetConfig, secrets_path: Path, progress_path: Path | None, *, is_update: bool = False
) -> None:
    """Returns when all replicas are up, however long a model takes to load. Raises LaunchError at the first failure."""
    from ray import serve

    from ..replicas.application import APP, build_application

    application = build_application(config, secrets_path, progress_path, is_update=is_update)
    # Serve goes on to say these until it has begun with the new application.
    said = _said_of(serve.status().applications.get(APP))
    try:
        serve.run_many([serve.RunTarget(application, name=APP)], wait_for_applications_running=False)
    except RuntimeError as error:
        raise LaunchError(f"the application could not be started: {error}") from error
    while (status := serve.status().applications.get(APP)) is None or status.status != "RUNNING":
        if status is None:
            raise LaunchError("the application was deleted by another process")
        said = {name: message for name, message in _said_of(status).items() if said.get(name) == message}
        if reasons := why_not_running(status, said):
            raise LaunchError(f"the application could not be started: {'; '.join(reasons)}")
        time.sleep(STATUS_POLL_S)


def _said_of(status: ApplicationStatusOverview | None) -> dict[str, str]:
    """What Serve says of each deployment."""
    return {} if status is None else {name: deployment.message for name, deployment in status.deployments.items()}


def why_not_running(status: ApplicationStatusOverview, said: Mapping[str, str]) -> list[str]:
    """Why it will not run, by deployment; empty: it still may. Serve itself retries failed starts without end.

    `said`: earlier messages of Serve; deployments with the same message are ignored.
    """
    from ..replicas.launch_keeper import last_line, num_failed_starts

    has_failed = status.status == "DEPLOY_FAILED"
    reasons = [
        f"{name}: {last_line(deployment.message)}"
        for name, deployment in status.deployments.items()
        if name not in said
        if num_failed_starts(deployment.message) or (has_failed and deployment.message)
    ]
    return reasons or ([last_line(status.message) or "Serve has given it up"] if has_failed else [])


def _wait_until_ready(url: str) -> None:
    """Returns once /ready says that a token was served."""
    deadline = time.monotonic() + READY_TIMEOUT_S
    problem = "no answer"
    with httpx.Client(trust_env=False, timeout=READY_TIMEOUT_S) as client:
        while time.monotonic() < deadline:
            try:
                answer = client.get(f"{url}/ready")
                if answer.status_code == 200:
                    return
                problem = f"{answer.status_code} {answer.text}"
            except httpx.TransportError as error:
                problem = str(error)
            time.sleep(POLL_S)
    raise LaunchError(f"no token was served within {READY_TIMEOUT_S:g} s: {problem}")


@contextmanager
def _followed(progress_path: Path, on_event: OnEvent) -> Iterator[None]:
    """Passes on the replicas' progress, from a thread."""
    read = ProgressReader(progress_path, on_event)
    ended = threading.Event()

    def follow() -> None:
        while not ended.wait(POLL_S):
            read()

    follower = threading.Thread(target=follow, name="progress", daemon=True)
    follower.start()
    try:
        yield
    finally:
        ended.set()
        follower.join()
        read()
