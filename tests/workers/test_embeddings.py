"""Embeddings are made of the states of transformers + PEFT, however their prompts are computed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest

from motet.tests.rigs.engine_rig import EngineRig, Stock
from motet.tests.rigs.gang_rig import gang
from motet.tests.rigs.oracle import RECIPES, VOCAB_SIZE, Oracle, write_adapters, write_model
from motet.tests.rigs.stand_in_gpu.gpu_worker import gpu_of_twins
from motet.workers.wire.messages import SamplingParams, SequenceUpdate
from motet.workers.wire.prompt_scores import Pooling, pooled_positions, unpacked_vector

pytestmark = pytest.mark.slow  # models of transformers, and engines
TOLERANCE = 1e-4  # in float32
ADAPTERS = (None, RECIPES[0].name, RECIPES[1].name)
POOLINGS: tuple[Pooling, ...] = ("mean", "last", "first")


@dataclass(frozen=True)
class Bench:
    oracle: Oracle
    stock: Stock
    prompts: tuple[tuple[list[int], str | None, Pooling], ...]

    def submit(self, rig: EngineRig) -> None:
        """All prompts, numbered by their place."""
        for index, (prompt, adapter, pooling) in enumerate(self.prompts):
            rig.submit(index, prompt, adapter, SamplingParams(max_tokens=0, pooling=pooling))

    def check(self, updates: Sequence[SequenceUpdate]) -> None:
        """Raises AssertionError unless these are the last updates of all prompts, with their embeddings."""
        last = {update.sequence_id: update for update in updates if update.finish_reason is not None}
        for index, (prompt, adapter, pooling) in enumerate(self.prompts):
            update = last[index]
            assert (update.token_ids, update.finish_reason) == ([], "length") and update.embedding is not None
            rows = pooled_positions(pooling, len(prompt))
            expected = self.oracle.states(prompt, adapter)[rows.start : rows.stop].mean(0)
            np.testing.assert_allclose(unpacked_vector(update.embedding), expected, atol=TOLERANCE, rtol=TOLERANCE)
        assert all(update.embedding is None or update.finish_reason for update in updates)


@pytest.fixture(scope="module", params=["llama", "gemma2"])
def bench(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    folder = tmp_path_factory.mktemp(request.param)
    model = write_model(request.param, folder / "model")
    adapters = write_adapters(model, folder / "adapters")
    generator = random.Random(5)
    lengths = iter((1, 41, 9, 57, 25, 33, 17, 2, 60))
    prompts = tuple(
        (generator.choices(range(VOCAB_SIZE), k=next(lengths)), name, pooling)
        for name in ADAPTERS
        for pooling in POOLINGS
    )
    return Bench(Oracle(model, adapters), Stock.make(model, adapters, folder / "store"), prompts)


def all_updates(rig: EngineRig) -> list[SequenceUpdate]:
    updates: list[SequenceUpdate] = []
    while rig.engine.has_work():
        updates += rig.step()
    return updates


@pytest.mark.parametrize(("device", "max_tokens_per_step"), [("cpu", 8), ("cpu", 512), ("cuda", 32)])
def test_embeddings_do_not_depend_on_chunks(bench: Bench, device: str, max_tokens_per_step: int) -> None:
    """Beside sequences that decode, on the CPU and where steps are launched ahead."""
    settings = {"max_tokens_per_step": max_tokens_per_step, "max_num_sequences": 6}
    if device == "cuda":
        with gpu_of_twins(), bench.stock.engine(400, device="cuda", **settings) as rig:
            _embed_beside_decodes(bench, rig)
    else:
        with bench.stock.engine(400, **settings) as rig:
            _embed_beside_decodes(bench, rig)


def _embed_beside_decodes(bench: Bench, rig: EngineRig) -> None:
    rig.submit(90, [1, 2, 3], None, SamplingParams(max_tokens=40, ignore_eos=True))
    bench.submit(rig)
    bench.check(all_updates(rig))
    assert len(rig.outputs[90].token_ids) == 40
    rig.assert_idle()


def test_what_is_pooled_is_computed_and_counted(bench: Bench) -> None:
    """Of a prompt whose pages are cached a mean computes all again, and the last token's states that token's page."""
    with bench.stock.engine(400, max_tokens_per_step=16) as rig:
        for repeat in range(2):
            for index, (prompt, adapter, pooling) in enumerate(bench.prompts):
                before = rig.engine.load().counters.num_computed_tokens
                rig.submit(index, prompt, adapter, SamplingParams(max_tokens=0, pooling=pooling))
                updates = all_updates(rig)
                usage, num_cached = updates[-1].usage, updates[-1].num_cached_tokens
                num_computed = rig.engine.load().counters.num_computed_tokens - before
                assert usage is not None and num_cached is not None
                assert (usage.num_computed_prompt_tokens, usage.num_cached_prompt_tokens) == (num_computed, num_cached)
                assert num_computed + num_cached == len(prompt) and usage.num_generated_tokens == 0
                if pooling == "last" and repeat:
                    assert num_cached >= (len(prompt) - 1) // 8 * 8
                else:
                    assert num_cached == 0
        rig.submit(50, bench.prompts[3][0], bench.prompts[3][1], SamplingParams(max_tokens=1, temperature=0.0))
        assert (all_updates(rig)[-1].num_cached_tokens or 0) >= (len(bench.prompts[3][0]) - 1) // 8 * 8


def test_each_row_of_a_preempted_prompt_counts_once(bench: Bench) -> None:
    """In a pool with room for little more than one of them, beside sequences that grow."""
    longest = max(bench.stock.num_pages(len(prompt) + 30, adapter) for prompt, adapter, _ in bench.prompts)
    with bench.stock.engine(longest + 4, max_tokens_per_step=8) as rig:
        for number in range(2):
            rig.submit(90 + number, [1, 2, number], None, SamplingParams(max_tokens=40, ignore_eos=True))
        updates = rig.step()
        bench.submit(rig)
        bench.check([*updates, *all_updates(rig)])
        rig.assert_idle()


def test_a_preemption_keeps_what_is_pooled(bench: Bench) -> None:
    """It is preempted by hand between chunks of its prompt, again and again."""
    prompt, adapter, _ = bench.prompts[8]
    own: tuple[list[int], str | None, Pooling] = (prompt, adapter, "mean")
    with bench.stock.engine(400, max_tokens_per_step=8) as rig:
        rig.submit(0, prompt, adapter, SamplingParams(max_tokens=0, pooling="mean"))
        updates: list[SequenceUpdate] = []
        num_preempted = num_steps = 0
        while rig.engine.has_work():
            updates += rig.step()
            num_steps += 1
            if num_steps % 3:  # else it would get nowhere: what is planned ahead is dropped
                continue
            scheduler = rig.engine._scheduler
            for sequence in [*scheduler._running.by_id.values()]:
                scheduler._preempt(sequence)
                num_preempted += 1
        assert num_preempted > 1
        Bench(bench.oracle, bench.stock, (own,)).check(updates)


def test_no_token_follows_a_prompt_that_is_pooled(bench: Bench) -> None:
    with bench.stock.engine(400) as rig:
        rig.submit(0, [1, 2, 3], None, SamplingParams(max_tokens=3, pooling="mean"))
        rig.finish()
        assert rig.outputs[0].error is not None and "max_tokens" in rig.outputs[0].error.message


def test_a_gang_of_two_workers_embeds_alike(bench: Bench) -> None:
    with gang(bench.stock.gang_config(400, 2, max_tokens_per_step=16)) as (engine, _):
        rig = EngineRig(engine, bench.stock.refs)
        bench.submit(rig)
        bench.check(all_updates(rig))
