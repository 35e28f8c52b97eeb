"""Bases whose layers' linears have weights of eight bits: against transformers and PEFT with the same rounding.

The engine runs on a stand-in GPU, with the plain twins. Transformers gets weights that are rounded here, each to the
nearest of all numbers of eight bits, and rounds what comes into them; PEFT's adapters see what is not rounded.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file

from motet.kernels.backend import plain_kernels, with_float8_weights
from motet.kernels.float8 import LARGEST, Float8Weight
from motet.tests.rigs.engine_rig import EngineRig, SequenceOutput, Stock
from motet.tests.rigs.gang_rig import gang
from motet.tests.rigs.oracle import ALL_LINEAR, RECIPES, VOCAB_SIZE, Answer, Oracle, write_adapters, write_model
from motet.tests.rigs.stand_in_gpu.gpu_worker import gpu_of_twins, run_worker_on_gpu
from motet.workers import worker_builder
from motet.workers.models.config import ModelConfig
from motet.workers.models.decoder import load_decoder
from motet.workers.models.layers import Attention, GatedMlp
from motet.workers.models.sharding import ModelSharding
from motet.workers.models.weights import Checkpoint
from motet.workers.wire.messages import SamplingParams

CPU = torch.device("cpu")
NUM_TOKENS = 6
ADAPTERS: tuple[str | None, ...] = (None, RECIPES[1].name, RECIPES[3].name)
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True, num_logprobs=VOCAB_SIZE)
# Of log-probabilities in float32. Rounding to eight bits is not smooth: an input halfway between two numbers may go to
# either, and takes its whole row along. So all but a few rows are this close, and the tests look at the median.
TOLERANCE = 1e-3
# In a float8's exponents from -6 to 8 with 3 bits of mantissa, and the steps of 2^-9 under these.
NUMBERS = torch.tensor(
    [m * 2.0**-9 for m in range(8)] + [(8 + m) * 2.0**e for e in range(-9, 6) for m in range(8)][:-1]
)


def rounded(x: torch.Tensor) -> torch.Tensor:
    """What the rows of x stand for in eight bits."""
    scales = x.abs().amax(-1, keepdim=True).clamp_min(1e-30) / LARGEST
    sizes = (x / scales).abs().contiguous()
    above = torch.searchsorted(NUMBERS, sizes).clamp(1, len(NUMBERS) - 1)
    low, high = NUMBERS[above - 1], NUMBERS[above]
    goes_up = torch.where(sizes - low == high - sizes, above % 2 == 0, sizes - low > high - sizes)
    return torch.where(goes_up, high, low) * x.sign() * scales


def oracle_in_float8(model_path: Path, adapters: dict[str, Path], degree: int = 1) -> Oracle:
    """Each of `degree` workers rounds its own part of what comes into o and down."""
    oracle = Oracle(model_path, adapters)
    for name, module in oracle._model.named_modules():
        kind = name.removesuffix(".base_layer").rpartition(".")[2]
        if ".layers." not in name or kind not in ALL_LINEAR or not isinstance(module, torch.nn.Linear):
            continue
        module.weight.data = rounded(module.weight.data)
        num_parts = degree if kind in ("o_proj", "down_proj") else 1

        def round_input(_: Any, given: tuple[torch.Tensor], num_parts: int = num_parts) -> torch.Tensor:
            return torch.cat([rounded(part) for part in given[0].chunk(num_parts, -1)], -1)

        module.register_forward_pre_hook(round_input)
    return oracle


@pytest.fixture(scope="module", params=["llama", "qwen2", "gemma3"])
def stock(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Stock:
    return made(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Stock:
    return made("llama", tmp_path_factory.mktemp("llama"))


def made(variant: str, folder: Path) -> Stock:
    model = write_model(variant, folder / "model")
    adapters = write_adapters(model, folder / "adapters")
    return Stock.make(model, {name: adapters[name] for name in ADAPTERS if name is not None}, folder / "store")


def folders(stock: Stock) -> dict[str, Path]:
    return {name: stock.model_path.parent / "adapters" / name for name in stock.refs}


def requested(rig: EngineRig) -> list[SequenceOutput]:
    generator = random.Random(7)
    for index, adapter in enumerate(ADAPTERS):
        rig.submit(index, generator.choices(range(VOCAB_SIZE), k=11), adapter, GREEDY)
    rig.finish()
    rig.assert_idle()
    return list(rig.outputs.values())


def differences(outputs: Sequence[SequenceOutput], oracle: Oracle) -> torch.Tensor:
    """Of log-probabilities, for each sequence and token the largest: the oracle continues with the engine's tokens."""
    generator, found = random.Random(7), []
    for shown, adapter in zip(outputs, ADAPTERS, strict=True):
        prompt = generator.choices(range(VOCAB_SIZE), k=11)
        assert shown.error is None
        logits = oracle.logits([*prompt, *shown.token_ids[:-1]], adapter)[len(prompt) - 1 :]
        expected = Answer(shown.token_ids, logits).logprobs
        for row, said in zip(expected, shown.logprobs, strict=True):
            found.append((row[said.top_ids] - torch.tensor(said.top_logprobs)).abs().max())
    return torch.stack(found)


def test_the_base_and_its_adapters_are_those_of_the_rounded_weights(stock: Stock) -> None:
    with gpu_of_twins(), stock.engine(60, device="cuda", weights_dtype="float8") as rig:
        assert rig.engine.info.kernels == "torch; layers' linears by torch in float8"
        outputs = requested(rig)
    assert differences(outputs, oracle_in_float8(stock.model_path, folders(stock))).median() < TOLERANCE
    plain = differences(outputs, Oracle(stock.model_path, folders(stock)))
    assert plain.median() > 20 * TOLERANCE, "the comparison can fail: rounding changes what is said"


def test_a_gang_of_two_rounds_what_each_worker_has(llama: Stock) -> None:
    config = llama.gang_config(60, 2, device="cuda", weights_dtype="float8")
    with gang(config, run_worker_on_gpu) as (engine, workers):
        outputs = requested(EngineRig(engine, llama.refs))
    assert [worker.exitcode for worker in workers] == [0, 0]
    assert differences(outputs, oracle_in_float8(llama.model_path, folders(llama), degree=2)).median() < TOLERANCE


def decoder_weights(stock: Stock, degree: int) -> list[list[Float8Weight]]:
    """By worker: qkv, o, gate and up, down of each layer."""
    model, kernels = ModelConfig.from_folder(stock.model_path), with_float8_weights(plain_kernels())
    found = []
    for rank in range(degree):
        source = Checkpoint(stock.model_path, torch.float32, CPU)
        weights = []
        for layer in load_decoder(ModelSharding(model, degree, rank), source, kernels).layers:
            assert isinstance(layer.mlp, GatedMlp) and isinstance(layer.attention, Attention)
            attention, mlp = layer.attention, layer.mlp
            weights += [attention.qkv.weight, attention.output.weight, mlp.gate_up.weight, mlp.down.weight]
        found.append(weights)
    return found


def test_gangs_of_all_sizes_have_the_same_weights(llama: Stock) -> None:
    """To the last bit, and those of the checkpoint, each rounded to the nearest number."""
    (whole,), parts = decoder_weights(llama, 1), decoder_weights(llama, 2)
    tensors = load_file(llama.model_path / "model.safetensors")
    for place in (1, 3):  # o and down, of which each worker has some inputs
        for layer in range(len(whole) // 4):
            index = 4 * layer + place
            name = ("self_attn.o_proj", "mlp.down_proj")[place == 3]
            together = torch.cat([part[index].values.view(torch.uint8) for part in parts], 1)
            assert torch.equal(together, whole[index].values.view(torch.uint8))
            assert all(torch.equal(part[index].scales, whole[index].scales) for part in parts)
            stands_for = whole[index].values.float() * whole[index].scales
            assert torch.equal(stands_for, rounded(tensors[f"model.layers.{layer}.{name}.weight"]))


def test_the_weights_take_a_byte_each_and_all_else_is_as_it_was(llama: Stock) -> None:
    (weights,) = decoder_weights(llama, 1)
    model = ModelConfig.from_folder(llama.model_path)
    num_weights = model.num_layers * sum(a * b for a, b in model.shape.modules.values())
    assert sum(weight.values.nbytes for weight in weights) == num_weights
    source = Checkpoint(llama.model_path, torch.bfloat16, CPU)
    decoder = load_decoder(ModelSharding(model), source, with_float8_weights(plain_kernels()))
    rest = (decoder.embedding, decoder.head, decoder.norm, decoder.layers[0].attention_norm)
    assert {tensor.dtype for tensor in rest if tensor is not None} == {torch.bfloat16}


def test_all_linears_of_layers_and_no_others_are_rounded(llama: Stock) -> None:
    """What goes through the linear of all else is the head."""
    calls: list[tuple[str, tuple[int, ...]]] = []

    def head(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        calls.append(("linear", tuple(weight.shape)))
        return torch.nn.functional.linear(x, weight, bias)

    with (
        gpu_of_twins(),
        mock.patch.object(worker_builder, "choose_kernels", return_value=replace(plain_kernels(), linear=head)),
        llama.engine(60, device="cuda", weights_dtype="float8") as rig,
    ):
        requested(rig)
    assert {shape for _, shape in calls} == {(VOCAB_SIZE, 64)}


def test_a_base_with_experts_is_refused(tmp_path: Path) -> None:
    stock = Stock.make(write_model("mixtral", tmp_path / "model"), {}, tmp_path / "store")
    with gpu_of_twins(), pytest.raises(ValueError, match=r"weights_dtype = 'float8': .* dense bases, and this one has"):
        stock.engine(60, device="cuda", weights_dtype="float8")


def test_a_cpu_and_older_gpus_are_refused(llama: Stock, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"weights_dtype = 'float8': .* for GPUs of compute capability 9\.0"):
        llama.engine(60, device="cpu", weights_dtype="float8")
    with gpu_of_twins():
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
        with pytest.raises(ValueError, match=r"weights_dtype = 'float8': this GPU has the compute capability 8\.0"):
            llama.engine(60, device="cuda", weights_dtype="float8")
