"""The cache keeps the adapters that were used last, within its bytes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from motet.adapters.errors import AdapterCorrupt
from motet.adapters.format.tensor_file import BFLOAT16, Tensor
from motet.workers.memory.host_adapter_cache import FULL, HostAdapterCache, as_torch, kept_pins


class Disk:
    """Stands in for the store: 100 bytes an adapter, and a count of reads."""

    def __init__(self) -> None:
        self.reads: list[str] = []

    def load_packed(self, digest: str, layout: object) -> Tensor:
        self.reads.append(digest)
        if digest == "bad":
            raise AdapterCorrupt("its file is cut short")
        return np.zeros(100, np.uint8)


def cache_of(max_bytes: int) -> tuple[HostAdapterCache, Disk]:
    disk = Disk()
    return HostAdapterCache(disk, None, max_bytes), disk  # type: ignore[arg-type]


def test_recent_adapters_are_not_read_again() -> None:
    cache, disk = cache_of(250)
    for digest in ("a", "b", "a", "c", "a", "b"):
        cache.get(digest)
        assert cache.num_bytes <= 250
    assert disk.reads == ["a", "b", "c", "b"]
    assert cache.num_reads == 4


def test_an_adapter_larger_than_the_cache_passes_through() -> None:
    cache, disk = cache_of(50)
    assert cache.get("a").nbytes == 100
    cache.get("a")
    assert (disk.reads, cache.num_reads, cache.num_bytes) == (["a", "a"], 2, 0)


def test_a_corrupt_adapter_is_not_kept() -> None:
    cache, disk = cache_of(250)
    for _ in range(2):
        with pytest.raises(AdapterCorrupt, match="cut short"):
            cache.get("bad")
    assert disk.reads == ["bad", "bad"]


@pytest.mark.parametrize("dtype", [np.dtype(np.float32), BFLOAT16])
def test_what_numpy_read_is_not_copied_for_torch(dtype: np.dtype[np.generic]) -> None:
    pages = np.arange(24).reshape(2, 3, 4).astype(dtype)
    seen = as_torch(pages)
    assert seen.dtype == getattr(torch, dtype.name)
    assert torch.equal(seen, torch.arange(24).reshape(2, 3, 4).to(seen.dtype))
    assert seen.data_ptr() == pages.ctypes.data


def test_what_is_forgotten_takes_no_room() -> None:
    cache, disk = cache_of(250)
    cache.get("a")
    cache.get("b")
    for digest in ("a", "a", "unknown"):
        cache.forget(digest)
    assert (cache.num_bytes, cache.find("a")) == (100, None)
    cache.get("b")
    assert disk.reads == ["a", "b"]


def test_what_came_and_went_is_reported_once() -> None:
    cache, _ = cache_of(250)
    assert cache.take_changes() == ((), ())
    for digest in ("a", "b"):
        cache.get(digest)
    assert cache.take_changes() == (("a", "b"), ())
    cache.get("c")
    assert cache.take_changes() == (("c",), ("a",))
    cache.get("b")
    assert cache.take_changes() == ((), ())
    cache.forget("b")
    cache.forget("unknown")
    assert cache.take_changes() == ((), ("b",))


def test_pinned_adapters_stay_whatever_else_comes() -> None:
    cache, disk = cache_of(600)
    cache.get("a")
    cache.pin({"a": True, "b": True})
    assert cache.next_to_pin() == "b"
    cache.get("b")
    assert cache.next_to_pin() is None
    for number in range(20):
        cache.get(f"other {number}")
        cache.check_integrity()
    num_reads = len(disk.reads)
    cache.forget("a")  # a router that does not know of the pin yet says that no name points to it
    assert cache.find("a") is not None and cache.find("b") is not None
    assert (cache.num_bytes, cache.num_pinned_bytes, len(disk.reads)) == (600, 200, num_reads)
    cache.pin({"a": False})
    for number in range(20):
        cache.get(f"another {number}")
    assert cache.find("a") is None and cache.find("b") is not None


def test_pins_without_room_are_reported_and_come_when_there_is_room() -> None:
    cache, disk = cache_of(400)
    for digest in ("c", "b", "a"):
        cache.pin({digest: True})
        while (lacking := cache.next_to_pin()) is not None:
            cache.get(lacking)
    assert cache.take_pin_news() == {"a": FULL}
    assert cache.take_pin_news() == {}
    assert cache.find("a") is None, "what was not requested pushes out nothing"
    cache.pin({"c": False})
    assert cache.take_pin_news() == {"a": ""}
    assert cache.next_to_pin() == "a"
    cache.get("a")
    assert cache.num_pinned_bytes == 200
    assert disk.reads == ["c", "b", "a", "a"]


def test_a_pin_that_cannot_be_read_says_why_until_it_can() -> None:
    cache, _ = cache_of(400)
    cache.pin({"a": True, "b": True})
    assert cache.next_to_pin() == "a"
    cache.fail_pin("a", "the store hangs", again=True)
    assert cache.next_to_pin() == "b"
    cache.fail_pin("b", "cut short", again=False)
    assert cache.take_pin_news() == {"a": "the store hangs", "b": "cut short"}
    assert cache.next_to_pin() == "a"
    cache.get("a")
    assert cache.next_to_pin() is None
    cache.get("b")  # a sequence asks for it
    assert cache.take_pin_news() == {"a": "", "b": ""}
    assert cache.num_pinned_bytes == 200


operations = st.lists(
    st.tuples(st.sampled_from(["get", "pin", "unpin", "forget", "read", "fail"]), st.sampled_from("abcdefghij")),
    max_size=60,
)


@given(operations, st.integers(0, 1200))
def test_pins_never_exceed_half_and_are_never_evicted(done: list[tuple[str, str]], max_bytes: int) -> None:
    cache, _ = cache_of(max_bytes)
    pinned: set[str] = set()
    kept: set[str] = set()
    for what, digest in done:
        match what:
            case "get":
                cache.get(digest)
            case "pin" | "unpin":
                cache.pin({digest: what == "pin"})
                (pinned.add if what == "pin" else pinned.discard)(digest)
            case "forget":
                cache.forget(digest)
            case "fail":
                cache.fail_pin(digest, "why", again=True)
            case "read":
                if (lacking := cache.next_to_pin()) is not None:
                    cache.get(lacking)
        cache.check_integrity()
        assert cache.num_pinned_bytes <= max_bytes // 2
        kept &= pinned
        assert all(cache.find(one) is not None for one in kept), "a pinned adapter was evicted"
        kept |= {one for one in pinned if cache._pins.find(one) is not None}
    for _ in range(20):  # however it was, all that has room comes
        if (lacking := cache.next_to_pin()) is not None:
            cache.get(lacking)
    assert cache.next_to_pin() is None
    assert cache.num_pinned_bytes == 100 * min(len(pinned), max_bytes // 200)


@given(st.integers(0, 100), st.dictionaries(st.text("abc", min_size=1, max_size=3), st.integers(1, 60)))
def test_pins_that_get_room_fit_and_nothing_else_would(free: int, waiting: dict[str, int]) -> None:
    kept = kept_pins(free, waiting)
    left = free - sum(waiting[digest] for digest in kept)
    assert left >= 0 and kept == sorted(kept)
    assert all(waiting[digest] > left for digest in waiting if digest not in kept)
