"""Keeps the logs of the last few starts on this machine, whose session folders are removed."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

KEPT_RUNS: Final = 5
MAX_RUN_BYTES: Final = 64 << 20  # of all logs of a run; the oldest files beyond it are left out
MAX_FILE_BYTES: Final = 16 << 20  # of the end of each file
LOGS_OF_SESSION: Final = Path("ray", "session_latest", "logs")
_PIECE_BYTES: Final = 1 << 20


class FoundLog(NamedTuple):
    path: Path
    num_bytes: int
    written_at: float


def chosen(found: Iterable[FoundLog]) -> list[tuple[FoundLog, int]]:
    """The files of a run to keep, the newest first, and how many bytes of the end of each."""
    left, kept = MAX_RUN_BYTES, []
    for log in sorted(found, key=lambda log: log.written_at, reverse=True):
        num_bytes = min(log.num_bytes, MAX_FILE_BYTES, left)
        if num_bytes:
            kept.append((log, num_bytes))
            left -= num_bytes
    return kept


def has_logs(session_path: Path) -> bool:
    """Whether Ray has written any logs."""
    return any((session_path / LOGS_OF_SESSION).rglob("*"))


def keep_logs(session_path: Path, kept_path: Path) -> None:
    """Copies the session's logs to `kept_path`, whose name must sort after those beside it, and removes the oldest.

    Copies nothing if Ray did not start. Raises OSError.
    """
    logs_path = (session_path / LOGS_OF_SESSION).resolve()
    found = []
    for path in logs_path.rglob("*"):
        if path.is_file() and not path.is_symlink():
            status = path.stat()
            found.append(FoundLog(path, status.st_size, status.st_mtime))
    if not found:
        return
    kept_path.mkdir(mode=0o700, parents=True)
    for log, num_bytes in chosen(found):
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
