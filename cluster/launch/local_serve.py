"""A private Ray cluster on this machine with Serve behind HAProxy, in a session folder of its own.

The folder, HAProxy's sockets and its side ports are private, so that they do not clash with another Ray or HAProxy on
the machine. Ray, the routers' HTTP ports and HAProxy's statistics listen on loopback only, unreachable from other
machines. Only HAProxy's front listens at the host and port of the settings.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from ..edge.edge_config import EdgeLimits
from ..edge.haproxy import write_haproxy
from ..edge.serve_variables import (
    BINARY_VARIABLE,
    HUGE_PAGES,
    LASTING_STARTS,
    LASTING_STREAMS,
    PATIENT_STARTS,
    SERVE_FLAGS,
)
from ..progress import OnEvent, ignore_event, step
from ..resources import usable_cores
from ..settings.setting_field import ConfigError
from .janitor import SESSION_VARIABLE, sweep

LOOPBACK = "127.0.0.1"
NUM_LOGICAL_CPUS = 2  # of Ray; each starts one idle worker, which makes replacing a gang quick
OBJECT_STORE_BYTES = 100 << 20  # motet does not use it
PORTS: Sequence[int] = range(20_000, 30_000)  # neither the kernel (from 32768 on) nor Ray nor Serve assigns these
MAX_SOCKET_BYTES = 107 if sys.platform == "linux" else 103  # of the path of a Unix socket
# The longest paths of sockets below the session's folder, and how long the whole paths may be. HAProxy binds another
# name first, which is ten bytes longer; Serve puts the id of its node before HAProxy's names.
SOCKETS = (
    ("/ray/session_2026-01-31_23-59-59_123456_1234567/sockets/plasma_store", MAX_SOCKET_BYTES),
    (f"/haproxy/{'0' * 56}/a.sock", MAX_SOCKET_BYTES - 10),
)
MAX_SESSION_BYTES = min(max_bytes - len(path) for path, max_bytes in SOCKETS)  # of the path of the session's folder
SHORT_PARENT = Path("/tmp")
# An alert of HAProxy, without its process and the places in its configuration.
ALERT = re.compile(r"^\[ALERT\] *\(\d+\) : (?:config : )?(?:parsing \[[^\]]*\] : )*(.+)", re.MULTILINE)
NUM_START_ATTEMPTS = 3  # Ray has timeouts, mostly of 30 s, that no variable changes

_log = logging.getLogger(__name__)


class ServeNotStarted(Exception):  # noqa: N818
    """Ray or Serve did not start; the message says which step failed, and how busy the machine is."""


def check_port_is_free(host: str, port: int) -> None:
    """Raises ConfigError if a server cannot listen there."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except (OSError, OverflowError) as error:
            reason = error.strerror if isinstance(error, OSError) else "1 to 65535 is accepted"
            raise ConfigError(
                "--port", port, f"cannot listen at {host}:{port}: {reason}; choose another with --port"
            ) from None


def free_ports(count: int) -> list[int]:
    """Ports of loopback that are free, and probably still are when a process listens there.

    They are among `PORTS`, because the kernel may assign its ephemeral ports to any process that connects.
    """
    with ExitStack() as probes:
        ports: list[int] = []
        for port in secrets.SystemRandom().sample(PORTS, len(PORTS)):
            if len(ports) == count:
                break
            probe = probes.enter_context(socket.socket())
            with suppress(OSError):  # it is taken
                probe.bind((LOOPBACK, port))
                ports.append(port)
    if len(ports) < count:
        raise OSError(f"fewer than {count} ports of {LOOPBACK} are free from {min(PORTS)} to {max(PORTS)}")
    return ports


def make_session_folder() -> Path:
    """Makes a folder in the one for temporary files, or in /tmp if paths of sockets would be too long there.

    Raises ConfigError if neither can be used.
    """
    tmpdir = Path(tempfile.gettempdir())
    for parent in dict.fromkeys((tmpdir, SHORT_PARENT)):
        with suppress(OSError):
            folder = Path(tempfile.mkdtemp(prefix="motet-", dir=parent))
            if len(os.fsencode(folder)) <= MAX_SESSION_BYTES:
                if parent != tmpdir:
                    _log.warning("TMPDIR=%s is too long for the paths of sockets: %s is used", tmpdir, folder)
                return folder
            folder.rmdir()
    accepted = f"a folder that can be written, with a path of at most {MAX_SESSION_BYTES - 15} bytes"
    raise ConfigError("TMPDIR", str(tmpdir), f"{accepted}, is needed for sockets; {SHORT_PARENT} cannot be used either")


def serve_environment(session: str, session_path: Path, host: str, limits: EdgeLimits) -> dict[str, str]:
    """Variables that every process of the session needs, set before ray is imported. `host`: where the front listens.

    Serve has one host for replicas and front, which is set to loopback; motet's edge moves the front to `host`.
    """
    stats_port, metrics_port, http_fallback_port, grpc_fallback_port = free_ports(4)
    haproxy_path = session_path / "haproxy"
    haproxy_path.mkdir()
    binary = write_haproxy(haproxy_path / "haproxy", limits, host)
    return {
        SESSION_VARIABLE: session,
        "SPT_NOENV": "1",  # keeps Ray's process titles from overwriting the environment, and SESSION_VARIABLE in it
        **SERVE_FLAGS,
        BINARY_VARIABLE: str(binary),
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(haproxy_path / "haproxy.cfg"),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(haproxy_path / "a.sock"),
        "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": str(haproxy_path / "m.sock"),
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(haproxy_path),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(haproxy_path / "server-state"),
        "RAY_SERVE_HAPROXY_STATS_PORT": str(stats_port),
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(metrics_port),
        "RAY_SERVE_HAPROXY_METRICS_ENABLED": "0",  # the routers count requests themselves
        "RAY_SERVE_HAPROXY_NBTHREAD": "1",
        **LASTING_STREAMS,
        **LASTING_STARTS,
        **PATIENT_STARTS,
        **HUGE_PAGES,
        "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(http_fallback_port),
        "RAY_SERVE_FALLBACK_PROXY_GRPC_PORT": str(grpc_fallback_port),
        "RAY_AUTH_MODE": "token",  # of Ray's and Serve's own servers, some of which listen on all interfaces
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_worker_niceness": "0",  # workers are niced by default and starve beside other jobs
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # all on loopback: a laptop may change its address any time
        "RAY_USAGE_STATS_ENABLED": "0",
    }


def start_serve(
    session_path: Path,
    port: int,
    num_cpus: float,
    on_event: OnEvent = ignore_event,
    catch_signals: Callable[[], None] = lambda: None,
) -> None:
    """Starts Ray and Serve; needs `serve_environment` in the environment. `num_cpus`: what all replicas take.

    A failed start, as on a machine too busy for Ray's own timeouts, is retried from the beginning; the last failure
    raises ServeNotStarted. `catch_signals` restores the caller's signal handlers, which a failed start has replaced.
    """
    with step(on_event, "loading Ray"):
        import ray
        from ray import serve  # noqa: F401  # an import error is not a failed start, and is not retried
        from ray.serve._private import constants

    logging.getLogger("ray.serve").setLevel(logging.WARNING)  # the launcher reports the stages
    if not (constants.RAY_SERVE_ENABLE_HA_PROXY and constants.RAY_SERVE_THROUGHPUT_OPTIMIZED):
        raise RuntimeError("ray.serve was imported before serve_environment was set: it reads its flags at import")

    began_at, waited_for = time.monotonic(), ""

    def note_step(stage: str, done: int, total: int) -> None:
        nonlocal waited_for
        waited_for = stage
        on_event(stage, done, total)

    for attempt in range(1, NUM_START_ATTEMPTS + 1):
        try:
            _start_serve(session_path, port, num_cpus, note_step)
            return
        except ValueError:  # bad arguments: another attempt would not help
            raise
        except Exception as error:  # Ray has no exception class for a start that took too long
            if attempt == NUM_START_ATTEMPTS:
                seconds = time.monotonic() - began_at
                said = f"{waited_for} failed, the last of {attempt} times in {seconds:.0f} s: {_reason(error)}"
                if _alert(error) is None:
                    said += (
                        f". This machine has {usable_cores()} cores and a load average of {os.getloadavg()[0]:.1f}: if "
                        "the load is higher than the cores, the machine is too busy for Ray"
                    )
                raise ServeNotStarted(said) from error
            _log.warning("Ray did not start, trying again: %s", _reason(error))
            ray.shutdown()
            catch_signals()
            sweep(os.environ[SESSION_VARIABLE])


def _start_serve(session_path: Path, port: int, num_cpus: float, on_event: OnEvent) -> None:
    import ray
    from ray import serve
    from ray.serve.config import HTTPOptions

    with step(on_event, "starting Ray"):
        ray.init(
            address="local",
            num_cpus=max(NUM_LOGICAL_CPUS, int(-(-num_cpus // 1))),
            object_store_memory=OBJECT_STORE_BYTES,
            include_dashboard=False,
            log_to_driver=False,
            logging_level="error",  # Serve replaces a worker that died, without Ray's warning
            _temp_dir=str(session_path / "ray"),
        )
    with step(on_event, "starting Ray Serve"):
        serve.start(
            proxy_location="HeadOnly",
            http_options=HTTPOptions(host=LOOPBACK, port=port),
            logging_config={"log_level": "WARNING", "enable_access_log": False},
        )


def _reason(error: Exception) -> str:
    """HAProxy's first alert, or the last line of the error: some of Ray's are pages long, with the cause at the end."""
    if (alert := _alert(error)) is not None:
        return alert
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1].rstrip(".") if lines else type(error).__name__


def _alert(error: Exception) -> str | None:
    """HAProxy's first alert in the error, which has the cause; None: HAProxy did not say anything."""
    match = ALERT.search(str(error))
    return None if match is None else f"HAProxy: {match[1].strip().rstrip('.')}"


def set_environment(variables: dict[str, str]) -> dict[str, str | None]:
    """Sets variables for this process and its children. Returns their former values, for `restore_environment`."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    return before


def restore_environment(before: dict[str, str | None]) -> None:
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
