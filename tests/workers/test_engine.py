"""The engine, with a loader that runs meanwhile, and with sequences that are cancelled."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from motet.adapters.errors import StoreUnavailable
from motet.adapters.format.tensor_file import Tensor
from motet.adapters.packing.layout import AdapterLayout
from motet.adapters.store.store import AdapterStore
from motet.tests.rigs.engine_rig import Stock
from motet.tests.rigs.given_up_reads import give_up_reads
from motet.tests.rigs.oracle import write_adapters, write_model
from motet.tests.rigs.patience import PATIENCE_S, eventually
from motet.workers.engine_messages import GiveUpWaiting, TokenInterval
from motet.workers.memory import store_readers
from motet.workers.memory.host_adapter_cache import HostAdapterCache
from motet.workers.wire.messages import Cancel, Outdated, SamplingParams, SequenceError

LONG = SamplingParams(max_tokens=100, temperature=0, ignore_eos=True)


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Stock:
    folder = tmp_path_factory.mktemp("engine")
    model = write_model("llama", folder / "model")
    return Stock.make(model, write_adapters(model, folder / "adapters"), folder / "store")


def test_a_sequence_that_waited_too_long_ends_and_a_running_one_goes_on(stock: Stock) -> None:
    with stock.engine(num_pages=60, max_num_sequences=1) as rig:
        rig.submit(0, [1] * 20, None, SamplingParams(max_tokens=3, temperature=0, ignore_eos=True))
        rig.submit(1, [2] * 20, None, LONG)
        rig.step()
        error = SequenceError("overloaded", "it waited")
        for sequence_id in (0, 1, 99):
            rig.engine.receive(GiveUpWaiting(sequence_id, error))
        updates = rig.engine.step()
        assert [update.sequence_id for update in updates if update.error == error] == [1]
        while rig.engine.has_work():
            updates += rig.engine.step()
        assert [update.finish_reason for update in updates if update.finish_reason] == ["length"]
        assert rig.engine.load().gauges.num_running == rig.engine.load().gauges.num_waiting == 0


def test_another_token_interval_is_resolved_for_the_engine_s_device(stock: Stock) -> None:
    with stock.engine(num_pages=60) as rig:
        for setting, expected_s in ((0.25, 0.25), ("auto", 0.1), (0.0, 0.0)):
            rig.engine.receive(TokenInterval(setting))  # type: ignore[arg-type]
            assert rig.engine._scheduler.token_interval_s == expected_s


def test_a_cancel_frees_the_pages_within_two_steps(stock: Stock) -> None:
    with stock.engine(num_pages=60) as rig:
        rig.submit(0, [1] * 20, None, LONG)
        rig.submit(1, [2] * 20, None, LONG)
        for _ in range(5):
            rig.step()
        before = rig.engine.load()
        rig.engine.receive(Cancel(0))
        rig.step()
        after = rig.engine.load()
        assert after.gauges.num_running == 1
        free_before = before.gauges.num_free_pages + before.gauges.num_idle_prefix_pages
        assert after.gauges.num_free_pages + after.gauges.num_idle_prefix_pages >= free_before + 2
        assert after.counters.num_steps - before.counters.num_steps <= 2
        rig.engine.receive(Cancel(1))


def test_steps_go_on_while_an_adapter_is_coming(stock: Stock, monkeypatch: pytest.MonkeyPatch) -> None:
    let_go, get = threading.Event(), HostAdapterCache.get

    def slow(cache: HostAdapterCache, digest: str) -> torch.Tensor:
        assert let_go.wait(PATIENCE_S)
        return get(cache, digest)

    monkeypatch.setattr(HostAdapterCache, "get", slow)
    name = next(iter(stock.refs))
    with stock.engine(num_pages=200) as rig:
        rig.submit(0, [1, 2, 3], None, LONG)
        rig.submit(1, [1, 2, 3], name, LONG)
        for _ in range(10):
            rig.step()
        assert len(rig.outputs[0].token_ids) >= 9
        assert rig.outputs[1].token_ids == []
        let_go.set()
        rig.finish()
        assert len(rig.outputs[1].token_ids) == 100


def test_a_store_that_fails_is_read_again_and_then_named(stock: Stock, monkeypatch: pytest.MonkeyPatch) -> None:
    num_failures, load_packed = 2, AdapterStore.load_packed

    def flaky(store: AdapterStore, digest: str, layout: AdapterLayout) -> Tensor:
        nonlocal num_failures
        if num_failures:
            num_failures -= 1
            raise StoreUnavailable("Stale file handle")
        return load_packed(store, digest, layout)

    monkeypatch.setattr(AdapterStore, "load_packed", flaky)
    monkeypatch.setattr(store_readers, "_PAUSES_S", (0.01, 0.01, 0.01))
    name, short = next(iter(stock.refs)), SamplingParams(max_tokens=3, temperature=0, ignore_eos=True)
    with stock.engine(num_pages=200) as rig:
        rig.submit(0, [1, 2, 3], name, short)
        rig.finish()
        assert (len(rig.outputs[0].token_ids), rig.outputs[0].error) == (3, None)
        assert rig.engine.load().counters.num_failed_reads == 2
    num_failures = 1000
    with stock.engine(num_pages=200) as rig:
        rig.submit(0, [1, 2, 3], name, short, generated=[4, 5])
        rig.finish()
        assert rig.outputs[0].error == SequenceError("store_unavailable", "Stale file handle")
        assert rig.engine.load().counters.num_failed_reads == 4
        rig.assert_idle()
        num_failures = 0
        rig.submit(1, [1, 2, 3], name, short, generated=[4, 5])
        rig.finish()
        assert len(rig.outputs[1].token_ids) == 1


def test_a_read_that_hangs_holds_up_no_other(stock: Stock, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, *_ = stock.refs
    let_go, load_packed = threading.Event(), AdapterStore.load_packed

    def hang(store: AdapterStore, digest: str, layout: AdapterLayout) -> Tensor:
        if digest == stock.refs[first].digest:
            assert let_go.wait(PATIENCE_S)
        return load_packed(store, digest, layout)

    monkeypatch.setattr(AdapterStore, "load_packed", hang)
    short = SamplingParams(max_tokens=3, temperature=0, ignore_eos=True)
    with stock.engine(num_pages=200, store_deadline_s=PATIENCE_S) as rig:
        rig.submit(0, [1, 2, 3], first, short)
        rig.step()
        rig.submit(1, [1, 2, 3], second, short)
        while not rig.outputs[1].ended:
            rig.step()
        assert (len(rig.outputs[1].token_ids), rig.outputs[0].ended) == (3, False)
        give_up_reads(rig.engine.executor.loader._readers, 1)  # type: ignore[attr-defined]
        rig.finish()
        assert rig.outputs[0].error is not None
        assert rig.outputs[0].error.kind == "store_unavailable"
        assert rig.engine.load().gauges.num_hung_reads == 1
        pool = rig.engine.executor.runner._pool  # type: ignore[attr-defined]
        before = pool.clone()
        let_go.set()
        eventually(lambda: rig.engine.executor.loader.host_adapter_stats().num_hung_reads == 0)  # type: ignore[attr-defined]
        assert torch.equal(pool, before), "a load that was given up was copied to pages that it has no more"
        rig.submit(2, [1, 2, 3], first, short)
        rig.finish()
        assert len(rig.outputs[2].token_ids) == 3
        assert rig.engine.load().gauges.num_hung_reads == 0


def test_an_adapter_cancelled_while_it_comes_is_there_for_the_next(stock: Stock) -> None:
    name = next(iter(stock.refs))
    with stock.engine(num_pages=200) as rig:
        rig.submit(0, [1, 2, 3], name, LONG)
        rig.step()
        rig.engine.receive(Cancel(0))
        rig.finish()
        rig.submit(1, [1, 2, 3], name, SamplingParams(max_tokens=3, temperature=0, ignore_eos=True))
        rig.finish()
        assert len(rig.outputs[1].token_ids) == 3
        assert rig.engine.load().counters.num_adapter_loads == 1


def test_what_an_overflowing_adapter_leaves_behind_reaches_no_other_sequence(stock: Stock, tmp_path: Path) -> None:
    """Pages are not cleared when they are freed: NaN in them must not change the next owner's results."""
    name = next(iter(stock.refs))
    with stock.engine(num_pages=60) as rig:
        rig.submit(0, [5, 6, 7], None, LONG)
        rig.finish()
        expected = rig.outputs[0].token_ids
    with stock.engine(num_pages=60) as rig:
        pool = rig.engine.executor.runner._pool  # type: ignore[attr-defined]
        pool.fill_(torch.nan)
        rig.submit(0, [5, 6, 7], None, LONG)
        rig.submit(1, [5, 6, 7], name, LONG)
        rig.finish()
        assert rig.outputs[0].token_ids == expected
        assert rig.outputs[1].error is None


def test_host_memory_does_not_keep_what_no_name_points_to(stock: Stock) -> None:
    old, new, *_ = stock.refs
    short = SamplingParams(max_tokens=3, temperature=0, ignore_eos=True)
    with stock.engine(num_pages=200, host_bytes=1 << 30) as rig:
        for sequence_id, name in enumerate((old, new)):
            rig.submit(sequence_id, [1, 2, 3], name, short)
            rig.finish()
        both = rig.engine.load().gauges.host_adapter_bytes
        rig.engine.receive(Outdated(stock.refs[old].digest))
        rig.submit(2, [1, 2, 3], new, short)
        rig.finish()
        assert 0 < rig.engine.load().gauges.host_adapter_bytes < both
        rig.submit(3, [1, 2, 3], old, short)  # one that began with the old version goes on with it
        rig.finish()
        assert rig.outputs[3].token_ids == rig.outputs[0].token_ids
