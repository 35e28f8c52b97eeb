"""Real engines with KV in the pool, in host memory or on disk: what they read there, and errors there."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pytest

from motet.tests.rigs.engine_rig import EngineRig, Stock
from motet.tests.rigs.oracle import RECIPES, VOCAB_SIZE, write_adapters, write_model
from motet.workers.memory.page_arrays import DiskPages
from motet.workers.wire.messages import SamplingParams, SequenceRequest
from motet.workers.wire.page_keys import PageKey, first_link, next_keys

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


def keys(rig: EngineRig, adapter: str) -> list[PageKey]:
    """The keys of the prompt's full pages."""
    request = SequenceRequest(
        sequence_id=0, prompt_token_ids=PROMPT, sampling=GREEDY, tenant="acme", adapter=rig.refs[adapter]
    )
    return next_keys(first_link(request), PROMPT, 0, 8, 5)


def where(rig: EngineRig, adapter: str) -> set[str]:
    """The fastest tier that each of the prompt's pages is in."""
    scheduler = rig.engine._scheduler
    tiers: list[tuple[str, Any]] = [("device", scheduler.memory.prefixes._pages), *scheduler._tiers._tiers.items()]
    return {next((tier for tier, held in tiers if key in held), "nowhere") for key in keys(rig, adapter)}


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
