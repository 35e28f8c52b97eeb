"""Entries of the ledger on disk, a file for each tenant's life and day: JSON lines, compressed.

`<root>/2026-11-22/acme.jsonl.gz` has what was taken in on that day (UTC, by Redis's clock), each line `{"n": number in
the tenant's stream, "e": entry}`; `acme~1.jsonl.gz` has those of who was called so after `acme` was deleted once. What
a tenant used follows from these files alone: `merged` of entry.py, by id.
"""

from __future__ import annotations

import asyncio
import fcntl
import gzip
import logging
import os
import shutil
import zlib
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import BinaryIO, Final

import msgspec

from ...errors import RegistryUnavailable
from ...store.durable_file import make_folder, replacing
from .ledger import Ledger, RawEntry

_LOCK_INTERVAL_S: Final = 0.05
_NUM_NAMED: Final = 5  # of those that could not be archived
_MOST_LINE_BYTES: Final = 1 << 20  # what is longer is no entry
_log = logging.getLogger(__name__)
_Version = tuple[int, int, int] | None  # of a file, None: there is none


class ArchivedEntry(msgspec.Struct, frozen=True):
    n: str
    e: msgspec.Raw


_encode: Final = msgspec.json.Encoder().encode
_decode: Final = msgspec.json.Decoder(ArchivedEntry).decode


class LedgerArchive:
    """Moves entries of days that have passed from Redis to files. Any number of processes may do so at a time.

    A file that is damaged is copied to `….damaged`, and what could be read of it stays.
    """

    def __init__(self, ledger: Ledger, root: Path) -> None:
        self._ledger, self._root = ledger, root

    async def archive(self, life: str, now: datetime) -> int:
        """Archives days that are older than the ledger keeps; returns how many. Raises RegistryUnavailable, OSError.

        A day's entries leave Redis only when their file survives a crash of the machine.
        """
        return await self._archive_before(life, now.date() - timedelta(days=self._ledger.kept_days))

    async def archive_all(self, now: datetime) -> int:
        """The same for all tenants. Raises OSError when all others are archived, if some could not be."""
        num_days, failed, last = 0, list[str](), None
        for life in await self._ledger.lives():
            try:
                num_days += await self.archive(life, now)
            except RegistryUnavailable:
                raise
            except Exception as error:
                if not isinstance(error, OSError):
                    _log.exception("the ledger of %s could not be archived", life)
                failed.append(life)
                last = error
        if failed:
            names = ", ".join(failed[:_NUM_NAMED])
            message = f"{len(failed)} ledgers could not be archived, such as those of {names}: {last}"
            raise OSError(message) from last
        return num_days

    async def retire(self, life: str, now: datetime) -> None:
        """Archives all of a tenant's entries, and removes its ledger: the tenant is deleted.

        Those that come later stay until their day is archived; nobody is shown them.
        """
        await self._archive_before(life, now.astimezone(UTC).date() + timedelta(days=2))
        await self._ledger.remove(life, now)

    def path(self, life: str, day: date) -> Path:
        return self._root / day.isoformat() / f"{life}.jsonl.gz"

    async def _archive_before(self, life: str, end: date) -> int:
        num_days = 0
        async with self._locked(life):
            while (day := await self._ledger.first_day(life)) is not None and day < end:
                await self._archive_day(life, day)
                await self._ledger.trim(life, day)
                num_days += 1
        return num_days

    @asynccontextmanager
    async def _locked(self, life: str) -> AsyncIterator[None]:
        """Waits until nobody else archives this life. Where the file system has no locks it does not wait."""
        folder = self._root / "locks"
        await asyncio.to_thread(make_folder, folder)
        with await asyncio.to_thread((folder / life).open, "ab") as file:
            while not await asyncio.to_thread(_lock, file):  # noqa: ASYNC110
                await asyncio.sleep(_LOCK_INTERVAL_S)
            yield

    async def _archive_day(self, life: str, day: date) -> None:
        while not await self._has_written(life, day):
            pass  # each time somebody else has, so that this ends

    async def _has_written(self, life: str, day: date) -> bool:
        """False: the file was replaced meanwhile, by one whom no lock kept from it.

        Then it has what it was before it trimmed, which is missing here, and stays.
        """
        path, temporary = self.path(life, day), self._root / "tmp"
        for folder in (path.parent, temporary):
            await asyncio.to_thread(make_folder, folder)
        before = await asyncio.to_thread(_version, path)
        writing = _writing(path, temporary, before)
        file = await asyncio.to_thread(writing.__enter__)
        try:
            # What an archivist that died before it trimmed has written, or what came before the tenant was deleted.
            held = await asyncio.to_thread(_copy_lines, path, temporary, file)
            async for page in self._ledger.entries_of(life, day):
                new = b"".join(_line(entry) for entry in page if entry.number not in held)
                await asyncio.to_thread(file.write, new)
        except BaseException as error:
            await asyncio.to_thread(writing.__exit__, type(error), error, error.__traceback__)
            raise
        try:
            await asyncio.to_thread(writing.__exit__, None, None, None)
        except _ReplacedError:
            return False
        return True


class _ReplacedError(Exception):
    """Somebody else has replaced the file."""


@contextmanager
def _writing(path: Path, temporary: Path, before: _Version) -> Iterator[BinaryIO]:
    with replacing(path, temporary) as file:
        with gzip.GzipFile(fileobj=file, mode="wb", mtime=0) as packed:
            yield packed  # type: ignore[misc]  # it writes as a file does
        file.flush()
        os.fsync(file.fileno())  # which may take long: nearly nothing is left to do after the look at the file
        if _version(path) != before:
            raise _ReplacedError


def _version(path: Path) -> _Version:
    """Another one for each file that was ever at this path."""
    try:
        with path.open("rb") as file:  # opened, since a network's file system may tell old news of one that is not
            found = os.fstat(file.fileno())
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


def _lock(file: BinaryIO) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        _log.debug("the archive's file system has no locks: %s", error)
    return True


def _line(entry: RawEntry) -> bytes:
    return _encode(ArchivedEntry(entry.number, msgspec.Raw(entry.text.encode()))) + b"\n"


def _copy_lines(path: Path, temporary: Path, target: BinaryIO) -> set[str]:
    """Copies what a file has, a line at a time, and returns the lines' numbers; none if there is no such file."""
    numbers = set[str]()
    if not path.exists():
        return numbers
    damage: Exception | None = None
    try:
        with gzip.open(path) as file:
            while line := file.readline(_MOST_LINE_BYTES):
                try:
                    number = _decode(line).n
                except (msgspec.DecodeError, UnicodeDecodeError) as error:
                    damage = error
                    continue
                if number not in numbers:
                    numbers.add(number)
                    target.write(line.removesuffix(b"\n") + b"\n")
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        damage = error
    if damage is not None:
        aside = path.with_name(f"{path.name}.{path.stat().st_mtime_ns}.damaged")  # one name however often it is tried
        with path.open("rb") as file, replacing(aside, temporary) as copy:
            shutil.copyfileobj(file, copy)
        _log.error("%s is damaged (%s): it is kept as %s, and %d entries go on", path, damage, aside, len(numbers))
    return numbers
