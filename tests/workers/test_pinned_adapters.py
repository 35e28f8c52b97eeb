"""Pinned adapters stay in host memory on a real engine; and what a leader makes of its routers' words."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from motet.adapters.store.store import AdapterStore
from motet.tests.rigs.engine_rig import EngineRig, Stock
from motet.tests.rigs.oracle import write_adapters, write_model
from motet.tests.rigs.patience import eventually
from motet.workers.engine_messages import PinChanges
from motet.workers.memory import adapter_loader
from motet.workers.memory.host_adapter_cache import FULL
from motet.workers.memory.pinned_adapters import FORGET_S, PinnedAdapters
from motet.workers.wire.messages import Pinned, ResidencyChange, SamplingParams
from motet.workers.wire.page_keys import short_digest

ONE = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Stock:
    folder = tmp_path_factory.mktemp("pinned")
    model = write_model("llama", folder / "model")
    return Stock.make(model, write_adapters(model, folder / "adapters"), folder / "store")


class Host:
    """What the engine has reported of its host memory, as a leader keeps it."""

    def __init__(self, rig: EngineRig) -> None:
        self.rig, self.hosted, self.failed = rig, set[int](), dict[int, str]()

    def step(self) -> ResidencyChange:
        self.rig.step()
        change = self.rig.engine.take_residency_changes()
        self.hosted = (self.hosted - {*change.hosted_went}) | {*change.hosted_came}
        self.failed |= change.pin_news
        return change

    def has(self, adapter: str) -> bool:
        self.step()
        return short_digest(self.rig.refs[adapter].digest) in self.hosted

    def failure(self, adapter: str) -> str | None:
        self.step()
        return self.failed.get(short_digest(self.rig.refs[adapter].digest))


def num_bytes(stock: Stock, adapter: str) -> int:
    return stock.layout.num_pages(stock.refs[adapter].module_ranks) * stock.page_bytes


def test_a_pinned_adapter_comes_by_itself_and_is_read_once_whatever_else_is_requested(stock: Stock) -> None:
    pinned, *others = sorted(stock.refs, key=lambda name: num_bytes(stock, name))
    host_bytes = 2 * num_bytes(stock, others[-1])
    with stock.engine(num_pages=60, host_bytes=host_bytes) as rig:
        host = Host(rig)
        rig.engine.receive(PinChanges({stock.refs[pinned].digest: True}))
        assert not rig.engine.has_work()
        eventually(lambda: host.has(pinned))
        for sequence_id, name in enumerate([*others, *others, pinned, *others]):
            rig.submit(sequence_id, [1, 2, 3], name, ONE)
            rig.finish()
            assert rig.outputs[sequence_id].error is None
            assert host.has(pinned)
            assert rig.engine.load().gauges.host_adapter_bytes <= host_bytes
        rig.engine.receive(PinChanges({stock.refs[pinned].digest: False}))
        for sequence_id, name in enumerate([*others, *others], 100):
            rig.submit(sequence_id, [1, 2, 3], name, ONE)
            rig.finish()
        assert not host.has(pinned)


def test_what_cannot_be_kept_says_why(stock: Stock, monkeypatch: pytest.MonkeyPatch) -> None:
    small, *_, large = sorted(stock.refs, key=lambda name: num_bytes(stock, name))
    monkeypatch.setattr(adapter_loader, "AGAIN_S", 0.01)
    with stock.engine(num_pages=60, host_bytes=2 * num_bytes(stock, small)) as rig:
        host = Host(rig)
        rig.engine.receive(PinChanges({stock.refs[large].digest: True, stock.refs[small].digest: True, "f" * 64: True}))
        eventually(lambda: host.has(small))
        eventually(lambda: host.failure(large) == FULL)
        eventually(lambda: host.step() and "f" * 64 in host.failed.get(short_digest("f" * 64), ""))
        rig.engine.receive(PinChanges({stock.refs[large].digest: False}))
        eventually(lambda: host.failure(large) == "")


def test_a_store_that_is_away_delays_a_pin(stock: Stock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = next(iter(stock.refs))
    monkeypatch.setattr(adapter_loader, "AGAIN_S", 0.01)
    is_away = True
    load_packed = AdapterStore.load_packed

    def load(store: AdapterStore, *arguments: object) -> object:
        if is_away:
            raise OSError("the disk is gone")
        return load_packed(store, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(AdapterStore, "load_packed", load)
    with stock.engine(num_pages=60, host_bytes=1 << 30) as rig:
        host = Host(rig)
        rig.engine.receive(PinChanges({stock.refs[name].digest: True}))
        eventually(lambda: "the disk is gone" in (host.failure(name) or ""))
        assert not host.has(name)


def test_the_last_word_of_each_router_counts() -> None:
    now = 0.0
    pinned = PinnedAdapters(lambda: now)
    assert pinned.receive("one", Pinned(["a", "b"], is_whole=True)) == {"a": True, "b": True}
    assert pinned.receive("two", Pinned(["b", "c"], is_whole=True)) == {"c": True}
    assert pinned.receive("one", Pinned([], ["b"])) == {}
    assert pinned.receive("two", Pinned([], ["b", "unknown"])) == {"b": False}
    assert pinned.receive("one", Pinned(["d"], is_whole=True)) == {"d": True, "a": False}
    pinned.leave("one")
    now = FORGET_S - 1
    assert pinned.expire() == {}
    assert pinned.receive("one", Pinned(["d"], is_whole=True)) == {}  # it has come back
    now = 10 * FORGET_S
    assert pinned.expire() == {}
    pinned.leave("one")
    pinned.leave("never reported anything")
    now += FORGET_S
    assert pinned.expire() == {"d": False}


words = st.tuples(
    st.sampled_from("xyz"), st.lists(st.sampled_from("abcd")), st.lists(st.sampled_from("efgh")), st.booleans()
)


@given(st.lists(words | st.sampled_from("xyz"), max_size=30))
def test_the_engine_receives_the_union(said: list[tuple[str, list[str], list[str], bool] | str]) -> None:
    pinned, routers, engine = PinnedAdapters(lambda: 0.0), dict[str, set[str]](), set[str]()
    for one in said:
        if isinstance(one, str):
            pinned.leave(one)
            assert pinned.expire() == {}
            continue
        router, came, went, is_whole = one
        changes = pinned.receive(router, Pinned(came, went, is_whole))
        routers[router] = {*came} if is_whole else (routers.get(router, set()) | {*came}) - {*went}
        for digest, is_pinned in changes.items():
            assert (digest in engine) is not is_pinned
            (engine.add if is_pinned else engine.discard)(digest)
        assert engine == set().union(*routers.values())
