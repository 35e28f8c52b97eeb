"""What a worker computes before it is ready: every kernel that requests need later is compiled by then."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

pytest.importorskip("triton", reason="Triton is for Linux on x86-64")

from motet.adapters.adapter import EMBEDDING, HEAD
from motet.tests.rigs.engine_rig import Stock
from motet.tests.rigs.oracle import RECIPES, VOCAB_SIZE, write_adapters, write_model
from motet.tests.rigs.specialisations import Specialisation, recorded_gpu
from motet.workers.execution import runner
from motet.workers.execution.warm_up import Rows, WarmUpLimits, as_plan, doubled, largest_steps, warm_up_steps
from motet.workers.plan import INT32_BYTES, Residence
from motet.workers.wire.messages import SamplingParams

LONGEST = 1024  # tokens: four splits of a decode
ADAPTERS = (None, RECIPES[0].name, RECIPES[1].name)
LIMITS = {"max_num_sequences": 6, "max_tokens_per_step": 320}  # more rows than LoRA's short tiles take
CHOSEN: dict[str, Any] = {"max_tokens": 3, "ignore_eos": True}
WAYS = (
    SamplingParams(temperature=0.0, **CHOSEN),
    SamplingParams(temperature=0.8, seed=3, top_p=0.9, num_logprobs=2, **CHOSEN),
    SamplingParams(temperature=0.9, seed=4, repetition_penalty=1.2, **CHOSEN),
)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Stock:
    folder = tmp_path_factory.mktemp("llama")
    model = write_model("llama", folder / "model", max_position_embeddings=LONGEST)
    adapters = write_adapters(model, folder / "adapters")
    chosen = {name: adapters[name] for name in ADAPTERS if name is not None}
    return Stock.make(model, chosen, folder / "store", block_size=16, dtype="bfloat16")


def specialisations_of(
    stock: Stock, seed: int, adapters: Sequence[str | None] = ADAPTERS
) -> tuple[set[Specialisation], set[Specialisation]]:
    """Those before the engine is ready, and those that requests of many lengths needed beside them."""
    generator = random.Random(seed)
    with recorded_gpu() as found, stock.engine(200, device="cuda", **LIMITS) as rig:
        before = set(found)
        for sequence_id in range(24):
            prompt = generator.choices(range(VOCAB_SIZE), k=generator.choice((1, 2, 9, 40, 130, 250, 700)))
            rig.submit(sequence_id, prompt, generator.choice(adapters), WAYS[sequence_id % len(WAYS)])
            for _ in range(generator.choice((0, 0, 1, 3))):
                rig.step()
        rig.finish()
        assert [output.error for output in rig.outputs.values()] == [None] * 24
        return before, found - before


def test_serving_with_recurrent_states_needs_none_either(tmp_path: Path) -> None:
    sizes = {"linear_num_value_heads": 16, "linear_key_head_dim": 16, "linear_value_head_dim": 8, "head_dim": 16}
    model = write_model("qwen3_5", tmp_path / "model", max_position_embeddings=LONGEST, **sizes)
    adapters = write_adapters(model, tmp_path / "adapters")
    chosen = {name: adapters[name] for name in ADAPTERS if name is not None}
    stock = Stock.make(model, chosen, tmp_path / "store", block_size=32, dtype="bfloat16")
    before, later = specialisations_of(stock, seed=1)
    kernels = Counter(name for name, *_ in before)
    # One for each layer's weights is enough: nothing that differs from step to step is compiled for.
    assert kernels["convolution_kernel"] == kernels["recurrence_kernel"] == kernels["gated_norm_kernel"] == 1
    assert later == set(), sorted({name for name, *_ in later})


def test_serving_trained_heads_needs_none_either(tmp_path: Path) -> None:
    model = write_model("llama", tmp_path / "model", max_position_embeddings=LONGEST)
    base = AutoModelForCausalLM.from_pretrained(model)
    ends = LoraConfig(task_type="CAUSAL_LM", target_modules=["v_proj", EMBEDDING, HEAD], init_lora_weights=False)
    get_peft_model(base, ends).save_pretrained(tmp_path / "ends", save_embedding_layers=False)
    folders = {"ends": tmp_path / "ends", RECIPES[0].name: write_adapters(model, tmp_path)[RECIPES[0].name]}
    stock = Stock.make(model, folders, tmp_path / "store", block_size=16, dtype="bfloat16")
    _, later = specialisations_of(stock, seed=1, adapters=(None, *folders))
    assert later == set(), sorted({name for name, *_ in later})


def test_serving_needs_no_kernel_that_was_not_compiled(llama: Stock) -> None:
    before, later = specialisations_of(llama, seed=1)
    kernels = Counter(name for name, *_ in before)
    assert {"decode_kernel", "chunk_kernel", "shrink_kernel", "expand_kernel", "write_kv_kernel"} <= kernels.keys()
    assert later == set(), sorted({name for name, *_ in later})


def test_steps_that_are_left_out_are_missed(llama: Stock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts alone, as a worker once computed them, leave kernels to be compiled while it serves."""
    monkeypatch.setattr(runner, "warm_up_steps", lambda limits: ((Rows(length, 0, 0),) for length in (2, 16, 128)))
    _, later = specialisations_of(llama, seed=1)
    assert {name for name, *_ in later} >= {"split_kernel", "decode_kernel", "combine_kernel"}


@pytest.mark.parametrize("limits", [WarmUpLimits(320, 6, 256), WarmUpLimits(2048, 256, 8192), WarmUpLimits(4, 9, 3)])
def test_steps_stay_within_the_limits(limits: WarmUpLimits) -> None:
    steps = [*warm_up_steps(limits), *largest_steps(limits)]
    for step in steps:
        assert 0 < len(step) <= limits.max_sequences
        assert sum(rows.num_tokens for rows in step) <= limits.max_tokens
        assert all(rows.num_tokens > 0 and rows.start + rows.num_tokens <= limits.longest for rows in step)
    assert max(sum(rows.num_tokens for rows in step) for step in steps) == limits.max_tokens
    assert len(steps) < 100


def test_other_sequences_beside_a_long_one_need_no_kernel_of_their_own(
    llama: Stock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels choose by the longest sequence: the same steps with all of them long, or with half of them."""
    found = compiled_for(llama)

    def longer(limits: WarmUpLimits) -> Iterator[tuple[Rows, ...]]:
        for share in (1, 2):
            for step in warm_up_steps(limits):
                is_long = [rows.num_tokens == 1 and index % share == 0 for index, rows in enumerate(step)]
                yield tuple(
                    replace(rows, start=limits.longest - 1) if long else rows
                    for rows, long in zip(step, is_long, strict=True)
                )

    monkeypatch.setattr(runner, "warm_up_steps", longer)
    assert compiled_for(llama) <= found


def compiled_for(stock: Stock) -> set[Specialisation]:
    """What is launched before an engine is ready."""
    with recorded_gpu() as found, stock.engine(200, device="cuda", **LIMITS):
        return set(found)


def test_warm_up_writes_few_pages() -> None:
    """Of 4,096 sequences of 131,072 tokens 8,192 pages each, which take 0.4 GB to bring to a GPU, in every step."""
    limits, block_size = WarmUpLimits(8192, 4096, 131_072), 16
    adapters = [Residence(str(index), {}, ()) for index in range(limits.max_sequences)]
    for number, step in enumerate(warm_up_steps(limits)):
        plan = as_plan(step, number, block_size, adapters)
        num_pages = [len(sequence.pages) // INT32_BYTES for sequence in plan.sequences]
        chunks = limits.max_tokens // block_size + 1
        assert sum(num_pages) <= limits.longest // block_size + chunks + len(num_pages)


def test_one_sequence_of_one_token() -> None:
    assert list(warm_up_steps(WarmUpLimits(1, 1, 1))) == [(Rows(1, 0, 0),)] * 2


def test_numbers_are_doubled_to_the_end() -> None:
    assert list(doubled(2, 9)) == [2, 4, 8, 9]
    assert list(doubled(2, 8)) == [2, 4, 8]
    assert list(doubled(1, 0)) == []
