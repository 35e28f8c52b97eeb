"""Bases whose layers' linears have int8 weights, on a CPU: against transformers and PEFT with the same rounding."""

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

from motet.kernels.backend import Kernels, choose_kernels, plain_kernels, with_quantised_weights
from motet.kernels.quantised import QuantisedWeight
from motet.tests.rigs.demo_perplexity import perplexity
from motet.tests.rigs.engine_rig import EngineRig, SequenceOutput, Stock
from motet.tests.rigs.gang_rig import gang
from motet.tests.rigs.oracle import ALL_LINEAR, RECIPES, VOCAB_SIZE, Answer, Oracle, write_adapters, write_model
from motet.tests.rigs.quantised_base import write_quantised
from motet.workers import worker_builder
from motet.workers.device import check_weights_dtype
from motet.workers.models.config import ModelConfig
from motet.workers.models.decoder import load_decoder
from motet.workers.models.layers import Attention, GatedMlp
from motet.workers.models.quantised_weights import QuantisedCheckpoint
from motet.workers.models.sharding import ModelSharding
from motet.workers.models.weights import Checkpoint
from motet.workers.wire.messages import SamplingParams

CPU = torch.device("cpu")
ADAPTERS: tuple[str | None, ...] = (None, RECIPES[1].name, RECIPES[3].name)
GREEDY = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True, num_logprobs=VOCAB_SIZE)
# Of log-probabilities in float32. An input halfway between two numbers may go to either, and takes its row along: all
# but a few rows are this close, and the tests look at the median.
TOLERANCE = 1e-3


def rounded(x: torch.Tensor) -> torch.Tensor:
    """What the rows of x stand for in eight bits."""
    scales = x.abs().amax(-1, keepdim=True).clamp_min(1e-30) / 127
    return (x / scales).round() * scales


def oracle_in_int8(model_path: Path, adapters: dict[str, Path], degree: int = 1, has_weights: bool = True) -> Oracle:
    """Each of `degree` workers rounds its own part of what comes into o and down."""
    oracle = Oracle(model_path, adapters)
    for name, module in oracle._model.named_modules():
        kind = name.removesuffix(".base_layer").rpartition(".")[2]
        if ".layers." not in name or kind not in ALL_LINEAR or not isinstance(module, torch.nn.Linear):
            continue
        if has_weights:
            module.weight.data = rounded(module.weight.data)
        num_parts = degree if kind in ("o_proj", "down_proj") else 1

        def round_input(_: Any, given: tuple[torch.Tensor], num_parts: int = num_parts) -> torch.Tensor:
            return torch.cat([rounded(part) for part in given[0].chunk(num_parts, -1)], -1)

        module.register_forward_pre_hook(round_input)
    return oracle


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Stock:
    folder = tmp_path_factory.mktemp("llama")
    model = write_model("llama", folder / "model")
    return stocked(model, model, folder)


def stocked(model: Path, served: Path, folder: Path) -> Stock:
    """Adapters of `model` beside `served`, which is the same or stands for it."""
    adapters = write_adapters(model, folder / "adapters")
    return Stock.make(served, {name: adapters[name] for name in ADAPTERS if name is not None}, folder / "store")


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
    generator, rows = random.Random(7), []
    for output, adapter in zip(outputs, ADAPTERS, strict=True):
        prompt = generator.choices(range(VOCAB_SIZE), k=11)
        assert output.error is None
        logits = oracle.logits([*prompt, *output.token_ids[:-1]], adapter)[len(prompt) - 1 :]
        for row, token in zip(Answer(output.token_ids, logits).logprobs, output.logprobs, strict=True):
            rows.append((row[token.top_ids] - torch.tensor(token.top_logprobs)).abs().max())
    return torch.stack(rows)


@pytest.mark.parametrize("is_native", [True, False])
def test_the_base_and_its_adapters_are_those_of_the_rounded_weights(llama: Stock, is_native: bool) -> None:
    choose = choose_kernels if is_native else lambda *_, **__: plain_kernels()
    with (
        mock.patch.object(worker_builder, "choose_kernels", choose),
        llama.engine(60, weights_dtype="int8") as rig,
    ):
        assert "layers' linears in int8" in rig.engine.info.kernels
        outputs = requested(rig)
    assert differences(outputs, oracle_in_int8(llama.model_path, folders(llama))).median() < TOLERANCE
    plain = differences(outputs, Oracle(llama.model_path, folders(llama)))
    assert plain.median() > 20 * TOLERANCE, "the comparison can fail: rounding changes what is said"


def test_a_file_of_w8a8_is_computed_as_it_was_published(tmp_path: Path) -> None:
    model = write_model("llama", tmp_path / "model")
    quantised, expected = write_quantised(model, "w8a8", tmp_path)
    stock = stocked(model, quantised, tmp_path)
    with stock.engine(60) as rig:
        outputs = requested(rig)
    assert differences(outputs, oracle_in_int8(expected, folders(stock), has_weights=False)).median() < TOLERANCE


def test_a_gang_of_two_rounds_what_each_worker_has(llama: Stock) -> None:
    with gang(llama.gang_config(60, 2, weights_dtype="int8")) as (engine, workers):
        outputs = requested(EngineRig(engine, llama.refs))
    assert [worker.exitcode for worker in workers] == [0, 0]
    assert differences(outputs, oracle_in_int8(llama.model_path, folders(llama), degree=2)).median() < TOLERANCE


def layer_weights(kernels: Kernels, source: Checkpoint, model: ModelConfig, degree: int, rank: int) -> list[Any]:
    weights = []
    for layer in load_decoder(ModelSharding(model, degree, rank), source, kernels).layers:
        assert isinstance(layer.mlp, GatedMlp) and isinstance(layer.attention, Attention)
        attention, mlp = layer.attention, layer.mlp
        weights += [attention.qkv.weight, attention.output.weight, mlp.gate_up.weight, mlp.down.weight]
    return weights


def int8_weights(stock: Stock, degree: int, rank: int) -> list[QuantisedWeight]:
    kernels = with_quantised_weights(plain_kernels(), torch.float32, 1, rounds=True)
    source = Checkpoint(stock.model_path, torch.float32, CPU)
    return layer_weights(kernels, source, ModelConfig.from_folder(stock.model_path), degree, rank)


def test_gangs_of_all_sizes_have_the_same_weights(llama: Stock) -> None:
    """To the last bit, and those of the checkpoint, each rounded to the nearest number."""
    whole, parts = int8_weights(llama, 1, 0), [int8_weights(llama, 2, rank) for rank in range(2)]
    tensors = load_file(llama.model_path / "model.safetensors")
    for place, name in ((1, "self_attn.o_proj"), (3, "mlp.down_proj")):  # of which each worker has some inputs
        for layer in range(len(whole) // 4):
            index = 4 * layer + place
            assert torch.equal(torch.cat([part[index].codes for part in parts], 1), whole[index].codes)
            assert all(torch.equal(part[index].scales, whole[index].scales) for part in parts)
            assert torch.equal(whole[index].dequantised(), rounded(tensors[f"model.layers.{layer}.{name}.weight"]))


@pytest.mark.parametrize(("name", "bits"), [("int8", 8), ("int4", 4)])
def test_weights_take_their_bits_and_all_else_is_as_it_was(
    llama: Stock, name: str, bits: int, tmp_path: Path, native_kernels: Kernels
) -> None:
    model = ModelConfig.from_folder(llama.model_path)
    rounds = name == "int8"
    kernels = with_quantised_weights(native_kernels, torch.bfloat16, 1, rounds=rounds)
    source = Checkpoint(llama.model_path, torch.bfloat16, CPU)
    if not rounds:
        quantised, _ = write_quantised(llama.model_path, name, tmp_path)
        config = ModelConfig.from_folder(quantised)
        assert config.quantisation is not None
        source = QuantisedCheckpoint(quantised, torch.bfloat16, CPU, config.quantisation)
    decoder = load_decoder(ModelSharding(model), source, kernels)
    layer = decoder.layers[0]
    assert isinstance(layer.mlp, GatedMlp) and isinstance(layer.attention, Attention)
    linears = (layer.attention.qkv, layer.attention.output, layer.mlp.gate_up, layer.mlp.down)
    for linear in linears:
        num_out, num_in = linear.weight.num_out, linear.weight.num_in
        padded = -(-num_out // 64) * 64
        assert num_out * num_in * bits // 8 <= linear.weight.panels.nbytes <= padded * num_in * bits // 8
    assert layer.attention_norm is not None
    assert {tensor.dtype for tensor in (decoder.embedding, decoder.norm, layer.attention_norm)} == {torch.bfloat16}
    assert not isinstance(decoder.head, type(linears[0].weight))


@pytest.fixture(scope="module")
def native_kernels() -> Kernels:
    kernels = choose_kernels(CPU, torch.bfloat16, 1)
    if kernels.library is None:
        pytest.skip("needs a C++ compiler")
    return replace(kernels)


def test_the_demo_model_is_as_good_as_before(tmp_path: Path) -> None:
    """Its perplexity over questions that it was not trained on and their answers, within a hundredth."""
    before, after = (
        perplexity(tmp_path / kind, 40, weights_dtype=kind)  # the first is float32
        for kind in ("dtype", "int8")
    )
    assert before != after and abs(after / before - 1) < 0.01


def test_fp8_files_are_rounded_to_int8_where_that_is_asked_for(llama: Stock, tmp_path: Path) -> None:
    """All linears, each row of outputs with the scale of all its inputs; those of four bits stay as they are."""
    kernels = with_quantised_weights(plain_kernels(), torch.float32, 1, rounds=True)
    for name, numbers, degree in (("fp8", "int8", 2), ("int4", "uint4", 1)):
        quantised, expected = write_quantised(llama.model_path, name, tmp_path)
        model = ModelConfig.from_folder(quantised)
        assert model.quantisation is not None
        source = QuantisedCheckpoint(quantised, torch.float32, CPU, model.quantisation)
        weights = layer_weights(kernels, source, model, degree, degree - 1)
        assert {weight.numbers for weight in weights} == {numbers}
        down = load_file(expected / "model.safetensors")["model.layers.0.mlp.down_proj.weight"]
        right = rounded(down)[:, down.shape[1] // 2 :] if name == "fp8" else down
        assert torch.equal(weights[3].dequantised(), right)


def test_a_base_with_experts_and_a_gpu_are_refused(tmp_path: Path, llama: Stock) -> None:
    stock = Stock.make(write_model("mixtral", tmp_path / "model"), {}, tmp_path / "store")
    with pytest.raises(ValueError, match=r"weights_dtype = 'int8': .* dense bases, and this one has"):
        stock.engine(60, weights_dtype="int8")
    with pytest.raises(ValueError, match=r"weights_dtype = 'int8': weights in int8 are for CPUs"):
        check_weights_dtype(torch.device("cuda"), "int8")
