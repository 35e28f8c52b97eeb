"""The engine on the Triton kernels, interpreted, against transformers + PEFT; its decodes recorded and replayed."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch

from motet.kernels.backend import triton_kernels
from motet.tests.rigs.engine_rig import Stock
from motet.tests.rigs.oracle import RECIPES, VOCAB_SIZE, Oracle, write_adapters, write_model
from motet.workers import worker_builder
from motet.workers.execution.executor import LocalExecutor
from motet.workers.execution.graphs import Compute, bucket_sizes
from motet.workers.wire.messages import SamplingParams

TOLERANCE = 1e-3  # of logits in float32
NUM_TOKENS = 4
ADAPTERS = (None, RECIPES[0].name, "patterns")  # mixed ranks, by module and by layer
FAMILIES = ["llama", "gemma2", "mixtral", "gpt_oss", "llama4", "deepseek_v3"]
FAMILIES += ["qwen3_5", "lfm2", "granite_hybrid", "falcon_h1"]  # with recurrent states
LENGTHS = (9, 3, 6)  # of prompts, in tokens: the interpreter is slow


@dataclass
class Rerun:
    """Stands in for a CUDA graph: computes again on the same memory, and counts."""

    compute: Compute
    replays: list[int]

    def replay(self) -> torch.Tensor:
        out = self.compute(lambda between: between())
        self.replays.append(len(out))
        return out


@dataclass(frozen=True)
class Bench:
    oracle: Oracle
    stock: Stock


@pytest.fixture(scope="module", params=FAMILIES)
def bench(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    folder = tmp_path_factory.mktemp(request.param)
    # Rows of experts' adapters with runs of 16 elements, as Triton needs them.
    changes = {"intermediate_size": 48} if request.param == "mixtral" else {}
    model_path = write_model(request.param, folder / "model", **changes)
    adapters = write_adapters(model_path, folder / "adapters")
    return Bench(Oracle(model_path, adapters), Stock.make(model_path, adapters, folder / "store"))


def test_exact(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The base and adapters in one batch, prompt chunks beside decodes, against the oracle's answer to each alone."""
    kernels = triton_kernels(torch.device("cpu"), torch.float32)
    decodes, mixed = list[int](), list[int]()
    monkeypatch.setattr(worker_builder, "choose_kernels", lambda *_, **__: kernels)
    sampling = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True, num_logprobs=VOCAB_SIZE)
    with bench.stock.engine(num_pages=100, max_tokens_per_step=10) as rig:
        assert rig.engine.info.kernels.startswith("triton")
        executor = rig.engine.executor
        assert isinstance(executor, LocalExecutor)
        executor.runner.keep_tables(16, 60)
        executor.runner.record_decodes(10, lambda compute: Rerun(compute, decodes))
        executor.runner.record_mixed(10, lambda compute: Rerun(compute, mixed))
        generator = random.Random(5)
        prompts = [[generator.randrange(VOCAB_SIZE) for _ in range(length)] for length in LENGTHS]
        for sequence_id, (prompt, adapter) in enumerate(zip(prompts, ADAPTERS, strict=True)):
            rig.submit(sequence_id, prompt, adapter, sampling)
        rig.finish()
        rig.assert_idle()
    for sequence_id, (prompt, adapter) in enumerate(zip(prompts, ADAPTERS, strict=True)):
        output = rig.outputs[sequence_id]
        assert (output.error, len(output.token_ids)) == (None, NUM_TOKENS)
        logits = bench.oracle.logits(prompt + output.token_ids[:-1], adapter)[len(prompt) - 1 :]
        for row, said, token_id in zip(logits.log_softmax(-1), output.logprobs, output.token_ids, strict=True):
            received = torch.tensor(said.top_logprobs)[torch.tensor(said.top_ids).argsort()]
            torch.testing.assert_close(received, row, atol=TOLERANCE, rtol=0)
            assert row.max() - row[token_id] < TOLERANCE
    if executor.runner._geometry.kv_sides == 1:  # steps with latent attention are not recorded
        assert not decodes and not mixed
        return
    assert decodes and set(decodes) <= set(bucket_sizes(4))
    assert mixed and set(mixed) == {10}
