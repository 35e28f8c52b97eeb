"""What a gang and a router keep does not grow with the versions, answers and tenants that they have seen."""

from __future__ import annotations

import gc
import hashlib
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from motet.adapters.packing.packed_file import write_packed
from motet.adapters.store.durable_file import make_folder
from motet.adapters.store.store import AdapterStore
from motet.router.fleet.dispatch import FleetDispatcher
from motet.tests.rigs.engine_rig import EngineRig, Stock
from motet.tests.rigs.oracle import write_adapters, write_model
from motet.tests.rigs.part_configs import admission_config, leader_config
from motet.tests.rigs.patience import PATIENCE_S
from motet.tests.rigs.patience import eventually_in_loop as eventually
from motet.tests.rigs.stand_in_engine import INFO, StandInEngine, adapter_pages
from motet.workers.leader.frame_server import FrameServer
from motet.workers.wire.messages import AdapterRef, Outdated, SamplingParams, SequenceRequest


def held() -> tuple[int, int]:
    """How many containers live, and how many blocks of memory Python has given out, its ints and strings included."""
    gc.collect()
    return len(gc.get_objects()), sys.getallocatedblocks()


def assert_flat(before: tuple[int, int], num_served: int) -> None:
    """A key and a value kept of each would be two blocks at least. What is reused comes and goes by some hundreds."""
    num_objects, num_blocks = (now - then for now, then in zip(held(), before, strict=True))
    assert num_objects < num_served // 2, f"{num_objects} more objects after {num_served} more versions"
    assert num_blocks < 2 * num_served, f"{num_blocks} more blocks after {num_served} more versions"


@pytest.mark.parametrize("kept_of_each", [lambda n: {f"digest {n}": [n]}, lambda n: {f"digest {n}": 1000.0 + n}])
def test_what_is_kept_of_each_version_shows(kept_of_each: Callable[[int], dict[str, object]]) -> None:
    """A key and a number of each are enough."""
    kept: list[dict[str, object]] = []
    one: dict[str, object] = {}
    before = held()
    for number in range(200):
        one |= kept_of_each(number)
    kept.append(one)
    with pytest.raises(AssertionError):
        assert_flat(before, 200)
    kept.clear()
    one.clear()
    assert_flat(before, 200)


def version_of(stock: Stock, name: str, number: int) -> AdapterRef:
    """The adapter in the store under a digest of its own, as another version of it would be."""
    ref, store = stock.refs[name], AdapterStore(stock.store_path)
    digest = hashlib.sha256(f"{name} {number}".encode()).hexdigest()
    path = store._packed_path(digest, stock.layout)
    make_folder(path.parent)
    with path.open("wb") as file:
        pages = store.load_packed(ref.digest, stock.layout)
        write_packed(file, digest, stock.layout, len(pages), [pages])
    return AdapterRef(digest, ref.module_ranks)


def test_a_gang_keeps_nothing_of_versions_and_answers_that_are_gone(tmp_path: Path) -> None:
    model = write_model("llama", tmp_path / "model")
    stock = Stock.make(model, write_adapters(model, tmp_path / "adapters"), tmp_path / "store")
    name = next(iter(stock.refs))
    sampling = SamplingParams(max_tokens=4, temperature=1.0, ignore_eos=True)

    def serve(rig: EngineRig, numbers: range) -> None:
        for number in numbers:
            rig.outputs.clear()
            ref = version_of(stock, name, number)
            for each in range(2):
                rig.submit(2 * number + each, [1 + number % 50, 1 + each] * 9, ref if each else None, sampling)
            while rig.engine.has_work():
                assert all(update.error is None for update in rig.engine.step())
            rig.engine.take_residency_changes()
            if number % 2:  # of some of them no router reports that they are outdated
                rig.engine.receive(Outdated(ref.digest))

    with stock.engine(num_pages=60, host_bytes=10 * stock.page_bytes, kv_host_bytes=0) as rig:
        serve(rig, range(150))
        before = held()
        serve(rig, range(150, 350))
        assert_flat(before, 200)


async def test_leader_and_router_keep_nothing_of_answers_versions_and_tenants_that_are_gone() -> None:
    engine = StandInEngine(step_s=0.001)
    # What has ended is kept for ten seconds for clients that come back: here it is bounded by its number.
    server = FrameServer(engine, INFO, "a secret", leader_config(max_finished=50))
    router = FleetDispatcher(
        "a secret", gang_wait_s=PATIENCE_S, adapter_pages=adapter_pages, admission=admission_config()
    )

    async def serve(numbers: range) -> None:
        for number in numbers:
            ref = AdapterRef(hashlib.sha256(str(number).encode()).hexdigest(), {"q_proj": 8})
            request = SequenceRequest(
                prompt_token_ids=[number % 200] * 40,
                sampling=SamplingParams(max_tokens=4),
                tenant=f"tenant-{number}",
                adapter=ref,
                key=f"key-{number}",
            )
            async for update in router.submit(request):
                assert update.error is None
            router.outdate(ref.digest)
            engine.evict(ref.digest)
            engine.forget_pages()
            engine.submitted.clear()
            engine.outdated.clear()

    try:
        router.update({"a": await server.start("127.0.0.1")})
        await eventually(router.gangs)
        await serve(range(200))
        before = held()
        await serve(range(200, 700))
        assert_flat(before, 500)
    finally:
        await router.close()
        await server.stop()
