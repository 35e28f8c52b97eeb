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
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

import psutil

# Keeps the logs of the last few starts on this machine, whose session folders are removed.

KEPT_RUNS: Final = 5
MAX_RUN_BYTES: Final = 64 << 20  # of all logs of a run; the oldest files beyond it are left out
MAX_FILE_BYTES: Final = 16 << 20  # of the end of each file
LOGS_OF_SESSION: Final = Path("ray", "session_latest", "logs")
_PIECE_BYTES: Final = 1 << 20


class FoundLog(NamedTuple):
    path: Path
    num_bytes: int
    written_at: float


def chosen(logs: Iterable[FoundLog]) -> list[tuple[FoundLog, int]]:
    """The files of a run to keep, the newest first, and how many bytes of the end of each."""
    remaining_bytes, selection = MAX_RUN_BYTES, []
    for log in sorted(logs, key=lambda log: log.written_at, reverse=True):
        num_bytes = min(log.num_bytes, MAX_FILE_BYTES, remaining_bytes)
        if num_bytes:
            selection.append((log, num_bytes))
            remaining_bytes -= num_bytes
    return selection


def has_logs(session_path: Path) -> bool:
    """Whether Ray has written any logs."""
    return any((session_path / LOGS_OF_SESSION).rglob("*"))


def keep_logs(session_path: Path, kept_path: Path) -> None:
    """Copies the session's logs to `kept_path`, whose name must sort after those beside it, and removes the oldest.

    Copies nothing if Ray did not start. Raises OSError.
    """
    logs_path = (session_path / LOGS_OF_SESSION).resolve()
    logs = []
    for path in logs_path.rglob("*"):
        if path.is_file() and not path.is_symlink():
            status = path.stat()
            logs.append(FoundLog(path, status.st_size, status.st_mtime))
    if not logs:
        return
    kept_path.mkdir(mode=0o700, parents=True)
    for log, num_bytes in chosen(logs):
        target = kept_path / log.path.relative_to(logs_path)
        target.parent.mkdir(parents=True, exist_ok=True)
        with log.path.open("rb") as source, target.open("wb") as copy:
            source.seek(log.num_bytes - num_bytes)
            while num_bytes and (piece := source.read(min(num_bytes, _PIECE_BYTES))):
                copy.write(piece)
                num_bytes -= len(piece)
    runs = sorted(path for path in kept_path.parent.iterdir() if path.is_dir() and path.name[0].isdigit())
    for run in runs[:-KEPT_RUNS]:
        with suppress(OSError):
            shutil.rmtree(run)


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
    processes = []
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and process.environ().get(SESSION_VARIABLE) == session:
                processes.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            continue  # ended meanwhile, or another user's
    return processes


def sweep(session: str) -> None:
    """Asks the session's processes to end, and kills those that do not, until none is left."""
    deadline = time.monotonic() + SWEEP_TIMEOUT_S
    for process in find_processes(session):
        _signal(process, "terminate")
    time.sleep(GRACE_S)
    while (survivors := find_processes(session)) and time.monotonic() < deadline:
        for process in survivors:
            _signal(process, "kill")
        psutil.wait_procs(survivors, timeout=0.2)


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
