"""What can be tested of the private Serve without starting it."""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
import tempfile
from pathlib import Path

import pytest
import ray
from ray import serve
from ray._private import ray_constants
from ray.serve._private import constants

from motet.cluster.config import MotetConfig
from motet.cluster.launch import launch, local_serve
from motet.cluster.launch.janitor import LOGS_OF_SESSION, SESSION_VARIABLE, find_processes, sweep
from motet.cluster.launch.launch import Deployment, LaunchError
from motet.cluster.launch.local_serve import (
    NUM_START_ATTEMPTS,
    ServeNotStarted,
    check_port_is_free,
    free_ports,
    make_session_folder,
    restore_environment,
    serve_environment,
    set_environment,
    start_serve,
)
from motet.cluster.settings.setting_field import ConfigError
from motet.tests.rigs.part_configs import edge_limits
from motet.tests.rigs.running_motet import DEMO


def test_a_port_in_use_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"port = {port}: cannot listen at 127\.0\.0\.1:{port}"):
            check_port_is_free("127.0.0.1", port)
    check_port_is_free("127.0.0.1", port)


def test_a_host_of_another_machine_is_named() -> None:
    with pytest.raises(ConfigError, match=r"cannot listen at 192\.0\.2\.77"):
        check_port_is_free("192.0.2.77", free_ports(1)[0])


def test_free_ports_differ_and_the_kernel_gives_them_to_no_other() -> None:
    found = free_ports(20)
    assert len(set(found)) == 20
    assert max(found) < 32_768  # from there on it does


def test_ports_that_are_taken_are_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    few = free_ports(3)
    monkeypatch.setattr(local_serve, "PORTS", few)
    with socket.create_server(("127.0.0.1", few[0])):
        assert set(free_ports(2)) == set(few[1:])
        with pytest.raises(OSError, match="fewer than 3 ports"):
            free_ports(3)


def test_haproxy_lets_streams_end_when_another_one_takes_over(tmp_path: Path) -> None:
    variables = serve_environment("session", tmp_path, "127.0.0.1", edge_limits())
    longest_s = int(variables["RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S"])
    assert longest_s >= MotetConfig.of(model_path=DEMO / "base", data_dir=tmp_path).timeouts.router_drain_s


def test_the_environment_is_put_back(tmp_path: Path) -> None:
    variables = serve_environment("session", tmp_path, "127.0.0.1", edge_limits())
    kept = dict(os.environ)
    before = set_environment(variables)
    assert os.environ["RAY_SERVE_ENABLE_HA_PROXY"] == "1"
    restore_environment(before)
    assert dict(os.environ) == kept


def test_sockets_of_a_session_have_paths_that_the_kernel_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """However long TMPDIR is. The longest are Ray's, whose own names are made here, and HAProxy's."""
    names = [f"{ray_constants.SESSION_LATEST.removesuffix('latest')}2026-11-25_04-34-09_123456_4194304", "sockets"]
    limit, middling = Path("/tmp") / secrets.token_hex(2)[:-1], Path("/tmp") / secrets.token_hex(7)
    for parent, is_short in ((limit, True), (middling, False), (tmp_path / ("long" * 30), False)):
        caplog.clear()
        parent.mkdir(exist_ok=True)
        monkeypatch.setattr(tempfile, "tempdir", str(parent))
        folder = make_session_folder()
        try:
            assert (folder.parent == parent) == is_short
            assert ("is too long for the paths of sockets" in caplog.text) == (not is_short)
            haproxys = folder / "haproxy" / ray.NodeID.from_random().hex() / "a.sock.1234567.tmp"
            for socket_path in (folder / "ray" / "/".join(names) / "plasma_store", haproxys):
                socket_path.parent.mkdir(parents=True, exist_ok=True)
                with socket.socket(socket.AF_UNIX) as one:
                    one.bind(str(socket_path))
        finally:
            shutil.rmtree(folder)
            if parent.parent == Path("/tmp"):
                parent.rmdir()
    monkeypatch.setattr(local_serve, "SHORT_PARENT", tmp_path / "none")
    with pytest.raises(ConfigError, match=r"TMPDIR = .*at most 10 bytes"):
        make_session_folder()
    assert not list(parent.iterdir())


class StandInRay:
    """Starts a process, as Ray would, and then fails so many times."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, error: Exception, num_failures: int) -> None:
        self.num_starts = self.num_shutdowns = 0
        self.num_left: list[int] = []  # processes that were there at each start
        self._error, self._num_failures = error, num_failures
        self._processes: list[subprocess.Popen[bytes]] = []
        monkeypatch.setenv(SESSION_VARIABLE, secrets.token_hex(8))
        monkeypatch.setattr(constants, "RAY_SERVE_ENABLE_HA_PROXY", True)
        monkeypatch.setattr(constants, "RAY_SERVE_THROUGHPUT_OPTIMIZED", True)
        monkeypatch.setattr(ray, "init", self._init)
        monkeypatch.setattr(ray, "shutdown", self._shutdown)
        monkeypatch.setattr(serve, "start", self._start)

    def _init(self, **options: object) -> None:
        self.num_left.append(len(find_processes(os.environ[SESSION_VARIABLE])))
        self._processes.append(subprocess.Popen(["sleep", "600"]))

    def _start(self, **options: object) -> None:
        self.num_starts += 1
        if self.num_starts <= self._num_failures:
            raise self._error

    def _shutdown(self) -> None:
        self.num_shutdowns += 1

    def close(self) -> None:
        sweep(os.environ[SESSION_VARIABLE])
        for process in self._processes:
            process.wait()


def test_a_start_of_ray_that_takes_too_long_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stand_in = StandInRay(monkeypatch, TimeoutError("HTTP proxies not available after 60s."), 2)
    start_serve(tmp_path, 18000, 1)
    assert (stand_in.num_starts, stand_in.num_shutdowns) == (3, 2)
    assert stand_in.num_left == [0, 0, 0]  # nothing of an attempt is left when the next one begins
    assert caplog.text.count("Ray did not start, trying again: HTTP proxies not available after 60s") == 2
    stand_in.close()


def test_signals_are_caught_again_once_a_failed_start_is_shut_down(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    stand_in = StandInRay(monkeypatch, TimeoutError("HTTP proxies not available after 60s."), 2)
    num_shutdowns: list[int] = []
    start_serve(tmp_path, 18000, 1, catch_signals=lambda: num_shutdowns.append(stand_in.num_shutdowns))
    assert num_shutdowns == [1, 2]
    stand_in.close()


def test_flags_that_were_read_too_early_are_reported_at_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stand_in = StandInRay(monkeypatch, TimeoutError("never raised"), 0)
    monkeypatch.setattr(constants, "RAY_SERVE_ENABLE_HA_PROXY", False)
    with pytest.raises(RuntimeError, match=r"ray\.serve was imported before serve_environment was set"):
        start_serve(tmp_path, 18000, 1)
    assert (stand_in.num_left, stand_in.num_starts, stand_in.num_shutdowns) == ([], 0, 0)
    assert "Ray did not start" not in caplog.text
    stand_in.close()


def test_a_failed_start_is_not_reported_as_still_going_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    stand_in = StandInRay(monkeypatch, TimeoutError("HTTP proxies not available after 60s."), 1)
    events: list[tuple[str, int]] = []
    start_serve(tmp_path, 18000, 1, lambda what, done, total: events.append((what, done)))
    attempt = [("starting Ray", 0), ("starting Ray", 1), ("starting Ray Serve", 0), ("starting Ray Serve", 1)]
    assert events == [("loading Ray", 0), ("loading Ray", 1), *attempt, *attempt]
    stand_in.close()


def test_a_start_of_ray_that_cannot_be_is_given_up_and_says_what_was_waited_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (12.34, 0.0, 0.0))
    monkeypatch.setattr(local_serve, "usable_cores", lambda: 2)
    stand_in = StandInRay(monkeypatch, Exception("Traceback:\n  many lines\nThe current node timed out.\n"), 100)
    said = (
        r"^starting Ray Serve failed, the last of 3 times in \d+ s: The current node timed out\. This machine has 2 "
        r"cores and a load average of 12\.3: if the load is higher than the cores, the machine is too busy for Ray$"
    )
    with pytest.raises(ServeNotStarted, match=said):
        start_serve(tmp_path, 18000, 1)
    assert stand_in.num_starts == NUM_START_ATTEMPTS
    stand_in.close()


def test_an_alert_of_haproxy_is_quoted_and_not_put_down_to_the_machine(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    place = "config : parsing [/tmp/h/haproxy.cfg:8] : "
    error = RuntimeError(
        "HAProxy crashed during startup:\n"
        "[WARNING]  (7) : config : parsing [/tmp/h/haproxy.cfg:7] : a rule.\n"
        f"[ALERT]    (7) : {place}{place.removeprefix('config : ')}'stats socket' : path 'a.sock' too long (max 97)\n"
        "[ALERT]    (7) : config : Fatal errors found in configuration.\n"
    )
    stand_in = StandInRay(monkeypatch, error, 100)
    said = r" times in \d+ s: HAProxy: 'stats socket' : path 'a\.sock' too long \(max 97\)$"
    with pytest.raises(ServeNotStarted, match=said):
        start_serve(tmp_path, 18000, 1)
    stand_in.close()


def test_a_wrong_request_to_ray_is_not_repeated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    stand_in = StandInRay(monkeypatch, ValueError("bad"), 100)
    with pytest.raises(ValueError, match="bad"):
        start_serve(tmp_path, 18000, 1)
    assert stand_in.num_starts == 1
    stand_in.close()


@pytest.mark.parametrize("has_logs", [True, False])
def test_a_launch_error_says_where_the_logs_of_a_failed_start_lie(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, has_logs: bool
) -> None:
    """And they lie there."""

    def fail(session_path: Path, *given: object) -> None:
        if has_logs:
            (session_path / LOGS_OF_SESSION).mkdir(parents=True)
            (session_path / LOGS_OF_SESSION / "gcs_server.out").write_text("what went wrong\n")
        raise ServeNotStarted("starting Ray failed")

    monkeypatch.setattr(launch, "start_serve", fail)
    config = MotetConfig.of(model_path=DEMO / "base", data_dir=tmp_path / "data", port=free_ports(1)[0])
    with pytest.raises(LaunchError, match=r"^starting Ray failed") as raised:
        Deployment().start(config, lambda *event: None)
    kept = list((tmp_path / "data" / "logs").rglob("gcs_server.out"))
    if not has_logs:
        assert (str(raised.value), kept) == ("starting Ray failed", [])
        return
    (log,) = kept
    assert str(raised.value) == f"starting Ray failed\nlogs: {log.parent}"
    assert log.read_text() == "what went wrong\n"
