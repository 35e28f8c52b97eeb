"""Reads of the store that fail, hang, come back late, and are too many."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from queue import SimpleQueue

import pytest

from motet.adapters.errors import AdapterCorrupt, StoreUnavailable
from motet.tests.rigs.given_up_reads import give_up_reads
from motet.tests.rigs.patience import PATIENCE_S, eventually
from motet.workers.memory import store_readers
from motet.workers.memory.store_readers import StoreReaders


class Disk:
    """Reads a digest as its capital letters. Those in `hanging` hang until they are let go; "bad" is damaged."""

    def __init__(self) -> None:
        self.num_reads: Counter[str] = Counter()
        self.num_failures: Counter[str] = Counter()  # that are still to come
        self.hanging: dict[str, threading.Event] = {}

    def hang(self, *digests: str) -> None:
        self.hanging |= {digest: threading.Event() for digest in digests}

    def read(self, digest: str) -> str:
        self.num_reads[digest] += 1
        if digest in self.hanging:
            assert self.hanging[digest].wait(PATIENCE_S)
        if self.num_failures[digest]:
            self.num_failures[digest] -= 1
            raise StoreUnavailable("Stale file handle")
        if digest == "bad":
            raise AdapterCorrupt("damaged")
        return digest.upper()


class Rig:
    def __init__(self, deadline_s: float) -> None:
        self.disk = Disk()
        self.readers: StoreReaders[str] = StoreReaders(self.disk.read, deadline_s)
        self.ends: SimpleQueue[tuple[str, str | Exception]] = SimpleQueue()

    def begin(self, *digests: str) -> None:
        for digest in digests:
            self.readers.begin(digest, lambda end, digest=digest: self.ends.put((digest, end)))  # type: ignore[misc]

    def next_ends(self, count: int) -> dict[str, str | Exception]:
        return dict(self.ends.get(timeout=PATIENCE_S) for _ in range(count))

    def close(self) -> None:
        for event in self.disk.hanging.values():
            event.set()
        self.readers.close()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_readers, "_PAUSES_S", (0.01, 0.02))


@pytest.fixture
def patient(quick: None) -> Iterator[Rig]:
    rig = Rig(PATIENCE_S)
    yield rig
    rig.close()


@pytest.fixture
def hasty(quick: None) -> Iterator[Rig]:
    rig = Rig(0.3)
    yield rig
    rig.close()


def test_what_fails_is_tried_again_so_often_and_no_oftener(patient: Rig) -> None:
    patient.disk.num_failures.update({"a": 2, "b": 3})
    patient.begin("a", "b", "bad")
    ends = patient.next_ends(3)
    assert ends["a"] == "A"
    assert isinstance(ends["b"], StoreUnavailable)
    assert isinstance(ends["bad"], AdapterCorrupt)
    assert patient.disk.num_reads == {"a": 3, "b": 3, "bad": 1}  # damage does not go away
    assert patient.readers.num_failed == 5


def test_others_are_read_beside_one_that_hangs(patient: Rig) -> None:
    patient.disk.hang("slow")
    patient.begin("slow", "a", "b")
    assert patient.next_ends(2) == {"a": "A", "b": "B"}
    patient.disk.hanging["slow"].set()
    assert patient.next_ends(1) == {"slow": "SLOW"}
    assert patient.readers.num_hung == 0


def test_one_that_hangs_is_given_up_and_its_place_is_taken(patient: Rig) -> None:
    stuck = [f"stuck {number}" for number in range(4)]
    patient.disk.hang(*stuck)
    patient.begin(*stuck)
    give_up_reads(patient.readers, 4)
    assert all(isinstance(end, StoreUnavailable) for end in patient.next_ends(4).values())
    assert patient.readers.num_hung == 4
    patient.begin("a")
    assert patient.next_ends(1) == {"a": "A"}
    for event in patient.disk.hanging.values():
        event.set()
    eventually(lambda: patient.readers.num_hung == 0)
    assert patient.ends.empty(), "the end of a read was reported twice"


def test_when_all_hang_reads_fail_at_once_until_one_comes_back(hasty: Rig) -> None:
    stuck = [f"stuck {number}" for number in range(12)]
    hasty.disk.hang(*stuck)
    num_threads = threading.active_count()
    hasty.begin(*stuck)
    hasty.next_ends(12)
    while hasty.readers.num_hung < 12:  # those that had waited behind the first ones were given up there
        hasty.begin(*(digest for digest in stuck if not hasty.disk.num_reads[digest]))
        eventually(lambda: not hasty.ends.empty())
        while not hasty.ends.empty():
            hasty.ends.get()
    assert threading.active_count() <= num_threads + 13
    hasty.begin("a")
    assert isinstance(dict([hasty.ends.get_nowait()])["a"], StoreUnavailable)
    hasty.disk.hanging[stuck[0]].set()
    eventually(lambda: hasty.readers.num_hung < 12)
    hasty.readers._deadline_s = PATIENCE_S
    hasty.begin("a")
    assert hasty.next_ends(1) == {"a": "A"}
