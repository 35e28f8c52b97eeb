"""Entries of the ledger on disk, a file for each tenant's life and day: JSON lines, compressed.

`<root>/2026-11-22/acme.jsonl.gz` has what was taken in on that day (UTC, by Redis's clock), each line `{"n": number in
the tenant's stream, "e": entry}`; `acme~1.jsonl.gz` has those of who was called so after `acme` was deleted once. What
a tenant used follows from these files alone: `merged` of entry.py, by id.
"""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import BinaryIO, Final

import msgspec

from ..store.durable_file import make_folder, replacing
from .ledger import Ledger, RawEntry


class ArchivedEntry(msgspec.Struct, frozen=True):
    n: str
    e: msgspec.Raw


_encode: Final = msgspec.json.Encoder().encode
_decode: Final = msgspec.json.Decoder(ArchivedEntry).decode


class LedgerArchive:
    """Moves entries of days that have passed from Redis to files. Any number of processes may do so at a time."""

    def __init__(self, ledger: Ledger, root: Path) -> None:
        self._ledger, self._root = ledger, root

    async def archive(self, life: str, now: datetime) -> int:
        """Archives days that are older than the ledger keeps; returns how many. Raises RegistryUnavailable, OSError.

        A day's entries leave Redis only when their file survives a crash of the machine.
        """
        return await self._archive_before(life, now.date() - timedelta(days=self._ledger.kept_days))

    async def archive_all(self, now: datetime) -> int:
        """The same for all tenants."""
        return sum([await self.archive(life, now) for life in await self._ledger.lives()])

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
        while (day := await self._ledger.first_day(life)) is not None and day < end:
            await self._archive_day(life, day)
            await self._ledger.trim(life, day)
            num_days += 1
        return num_days

    async def _archive_day(self, life: str, day: date) -> None:
        path, temporary = self.path(life, day), self._root / "tmp"
        for folder in (path.parent, temporary):
            await asyncio.to_thread(make_folder, folder)
        # What an archivist that died before it trimmed has written, or what came before the tenant was deleted.
        held = await asyncio.to_thread(_lines, path)
        writing = _writing(path, temporary)
        file = await asyncio.to_thread(writing.__enter__)
        try:
            for line in held.values():
                await asyncio.to_thread(file.write, line)
            async for page in self._ledger.entries_of(life, day):
                new = b"".join(_line(entry) for entry in page if entry.number not in held)
                await asyncio.to_thread(file.write, new)
        except BaseException as error:
            await asyncio.to_thread(writing.__exit__, type(error), error, error.__traceback__)
            raise
        await asyncio.to_thread(writing.__exit__, None, None, None)


@contextmanager
def _writing(path: Path, temporary: Path) -> Iterator[BinaryIO]:
    with replacing(path, temporary) as file, gzip.GzipFile(fileobj=file, mode="wb", mtime=0) as packed:
        yield packed  # type: ignore[misc]  # it writes as a file does


def _line(entry: RawEntry) -> bytes:
    return _encode(ArchivedEntry(entry.number, msgspec.Raw(entry.text.encode()))) + b"\n"


def _lines(path: Path) -> dict[str, bytes]:
    """The lines of a file by their numbers; none if there is no such file."""
    if not path.exists():
        return {}
    with gzip.open(path) as file:
        return {_decode(line).n: line for line in file}
