"""Ends the processes that a motet on this machine left running, in a process that outlives a killed launcher.

Its standard input is a pipe whose other end the launcher holds. When the pipe closes, because the launcher stopped or
died, every process of the session is killed, its logs are kept and its folder is removed. A process of the session is
one whose environment carries the session's mark, which Ray, its workers and HAProxy inherit. The Redis server is
started before the mark is set: it ends with the process that started it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import psutil

from .kept_logs import keep_logs

SESSION_VARIABLE = "MOTET_SESSION"
SWEEP_TIMEOUT_S = 15.0
GRACE_S = 0.5


class Janitor:
    """The launcher's handle for its janitor."""

    def __init__(self, session: str, session_path: Path, kept_path: Path) -> None:
        """`kept_path`: the folder that gets the session's logs."""
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", __name__, session, str(session_path), str(kept_path)],
            stdin=subprocess.PIPE,
            start_new_session=True,  # so that Ctrl-C in the terminal does not reach it
        )

    def finish(self) -> None:
        """Makes the janitor end what is left, and waits for it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(SWEEP_TIMEOUT_S + 5)


def find_processes(session: str) -> list[psutil.Process]:
    """All other processes that carry the session's mark."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and process.environ().get(SESSION_VARIABLE) == session:
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            continue  # ended meanwhile, or another user's
    return found


def sweep(session: str) -> None:
    """Asks the session's processes to end, and kills those that do not, until none is left."""
    deadline = time.monotonic() + SWEEP_TIMEOUT_S
    for process in find_processes(session):
        _signal(process, "terminate")
    time.sleep(GRACE_S)
    while (left := find_processes(session)) and time.monotonic() < deadline:
        for process in left:
            _signal(process, "kill")
        psutil.wait_procs(left, timeout=0.2)


def _signal(process: psutil.Process, method: str) -> None:
    try:
        getattr(process, method)()
    except psutil.NoSuchProcess:
        pass  # ended by itself


def main(session: str, session_path: str, kept_path: str) -> None:
    sys.stdin.buffer.read()
    sweep(session)
    try:
        keep_logs(Path(session_path), Path(kept_path))
    except OSError as error:
        print(f"motet: the logs could not be kept in {kept_path}: {error}", file=sys.stderr, flush=True)
    shutil.rmtree(session_path, ignore_errors=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
