"""The whole engine on a stand-in GPU, every family: the CPU's tokens, and nothing that a GPU would not survive."""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from motet.benchmarks.gpu.engine_bench import DRY_SIZE, Bench
from motet.benchmarks.gpu.machine import Machine
from motet.kernels import joint_sampling
from motet.kernels.joint_sampling import ChoicesUnderWay, RowChoice
from motet.kernels.plain.sampling import draw_alone
from motet.kernels.sampling import Draw
from motet.tests.rigs.engine_rig import EngineRig, SequenceOutput, Stock
from motet.tests.rigs.gang_rig import gang
from motet.tests.rigs.oracle import RECIPES, VARIANTS, VOCAB_SIZE, write_adapters, write_model
from motet.tests.rigs.stand_in_gpu.gpu_worker import UNEVEN_BYTES, gpu_of_twins, run_worker_on_gpu, twins
from motet.tests.rigs.stand_in_gpu.stand_in_gpu import StandInGpu
from motet.tests.rigs.stand_in_gpu.tally import Wait
from motet.workers import device, window_pages, worker_builder
from motet.workers import worker_builder as worker_builder_module
from motet.workers.costs.step_defaults import cpu_pool_bytes
from motet.workers.decoding.token_choice import uniform
from motet.workers.decoding.token_counts import TokenCounts
from motet.workers.execution import runner
from motet.workers.execution.executor import LocalExecutor
from motet.workers.machine_memory import usable_memory_bytes
from motet.workers.models.config import ModelConfig
from motet.workers.plan import SamplePlan
from motet.workers.wire.engine_load import EngineCounters
from motet.workers.wire.messages import SamplingParams

NUM_TOKENS = 4
CHOSEN: dict[str, Any] = {"max_tokens": NUM_TOKENS, "ignore_eos": True}
WAYS = (  # in which tokens are chosen
    SamplingParams(temperature=0.0, num_logprobs=3, **CHOSEN),
    SamplingParams(temperature=0.8, seed=3, top_p=0.9, **CHOSEN),
    SamplingParams(temperature=0.9, seed=4, repetition_penalty=1.2, frequency_penalty=0.3, num_logprobs=2, **CHOSEN),
    SamplingParams(temperature=1.0, seed=5, top_k=7, min_p=0.01, logit_bias={3: 2.0, 9: -1.0}, **CHOSEN),
)
ADAPTERS = (None, RECIPES[0].name, RECIPES[1].name)


@pytest.fixture(scope="module", params=VARIANTS)
def stock(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Stock:
    return made(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Stock:
    return made("llama", tmp_path_factory.mktemp("llama"))


def made(variant: str, folder: Path) -> Stock:
    model = write_model(variant, folder / "model")
    adapters = write_adapters(model, folder / "adapters")
    return Stock.make(model, {name: adapters[name] for name in ADAPTERS if name is not None}, folder / "store")


def prompts(num: int) -> list[list[int]]:
    generator = random.Random(num)
    return [generator.choices(range(VOCAB_SIZE), k=generator.randint(18, 30)) for _ in range(num)]


def ask_all(rig: EngineRig, requested: list[list[int]]) -> list[SequenceOutput]:
    """Each prompt in another way, some of them with adapters; all at once."""
    first = len(rig.outputs)
    for index, prompt in enumerate(requested):
        rig.submit(first + index, prompt, ADAPTERS[index % len(ADAPTERS)], WAYS[index % len(WAYS)])
    rig.finish()
    rig.assert_idle()
    return list(rig.outputs.values())[first:]


def requested_twice(
    stock: Stock, device: str, folder: Path, num_pages: int
) -> tuple[list[SequenceOutput], EngineCounters]:
    """The answers of an engine that answers all, does so again, and has moved KV behind the pool in between."""
    num_host_pages = 10 + 2 * stock.num_state_pages
    tiers = {
        "kv_host_bytes": num_host_pages * stock.page_bytes,
        "kv_disk_bytes": 200 * stock.page_bytes,
        "kv_disk_path": folder,
    }
    with stock.engine(num_pages, device=device, host_bytes=40 * stock.page_bytes, **tiers) as rig:
        rig.prefer_copies()
        answers = [*ask_all(rig, prompts(4)), *ask_all(rig, prompts(4))]
        return answers, rig.engine.load().counters


def same(ours: list[SequenceOutput], theirs: list[SequenceOutput]) -> None:
    for output, other in zip(ours, theirs, strict=True):
        assert (output.error, output.finish_reason) == (None, "length")
        assert output.token_ids == other.token_ids
        for said, received in zip(output.logprobs, other.logprobs, strict=True):
            assert said.chosen == pytest.approx(received.chosen, abs=1e-3)
            assert said.top_ids == received.top_ids


@pytest.fixture(scope="module")
def on_the_cpu(stock: Stock) -> list[SequenceOutput]:
    """The base and adapters in one batch, with draws, penalties and log-probabilities."""
    with stock.engine(60) as rig:
        return ask_all(rig, prompts(3))


def test_every_family_answers_as_on_the_cpu(stock: Stock, on_the_cpu: list[SequenceOutput]) -> None:
    with gpu_of_twins(), stock.engine(60, device="cuda") as rig:
        same(ask_all(rig, prompts(3)), on_the_cpu)


@pytest.mark.each_kind
@pytest.mark.parametrize("expert_sharding", ["tensor", "expert"])
def test_a_gang_of_two_answers_as_one_does(
    stock: Stock, on_the_cpu: list[SequenceOutput], expert_sharding: str
) -> None:
    """Each worker on a stand-in of its own, gloo between them."""
    if expert_sharding == "expert" and ModelConfig.from_folder(stock.model_path).experts is None:
        pytest.skip("a base without experts is cut in one way")
    config = stock.gang_config(60, 2, device="cuda", expert_sharding=expert_sharding)
    with gang(config, run_worker_on_gpu) as (engine, workers):
        there = ask_all(EngineRig(engine, stock.refs), prompts(3))
    assert [worker.exitcode for worker in workers] == [0, 0]
    same(there, on_the_cpu)


@pytest.mark.parametrize("stock", ["llama", "qwen3_5"], indirect=True)
def test_pages_move_between_the_tiers_beside_the_steps(stock: Stock, tmp_path: Path) -> None:
    """On a pool so small that adapters, KV and states push one another out, and come back from host memory and disk."""
    num_pages = max(stock.num_pages(30 + NUM_TOKENS, adapter) for adapter in ADAPTERS) + 4 + stock.num_state_pages
    here, _ = requested_twice(stock, "cpu", tmp_path, num_pages)
    with gpu_of_twins() as gpu:
        there, counters = requested_twice(stock, "cuda", tmp_path, num_pages)
        copies = {thread: gpu.tally.copies_of(thread) for thread in ("page-mover", "disk-mover", "adapter-loader")}
    same(there, here)
    assert counters.num_move_failures == 0
    assert min(counters.num_pages_out, counters.num_pages_in, counters.num_adapter_evictions) > 0
    assert all(made for made in copies.values())
    assert not [copy for made in copies.values() for copy in made if copy.waits], "a copy from or to pageable memory"


def waits_beside_kernels(gpu: StandInGpu) -> list[Wait]:
    """Those of the thread that computes, but for those in the twins of the kernels: Triton's have none.

    The twin that chooses tokens is for CPUs.
    """
    return [
        wait
        for wait in gpu.tally.waits_of("worker")
        if not wait.line.startswith("kernels/plain/") or wait.line.startswith("kernels/plain/sampling.py")
    ]


def chosen_one_by_one(
    logits: torch.Tensor, plans: Sequence[SamplePlan], counts: Sequence[TokenCounts | None] = (), *_: object
) -> ChoicesUnderWay:
    """As tokens were chosen on a GPU once: penalties row by row, and each draw sent to the host."""
    for row, (plan, seen) in enumerate(zip(plans, counts or [None] * len(plans), strict=True)):
        requested = plan.params
        if seen is not None:
            at = torch.frombuffer(seen.token_ids, dtype=torch.int32).long().to(logits.device)
            values = logits[row].index_select(0, at)
            factor = requested.repetition_penalty
            logits[row].index_copy_(0, at, torch.where(values > 0, values / factor, values * factor))
        if requested.temperature > 0:
            draw = Draw(requested, uniform(plan.seed, plan.index))
            logits[row, draw_alone(logits[row], draw)] = 1e3
    return ChoicesUnderWay(logits, [RowChoice(None, None, {}, plan.params.num_logprobs) for plan in plans])


def test_the_host_waits_for_a_steps_tokens_alone(llama: Stock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once for each step that chooses tokens. Inputs that go one by one and draws row by row, put back, are found."""

    def waits() -> tuple[int, int]:
        with gpu_of_twins() as gpu, llama.engine(60, device="cuda") as rig:
            gpu.tally.clear()
            ask_all(rig, prompts(4))
            return len(waits_beside_kernels(gpu)), rig.engine.load().counters.num_steps

    num_waits, num_steps = waits()
    assert NUM_TOKENS <= num_waits <= num_steps
    one_by_one: dict[str, tuple[object, object]] = {
        "staged": (joint_sampling, lambda device, *tensors: [x.to(device) for x in tensors]),
        "begin_sample": (runner, chosen_one_by_one),
    }
    for name, (owner, old) in one_by_one.items():
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, old)
            num_waits, num_steps = waits()
        assert num_waits > 3 * num_steps, name


def test_what_a_worker_takes_of_its_gpu_is_measured(llama: Stock, caplog: pytest.LogCaptureFixture) -> None:
    with gpu_of_twins() as gpu, caplog.at_level(logging.INFO, "motet.workers.worker_builder"):
        with llama.engine(60, device="cuda"):
            taken = gpu.streams.num_allocated_bytes
        assert "the GPU's memory: weights 0.00 GiB, the pool 0.00 GiB, chunks of prompts" in caplog.text
        gpu.streams.total_bytes = gpu.streams.num_allocated_bytes + taken - 1000
        with pytest.raises(
            ValueError, match=r"no room for [a-z ]+: weights 0\.00 GiB.* a smaller pool_bytes .*leaves more"
        ):
            llama.engine(60, device="cuda")


def test_what_a_start_has_computed_leaves_nothing_in_the_pool(llama: Stock) -> None:
    """Attention may multiply what it does not see, and the start's adapters are arbitrary numbers."""
    with gpu_of_twins(), llama.engine(60, device="cuda") as rig:
        executor = rig.engine.executor
        assert isinstance(executor, LocalExecutor)
        assert not executor.runner.pool.cpu().any()


def test_workers_of_a_gang_have_the_pool_of_the_smallest_gpu(llama: Stock) -> None:
    config = llama.gang_config(60, 2, device="cuda", pool_bytes=None, device_memory_share=1.0)
    with gang(config, run_worker_on_gpu) as (engine, workers):
        there = ask_all(EngineRig(engine, llama.refs), prompts(4))
        pool_bytes = engine.info.num_pages * engine.info.page_bytes
    assert 8 * UNEVEN_BYTES < pool_bytes <= 9 * UNEVEN_BYTES
    assert [worker.exitcode for worker in workers] == [0, 0]
    with llama.engine(60) as rig:
        same(there, ask_all(rig, prompts(4)))


def test_the_benchmark_for_gpus_runs_with_its_tiers() -> None:
    machine, size = Machine(torch.device("cuda", 0), torch.float32, is_dry=False), replace(DRY_SIZE, context=20)
    here = Bench(replace(machine, device=torch.device("cpu"), is_dry=True), size, twins())
    expected = here.serve(2)
    here.engine.close()
    with gpu_of_twins() as gpu:
        bench = Bench(machine, size, twins())
        served = bench.serve(2)
        bench.engine.close()
        assert gpu.tally.copies_of("page-mover"), "filled pages go to host memory"
    assert served.token_ids == expected.token_ids


def test_the_pool_of_a_gpu_is_what_is_left(llama: Stock, caplog: pytest.LogCaptureFixture) -> None:
    """All pages that have room beside the weights, the largest step and what is stated for later; and no more."""
    total = worker_builder_module.LATER_BYTES + (1 << 27)
    with gpu_of_twins() as gpu, caplog.at_level(logging.INFO, "motet.workers.worker_builder"):
        gpu.streams.total_bytes = total
        with llama.engine(60, device="cuda", pool_bytes=None, device_memory_share=0.999) as rig:
            num_pages = rig.engine.info.num_pages
            pool_bytes, allocated = num_pages * llama.page_bytes, gpu.streams.num_allocated_bytes
            there = ask_all(rig, prompts(4))
            assert (
                gpu.streams.num_peak_bytes <= int(0.999 * total) - worker_builder_module.LATER_BYTES + llama.page_bytes
            )
    left = int(0.999 * total) - worker_builder_module.LATER_BYTES - allocated
    assert 0 <= left < 0.1 * pool_bytes, "what the largest step takes for a while, and a part of a page"
    assert "the pool gets" in caplog.text
    with llama.engine(60) as rig:
        same(there, ask_all(rig, prompts(4)))


def test_a_gpu_with_nothing_left_says_what_is_there(llama: Stock) -> None:
    with gpu_of_twins() as gpu:
        gpu.streams.total_bytes = worker_builder_module.LATER_BYTES
        output = r"no room for a pool: device_memory_share = 0\.9 .* weights .* a larger share"
        with pytest.raises(ValueError, match=output):
            llama.engine(60, device="cuda", pool_bytes=None)


def test_float32_is_refused_on_a_gpu(llama: Stock, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-in lets it in, to compare tokens; a worker does not."""
    with gpu_of_twins():
        monkeypatch.setattr(worker_builder, "check_dtype", device.check_dtype)
        with pytest.raises(ValueError, match=r"float32 is not served on a GPU.* and float32 with device cpu"):
            llama.engine(60, device="cuda")


def test_a_cpu_takes_a_pool_of_its_own_size(llama: Stock) -> None:
    with llama.engine(60, pool_bytes=None, pool_sharers=4096) as rig:
        assert rig.engine.info.num_pages == cpu_pool_bytes(usable_memory_bytes(), 4096) // llama.page_bytes


def test_dense_pages_are_filled_on_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a sequence that is longer than a window and what kernels for GPUs read before it (twins read no tiles)."""
    monkeypatch.setattr(window_pages, "_TILE_KEYS", 20)
    stock = made("gemma3", tmp_path)
    prompt = random.Random(7).choices(range(VOCAB_SIZE), k=200)
    answers = list[list[int]]()
    with gpu_of_twins():
        for kind in ("cpu", "cuda"):
            with stock.engine(90, device=kind, max_tokens_per_step=64) as rig:
                rig.submit(0, prompt, None, WAYS[0])
                most_dense = 0
                while rig.engine.has_work():
                    rig.step()
                    running = rig.engine._scheduler._running.by_id.values()
                    most_dense = max([most_dense, *(len(each.dense_pages) for each in running)])
                rig.assert_idle()
                answers.append(rig.outputs[0].token_ids)
                assert most_dense > 0
    assert answers[0] == answers[1]
