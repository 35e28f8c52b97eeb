"""Contexts of many windows against transformers, on a pool in which every page that was given back holds NaN."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch

from motet.tests.rigs.engine_rig import EngineRig, Stock
from motet.tests.rigs.gang_rig import gang
from motet.tests.rigs.oracle import RECIPES, VOCAB_SIZE, Answer, Oracle, write_adapters, write_model
from motet.workers.execution.executor import LocalExecutor
from motet.workers.models.config import ModelConfig
from motet.workers.models.sharding import ModelSharding
from motet.workers.window_pages import most_pages
from motet.workers.wire.messages import SamplingParams

pytestmark = pytest.mark.slow
TOLERANCE = 1e-3  # of logits, in float32
LONGEST, NUM_TOKENS, BUDGET, BLOCK = 170, 40, 16, 8
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
VARIANTS_WITH_WINDOWS = ("mistral_window", "mixtral", "gemma2", "gemma3", "gpt_oss", "llama4", "gemma4", "gemma4_moe")
Requested = tuple[list[int], str | None, Answer]  # prompt, adapter, the oracle's answer


@pytest.fixture(scope="module", params=VARIANTS_WITH_WINDOWS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Stock, Oracle]]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp(request.param)
    path = write_model(request.param, folder / "model")
    adapters = write_adapters(path, folder / "adapters")
    yield Stock.make(path, adapters, folder / "store", BLOCK), Oracle(path, adapters)
    torch.set_num_threads(num_threads)


def questions(oracle: Oracle, seed: int, num: int = 5) -> list[Requested]:
    """Prompts of many windows whose best tokens lead clearly, so that rounding cannot change the answer."""
    rng, found = random.Random(seed), list[Requested]()
    while len(found) < num:
        adapters = [(None, RECIPES[3].name)[place % 2] for place in range(len(found), num)]
        prompts = [[rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(LONGEST // 2, LONGEST))] for _ in adapters]
        answers = oracle.answers(prompts, adapters, NUM_TOKENS)
        requested = zip(prompts, adapters, answers, strict=True)
        found += [(prompt, own, answer) for prompt, own, answer in requested if answer.margin > 5 * TOLERANCE]
    return found


def poison(rig: EngineRig) -> int:
    """Fills all free pages with NaN; returns their number."""
    executor, free = rig.engine.executor, rig.engine._scheduler.memory.allocator._free
    assert isinstance(executor, LocalExecutor)
    executor.runner.pool[torch.tensor(free, dtype=torch.int64)] = torch.nan
    executor.runner.pool[executor.runner.num_pages :] = torch.nan  # no sequence's
    return len(free)


def serve(rig: EngineRig, requested: list[Requested], first_id: int) -> None:
    for sequence_id, (prompt, adapter, _) in enumerate(requested, first_id):
        rig.submit(sequence_id, prompt, adapter, GREEDY)
    while rig.engine.has_work():
        rig.step()
        poison(rig)
    rig.assert_idle()
    for sequence_id, (_, _, answer) in enumerate(requested, first_id):
        assert rig.outputs[sequence_id].error is None
        assert rig.outputs[sequence_id].token_ids == answer.token_ids


@pytest.mark.parametrize("prefix_cache", [False, True])
def test_answers_are_the_oracles(model: tuple[Stock, Oracle], prefix_cache: bool) -> None:
    """All at once, in chunks; and again, with what the cache has of them. The pool holds no two of them whole."""
    stock, oracle = model
    requested = questions(oracle, seed=1)
    config = ModelConfig.from_folder(stock.model_path)
    window, full_layers = ModelSharding(config).window_pages(BLOCK, element_bytes=4)
    some_see_all = stock.model_path.parent.name.startswith(("gemma", "gpt_oss", "llama4"))
    assert window is not None and (full_layers is not None) == some_see_all
    num_adapter_pages = max(stock.num_pages(1, adapter) for _, adapter, _ in requested)
    most = most_pages(LONGEST + NUM_TOKENS, BLOCK, window, BUDGET, full_layers)
    num_pages = 2 * (most + (full_layers is not None)) + num_adapter_pages
    assert num_pages - num_adapter_pages < 2 * -(-(LONGEST + NUM_TOKENS) // BLOCK)
    with stock.engine(num_pages, max_tokens_per_step=BUDGET, prefix_cache=prefix_cache) as rig:
        assert rig.engine._scheduler._limits.window == window
        for first_id in (0, len(requested)):
            serve(rig, requested, first_id)
        assert poison(rig) > 0
        assert rig.engine.load().counters.num_generated_tokens == 2 * len(requested) * NUM_TOKENS


def test_a_gang_of_two_workers_gives_the_same_answers(model: tuple[Stock, Oracle]) -> None:
    """Each has its part of every page, and fills dense pages from it."""
    stock, oracle = model
    requested = questions(oracle, seed=3)
    sharding = ModelSharding(ModelConfig.from_folder(stock.model_path), 2)
    _, full_layers = sharding.window_pages(BLOCK, element_bytes=4)
    num_adapter_pages = max(stock.num_pages(1, adapter) for _, adapter, _ in requested)
    num_pages = 2 * -(-(LONGEST + NUM_TOKENS) // BLOCK) + num_adapter_pages
    with gang(stock.gang_config(num_pages, 2, max_tokens_per_step=BUDGET)) as (engine, _):
        rig = EngineRig(engine, stock.refs)
        num_dense = 0
        for sequence_id, (prompt, adapter, _) in enumerate(requested):
            rig.submit(sequence_id, prompt, adapter, GREEDY)
        while rig.engine.has_work():
            rig.step()
            num_dense += sum(len(each.dense_pages) for each in engine._scheduler._running.by_id.values())
        rig.assert_idle()
        assert (num_dense > 0) == (full_layers is not None)
        for sequence_id, (_, _, answer) in enumerate(requested):
            assert rig.outputs[sequence_id].token_ids == answer.token_ids


def test_a_window_comes_back_from_host_memory(model: tuple[Stock, Oracle]) -> None:
    """Preempted again and again, and gone from the pool each time."""
    stock, oracle = model
    requested = questions(oracle, seed=2, num=1)
    with stock.engine(60, max_tokens_per_step=BUDGET, kv_host_bytes=100 * stock.page_bytes) as rig:
        rig.prefer_copies()
        scheduler = rig.engine._scheduler
        prompt, adapter, answer = requested[0]
        rig.submit(0, prompt, adapter, GREEDY)
        num_preempted = 0
        while rig.engine.has_work():
            rig.step()
            sequence = scheduler._running.by_id.get(0)
            if sequence is not None and len(sequence.token_ids) > len(prompt) + 8 * (num_preempted + 1):
                scheduler._preempt(sequence)
                scheduler.memory.make_room(scheduler.memory.num_pages_to_take, frozenset())
                num_preempted += 1
            poison(rig)
        assert num_preempted > 2
        assert rig.outputs[0].token_ids == answer.token_ids
        assert rig.engine.load().counters.num_pages_in > 0
