"""Pages of sequences in bases of which some layers have a window: dense pages stand for those that it has passed."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from motet.kernels.pages import copy_slabs
from motet.tests.rigs.scheduler_rig import Worker, asking, run, scheduler
from motet.workers.config import KVDtype
from motet.workers.memory.page_arrays import PoolGeometry, kv_layers, make_pool
from motet.workers.models.config import ModelConfig
from motet.workers.models.sharding import ModelSharding
from motet.workers.scheduling.growing_sequence import GrowingSequence
from motet.workers.scheduling.scheduler import Scheduler
from motet.workers.scheduling.tier_traffic import TierSizes
from motet.workers.window_pages import FullLayers, GangLimits
from motet.workers.wire.page_keys import KeyChain, dense_key, next_keys

WINDOW, BLOCK, BUDGET = 10, 4, 8
GEMMA_3 = FullLayers(2, 13)  # six blocks a page, and a slab that no block needs
GEMMA_2 = FullLayers(3, 6)
PROMPT = [*range(1, 91)]  # 90 tokens: 22 full pages of four


def rig(
    num_pages: int, layers: FullLayers = GEMMA_3, tiers: TierSizes | None = None, num_sequences: int = 16
) -> tuple[Scheduler, Worker]:
    of = GangLimits(400, 100, BLOCK, num_pages, BUDGET, num_sequences, WINDOW, layers)
    s, worker = scheduler(of, tiers), Worker(of)
    worker.sequence_of = s._running.by_id.__getitem__
    return s, worker


def step(s: Scheduler, worker: Worker) -> None:
    plan = s.schedule()
    s.commit(plan, worker.execute(plan))
    s.check_integrity()
    worker.check_residence(s)


@pytest.mark.parametrize("layers", [GEMMA_3, GEMMA_2])
def test_a_sequence_gets_to_its_end_in_the_pages_that_it_needs(layers: FullLayers) -> None:
    num_pages = GangLimits(400, 100, BLOCK, 1, BUDGET, 8, WINDOW, layers).needed_pages(349)
    assert num_pages < 350 // BLOCK
    s, worker = rig(num_pages, layers)
    assert s.add(asking(0, [1, 2, 3] * 50, max_tokens=200), 0) is None
    most_held = 0
    while s.has_work():
        step(s, worker)
        most_held = max([most_held, *(each.num_held_pages for each in s._running.by_id.values())])
    assert most_held < num_pages
    assert s.load().counters.num_generated_tokens == 200
    assert s.load().counters.num_computed_tokens == 150 + 199, "something was computed twice"
    too_small, _ = rig(num_pages - 1, layers)
    assert too_small.add(asking(0, [1, 2, 3] * 50, max_tokens=200), 0) is not None


def test_a_decoding_sequence_holds_its_window_and_dense_pages() -> None:
    s, worker = rig(num_pages=100)
    s.add(asking(0, [1] * 200, max_tokens=60), 0)
    for _ in range(60):
        step(s, worker)
    (sequence,) = s._running.by_id.values()
    assert len(sequence.dense_pages) == sequence.num_gone // 6 == (sequence.num_computed - WINDOW) // BLOCK // 6
    assert sequence.num_held_pages <= len(sequence.dense_pages) + -(-WINDOW // BLOCK) + 1 + 6


def test_samples_of_a_prompt_share_its_dense_pages() -> None:
    s, worker = rig(num_pages=60)
    for number in range(6):
        s.add(asking(number, PROMPT, max_tokens=30, seed=number), number)
    while len(s._running.by_id) < 6 or s._decodes.to_condense:
        step(s, worker)
    for _ in range(4):
        step(s, worker)
    tables = [sequence.dense_pages for sequence in s._running.by_id.values()]
    assert len(tables) == 6 and tables[0][:3] == tables[-1][:3] and len(tables[0]) >= 3
    run(s, worker)
    assert worker.num_computed <= len(PROMPT) + 6 * 2 + 6 * 30


def test_a_prefix_is_found_in_dense_pages() -> None:
    s, worker = rig(num_pages=60)
    s.add(asking(0, PROMPT, max_tokens=1), 0)
    while s.has_work():
        step(s, worker)
    keys = next_keys(KeyChain.of(asking(0, PROMPT), 1).first_link, PROMPT, 0, BLOCK, 22)
    assert s.memory.prefixes.page_of(dense_key(keys[11])) is not None
    s.memory.prefixes.forget(keys[:12])
    before = worker.num_computed
    s.add(asking(1, PROMPT, max_tokens=9), 0)
    plan = s.schedule()
    assert [(part.start, len(part.token_ids)) for part in plan.sequences] == [(88, 2)]
    s.commit(plan, worker.execute(plan))
    s.check_integrity()
    while s.has_work():
        step(s, worker)
    assert worker.num_computed == before + 2 + 8
    s.memory.prefixes.forget([dense_key(keys[5])])
    s.add(asking(2, PROMPT, max_tokens=1), 0)
    plan = s.schedule()
    assert [part.start for part in plan.sequences] == [0]
    s.commit(plan, worker.execute(plan))
    run(s, worker)


def test_dense_pages_are_among_those_that_waiting_sequences_want() -> None:
    """Else they would be evicted first, and with them all that comes after."""
    s, worker = rig(num_pages=60)
    s.add(asking(0, PROMPT, max_tokens=1), 0)
    while s.has_work():
        step(s, worker)
    keys = next_keys(KeyChain.of(asking(0, PROMPT), 1).first_link, PROMPT, 0, BLOCK, 22)
    s.add(asking(1, PROMPT, max_tokens=9), 0)
    (waiting,) = s._waiting.first(1)
    prefixes = s._prefixes
    for forgotten in (0, 12, 14):
        s.memory.prefixes.forget(keys[:forgotten])
        held = prefixes._in_pool(keys).held_pages
        assert len(held) and prefixes.prefix_here(waiting).num_found == 22 * BLOCK
        assert set(held) <= set(prefixes.pages_here([waiting], 100))
        assert len(prefixes.pages_here([waiting, waiting], 3)) == 3
    s.memory.prefixes.forget([dense_key(keys[5])])
    assert prefixes.pages_here([waiting], 100) == [] and prefixes.prefix_here(waiting).num_found == 0


def test_a_window_comes_back_from_host_memory_behind_dense_pages() -> None:
    """What lies before it in the tier is not copied."""
    s, worker = rig(num_pages=60, tiers=TierSizes(host=200))
    s._costs.observe_step = lambda *_: None  # type: ignore[method-assign]  # copies are worth it
    s.add(asking(0, PROMPT, max_tokens=1), 0)
    run(s, worker)
    s.memory.prefixes.forget(next_keys(KeyChain.of(asking(0, PROMPT), 1).first_link, PROMPT, 0, BLOCK, 22))
    before = worker.num_computed
    s.add(asking(1, PROMPT, max_tokens=1), 0)
    while s.has_work():
        step(s, worker)
    assert s.load().counters.num_pages_in == 22 - 18
    assert worker.num_computed == before + 2


def test_a_prefix_that_is_held_whole_leaves_less_room_for_adapters_than_was_to_be_expected() -> None:
    """Copies that begin for one sequence hold more pages than it ever needs; the next one's adapter is loaded later."""
    s, worker = rig(num_pages=44, tiers=TierSizes(host=200))
    s._costs.observe_step = lambda *_: None  # type: ignore[method-assign]  # copies are worth it
    s.add(asking(0, PROMPT, max_tokens=1), 0)
    run(s, worker)
    s.add(asking(3, [9], max_tokens=12, adapter="b16"), 0)
    for _ in range(3):
        step(s, worker)
    keys = next_keys(KeyChain.of(asking(0, PROMPT), 1).first_link, PROMPT, 0, BLOCK, 22)
    s.memory.prefixes.forget([*map(dense_key, keys), *keys[20:]])
    assert len(s.memory.prefixes.find(keys)) == 20 > s._limits.most_pages(len(PROMPT))
    s.add(asking(1, PROMPT, max_tokens=9), 0)
    s.add(asking(2, [7], max_tokens=1, adapter="a6"), 0)
    plan = s.schedule()
    assert [move.source for move in plan.moves] == ["host"] and not plan.loads
    s.commit(plan, worker.execute(plan))
    assert {update.sequence_id for update in run(s, worker) if update.finish_reason} == {1, 2, 3}


def test_a_sequence_whose_numbers_are_not_finite_leaves_no_dense_page() -> None:
    s, worker = rig(num_pages=60)
    worker.broken.add(0)
    s.add(asking(0, PROMPT, max_tokens=9), 0)
    run(s, worker)
    assert s.memory.prefixes.num_pages == 0


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 1 << 40), st.sampled_from([GEMMA_3, GEMMA_2]), st.booleans(), st.booleans())
def test_pages_are_never_lost_nor_freed_while_needed(
    seed: int, layers: FullLayers, has_tiers: bool, looks_ahead: bool
) -> None:
    """Sequences with common begins, adapters and cancels in a small pool. The worker knows the KV of every token."""
    rng = random.Random(seed)
    num_pages = rng.randint(36, 80)
    s, worker = rig(num_pages, layers, TierSizes(host=40) if has_tiers else None, rng.randint(1, 8))
    worker.slow_loads = rng if has_tiers else None
    if has_tiers:
        s._costs.observe_step = lambda *_: None  # type: ignore[method-assign]  # copies are worth it
    documents = [[rng.choice([0, 1, rng.randrange(90)]) for _ in range(rng.randint(1, 100))] for _ in range(3)]
    added, pending, known = 0, None, dict[int, GrowingSequence]()
    worker.sequence_of = known.__getitem__  # a plan may have a sequence that was preempted since
    for _ in range(3000):
        if added < 12 and rng.random() < 0.1:
            document = rng.choice(documents)
            prompt = [*document[: rng.randint(1, len(document))], rng.randrange(90)]
            adapter = rng.choice([None, "a2", "y3"])
            s.add(asking(added, prompt, rng.randint(1, 60), adapter, tenant=rng.choice("tu")), added)
            added += 1
        if rng.random() < 0.01 and s._running.by_id and pending is None:
            s.cancel(rng.choice([*s._running.by_id]))
        if rng.random() < 0.01 and s._running.by_id and pending is None:
            s._preempt(rng.choice([*s._running.by_id.values()]))
        plan = s.schedule()
        known |= s._running.by_id
        held = {page for each in s._running.by_id.values() for page in each.held_pages}
        assert {copy.target for copy in plan.copies} <= held, "a copy into a page of no running sequence"
        if pending is None:
            pending = plan
        else:
            result = worker.execute(pending)
            plan = s.settle(plan, result)
            s.commit(pending, result)
            pending = plan
        if not looks_ahead or rng.random() < 0.2:
            s.commit(pending, worker.execute(pending))
            pending = None
            worker.check_residence(s)
        s.check_integrity()
        if added == 12 and not s.has_work():
            break
    assert not s.has_work(), "sequences wait without end"
    if pending is not None:
        s.commit(pending, worker.execute(pending))
    s.check_integrity()
    assert s.memory.num_pages_to_take == num_pages


def test_layers_find_their_kv_in_dense_pages() -> None:
    """What is written by whole pages is read from a dense one, by the layers that see all tokens."""
    of = PoolGeometry(9, 13, 16, 4, 1, 2, torch.float32, full_layers=GEMMA_3, first_kv=(5, 11))
    pool = make_pool(of, torch.device("cpu"))
    layers = kv_layers(pool, of)
    sources = [7, 2, 5, 1, 4, 0]
    for number, page in enumerate(sources):
        for layer, kv in enumerate(layers):
            kv[page * 13] = 100 * number + layer
    for number, page in enumerate(sources):
        assert sorted(pool[page, :, 0].tolist()) == [100 * number + layer for layer in range(13)]
    copy_slabs(pool, sources, 8, GEMMA_3.num_full)
    for number, entry in enumerate(GEMMA_3.dense_entries([8])):
        for layer in (5, 11):
            assert (layers[layer][entry] == 100 * number + layer).all()
        assert all(entry < len(kv) for kv in layers), "no kernel reads behind the pool"


@pytest.mark.parametrize(("degree", "num_blocks"), [(1, 10), (2, 10), (8, 6)])
@pytest.mark.parametrize("kv_dtype", ["dtype", "float8"])
def test_page_tables_of_large_pools_fit_their_integers(
    degree: int, num_blocks: int, kv_dtype: KVDtype, tmp_path: Path
) -> None:
    """Heads of Gemma 4 31B have other sizes in layers that see all: a slab that divides both is small."""
    sizes = {"num_hidden_layers": 60, "hidden_size": 5376, "intermediate_size": 21504, "num_attention_heads": 32}
    kv_heads = {"num_key_value_heads": 16, "num_global_key_value_heads": 4, "attention_k_eq_v": True}
    published = transformers.Gemma4TextConfig(**sizes, **kv_heads, sliding_window=1024)
    published.architectures = ["Gemma4ForCausalLM"]
    published.save_pretrained(tmp_path)
    config = ModelConfig.from_folder(tmp_path)
    for block_size in (8, 16, 32):
        window, layers = ModelSharding(config, degree).window_pages(block_size, kv_dtype)
        assert window == 1024
        assert layers is not None
        assert layers.num_blocks >= num_blocks
        assert (1 << 20) * layers.num_slabs < 1 << 31
