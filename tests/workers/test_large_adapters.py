"""Adapters larger than host memory for adapters: read and copied in parts, never held whole."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from motet.adapters.errors import AdapterError, StoreUnavailable
from motet.adapters.format.tensor_file import Tensor
from motet.adapters.packing.layout import AdapterLayout
from motet.adapters.packing.packed_file import PagesPart
from motet.adapters.packing.packing import packed_chunks
from motet.adapters.store import store as store_module
from motet.adapters.store.store import AdapterStore
from motet.tests.rigs.engine_rig import EngineRig, Stock
from motet.tests.rigs.oracle import write_adapters, write_model
from motet.workers.memory import host_adapter_cache, store_readers
from motet.workers.memory.host_adapter_cache import FULL, HostAdapterCache, as_torch
from motet.workers.wire.messages import SamplingParams, SequenceError

SHORT = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Stock:
    folder = tmp_path_factory.mktemp("large")
    model = write_model("llama", folder / "model")
    return Stock.make(model, write_adapters(model, folder / "adapters"), folder / "store")


@pytest.fixture
def parts(stock: Stock, monkeypatch: pytest.MonkeyPatch) -> list[PagesPart]:
    """Of two pages each: those that are read, in order. What is packed anew is packed so, too."""
    found: list[PagesPart] = []
    load_part = AdapterStore.load_part

    def load(store: AdapterStore, digest: str, layout: AdapterLayout, part: PagesPart) -> Tensor:
        found.append(part)
        return load_part(store, digest, layout, part)

    chunk_bytes = 2 * stock.page_bytes
    monkeypatch.setattr(AdapterStore, "load_part", load)
    monkeypatch.setattr(host_adapter_cache, "PART_BYTES", chunk_bytes)
    monkeypatch.setattr(store_module, "packed_chunks", partial(packed_chunks, chunk_bytes=chunk_bytes))
    return found


def name_of(stock: Stock) -> str:
    """One that takes several parts, and not an even number of pages or parts that all are full."""
    return max(stock.refs, key=lambda name: stock.layout.num_pages(stock.refs[name].module_ranks))


def engine(stock: Stock) -> EngineRig:
    return stock.engine(num_pages=200, host_bytes=stock.page_bytes)


def ask(rig: EngineRig, number: int, name: str) -> list[int]:
    rig.submit(number, [1, 2, 3], name, SHORT)
    rig.finish()
    assert rig.outputs[number].error is None
    return rig.outputs[number].token_ids


def packed_file(stock: Stock, name: str) -> Path:
    digest = stock.refs[name].digest
    return stock.store_path / digest[:2] / digest / f"{stock.layout.key}.packed"


def assert_pages_are_right(rig: EngineRig, stock: Stock, name: str) -> None:
    digest = stock.refs[name].digest
    pages = rig.engine._scheduler.memory.adapters.residence(digest).pages
    expected = as_torch(AdapterStore(stock.store_path).load_packed(digest, stock.layout))
    assert torch.equal(rig.engine.executor.runner._pool[list(pages)], expected)  # type: ignore[attr-defined]


def test_its_pages_come_in_parts_and_host_memory_holds_none(stock: Stock, parts: list[PagesPart]) -> None:
    name = name_of(stock)
    num_pages = stock.layout.num_pages(stock.refs[name].module_ranks)
    assert num_pages > 4
    with engine(stock) as rig:
        tokens = ask(rig, 0, name)
        assert_pages_are_right(rig, stock, name)
        assert parts == [PagesPart(at, min(at + 2, num_pages), num_pages) for at in range(0, num_pages, 2)]
        load = rig.engine.load()
        assert (load.gauges.host_adapter_bytes, load.counters.num_adapter_reads) == (0, 1)
    with stock.engine(num_pages=200, host_bytes=1 << 30) as rig:
        assert ask(rig, 0, name) == tokens


@pytest.mark.parametrize("harm", ["missing", "damaged at its end"])
def test_it_is_packed_again_where_that_is_needed(stock: Stock, parts: list[PagesPart], harm: str) -> None:
    name = name_of(stock)
    path = packed_file(stock, name)
    before = path.read_bytes()
    if harm == "missing":
        path.unlink()
    else:
        path.write_bytes(before[:-1] + bytes([before[-1] ^ 1]))
    with engine(stock) as rig:
        ask(rig, 0, name)
        assert path.read_bytes() == before
        assert_pages_are_right(rig, stock, name)


def test_a_part_that_cannot_be_read_fails_the_load(
    stock: Stock, parts: list[PagesPart], monkeypatch: pytest.MonkeyPatch
) -> None:
    name, is_away, load_part = name_of(stock), True, AdapterStore.load_part

    def load(store: AdapterStore, digest: str, layout: AdapterLayout, part: PagesPart) -> Tensor:
        if is_away and part.start == 4:
            raise StoreUnavailable("Stale file handle")
        return load_part(store, digest, layout, part)

    monkeypatch.setattr(AdapterStore, "load_part", load)
    monkeypatch.setattr(store_readers, "_PAUSES_S", (0.01,))
    with engine(stock) as rig:
        rig.submit(0, [1, 2, 3], name, SHORT)
        rig.finish()
        assert rig.outputs[0].error == SequenceError("store_unavailable", "Stale file handle")
        rig.assert_idle()
        is_away = False
        ask(rig, 1, name)
        assert_pages_are_right(rig, stock, name)


def test_a_pin_without_room_is_not_read(stock: Stock, parts: list[PagesPart]) -> None:
    name = name_of(stock)
    digest = stock.refs[name].digest
    cache = HostAdapterCache(AdapterStore(stock.store_path), stock.layout, 6 * stock.page_bytes)
    cache.pin({digest: True})
    assert cache.next_to_pin() == digest
    with pytest.raises(AdapterError, match=FULL):
        cache.get_pinned(digest)
    assert (cache.num_reads, cache.num_bytes, cache.take_pin_news()) == (0, 0, {digest: FULL})
    cache.fail_pin(digest, FULL, again=False)
    assert (cache.next_to_pin(), cache.take_pin_news()) == (None, {})
    cache.check_integrity()
