"""Entries of the ledger on disk, a file for each tenant and day: JSON lines, compressed.

`<root>/2026-11-22/acme.jsonl.gz` has the answers that began on that day (UTC), each line `{"n": digest of the line,
"e": entry}`; `acme~1.jsonl.gz` has those of the tenant that was called `acme` after the first one was deleted. Two
lines of one id are merged by `merged` of entry.py. What a tenant used follows from these files alone.

Versions before records wrote what was taken in on that day, with its number in a stream as `n`.
"""

from __future__ import annotations

import asyncio
import fcntl
import gzip
import logging
import os
import shutil
import zlib
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from datetime import date, datetime, timedelta
from hashlib import blake2b
from pathlib import Path
from typing import BinaryIO, Final

import msgspec

from ...errors import RegistryUnavailable
from ...store.durable_file import make_folder, replacing
from .ledger import Ledger, PendingDay

_LOCK_INTERVAL_S: Final = 0.05
_NUM_NAMED: Final = 5  # of ledgers that could not be archived
_MOST_LINE_BYTES: Final = 1 << 20  # a longer line is not an entry
_log = logging.getLogger(__name__)
_Version = tuple[int, int, int] | None  # of a file, None: there is none
_Pages = AsyncIterator[list[tuple[str, bytes]]]  # of a day's lines: the name of each, and its entry as JSON


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
        self._folded: dict[str, str] = {}  # in which month the users of a tenant's ledger were folded last

    async def archive(self, tenant_id: str, now: datetime) -> int:
        """Archives days that have not changed for longer than the ledger keeps them; returns how many.

        A day's entries leave Redis only when their file survives a crash of the machine. Raises RegistryUnavailable,
        OSError.
        """
        num_days = 0
        async with self._locked(tenant_id):
            await self._archive_old(tenant_id)
            end_us = (now - timedelta(days=self._ledger.kept_days)).timestamp() * 1e6
            for pending in await self._ledger.pending_days(tenant_id):
                if pending.changed_us < end_us:
                    num_days += await self._archive_pending(tenant_id, pending)
        return num_days

    async def archive_all(self, now: datetime) -> int:
        """The same for all tenants; single users' sums of old months are added up.

        Raises OSError when all others are archived, if some could not be.
        """
        num_days, failed, last = 0, list[str](), None
        for tenant_id in await self._ledger.tenant_ids():
            try:
                num_days += await self.archive(tenant_id, now)
                await self._fold_users(tenant_id, now)
            except RegistryUnavailable:
                raise
            except Exception as error:
                if not isinstance(error, OSError):
                    _log.exception("the ledger of %s could not be archived", tenant_id)
                failed.append(tenant_id)
                last = error
        if failed:
            names = ", ".join(failed[:_NUM_NAMED])
            message = f"{len(failed)} ledgers could not be archived, such as those of {names}: {last}"
            raise OSError(message) from last
        return num_days

    async def _fold_users(self, tenant_id: str, now: datetime) -> None:
        month = f"{now:%Y%m}"
        if self._folded.get(tenant_id) != month:
            await self._ledger.fold_users(tenant_id, now.date())
            self._folded[tenant_id] = month

    async def retire(self, tenant_id: str, now: datetime) -> None:
        """Archives all of a tenant's entries, and removes its ledger: the tenant is deleted.

        Those that come later stay until their day is archived, and no question for usage shows them.
        """
        async with self._locked(tenant_id):
            await self._archive_old(tenant_id)
            while days := await self._ledger.pending_days(tenant_id):
                for pending in days:
                    await self._archive_pending(tenant_id, pending)
            await self._ledger.remove(tenant_id, now)
        self._folded.pop(tenant_id, None)

    def path(self, tenant_id: str, day: date) -> Path:
        return self._root / day.isoformat() / f"{tenant_id}.jsonl.gz"

    async def _archive_pending(self, tenant_id: str, pending: PendingDay) -> bool:
        await self._archive_day(tenant_id, pending.day, lambda: self._lines_of(tenant_id, pending.day))
        return await self._ledger.remove_day(tenant_id, pending)

    async def _archive_old(self, tenant_id: str) -> None:
        """Archives the stream of versions before records."""
        while (day := await self._ledger.first_old_day(tenant_id)) is not None:
            last = ""

            async def lines(day: date = day) -> _Pages:
                nonlocal last
                async for page in self._ledger.old_entries_of(tenant_id, day):
                    last = page[-1].number
                    yield [(entry.number, entry.text.encode()) for entry in page]

            await self._archive_day(tenant_id, day, lines)
            if last:  # else another archivist has trimmed it
                await self._ledger.trim_old(tenant_id, last)

    async def _lines_of(self, tenant_id: str, day: date) -> _Pages:
        async for page in self._ledger.entries_of(tenant_id, day):
            texts = [_encode(entry) for entry in page]
            yield [(blake2b(text, digest_size=8).hexdigest(), text) for text in texts]

    @asynccontextmanager
    async def _locked(self, tenant_id: str) -> AsyncIterator[None]:
        """Waits until no other archivist works on this tenant. Where the file system has no locks it does not wait."""
        folder = self._root / "locks"
        await asyncio.to_thread(make_folder, folder)
        with await asyncio.to_thread((folder / tenant_id).open, "ab") as file:
            while not await asyncio.to_thread(_lock, file):  # noqa: ASYNC110
                await asyncio.sleep(_LOCK_INTERVAL_S)
            yield

    async def _archive_day(self, tenant_id: str, day: date, lines: Callable[[], _Pages]) -> None:
        while not await self._has_written(tenant_id, day, lines()):
            pass  # another archivist has, which happens seldom

    async def _has_written(self, tenant_id: str, day: date, pages: _Pages) -> bool:
        """False: another archivist, which no lock held off, has replaced the file meanwhile.

        That file stays: it may have entries that have left Redis since.
        """
        path, temporary = self.path(tenant_id, day), self._root / "tmp"
        for folder in (path.parent, temporary):
            await asyncio.to_thread(make_folder, folder)
        before = await asyncio.to_thread(_version, path)
        writing = _writing(path, temporary, before)
        file = await asyncio.to_thread(writing.__enter__)
        try:
            # What another archivist wrote, or this one before more entries came.
            entry_names = await asyncio.to_thread(_copy_lines, path, temporary, file)
            async for page in pages:
                new = b"".join(_line(name, text) for name, text in page if name not in entry_names)
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
    """Another archivist has replaced the file."""


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
        with path.open("rb") as file:  # opened: a network's file system may show old attributes of a file that is not
            stat = os.fstat(file.fileno())
    except FileNotFoundError:
        return None
    return stat.st_ino, stat.st_mtime_ns, stat.st_size


def _lock(file: BinaryIO) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        _log.debug("the archive's file system has no locks: %s", error)
    return True


def _line(name: str, text: bytes) -> bytes:
    return _encode(ArchivedEntry(name, msgspec.Raw(text))) + b"\n"


def _copy_lines(path: Path, temporary: Path, target: BinaryIO) -> set[str]:
    """Copies what a file has, a line at a time, and returns the lines' names; none if there is no such file."""
    names = set[str]()
    if not path.exists():
        return names
    damage: Exception | None = None
    try:
        with gzip.open(path) as file:
            while line := file.readline(_MOST_LINE_BYTES):
                try:
                    name = _decode(line).n
                except (msgspec.DecodeError, UnicodeDecodeError) as error:
                    damage = error
                    continue
                if name not in names:
                    names.add(name)
                    target.write(line.removesuffix(b"\n") + b"\n")
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        damage = error
    if damage is not None:
        aside = path.with_name(f"{path.name}.{path.stat().st_mtime_ns}.damaged")  # one name however often it is tried
        with path.open("rb") as file, replacing(aside, temporary) as copy:
            shutil.copyfileobj(file, copy)
        _log.error("%s is damaged (%s): it is kept as %s, and %d entries go on", path, damage, aside, len(names))
    return names
