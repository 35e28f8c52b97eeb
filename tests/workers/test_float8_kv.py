"""Engines whose KV has eight bits: on a stand-in GPU with the plain twins, as on the CPU, and as transformers would be.

A CPU is refused the option; here it is let in, to compare tokens.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from transformers.models.llama import modeling_llama
from transformers.models.qwen2 import modeling_qwen2

from motet.kernels.backend import plain_kernels
from motet.tests.rigs.engine_rig import EngineRig, SequenceOutput, Stock
from motet.tests.rigs.full_pool import fill_to_the_last_page
from motet.tests.rigs.gang_rig import gang
from motet.tests.rigs.oracle import RECIPES, VOCAB_SIZE, Oracle, write_adapters, write_model
from motet.tests.rigs.stand_in_gpu.gpu_worker import gpu_of_twins, run_worker_on_gpu
from motet.tests.workers.test_float8_weights import TOLERANCE, rounded
from motet.workers import window_pages, worker_builder
from motet.workers.execution.executor import LocalExecutor
from motet.workers.models.config import ModelConfig
from motet.workers.models.sharding import ModelSharding
from motet.workers.wire.messages import SamplingParams

NUM_TOKENS = 6
ADAPTERS: tuple[str | None, ...] = (None, RECIPES[1].name, RECIPES[3].name)
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True, num_logprobs=VOCAB_SIZE)
FLOAT8: dict[str, Any] = {"kv_dtype": "float8"}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Stock:
    return made("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Stock:
    """Layers with a window and layers without one, whose pages share the pool."""
    return made("qwen2_window_yarn", tmp_path_factory.mktemp("mixed"))


def made(variant: str, folder: Path) -> Stock:
    """With adapters packed for KV of eight bits, as an upload leaves them."""
    model = write_model(variant, folder / "model")
    adapters = write_adapters(model, folder / "adapters")
    return Stock.make(model, {name: adapters[name] for name in ADAPTERS if name is not None}, folder / "store")


@contextmanager
def on_a_cpu() -> Iterator[None]:
    """By the twins: other kernels sum in another order, and what lies between two numbers of eight bits flips."""
    twins = mock.patch.object(worker_builder, "choose_kernels", return_value=plain_kernels())
    with mock.patch.object(worker_builder, "check_kv_dtype"), twins:
        yield


def page_bytes(stock: Stock) -> int:
    model = ModelConfig.from_folder(stock.model_path)
    return model.num_layers * model.slab(stock.block_size, "float8", 4) * 4


def prompts() -> list[list[int]]:
    """Two that begin alike, for each adapter."""
    generator = random.Random(7)
    found = []
    for _ in ADAPTERS:
        shared = generator.choices(range(VOCAB_SIZE), k=17)
        found += [[*shared, *generator.choices(range(VOCAB_SIZE), k=6)] for _ in range(2)]
    return found


def requested(
    rig: EngineRig, of: list[list[int]] | None = None, after_step: Callable[[], None] = lambda: None
) -> list[SequenceOutput]:
    """The answers to the prompts `of`, two for each adapter."""
    first = len(rig.outputs)
    for index, prompt in enumerate(of or prompts()):
        rig.submit(first + index, prompt, ADAPTERS[index // 2], GREEDY)
    rig.finish(after_step)
    rig.assert_idle()
    return list(rig.outputs.values())[first:]


def tokens(output: list[SequenceOutput]) -> list[list[int]]:
    assert [one.error for one in output] == [None] * len(output)
    return [one.token_ids for one in output]


@pytest.fixture(scope="module")
def on_the_cpu(llama: Stock) -> list[list[int]]:
    """With room for all, and all prompts in one step."""
    with on_a_cpu(), llama.engine(120, max_tokens_per_step=512, prefix_cache=False, **FLOAT8) as rig:
        assert rig.engine.info.kernels == "torch; attention by torch on KV in float8"
        assert rig.engine.info.page_bytes == page_bytes(llama)
        return tokens(requested(rig))


def test_pages_shared_and_moved_give_the_same_tokens(llama: Stock, on_the_cpu: list[list[int]], tmp_path: Path) -> None:
    """A pool so small that adapters and KV go to host memory and disk and come back; prompts in pieces."""
    size = page_bytes(llama)
    tiers = {"kv_host_bytes": 8 * size, "kv_disk_bytes": 200 * size, "kv_disk_path": tmp_path}
    with on_a_cpu(), llama.engine(120, **FLOAT8) as rig:
        layout = ModelSharding(ModelConfig.from_folder(llama.model_path)).layout(llama.block_size, "float32", "float8")
    needed = max(layout.num_pages(ref.module_ranks) for ref in llama.refs.values()) + 6
    with gpu_of_twins() as gpu:
        small = {"pool_bytes": needed * size, "host_bytes": 60 * size, "max_tokens_per_step": 24}
        with llama.engine(0, device="cuda", **small, **tiers, **FLOAT8) as rig:
            rig.prefer_copies()
            first, again = tokens(requested(rig)), tokens(requested(rig))
            counters = rig.engine.load().counters
        assert not [c for c in gpu.tally.copies_of("page-mover") if c.waits]
    assert (first, again) == (on_the_cpu, on_the_cpu)
    moved = (counters.num_pages_out, counters.num_pages_in, counters.num_adapter_evictions)
    assert min(moved) > 0 and counters.num_move_failures == 0


def test_what_is_computed_again_is_the_same(llama: Stock, on_the_cpu: list[list[int]]) -> None:
    """Four sequences of three pages, each of which grows by one, in thirteen: some give way."""
    with gpu_of_twins():
        small = {"pool_bytes": 13 * page_bytes(llama), "prefix_cache": False, "kv_host_bytes": 0}
        with llama.engine(0, device="cuda", **small, **FLOAT8) as rig:
            fill_to_the_last_page(rig.engine._scheduler)
            for index in range(4):
                rig.submit(index, prompts()[index % 2], None, GREEDY)
            rig.finish()
            assert tokens(list(rig.outputs.values())) == on_the_cpu[:2] * 2
            assert rig.engine.load().counters.num_preemptions > 0


def test_a_gang_of_two_answers_as_one_worker_does(llama: Stock, on_the_cpu: list[list[int]]) -> None:
    """Scales are of a head, so that it does not matter which worker has it."""
    config = llama.gang_config(120, 2, device="cuda", **FLOAT8)
    with gang(config, run_worker_on_gpu) as (engine, workers):
        there = tokens(requested(EngineRig(engine, llama.refs)))
    assert [worker.exitcode for worker in workers] == [0, 0]
    assert there == on_the_cpu


def test_layers_with_and_without_a_window_share_pages_and_give_the_same_tokens(mixed: Stock) -> None:
    with on_a_cpu(), mixed.engine(240, max_tokens_per_step=512, prefix_cache=False, **FLOAT8) as rig:
        alone = tokens(requested(rig))
    with gpu_of_twins(), mixed.engine(240, device="cuda", max_tokens_per_step=24, **FLOAT8) as rig:
        first, again = tokens(requested(rig)), tokens(requested(rig))
        assert rig.engine.load().counters.num_cached_tokens > 0
    assert (first, again) == (alone, alone)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_dense_pages_hold_kv_of_eight_bits(mixed: Stock, device: str) -> None:
    """Prompts of many windows give the tokens that they give where no page is given back.

    Everything that no sequence holds is NaN meanwhile, on the CPU alone: there no stream of the stand-in's reads it.
    """
    rng = random.Random(3)
    long = [rng.choices(range(VOCAB_SIZE), k=rng.randint(100, 160)) for _ in prompts()]
    of = {"max_tokens_per_step": 24, **FLOAT8}
    no_window = mock.patch.object(ModelSharding, "window_pages", return_value=(None, None))
    with on_a_cpu(), no_window, mixed.engine(240, prefix_cache=False, **of) as rig:
        whole = tokens(requested(rig, long))
    num_dense = 0
    place = on_a_cpu() if device == "cpu" else gpu_of_twins()
    few_keys = mock.patch.object(window_pages, "_TILE_KEYS", 6)  # twins read no tiles
    with place, few_keys, mixed.engine(240, device=device, **of) as rig:
        scheduler, executor = rig.engine._scheduler, rig.engine.executor

        def look() -> None:
            nonlocal num_dense
            num_dense += sum(len(each.dense_pages) for each in scheduler._running.by_id.values())
            if device == "cpu":
                assert isinstance(executor, LocalExecutor)
                executor.runner.pool[torch.tensor(scheduler.memory.allocator._free)] = torch.nan

        first, again = (tokens(requested(rig, long, look)) for _ in range(2))
        num_cached = rig.engine.load().counters.num_cached_tokens
    assert num_dense > 0 and num_cached > 0
    assert (first, again) == (whole, whole)


@pytest.mark.parametrize(("base", "family", "head_dim"), [("llama", modeling_llama, 16), ("mixed", modeling_qwen2, 16)])
def test_the_answers_are_those_of_transformers_with_rounded_kv(
    base: str, family: Any, head_dim: int, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """K as it comes from its rotation, V as it comes from its linear and adapter."""
    stock: Stock = request.getfixturevalue(base)
    with gpu_of_twins(), stock.engine(240, device="cuda", **FLOAT8) as rig:
        output = requested(rig)
    folders = {name: stock.model_path.parent / "adapters" / name for name in stock.refs}

    def differences(oracle: Oracle) -> torch.Tensor:
        found = []
        for index, (prompt, received) in enumerate(zip(prompts(), output, strict=True)):
            logits = oracle.logits([*prompt, *received.token_ids[:-1]], ADAPTERS[index // 2])[len(prompt) - 1 :]
            for row, said in zip(logits.log_softmax(-1), received.logprobs, strict=True):
                found.append((row[said.top_ids] - torch.tensor(said.top_logprobs)).abs().max())
        return torch.stack(found)

    unrounded = differences(Oracle(stock.model_path, folders))
    oracle = Oracle(stock.model_path, folders)
    rotate = family.apply_rotary_pos_emb

    def rotate_and_round(q: torch.Tensor, k: torch.Tensor, *rest: Any, **named: Any) -> tuple[torch.Tensor, ...]:
        q, k = rotate(q, k, *rest, **named)
        return q, rounded(k)

    def round_heads(_module: Any, _given: Any, v: torch.Tensor) -> torch.Tensor:
        return rounded(v.unflatten(-1, (-1, head_dim))).flatten(-2)

    monkeypatch.setattr(family, "apply_rotary_pos_emb", rotate_and_round)
    for name, module in oracle._model.named_modules():
        if name.endswith("v_proj"):
            module.register_forward_hook(round_heads)
    assert differences(oracle).median() < TOLERANCE
    assert unrounded.median() > 10 * TOLERANCE, "the comparison can fail: rounding changes what is said"


def test_who_is_refused(llama: Stock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"kv_dtype = 'float8': KV of eight bits is for GPUs of compute capability"):
        llama.engine(60, device="cpu", **FLOAT8)
    with gpu_of_twins(), monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
        with pytest.raises(ValueError, match=r"kv_dtype = 'float8': this GPU has the compute capability 8\.0"):
            llama.engine(60, device="cuda", **FLOAT8)
    sharding = ModelSharding(ModelConfig.from_folder(llama.model_path))
    with pytest.raises(ValueError, match=r"kv_dtype = 'float8': .* pages have 12 tokens, .* a multiple of 8"):
        sharding.slab(12, "float8")
    model = write_model("gemma2", tmp_path / "gemma")  # with heads of 24
    with pytest.raises(ValueError, match=r"this base has KV heads of 24 .* heads of a multiple of 16"):
        ModelSharding(ModelConfig.from_folder(model)).slab(16, "float8")
