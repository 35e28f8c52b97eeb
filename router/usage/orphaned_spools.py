"""Spools whose routers have died: which router may take them over, and what they hold.

A router holds a lock (flock) on a file beside its spool. The kernel frees it when the process ends, however it ends. On
a folder that several machines share the lock of another machine's router may not be seen here: such a spool is taken
only if its router has also not touched the file for a while, by the clock of the file server.
"""

from __future__ import annotations

import fcntl
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import msgspec

from ...adapters.registry.ledger.entry import Entry, merged
from .segment import read_segment
from .spool import LOCK_SUFFIX, boot_id
from .spool_lines import FINAL

SILENT_S: Final = 600.0  # after which a router of another machine is taken for dead
_decode: Final = msgspec.json.Decoder(Entry).decode
_log = logging.getLogger(__name__)


@contextmanager
def orphaned_spool(folder: Path, own_lock: Path) -> Iterator[list[Path] | None]:
    """The files of a spool whose router is dead, oldest first; None: there is none. Blocks.

    While the block lasts no other router can take it. Its files are removed when the block ends without an error.
    """
    own_time = own_lock.stat().st_mtime
    for path in sorted(folder.glob(f"*{LOCK_SUFFIX}")):
        lock = None if path == own_lock else _take(path, own_time)
        if lock is None:
            continue
        try:
            files = sorted(folder.glob(f"{path.name.removesuffix(LOCK_SUFFIX)}.*.log"))
            yield files
            for file in files:
                file.unlink(missing_ok=True)
            path.unlink(missing_ok=True)
        finally:
            os.close(lock)
        return
    yield None


def entries_in(files: list[Path]) -> Iterator[Entry]:
    """The lines of a dead router's files that are not acknowledged: answers that ended, then those under way."""
    under_way: dict[str, Entry] = {}
    num_damaged = 0
    for path in files:
        for kind, payload, is_acknowledged in read_segment(path):
            try:
                entry = _decode(payload) if kind else None
            except msgspec.MsgspecError:
                entry = None
            if entry is None:
                num_damaged += 1
            elif kind != FINAL:
                before = under_way.get(entry.id)
                under_way[entry.id] = entry if before is None else merged(before, entry)
            else:
                before = under_way.get(entry.id)
                if before is not None and merged(entry, before) == entry:  # else a resumed connection goes on
                    del under_way[entry.id]
                if not is_acknowledged:
                    yield entry
    if num_damaged:
        _log.warning("%d lines in the ledger of a router that has died are damaged: they are passed over", num_damaged)
    yield from under_way.values()


def _take(path: Path, own_time: float) -> int | None:
    """The lock's handle; None: its router lives, or another router has taken it."""
    try:
        lock = os.open(path, os.O_RDWR)
    except OSError:
        return None
    try:
        is_here = os.read(lock, 256).decode(errors="replace") == boot_id()
        found = os.stat(path)
        if not is_here and own_time - found.st_mtime < SILENT_S:
            raise BlockingIOError
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.stat(path).st_ino != os.fstat(lock).st_ino:
            raise BlockingIOError
    except OSError:
        os.close(lock)
        return None
    return lock
