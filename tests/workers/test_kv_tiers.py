"""Real engines with KV in the pool, in host memory or on disk: what they read there, and errors there."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from motet.tests.rigs.engine_rig import EngineRig, Stock
from motet.tests.rigs.oracle import RECIPES, VOCAB_SIZE, write_adapters, write_model
from motet.workers.execution.executor import LocalExecutor
from motet.workers.memory.page_arrays import DiskPages
from motet.workers.wire.messages import SamplingParams, SequenceRequest
from motet.workers.wire.page_keys import KeyChain, PageKey, next_keys, state_key

GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
PROMPT = random.Random(3).choices(range(VOCAB_SIZE), k=44)  # five full pages of eight, and half a page
OLD, NEW = RECIPES[3].name, RECIPES[4].name  # two versions of one adapter: the same modules, other weights
POOL = 60  # pages: the larger adapter and the prompt, and little else


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Stock:
    folder = tmp_path_factory.mktemp("tiers")
    model = write_model("llama", folder / "model")
    return Stock.make(model, write_adapters(model, folder / "adapters"), folder / "store")


@pytest.fixture(scope="module")
def alone(stock: Stock) -> dict[str | None, list[int]]:
    """The answer of an engine without a prefix cache."""
    with stock.engine(num_pages=200, prefix_cache=False) as rig:
        return {adapter: ask(rig, adapter) for adapter in (None, OLD, NEW)}


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Stock:
    """Of a base whose sequences have recurrent states of several pages."""
    folder = tmp_path_factory.mktemp("hybrid")
    return Stock.make(write_model("qwen3_5", folder / "model"), {}, folder / "store")


def engine(stock: Stock, num_host_pages: int, num_disk_pages: int, folder: Path, num_pages: int = POOL) -> EngineRig:
    settings: dict[str, Any] = {"kv_disk_path": folder, "host_bytes": num_host_pages * stock.page_bytes}
    settings |= {"kv_host_bytes": num_host_pages * stock.page_bytes, "kv_disk_bytes": num_disk_pages * stock.page_bytes}
    rig = stock.engine(num_pages, **settings)
    rig.prefer_copies()
    return rig


def ask(rig: EngineRig, adapter: str | None, prompt: list[int] = PROMPT) -> list[int]:
    sequence_id = len(rig.outputs)
    rig.submit(sequence_id, prompt, adapter, GREEDY)
    rig.finish()
    assert rig.outputs[sequence_id].finish_reason == "length", rig.outputs[sequence_id].error
    return rig.outputs[sequence_id].token_ids


def flood(rig: EngineRig, num_prompts: int) -> None:
    """Runs other prompts, each of ten pages with its answer."""
    generator = random.Random(num_prompts)
    for _ in range(num_prompts):
        ask(rig, None, generator.choices(range(VOCAB_SIZE), k=72))


def keys(rig: EngineRig, adapter: str | None) -> list[PageKey]:
    """The keys of the prompt's full pages."""
    ref = None if adapter is None else rig.refs[adapter]
    request = SequenceRequest(sequence_id=0, prompt_token_ids=PROMPT, sampling=GREEDY, tenant="acme", adapter=ref)
    return next_keys(KeyChain.of(request, 1).first_link, PROMPT, 0, 8, 5)


def tier_of(rig: EngineRig, key: PageKey) -> str:
    """The fastest tier that a page is in."""
    scheduler = rig.engine._scheduler
    tiers: list[tuple[str, Any]] = [("device", scheduler.memory.prefixes._pages), *scheduler._tiers._tiers.items()]
    return next((tier for tier, held in tiers if key in held), "nowhere")


def where(rig: EngineRig, adapter: str | None) -> set[str]:
    """The fastest tier that each of the prompt's pages is in."""
    return {tier_of(rig, key) for key in keys(rig, adapter)}


def disk_of(rig: EngineRig) -> DiskPages:
    return rig.engine.executor.mover._arrays["disk"]  # type: ignore[attr-defined, no-any-return]


def on_disk(stock: Stock, folder: Path) -> EngineRig:
    """An engine that has answered the old version's prompt, and has its KV on disk alone."""
    rig = engine(stock, 60, 400, folder)
    ask(rig, OLD)
    flood(rig, 12)
    assert where(rig, OLD) == {"disk"}
    return rig


@pytest.mark.parametrize("tier", ["device", "host", "disk"])
def test_a_new_version_is_answered_without_the_old_ones_pages(
    stock: Stock, alone: dict[str | None, list[int]], tier: str, tmp_path: Path
) -> None:
    num_pages, num_host_pages = (400, 60) if tier == "device" else (POOL, 60 if tier == "disk" else 400)
    with engine(stock, num_host_pages, 400, tmp_path, num_pages) as rig:
        assert ask(rig, OLD) == alone[OLD]
        flood(rig, 12)
        assert where(rig, OLD) == {tier}
        before = rig.engine.load().counters
        assert ask(rig, NEW) == alone[NEW] != alone[OLD]
        after = rig.engine.load().counters
        assert (after.num_cached_tokens, after.num_pages_in) == (before.num_cached_tokens, before.num_pages_in)
        assert where(rig, OLD) == {tier}
        assert ask(rig, OLD) == alone[OLD]  # requests for the old version still find its pages
        assert rig.engine.load().counters.num_cached_tokens >= after.num_cached_tokens + 40
        assert rig.engine.load().counters.num_pages_in - after.num_pages_in == (0 if tier == "device" else 5)


def test_a_truncated_file_costs_computing_again_and_disturbs_no_other(
    stock: Stock, alone: dict[str | None, list[int]], tmp_path: Path
) -> None:
    with on_disk(stock, tmp_path) as rig:
        os.ftruncate(disk_of(rig)._file.fileno(), 3)
        rig.submit(1000, PROMPT, None, GREEDY)
        assert ask(rig, OLD) == alone[OLD]
        assert rig.outputs[1000].token_ids == alone[None]
        load = rig.engine.load()
        assert load.counters.num_move_failures > 0
        assert load.counters.num_pages_in == 0
        assert ask(rig, OLD) == alone[OLD]
        rig.assert_idle()


def test_a_disk_that_is_full_costs_what_was_on_it_alone(
    stock: Stock, alone: dict[str | None, list[int]], tmp_path: Path
) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("the system has no /dev/full")
    with engine(stock, 40, 400, tmp_path) as rig, Path("/dev/full").open("r+b", buffering=0) as full:
        disk_of(rig)._file.close()
        disk_of(rig)._file = full
        for _ in range(2):
            assert [ask(rig, adapter) for adapter in (OLD, NEW, None)] == [alone[a] for a in (OLD, NEW, None)]
            flood(rig, 6)
        load = rig.engine.load()
        assert load.counters.num_move_failures == 3  # then the tier is given up
        assert load.gauges.num_disk_pages == 0
        assert load.gauges.num_host_pages > 0
        rig.assert_idle()


def state_of(rig: EngineRig) -> torch.Tensor | None:
    """The state after the prompt's full pages, as it lies in the pool; None: it is not there."""
    executor = rig.engine.executor
    assert isinstance(executor, LocalExecutor)
    pages = rig.engine._scheduler.memory.prefixes.state_of(keys(rig, None)[-1])
    return None if pages is None else executor.runner.pool[[*pages]].view(torch.uint8).clone()


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_a_state_that_comes_back_is_the_same_to_the_last_bit(hybrid: Stock, tier: str, tmp_path: Path) -> None:
    num_state_pages = hybrid.num_state_pages
    # Of the smaller host memory an eighth is as much as a prompt fills: all of it goes on to disk before it is needed.
    with engine(hybrid, 160 if tier == "disk" else 400, 400, tmp_path, num_pages=40) as rig:
        first, state = ask(rig, None), state_of(rig)
        assert state is not None and len(state) == num_state_pages > 1 and state.any()
        flood(rig, 20)
        assert {*where(rig, None), tier_of(rig, state_key(keys(rig, None)[-1]))} == {tier}
        before = rig.engine.load().counters
        rig.submit(1000, PROMPT, None, GREEDY)
        while (back := state_of(rig)) is None:
            rig.step()
        torch.testing.assert_close(back, state, rtol=0, atol=0)
        rig.finish()
        assert rig.outputs[1000].token_ids == first
        after = rig.engine.load().counters
        assert after.num_cached_tokens - before.num_cached_tokens == 40
        assert after.num_pages_in - before.num_pages_in == 5 + num_state_pages
        assert after.num_move_failures == 0


@pytest.mark.parametrize("damage", ["cut off", "changed"])
def test_a_damaged_file_costs_a_state_as_it_costs_a_page(hybrid: Stock, damage: str, tmp_path: Path) -> None:
    with engine(hybrid, 160, 400, tmp_path, num_pages=40) as rig:
        first = ask(rig, None)
        flood(rig, 20)
        file, (_, disk) = disk_of(rig)._file.fileno(), rig.engine._scheduler._tiers._tiers.values()
        key = state_key(keys(rig, None)[-1])
        last_slot = disk._slots[key][-1]
        if damage == "cut off":
            os.ftruncate(file, 3)
        else:
            os.pwrite(file, b"\x7f" * 64, last_slot * hybrid.page_bytes + 100)
        assert ask(rig, None) == first
        load = rig.engine.load()
        assert (load.counters.num_move_failures, load.counters.num_pages_in) == (1, 0)
        assert key not in disk
        assert ask(rig, None) == first
        rig.assert_idle()


@pytest.mark.parametrize("num_host_pages", [0, 1, 3])
def test_host_memory_that_is_too_small_is_as_good_as_none(
    stock: Stock, alone: dict[str | None, list[int]], num_host_pages: int, tmp_path: Path
) -> None:
    with engine(stock, num_host_pages, 0, tmp_path) as rig:
        for adapter in (OLD, NEW, OLD, NEW):
            assert ask(rig, adapter) == alone[adapter]
            flood(rig, 3)
        load = rig.engine.load()
        assert load.gauges.num_host_pages <= num_host_pages
        assert load.gauges.host_adapter_bytes <= num_host_pages * stock.page_bytes
        assert load.counters.num_adapter_reads == load.counters.num_adapter_loads > 0
        rig.assert_idle()


def test_an_adapter_in_host_memory_is_not_read_again(stock: Stock, tmp_path: Path) -> None:
    with engine(stock, 400, 0, tmp_path) as rig:
        for adapter in (OLD, NEW, OLD, NEW):
            ask(rig, adapter)
            assert rig.engine._scheduler.memory.make_room(POOL, frozenset())
        load = rig.engine.load()
        assert (load.counters.num_adapter_loads, load.counters.num_adapter_reads) == (4, 2)
        refs = [rig.refs[adapter] for adapter in (OLD, NEW)]
        num_pages = sum(stock.layout.num_pages(ref.module_ranks) for ref in refs)
        assert load.gauges.host_adapter_bytes == num_pages * stock.page_bytes


def test_an_engine_that_starts_again_finds_nothing_of_the_last_one(
    stock: Stock, alone: dict[str | None, list[int]], tmp_path: Path
) -> None:
    with on_disk(stock, tmp_path):
        assert list(tmp_path.iterdir()) == []
    stale = tmp_path / "tmp0000"
    stale.write_bytes(b"\x7f" * 50 * stock.page_bytes)  # as of a system whose files all have names
    with engine(stock, 12, 400, tmp_path) as rig:
        assert ask(rig, OLD) == alone[OLD]
        assert rig.engine.load().counters.num_cached_tokens == 0
        assert stale.stat().st_size == 50 * stock.page_bytes
