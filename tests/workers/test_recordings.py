"""What is recorded of a base's steps, and in which types; the recordings here compute anew in each replay."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from motet.kernels.backend import plain_kernels
from motet.kernels.plain.lora import PlainLora
from motet.tests.rigs.oracle import write_model
from motet.workers.decoding.token_choice import begin_sample
from motet.workers.execution.begun_step import BegunStep
from motet.workers.execution.executor import FeedingExecutor
from motet.workers.execution.graphs import Compute, bucket_sizes
from motet.workers.execution.runner import Runner
from motet.workers.memory.page_arrays import make_pool, pool_of
from motet.workers.models.config import ModelConfig
from motet.workers.models.decoder import load_decoder
from motet.workers.models.rotary import rotary_tables
from motet.workers.models.sharding import ModelSharding
from motet.workers.models.weights import Checkpoint
from motet.workers.parallel import Alone
from motet.workers.plan import SamplePlan, StepPlan
from motet.workers.wire.messages import SamplingParams

CPU = torch.device("cpu")
MAX_TOKENS = 64


class NoRoom(PlainLora):
    """Recordings hold no adapters."""

    def reserve(self, *_: object) -> None:
        return None

    def part(self, *_: object) -> None:
        raise AssertionError("there is no room that could be parted")

    def refill(self, *_: object) -> bool:
        return False


class Again:
    def __init__(self, compute: Compute) -> None:
        self._compute = compute
        compute(lambda between: None)

    def replay(self) -> torch.Tensor:
        return self._compute(lambda between: between())


def runner_of(model_path: Path, max_num_sequences: int) -> Runner:
    """In bfloat16, as GPUs serve."""
    model, lora = ModelConfig.from_folder(model_path), NoRoom()
    sharding = ModelSharding(model)
    kernels = replace(plain_kernels(), lora=lora, capturable_lora=lora)
    decoder = load_decoder(sharding, Checkpoint(model_path, torch.bfloat16, CPU), kernels)
    geometry = pool_of(sharding, 16, torch.bfloat16, 8)
    rotary = rotary_tables(model.rotaries, model.layer_sizes.head_dims, MAX_TOKENS, CPU)
    layout = sharding.layout(16, "bfloat16")
    runner = Runner(decoder, kernels, Alone(), make_pool(geometry, CPU), geometry, layout, rotary, geometry.num_pages)
    runner.keep_tables(max_num_sequences, MAX_TOKENS)
    return runner


@pytest.mark.parametrize("family", ["llama", "gemma2", "gemma3"])
def test_bases_are_recorded_in_the_type_that_gpus_serve(family: str, tmp_path: Path) -> None:
    """Norms of Gemma are float32 in a base of bfloat16."""
    runner = runner_of(write_model(family, tmp_path / "model"), 4)
    runner.record_decodes(MAX_TOKENS, Again)
    runner.record_mixed(MAX_TOKENS, Again)
    mixed = runner._mixed_graphs
    assert mixed is not None
    assert {each.dtype for each in (mixed._queries, mixed._attended, mixed._hidden)} == {torch.bfloat16}


def test_steps_with_prompts_are_not_recorded_where_heads_differ(tmp_path: Path) -> None:
    """What lies between two graphs has the width of one layer's heads; decodes are one graph."""
    runner = runner_of(write_model("gemma4", tmp_path / "model"), 4)
    runner.record_decodes(MAX_TOKENS, Again)
    runner.record_mixed(MAX_TOKENS, Again)
    assert runner._graphs is not None and runner._mixed_graphs is None


def test_a_draw_that_is_looked_through_again_ends_where_it_began(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are launched in inference mode, and torch lets no other code change what was made in it."""
    plan = StepPlan(1, (), (), ())
    sampling = SamplePlan(SamplingParams(temperature=1.0, top_p=0.95), 1, 0)
    launched: list[BegunStep] = []

    @torch.inference_mode()
    def begin(plan: StepPlan, before: BegunStep) -> BegunStep:
        launched.append(BegunStep((7,), begin_sample(torch.zeros(1, 4000), [sampling])))
        return launched[-1]

    runner, idle = Mock(begin=begin), Mock()
    idle.take_ended.return_value = ((), ())
    executor = FeedingExecutor(runner, idle, idle, "", 1, CPU)
    monkeypatch.setattr(executor, "_result_of", lambda plan, output: output.tokens)
    monkeypatch.setattr(executor, "begin_copies", lambda plan: None)
    executor.begin(plan)
    tokens: Any = executor.finish()
    executor.close()
    assert tokens[7] is not None and launched[0]._choices is not None and not launched[0]._choices.may_change


def test_decodes_are_recorded_up_to_what_a_step_can_have(tmp_path: Path) -> None:
    """However many sequences are allowed to run: a step has a token of each."""
    runner, recorded = runner_of(write_model("llama", tmp_path / "model"), 512), list[Callable[..., object]]()

    def record(compute: Compute) -> Again:
        recorded.append(compute)
        return Again(compute)

    runner.record_decodes(8, record)
    assert len(recorded) == len(bucket_sizes(8)), "without adapters: these have no room"
    assert runner._graphs is not None and len(runner._graphs._logits) == 8
