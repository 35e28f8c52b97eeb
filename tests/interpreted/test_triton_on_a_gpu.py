"""The engine as a GPU has it, with Triton's kernels and CUDA graphs, on a stand-in: the tokens of the CPU."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from motet.adapters.format.content import OutputVectors
from motet.adapters.store.store import AdapterStore
from motet.kernels.backend import plain_kernels, triton_kernels, with_float8_weights
from motet.kernels.gpu.expert_lora import TritonExpertLora
from motet.kernels.gpu.experts import TritonExperts
from motet.kernels.gpu.recurrence import TritonRecurrence
from motet.kernels.plain.expert_lora import HostExpertLora, HostExpertLoraBatch
from motet.kernels.plain.experts import PlainExperts
from motet.tests.rigs.engine_rig import EngineRig, Stock
from motet.tests.rigs.gang_rig import gang
from motet.tests.rigs.oracle import RECIPES, VOCAB_SIZE, write_adapters, write_expert_adapter, write_model
from motet.tests.rigs.stand_in_gpu.capture import GraphError
from motet.tests.rigs.stand_in_gpu.gpu_worker import run_recording_worker
from motet.tests.rigs.stand_in_gpu.stand_in_gpu import stand_in_gpu
from motet.tests.rigs.stand_in_gpu.triton_launches import GridError
from motet.workers import worker_builder
from motet.workers.wire.messages import AdapterRef, SamplingParams

# Of what it throws away: lanes behind a mask hold what unwritten memory holds.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

ADAPTER = RECIPES[0].name
NUM_TOKENS = 3  # the interpreter is slow
SMALL: dict[str, Any] = {"max_num_sequences": 2, "max_model_len": 24, "max_tokens_per_step": 16}


def llama(folder: Path) -> Stock:
    model = write_model("llama", folder / "model", num_hidden_layers=2)
    adapter = write_adapters(model, folder / "adapters")[ADAPTER]
    return Stock.make(model, {ADAPTER: adapter}, folder / "store")


def qwen3_5(folder: Path) -> Stock:
    """Two layers with a recurrent state, each with LoRA of four modules that share an input, and one with attention."""
    sizes = {"linear_num_key_heads": 1, "linear_num_value_heads": 16}  # outputs of all linears have runs of 16
    sizes |= {"linear_key_head_dim": 16, "linear_value_head_dim": 8, "head_dim": 16}
    model = write_model("qwen3_5", folder / "model", **sizes)
    adapter = write_adapters(model, folder / "adapters")[ADAPTER]
    return Stock.make(model, {ADAPTER: adapter}, folder / "store", block_size=16)


def mixtral(folder: Path) -> Stock:
    """With an adapter of all experts but one, whose rows have runs of 16 elements as Triton needs them."""
    model = write_model("mixtral", folder / "model", intermediate_size=48, num_hidden_layers=1)
    stock = Stock.make(model, {ADAPTER: write_expert_adapter(model, folder / "adapter")}, folder / "store")
    store = AdapterStore(stock.store_path)
    whole = store.load_content(stock.refs[ADAPTER].digest)
    matrices = {key: found for key, found in whole.matrices.items() if ".1." not in key[1]}
    content = store.put(replace(whole, matrices=matrices), [stock.layout])
    return replace(stock, refs={ADAPTER: AdapterRef(content.digest, content.module_ranks)})


def answers(rig: EngineRig) -> list[list[int]]:
    generator = random.Random(4)
    for sequence_id, adapter in enumerate((None, ADAPTER, ADAPTER)):
        sampling = SamplingParams(
            max_tokens=NUM_TOKENS, temperature=0.7 * (sequence_id == 1), seed=2, ignore_eos=True, num_logprobs=2
        )
        rig.submit(sequence_id, generator.choices(range(VOCAB_SIZE), k=10), adapter, sampling)
    rig.finish()
    rig.assert_idle()
    assert [output.error for output in rig.outputs.values()] == [None] * 3
    return [output.token_ids for output in rig.outputs.values()]


@pytest.mark.parametrize("family", [llama, mixtral, qwen3_5])
def test_decodes_are_replayed_and_give_the_cpus_tokens(family: Callable[[Path], Stock], tmp_path: Path) -> None:
    stock = family(tmp_path)
    with stock.engine(60) as rig:
        here = answers(rig)
    with stand_in_gpu() as gpu:
        with stock.engine(60, device="cuda", **SMALL) as rig:
            assert rig.engine.info.kernels.startswith("triton")
            gpu.tally.clear()
            assert answers(rig) == here
            num_steps = rig.engine.load().counters.num_steps
        assert len(gpu.tally.waits_of("worker")) <= num_steps, "the host waits for a step's tokens, and nothing else"
        assert gpu.tally.replays > 0
        assert gpu.tally.launches["chunk_kernel"] > 0, "attention of prompts runs outside of the graphs"
        assert gpu.tally.launches["write_kv_kernel"] == 0, "a step was launched kernel by kernel"
        if family is qwen3_5:
            assert gpu.tally.launches["recurrence_kernel"] > 0, "and so do the states of prompts"
        if family is mixtral:
            assert "experts.0,2-3.up_proj" in stock.refs[ADAPTER].module_ranks, "the adapter has parts for experts"


def test_a_step_that_scales_outputs_is_launched_and_gives_the_cpus_tokens(tmp_path: Path) -> None:
    stock = llama(tmp_path)
    store = AdapterStore(stock.store_path)
    plain, chance = store.load_content(stock.refs[ADAPTER].digest), np.random.default_rng(5)
    outputs = {
        (layer, module): OutputVectors(*chance.normal(0, 0.3, (2, stock.layout.shape.modules[module][1])).astype("f4"))
        for layer, module in ((0, "q_proj"), (1, "v_proj"), (1, "down_proj"))
    }
    content = store.put(replace(plain, outputs=outputs, outputs_source="these"), [stock.layout])
    stock = replace(stock, refs={ADAPTER: AdapterRef(content.digest, content.module_ranks)})
    with stock.engine(60) as rig:
        here = answers(rig)
    with stand_in_gpu() as gpu:
        with stock.engine(60, device="cuda", **SMALL) as rig:
            gpu.tally.clear()
            assert answers(rig) == here
            num_steps = rig.engine.load().counters.num_steps
        assert len(gpu.tally.waits_of("worker")) <= num_steps, "the host waits for a step's tokens, and nothing else"
        assert gpu.tally.launches["write_kv_kernel"] > 0, "steps with the adapter are not recorded"


def test_a_gang_of_two_replays_its_decodes(tmp_path: Path) -> None:
    """What the workers exchange is in the graphs."""
    model = write_model("llama", tmp_path / "model", num_hidden_layers=2)
    adapter = write_adapters(model, tmp_path / "adapters")[ADAPTER]
    stock = Stock.make(model, {ADAPTER: adapter}, tmp_path / "store")
    with stock.engine(60) as rig:
        here = answers(rig)
    with gang(stock.gang_config(60, 2, device="cuda", **SMALL), run_recording_worker) as (engine, workers):
        there = answers(EngineRig(engine, stock.refs))
    assert [worker.exitcode for worker in workers] == [0, 0]
    assert there == here


def of_pairs(expert_lora: TritonExpertLora, batch: Any, groups: Any, first: int) -> Any:
    """By the host, whichever experts count the pairs."""
    return HostExpertLora.of_pairs(expert_lora._twin, HostExpertLoraBatch((), batch.geometry), groups, first)


BROUGHT_TOGETHER = (TritonExpertLora, of_pairs)


@pytest.mark.parametrize(
    "old",
    [
        [(TritonExperts, PlainExperts.group), (TritonExperts, PlainExperts.combine), BROUGHT_TOGETHER],
        [(TritonExperts, PlainExperts.linear)],
        [BROUGHT_TOGETHER],
    ],
    ids=["groups", "products", "adapters"],
)
def test_experts_that_ask_the_host_cannot_be_recorded(
    old: list[tuple[type, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pairs counted by `nonzero` and `bincount`, products by `tolist`, adapters by `tolist`: each put back is found."""
    stock = mixtral(tmp_path)
    for owner, method in old:
        monkeypatch.setattr(owner, method.__name__, method)
    small = {**SMALL, "max_num_sequences": 1, "max_tokens_per_step": 2}
    with stand_in_gpu() as gpu:
        with pytest.raises(GraphError, match="while a graph is captured"):
            stock.engine(60, device="cuda", **small)
        lines = {wait.line.partition(":")[0] for wait in gpu.tally.waits_of("worker")}
        assert lines & {"kernels/plain/experts.py", "kernels/plain/expert_lora.py"}, "chunks wait for them, too"
        gpu.problems.clear()


def test_states_that_ask_the_host_cannot_be_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which rows are of which sequence, as the twin has it: put back, it is found."""
    stock, recur = (
        Stock.make(write_model("lfm2", tmp_path / "model"), {}, tmp_path / "store"),
        TritonRecurrence.__call__,
    )

    def asking(kernel: TritonRecurrence, *arguments: Any) -> torch.Tensor:
        arguments[-1].segment_rows.tolist()
        return recur(kernel, *arguments)

    monkeypatch.setattr(TritonRecurrence, "__call__", asking)
    with stand_in_gpu() as gpu:
        with pytest.raises(GraphError, match="while a graph is captured"):
            stock.engine(60, device="cuda", **SMALL | {"max_num_sequences": 1, "max_tokens_per_step": 2})
        gpu.problems.clear()


def test_a_grid_that_no_gpu_launches_is_found() -> None:
    """The interpreter would run it. Norms have their heads along y."""
    norm = triton_kernels(torch.device("cuda"), torch.bfloat16).rms_norm
    with stand_in_gpu() as gpu:
        heads, weight = torch.zeros(1, 65_536, 1, device="cuda"), torch.ones(1, device="cuda")
        with pytest.raises(GridError, match=r"norm_kernel: no GPU launches a grid of \(1, 65536\)"):
            norm(heads, weight, 1e-5)
        gpu.problems.clear()


def test_kv_of_eight_bits_is_written_and_read_in_recorded_steps(tmp_path: Path) -> None:
    """Prompts and decodes, on the base and on an adapter, whose pages are cut for it."""
    stock = llama(tmp_path)
    refuse, plain = "check_kv_dtype", mock.patch.object(worker_builder, "choose_kernels", return_value=plain_kernels())
    with mock.patch.object(worker_builder, refuse), plain, stock.engine(60, kv_dtype="float8") as rig:
        here = answers(rig)
    with stand_in_gpu() as gpu:
        with stock.engine(60, device="cuda", kv_dtype="float8", **SMALL) as rig:
            assert rig.engine.info.kernels.endswith("attention by triton on KV in float8")
            assert answers(rig) == here
        assert gpu.tally.replays > 0
        assert gpu.tally.launches["chunk_kernel"] > 0


def test_linears_of_eight_bits_are_recorded() -> None:
    """Rows are quantised and multiplied without the host; a replay computes from what its input holds then."""
    kernels = with_float8_weights(triton_kernels(torch.device("cuda"), torch.bfloat16))
    assert kernels.choice.endswith("layers' linears by cuBLAS in float8")
    twin = with_float8_weights(plain_kernels())
    assert kernels.float8 is not None and twin.float8 is not None
    first, second, weight = torch.randn(3, 32), torch.randn(3, 32), torch.randn(48, 32)
    with stand_in_gpu() as gpu:
        x, packed = first.to("cuda"), kernels.float8.pack(weight.to("cuda"))
        kernels.layer_linear(x, packed, None)
        graph = torch.cuda.CUDAGraph()
        gpu.tally.clear()
        with torch.cuda.graph(graph):
            y = kernels.layer_linear(x, packed, None)
        x.copy_(second.to("cuda"))
        graph.replay()
        got = y.cpu()
        assert gpu.tally.replays == 1
        del x, y, packed, graph
    expected = twin.layer_linear(second, twin.float8.pack(weight), None)
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)  # float32, summed in another order
