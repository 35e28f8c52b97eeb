"""The janitor against real processes."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from motet.cluster.launch.janitor import SESSION_VARIABLE, Janitor, find_processes
from motet.tests.rigs.patience import PATIENCE_S

STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(600)"
LAUNCHER = """
import sys, time
from pathlib import Path
from motet.cluster.launch.janitor import Janitor
Janitor(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
print(flush=True)
time.sleep(600)
"""


@pytest.fixture
def session() -> str:
    return secrets.token_hex(8)


@pytest.fixture
def stray(session: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process of the session that ignores SIGTERM and has no parent to end it."""
    environment = {**os.environ, SESSION_VARIABLE: session}
    process = subprocess.Popen(
        [sys.executable, "-c", STUBBORN], env=environment, stdout=subprocess.PIPE, start_new_session=True
    )
    assert process.stdout is not None
    process.stdout.readline()
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def test_ends_its_session_and_nothing_else(session: str, stray: subprocess.Popen[bytes], tmp_path: Path) -> None:
    other = subprocess.Popen([sys.executable, "-c", STUBBORN], env={**os.environ, SESSION_VARIABLE: "another"})
    folder = tmp_path / "session"
    (folder / "inner").mkdir(parents=True)
    assert [process.pid for process in find_processes(session)] == [stray.pid]
    Janitor(session, folder, tmp_path / "kept").finish()
    assert stray.wait(PATIENCE_S) == -9
    assert not folder.exists()
    assert other.poll() is None
    other.kill()
    other.wait()


def test_outlives_a_killed_launcher(session: str, stray: subprocess.Popen[bytes], tmp_path: Path) -> None:
    folder = tmp_path / "session"
    logs = folder / "ray" / "session_1" / "logs" / "motet"
    logs.mkdir(parents=True)
    (folder / "ray" / "session_latest").symlink_to(folder / "ray" / "session_1")
    (logs / "gang-1-1.log").write_text("what it said last\n")
    kept = tmp_path / "data" / "logs" / "2026-11-22"
    command = [sys.executable, "-c", LAUNCHER, session, str(folder), str(kept)]
    launcher = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert launcher.stdout is not None
    launcher.stdout.readline()
    janitors = psutil.Process(launcher.pid).children()
    assert len(janitors) == 1
    launcher.kill()
    launcher.wait()
    launcher.stdout.close()
    assert stray.wait(PATIENCE_S) == -9
    psutil.wait_procs(janitors, timeout=PATIENCE_S)
    assert not janitors[0].is_running()
    assert not folder.exists()
    assert (kept / "motet" / "gang-1-1.log").read_text() == "what it said last\n"
