"""Reads of a store that have hung for too long."""

from __future__ import annotations

from typing import Any

from motet.tests.rigs.patience import eventually
from motet.workers.memory.store_readers import StoreReaders


def give_up_reads(readers: StoreReaders[Any], count: int) -> None:
    """Has the deadline of so many reads come once all of them are in the store, however late a thread begins them."""
    eventually(lambda: len(readers._reading) == count)
    with readers._changed:
        for read in readers._reading:
            read.deadline = 0.0
        readers._changed.notify_all()
