"""Gangs of several workers against transformers + PEFT: the same tokens for every degree."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch

from motet.adapters.format.validation import validate
from motet.adapters.packing.layout import AdapterLayout
from motet.adapters.store.store import AdapterStore
from motet.benchmarks.rigs.thread_gang import ThreadGroup, run_threads
from motet.tests.rigs.engine_rig import EngineRig
from motet.tests.rigs.full_pool import fill_to_the_last_page
from motet.tests.rigs.gang_rig import gang, run_worker_in_nano_batches
from motet.tests.rigs.oracle import RECIPES, VARIANTS, VOCAB_SIZE, Oracle, write_adapters, write_model
from motet.tests.rigs.part_configs import engine_config
from motet.tests.rigs.patience import eventually
from motet.workers.config import EngineConfig
from motet.workers.engine import Engine
from motet.workers.engine_builder import build_engine
from motet.workers.execution.executor import WorkerLostError
from motet.workers.execution.gang_executor import GangExecutor
from motet.workers.memory.page_arrays import pool_of
from motet.workers.models.config import ModelConfig
from motet.workers.models.sharding import ModelSharding, layouts_of_gang
from motet.workers.plan import INT32_BYTES, Residence, SequencePlan, StepPlan, packed
from motet.workers.wire.messages import AdapterRef, SamplingParams
from motet.workers.worker import WorkerSettings, run_worker
from motet.workers.worker_builder import build_executor

pytestmark = pytest.mark.slow
BLOCK_SIZE = 8
NUM_TOKENS = 10
TOLERANCE = 1e-3  # of log-probabilities in float32; below it a choice is a close call, which rounding may decide
ADAPTERS: tuple[str | None, ...] = (None, *(recipe.name for recipe in RECIPES), None)


@dataclass(frozen=True)
class Case:
    oracle: Oracle
    model_path: Path
    store_path: Path
    refs: dict[str, AdapterRef]

    def config(self, degree: int, num_pages: int, **settings: int | float | str) -> EngineConfig:
        sharding = ModelSharding(ModelConfig.from_folder(self.model_path), degree)
        page_bytes = sharding.config.num_layers * sharding.slab(BLOCK_SIZE) * 4
        return engine_config(
            self.model_path,
            self.store_path,
            dtype="float32",
            pool_bytes=num_pages * page_bytes,
            block_size=BLOCK_SIZE,
            tensor_parallel=degree,
            **settings,
        )


@pytest.fixture(scope="module", params=VARIANTS)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder = tmp_path_factory.mktemp(request.param)
    model_path = write_model(request.param, folder / "model")
    adapters = write_adapters(model_path, folder / "adapters")
    model, store, refs = ModelConfig.from_folder(model_path), AdapterStore(folder / "store"), {}
    layouts = [layout for degree in (2, 4) for layout in layouts_of_gang(model, degree, BLOCK_SIZE, "float32")]
    for name, path in adapters.items():
        config = (path / "adapter_config.json").read_bytes()
        content = validate(config, path / "adapter_model.safetensors", model.shape)
        store.put(content, layouts)
        refs[name] = AdapterRef(content.digest, content.module_ranks)
    return Case(Oracle(model_path, adapters), model_path, folder / "store", refs)


@pytest.mark.parametrize("degree", [2, pytest.param(4, marks=pytest.mark.each_kind)])
def test_mixed_batch_on_a_small_pool(case: Case, degree: int) -> None:
    """Base and adapters in chunked batches; adapters evict one another."""
    _ask_a_mixed_batch(case, degree, max_tokens_per_step=24)


@pytest.mark.parametrize("degree", [2, 4])
@pytest.mark.parametrize("case", ["llama", "gemma3", "olmo3", "qwen2_moe"], indirect=True)
def test_mixed_batch_in_nano_batches(case: Case, degree: int) -> None:
    """Chunks of prompts and decodes in two parts, the sums of one under way while the other is computed."""
    processes = _ask_a_mixed_batch(case, degree, max_tokens_per_step=64, run=run_worker_in_nano_batches)
    assert [process.exitcode for process in processes] == [0] * degree


def _ask_a_mixed_batch(
    case: Case, degree: int, max_tokens_per_step: int, run: Callable[[WorkerSettings], None] = run_worker
) -> list[BaseProcess]:
    generator = random.Random(degree)
    prompts = [[generator.randrange(VOCAB_SIZE) for _ in range(generator.randint(1, 40))] for _ in ADAPTERS]
    sampling = SamplingParams(max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True, num_logprobs=0)
    sharding = ModelSharding(ModelConfig.from_folder(case.model_path), degree)
    layout = sharding.layout(BLOCK_SIZE, "float32")
    num_pages = 16 + max(layout.num_pages(ref.module_ranks) for ref in case.refs.values())
    num_pages += 3 * pool_of(sharding, BLOCK_SIZE, torch.float32, 1).state.num_pages
    # Where there are experts, two workers share the features of each, and four the experts.
    expert_sharding = "tensor" if degree == 2 else "expert"
    config = case.config(degree, num_pages, max_tokens_per_step=max_tokens_per_step, expert_sharding=expert_sharding)
    with gang(config, run) as (engine, processes):
        rig = EngineRig(engine, case.refs)
        for i, (prompt, adapter) in enumerate(zip(prompts, ADAPTERS, strict=True)):
            rig.submit(i, prompt, adapter, sampling)
        rig.finish()
        rig.assert_idle()
        assert engine.load().counters.num_adapter_evictions > 0
    for i, (prompt, adapter) in enumerate(zip(prompts, ADAPTERS, strict=True)):
        output = rig.outputs[i]
        assert (output.finish_reason, output.error) == ("length", None)
        logprobs = case.oracle.logits(prompt + output.token_ids[:-1], adapter)[len(prompt) - 1 :].log_softmax(-1)
        chosen = logprobs.gather(1, torch.tensor(output.token_ids).unsqueeze(1)).squeeze(1)
        # Greedy by the oracle's own numbers at every position, up to close calls.
        assert (logprobs.amax(dim=-1) - chosen).max() < TOLERANCE, f"adapter {adapter}"
        said = torch.tensor([entry.chosen for entry in output.logprobs])
        torch.testing.assert_close(said, chosen, atol=TOLERANCE, rtol=0)
    return processes


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder = tmp_path_factory.mktemp("llama")
    return Case(Oracle, write_model("llama", folder / "model"), folder / "store", {})  # type: ignore[arg-type]


def test_every_worker_copies_the_pages_that_are_alike_in_part(llama: Case) -> None:
    generator = random.Random(3)
    first = [generator.randrange(VOCAB_SIZE) for _ in range(21)]
    prompts = [first, [*first[:13], 5, 6, 7, 8], first]
    sampling = SamplingParams(max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True)

    def answers(engine: Engine) -> list[list[int]]:
        rig = EngineRig(engine, {})
        for i, prompt in enumerate(prompts):
            rig.submit(i, prompt, None, sampling)
            rig.finish()
        return [rig.outputs[i].token_ids for i in range(len(prompts))]

    alone = build_engine(llama.config(1, num_pages=30, prefix_cache=False))
    expected = answers(alone)
    alone.close()
    with gang(llama.config(2, num_pages=30)) as (engine, _):
        assert answers(engine) == expected
        assert engine.load().counters.num_cached_tokens == 13 + 20  # of both, less than a page is a copy


def _steps(rig: EngineRig, count: int) -> None:
    for _ in range(count):
        rig.step()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_worker_is_noticed(llama: Case, rank: int) -> None:
    with gang(llama.config(2, 40)) as (engine, processes):
        rig = EngineRig(engine, {})
        rig.submit(0, [1, 2, 3], None, SamplingParams(max_tokens=200, ignore_eos=True))
        rig.step()
        woken: list[float] = []
        engine.wake_on_copy_end(lambda: woken.append(time.monotonic()))
        processes[rank].kill()
        processes[rank].join()
        with pytest.raises(WorkerLostError, match="worker"):
            _steps(rig, 200)
        eventually(lambda: woken, lambda: "an idle leader would not have noticed")


@pytest.mark.parametrize("in_nano_batches", [False, True])
def test_a_worker_that_hangs_is_found_by_the_deadline(llama: Case, in_nano_batches: bool) -> None:
    """The other one, which waits for a sum of both, ends by itself."""
    run = run_worker_in_nano_batches if in_nano_batches else run_worker
    # Long beside a step of this model, on any machine.
    with gang(llama.config(2, 40, step_deadline_s=5.0), run) as (engine, processes):
        rig = EngineRig(engine, {})
        for i in range(3):
            rig.submit(i, [1, 2, 3], None, SamplingParams(max_tokens=200, ignore_eos=True))
        rig.step()
        pid = processes[1].pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        try:
            with pytest.raises(WorkerLostError):
                _steps(rig, 200)
            eventually(lambda: not processes[0].is_alive(), lambda: "it waits on")
        finally:
            processes[1].kill()


def test_a_worker_that_keeps_other_pages_than_the_leader_knows_ends_the_gang(llama: Case) -> None:
    with gang(llama.config(2, 40)) as (engine, _):
        rig = EngineRig(engine, {})
        rig.submit(0, [1, 2, 3] * 7, None, SamplingParams(max_tokens=100, temperature=0, ignore_eos=True))
        rig.step()
        assert isinstance(engine.executor, GangExecutor)
        kept = engine.executor._deltas.tables
        kept[0] = kept[0][:-INT32_BYTES]
        with pytest.raises(WorkerLostError, match="keeps 2 pages of sequence 0, and it keeps 3"):
            _steps(rig, 200)


def test_pages_that_change_hands_are_those_of_every_worker(llama: Case) -> None:
    """Sequences of a full pool grow, share pages, are preempted, and come back from host memory."""
    generator = random.Random(5)
    start = [generator.randrange(VOCAB_SIZE) for _ in range(20)]
    prompts = [
        [*start[: generator.randint(0, 20)], *(generator.randrange(VOCAB_SIZE) for _ in range(9))] for _ in "12345678"
    ]
    sampling = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)

    def answers(engine: Engine) -> list[list[int]]:
        rig = EngineRig(engine, {})
        rig.prefer_copies()
        fill_to_the_last_page(engine._scheduler)
        for i, prompt in enumerate(prompts):
            rig.submit(i, prompt, None, sampling)
        rig.finish()
        return [rig.outputs[i].token_ids for i in range(len(prompts))]

    alone = build_engine(llama.config(1, num_pages=100))
    expected = answers(alone)
    alone.close()
    with gang(llama.config(2, num_pages=24, kv_host_bytes=1 << 20)) as (engine, _):
        assert answers(engine) == expected
        counters = engine.load().counters
        assert counters.num_preemptions > 0 and counters.num_cached_tokens > 0
        engine.step()
        assert isinstance(engine.executor, GangExecutor)
        assert not engine.executor._deltas.tables, "tables are kept of sequences that have ended"


def test_every_worker_has_its_part_of_a_state_behind_the_pool(tmp_path: Path) -> None:
    """States come back from host memory and disk as the leader decides: the tokens are those of one worker alone."""
    hybrid = Case(Oracle, write_model("qwen3_5", tmp_path / "model"), tmp_path / "store", {})  # type: ignore[arg-type]
    generator = random.Random(5)
    prompts = [generator.choices(range(VOCAB_SIZE), k=44) for _ in range(9)]
    sampling = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)

    def answers(engine: Engine) -> list[list[int]]:
        rig = EngineRig(engine, {})
        rig.prefer_copies()
        for i, prompt in enumerate([*prompts, prompts[0]]):  # by the second time it is on disk
            rig.submit(i, prompt, None, sampling)
            rig.finish()
        return [rig.outputs[i].token_ids for i in range(len(prompts) + 1)]

    alone = build_engine(hybrid.config(1, num_pages=100))
    expected = answers(alone)
    alone.close()
    model = ModelConfig.from_folder(hybrid.model_path)
    part = pool_of(ModelSharding(model, 2), BLOCK_SIZE, torch.float32, 1)
    num_pages = 7 + 2 * part.state.num_pages
    tiers = {"kv_host_bytes": 2 * num_pages * part.page_bytes, "kv_disk_bytes": 1 << 20, "kv_disk_path": tmp_path}
    with gang(hybrid.config(2, num_pages, **tiers)) as (engine, _):  # type: ignore[arg-type]
        assert answers(engine) == expected
        counters = engine.load().counters
        assert counters.num_pages_in == 5 + part.state.num_pages
        assert (counters.num_cached_tokens, counters.num_move_failures) == (40, 0)


def test_a_degree_that_does_not_fit_is_refused(llama: Case) -> None:
    with pytest.raises(ValueError, match="a gang of 3 workers cannot share 4 attention heads"):
        llama.config(3, 40)
    model = replace(ModelConfig.from_folder(llama.model_path), num_heads=12, num_kv_heads=6)
    with pytest.raises(ValueError, match="a gang of 4 workers cannot share 6 KV heads: a divisor or a multiple"):
        ModelSharding(model, 4)


def test_each_worker_reads_its_own_slices(llama: Case) -> None:
    model = ModelConfig.from_folder(llama.model_path)
    for degree in (2, 4):
        parts = [ModelSharding(model, degree, rank) for rank in range(degree)]
        assert [part.heads for part in parts] == [(i * 4 // degree, (i + 1) * 4 // degree) for i in range(degree)]
        assert [part.vocabulary[1] for part in parts][-1] == model.vocab_size


@pytest.mark.parametrize("num_kv_heads", [1, 2])
def test_workers_that_outnumber_the_kv_heads_hold_one_each(num_kv_heads: int, tmp_path: Path) -> None:
    """The one that their query heads attend to, in pages of one head; adapters of k and v are cut alike."""
    model = ModelConfig.from_folder(write_model("llama", tmp_path, num_key_value_heads=num_kv_heads))
    one_head = ModelSharding(replace(model, num_kv_heads=1)).slab(BLOCK_SIZE)
    group = model.num_heads // num_kv_heads
    for rank in range(4):
        part = ModelSharding(model, 4, rank)
        (first, _), head = part.heads, rank * num_kv_heads // 4
        assert part.kv_heads_of(0) == (head, head + 1) and first // group == head
        assert part.slab(BLOCK_SIZE) == one_head == model.slab(BLOCK_SIZE) // num_kv_heads
        sharding = part.layout(BLOCK_SIZE, "float32").sharding
        assert sharding is not None and sharding.outputs["k_proj"] == sharding.outputs["v_proj"]
        assert sharding.outputs["k_proj"] == (head * model.head_dim, (head + 1) * model.head_dim)


def test_every_worker_packs_an_adapter_into_as_many_pages(llama: Case) -> None:
    model = ModelConfig.from_folder(llama.model_path)
    for ranks in ({"q_proj": 1}, {"down_proj": 3, "k_proj": 7}, dict.fromkeys(model.shape.modules, 16)):
        for degree in (2, 4):
            layouts: list[AdapterLayout] = layouts_of_gang(model, degree, BLOCK_SIZE, "float32")
            assert len({layout.num_pages(ranks) for layout in layouts}) == 1
            assert len({str(layout.offsets(ranks)) for layout in layouts}) == 1
            assert len({layout.key for layout in layouts}) == degree


@pytest.mark.parametrize("degree", [2, 4])
def test_workers_exchange_nothing_for_adapters(llama: Case, degree: int) -> None:
    """Two all-reduces a layer and one for the embedding, with adapters of any rank as without."""
    num_rows, model = 12, ModelConfig.from_folder(llama.model_path)

    def step(lora_rank: int) -> StepPlan:
        ranks, digest = dict.fromkeys(model.shape.modules, lora_rank), "digest" if lora_rank else None
        residences = (Residence("digest", ranks, tuple(range(5, 300))),) if lora_rank else ()
        sequences = (SequencePlan(i, (1,) * 6, 0, packed([i]), digest, None) for i in range(num_rows // 6))
        return StepPlan(1, tuple(sequences), residences, ())

    def work(group: ThreadGroup) -> list[tuple[int, int]]:
        executor, counted = build_executor(llama.config(degree, 400), group, None), []
        for lora_rank in (0, 4, 16):
            group.traffic.num_collectives = group.traffic.sent_bytes = 0
            executor.runner.run(step(lora_rank))
            counted.append((group.traffic.num_collectives, group.traffic.sent_bytes))
        executor.close()
        return counted

    num_collectives = 2 * model.num_layers + 1
    sent_bytes = num_collectives * num_rows * 4 * model.hidden_size * 2 * (degree - 1) // degree
    for counted in run_threads(degree, work):
        assert [num for num, _ in counted] == [num_collectives + 1] * 3  # one more gathers the logits
        assert len({sent for _, sent in counted}) == 1
        assert counted[0][1] == pytest.approx(sent_bytes, rel=0.05)
