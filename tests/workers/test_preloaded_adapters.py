"""An adapter that is brought as background work, on a real engine: which tier it reaches, and what it leaves alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from motet.tests.rigs.engine_rig import EngineRig, SequenceOutput, Stock
from motet.tests.rigs.oracle import write_adapters, write_model
from motet.workers.execution.executor import LocalExecutor
from motet.workers.wire.messages import Outdated, SamplingParams, SequenceRequest, Submit
from motet.workers.wire.page_keys import short_digest

ONE = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Stock:
    folder = tmp_path_factory.mktemp("preloaded")
    model = write_model("llama", folder / "model")
    return Stock.make(model, write_adapters(model, folder / "adapters"), folder / "store")


def preload(rig: EngineRig, sequence_id: int, adapter: str) -> None:
    """As a router's preloader asks for it."""
    rig.outputs[sequence_id] = SequenceOutput()
    rig.engine.receive(
        Submit(
            SequenceRequest(
                sequence_id=sequence_id,
                prompt_token_ids=[0],
                sampling=ONE,
                tenant="acme",
                adapter=rig.refs[adapter],
                is_background=True,
            )
        )
    )


class Tiers:
    """What the engine has reported, as a leader keeps it."""

    def __init__(self, rig: EngineRig) -> None:
        self.rig, self.pool, self.host = rig, set[str](), set[int]()

    def of(self, adapter: str) -> Sequence[str]:
        change = self.rig.engine.take_residency_changes()
        self.pool = (self.pool - {*change.went}) | {*change.came}
        self.host = (self.host - {*change.hosted_went}) | {*change.hosted_came}
        digest = self.rig.refs[adapter].digest
        return ["device"] * (digest in self.pool) + ["host"] * (short_digest(digest) in self.host)


def test_it_reaches_pool_and_host_memory_and_leaves_them_in_turn(stock: Stock) -> None:
    first, second = sorted(stock.refs, key=lambda name: stock.num_pages(2, name))[-2:]
    num_pages = stock.num_pages(2, second)  # which leaves no room for the first
    assert stock.num_pages(2, first) > 2, "two would fit"
    with stock.engine(num_pages=num_pages, host_bytes=1 << 30) as rig:
        tiers = Tiers(rig)
        assert tiers.of(first) == []
        preload(rig, 0, first)
        rig.finish()
        assert rig.outputs[0].finish_reason == "length"
        assert tiers.of(first) == ["device", "host"]
        preload(rig, 1, second)  # there is room for one
        rig.finish()
        assert (tiers.of(first), tiers.of(second)) == (["host"], ["device", "host"])
        rig.engine.receive(Outdated(rig.refs[first].digest))
        preload(rig, 2, second)
        rig.finish()
        rig.step()
        assert (tiers.of(first), tiers.of(second)) == ([], ["device", "host"])


def test_it_waits_as_long_as_others_run_and_takes_no_room_of_them(stock: Stock) -> None:
    others, *_, mine = sorted(stock.refs, key=lambda name: stock.num_pages(2, name))
    num_pages = stock.num_pages(2, mine)  # all of them, so that no other sequence can run beside it
    assert num_pages >= stock.num_pages(41, others)
    with stock.engine(num_pages=num_pages, host_bytes=1 << 30) as rig:
        rig.submit(0, [1] * 8, others, SamplingParams(max_tokens=32, temperature=0, ignore_eos=True))
        rig.step()
        while not rig.outputs[0].token_ids:
            rig.step()
        preload(rig, 1, mine)
        tiers = Tiers(rig)
        while not rig.outputs[0].ended:
            rig.step()
            assert "device" not in tiers.of(mine) or rig.outputs[0].ended
        rig.finish()
        load = rig.engine.load().counters
        assert load.num_preemptions == 0
        assert rig.outputs[1].finish_reason == "length"
        assert tiers.of(mine) == ["device", "host"]


def test_one_that_can_never_fit_says_so(stock: Stock) -> None:
    largest = max(stock.refs, key=lambda name: stock.num_pages(2, name))
    with stock.engine(num_pages=stock.num_pages(2, largest) - 1) as rig:
        preload(rig, 0, largest)
        rig.finish()
        error = rig.outputs[0].error
        assert error is not None and error.kind == "invalid_request" and "can never fit" in error.message


def test_one_whose_file_is_damaged_says_so(stock: Stock, tmp_path: Path) -> None:
    name = [*stock.refs][-1]
    folder = stock.store_path / stock.refs[name].digest[:2] / stock.refs[name].digest
    saved = {path: path.read_bytes() for path in folder.iterdir()}
    try:
        for path in saved:
            path.write_bytes(b"damaged")
        with stock.engine(num_pages=60) as rig:
            preload(rig, 0, name)
            rig.finish()
            error = rig.outputs[0].error
            assert error is not None and error.kind == "adapter_failed" and "damaged" in error.message
    finally:
        for path, content in saved.items():
            path.write_bytes(content)


def test_a_fault_of_the_worker_is_reported_in_the_log_alone(stock: Stock, caplog: pytest.LogCaptureFixture) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("at another tenant's adapter")

    with stock.engine(num_pages=60) as rig:
        executor = rig.engine.executor
        assert isinstance(executor, LocalExecutor)
        loader = executor.loader
        loader._kernels = replace(loader._kernels, write_pages=fail)
        preload(rig, 0, next(iter(stock.refs)))
        rig.finish()
        error = rig.outputs[0].error
        assert error is not None and error.kind == "adapter_failed"
        assert error.message.endswith("could not be loaded")
    assert "another tenant" in caplog.text
