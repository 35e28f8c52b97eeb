"""Bases with quantised files, with adapters: against transformers and PEFT on the weights that the files stand for."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from motet.kernels.backend import Kernels, choose_kernels, with_quantised_weights
from motet.kernels.experts import ExpertGroups
from motet.kernels.native.experts import PackedExperts
from motet.kernels.native.quantised_linear import PackedCodes, PackedExpertCodes
from motet.tests.rigs.engine_rig import EngineRig, SequenceOutput, Stock
from motet.tests.rigs.gang_rig import gang
from motet.tests.rigs.oracle import (
    RECIPES,
    VOCAB_SIZE,
    Answer,
    Oracle,
    write_adapters,
    write_expert_adapter,
    write_model,
)
from motet.tests.rigs.quantised_base import FORMATS, write_quantised
from motet.workers.models.config import ModelConfig
from motet.workers.models.decoder import Decoder, load_decoder
from motet.workers.models.layers import Attention, ExpertMlp
from motet.workers.models.quantised_weights import QuantisedCheckpoint
from motet.workers.models.sharding import ModelSharding
from motet.workers.models.weights import Checkpoint
from motet.workers.wire.messages import SamplingParams

NUM_TOKENS = 6
ADAPTERS: tuple[str | None, ...] = (None, RECIPES[1].name, RECIPES[3].name)
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True, num_logprobs=VOCAB_SIZE)
CPU = torch.device("cpu")
TOLERANCE = 4e-4  # of log-probabilities in float32, as of bases that are not quantised


def requested(rig: EngineRig, adapters: Sequence[str | None] = ADAPTERS) -> list[SequenceOutput]:
    generator = random.Random(11)
    for index, adapter in enumerate(adapters):
        rig.submit(index, generator.choices(range(VOCAB_SIZE), k=13), adapter, GREEDY)
    rig.finish()
    rig.assert_idle()
    return list(rig.outputs.values())


def difference(outputs: list[SequenceOutput], oracle: Oracle, adapters: Sequence[str | None] = ADAPTERS) -> float:
    """The largest of log-probabilities; the oracle continues with the engine's tokens, which it would choose, too."""
    generator, largest = random.Random(11), 0.0
    for output, adapter in zip(outputs, adapters, strict=True):
        prompt = generator.choices(range(VOCAB_SIZE), k=13)
        assert output.error is None
        logits = oracle.logits([*prompt, *output.token_ids[:-1]], adapter)[len(prompt) - 1 :]
        assert logits.argmax(-1).tolist() == output.token_ids
        for row, token in zip(Answer(output.token_ids, logits).logprobs, output.logprobs, strict=True):
            expected = row[token.top_ids].tolist()
            largest = max(largest, *(abs(a - b) for a, b in zip(expected, token.top_logprobs, strict=True)))
    return largest


def made(variant: str, name: str, folder: Path, **changes: int) -> tuple[Stock, Oracle, Oracle]:
    """The quantised base, what it is to say, and what the base of which it was made says."""
    model = write_model(variant, folder / "model", **changes)
    adapters = write_adapters(model, folder / "adapters")
    quantised, expected = write_quantised(model, name, folder)
    stock = Stock.make(quantised, {name: adapters[name] for name in ADAPTERS if name is not None}, folder / "store")
    folders = {name: folder / "adapters" / name for name in stock.refs}
    return stock, Oracle(expected, folders), Oracle(model, folders)


@pytest.mark.parametrize(
    ("variant", "name"),
    [
        *(("llama", name) for name in FORMATS if name not in ("w8a8", "mxfp4")),
        ("phi3", "gptq"),
        ("glm4", "int4"),
        ("qwen2_moe", "fp8"),
        ("qwen3_5", "int4"),
        ("deepseek_v3", "fp8"),  # as it is published
        ("deepseek_v2", "int4"),
        ("apertus", "int4"),
        ("nemotron_h_moe", "fp8"),
        ("deepseek_v2", "awq"),
        ("deepseek_v2", "gptq"),
    ],
)
def test_a_quantised_base_is_the_one_that_its_files_stand_for(variant: str, name: str, tmp_path: Path) -> None:
    stock, oracle, original = made(variant, name, tmp_path)
    with stock.engine(200) as rig:
        outputs = requested(rig)
    assert difference(outputs, oracle) < TOLERANCE
    prompt = random.Random(11).choices(range(VOCAB_SIZE), k=13)
    assert (original.logits(prompt, None) - oracle.logits(prompt, None)).abs().max() > 20 * TOLERANCE


@pytest.mark.parametrize(
    ("width", "degree", "expert_sharding"), [(64, 1, "tensor"), (64, 2, "tensor"), (96, 2, "tensor"), (64, 2, "expert")]
)
def test_gpt_oss_as_it_is_published(width: int, degree: int, expert_sharding: str, tmp_path: Path) -> None:
    """With experts of four bits; workers of a gang share the features of each, a group's among them, or the experts."""
    stock, oracle, original = made("gpt_oss", "mxfp4", tmp_path, intermediate_size=width)
    if degree == 1:
        with stock.engine(200) as rig:
            outputs = requested(rig)
    else:
        with gang(stock.gang_config(200, 2, expert_sharding=expert_sharding)) as (engine, _):
            outputs = requested(EngineRig(engine, stock.refs))
    assert difference(outputs, oracle) < TOLERANCE
    prompt = random.Random(11).choices(range(VOCAB_SIZE), k=13)
    assert (original.logits(prompt, None) - oracle.logits(prompt, None)).abs().max() > 20 * TOLERANCE


@pytest.mark.parametrize(
    ("variant", "name", "changes"),
    [("gpt_oss", "mxfp4", {"intermediate_size": 64}), ("qwen3_moe", "int4", {"moe_intermediate_size": 48})],
)
def test_lora_on_experts_of_four_bits(variant: str, name: str, changes: dict[str, int], tmp_path: Path) -> None:
    model = write_model(variant, tmp_path / "model", **changes)
    adapter = write_expert_adapter(model, tmp_path / "adapter")
    quantised, expected = write_quantised(model, name, tmp_path)
    stock, adapters = Stock.make(quantised, {"experts": adapter}, tmp_path / "store"), ("experts", None, "experts")
    with stock.engine(300) as rig:
        outputs = requested(rig, adapters)
    assert difference(outputs, Oracle(expected, {"experts": adapter}), adapters) < TOLERANCE
    with gang(stock.gang_config(300, 2)) as (engine, _):
        outputs = requested(EngineRig(engine, stock.refs), adapters)
    assert difference(outputs, Oracle(expected, {"experts": adapter}), adapters) < TOLERANCE


def loaded(
    folder: Path, sharding: tuple[int, int] = (1, 0), dtype: torch.dtype = torch.float32
) -> tuple[Decoder, Kernels]:
    """As a worker of a gang has it."""
    model = ModelConfig.from_folder(folder)
    kernels = with_quantised_weights(choose_kernels(CPU, dtype, 1), dtype, 1, rounds=False)
    checkpoint = Checkpoint(folder, dtype, CPU)
    if model.quantisation is not None:
        checkpoint = QuantisedCheckpoint(folder, dtype, CPU, model.quantisation)
    return load_decoder(ModelSharding(model, *sharding), checkpoint, kernels), kernels


def experts_of(folder: Path, sharding: tuple[int, int] = (1, 0)) -> list[ExpertMlp]:
    decoder, _ = loaded(folder, sharding)
    return [layer.mlp for layer in decoder.layers if isinstance(layer.mlp, ExpertMlp)]


def test_experts_of_four_bits_take_their_memory(tmp_path: Path) -> None:
    """Of MXFP4 4.25 bits a weight, as in the file, with its scales."""
    model = write_model("gpt_oss", tmp_path / "model", intermediate_size=64)
    quantised, _ = write_quantised(model, "mxfp4", tmp_path)
    layers = experts_of(quantised)
    assert len(layers) == 3
    for layer in layers:
        num_bytes = 0
        for weight in (layer.gate_up, layer.down):
            assert isinstance(weight, PackedExpertCodes)
            num_bytes += weight.panels.nbytes + weight.scales.nbytes
            assert weight.zeros is None
        assert 8 * num_bytes / (4 * 3 * 64 * 64) == 4.25


def test_float8_stays_in_eight_bits_where_the_cpu_multiplies_bfloat16(tmp_path: Path) -> None:
    """Linears, experts and shared experts give what the weights give that the files stand for."""
    model = write_model("qwen2_moe", tmp_path / "model")
    quantised, expected = write_quantised(model, "fp8", tmp_path)
    decoder, kernels = loaded(quantised, dtype=torch.bfloat16)
    original, plain = loaded(expected)
    if Path("/proc/cpuinfo").is_file() and "avx512_bf16" not in Path("/proc/cpuinfo").read_text():
        pytest.skip("float8 becomes bfloat16")
    x = torch.randn(9, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    groups = ExpertGroups(torch.arange(9), torch.ones(9), torch.tensor([0, 1, 3, 3, 4, 8, 9]))
    for layer, right in zip(decoder.layers, original.layers, strict=True):
        assert isinstance(layer.attention, Attention) and isinstance(right.attention, Attention)
        pairs = [(layer.attention.qkv, right.attention.qkv)]
        if isinstance(layer.mlp, ExpertMlp):
            assert isinstance(layer.mlp.gate_up, PackedExpertCodes) and isinstance(layer.mlp.down, PackedExpertCodes)
            assert layer.mlp.gate_up.panels.nbytes >= 6 * 80 * 64 and layer.mlp.gate_up.table is None
            actual = kernels.expert_linear(x, layer.mlp.gate_up, groups)
            expected_y = plain.expert_linear(x.float(), right.mlp.gate_up, groups)  # type: ignore[union-attr]
            torch.testing.assert_close(actual.float(), expected_y, rtol=2**-7, atol=1e-5)
            pairs.append((layer.mlp.shared.gate_up, right.mlp.shared.gate_up))  # type: ignore[union-attr]
        for linear, wide in pairs:
            assert isinstance(linear.weight, PackedCodes)
            actual = kernels.layer_linear(x, linear.weight, None)
            expected_y = plain.layer_linear(x.float(), wide.weight, None)
            torch.testing.assert_close(actual.float(), expected_y, rtol=2**-7, atol=1e-5)


def test_a_cut_within_a_group_and_experts_that_differ_have_the_engines_dtype(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Of a gang of four each worker has four inputs of a group of 16; else one expert of a layer is in 16 bits."""
    caplog.set_level("INFO", "motet.workers.models.decoder")
    model = write_model("qwen3_moe", tmp_path / "model", moe_intermediate_size=16)
    quantised, expected = write_quantised(model, "gptq", tmp_path)
    layers = zip(experts_of(quantised, (4, 1)), experts_of(expected, (4, 1)), strict=True)
    for layer, right in layers:
        assert isinstance(layer.gate_up, PackedExpertCodes) and isinstance(layer.down, PackedExperts)
        assert torch.equal(layer.down.panels, right.down.panels)
    assert "of 12 weights of layers, where all experts of one count as two, 9 have four or eight bits" in caplog.text
    stored, name = load_file(quantised / "model.safetensors"), "model.layers.1.mlp.experts.2.gate_proj"
    stored = {key: tensor for key, tensor in stored.items() if not key.startswith(f"{name}.")}
    stored[f"{name}.weight"] = load_file(expected / "model.safetensors")[f"{name}.weight"]
    save_file(stored, quantised / "model.safetensors")
    caplog.clear()
    layers = zip(experts_of(quantised), experts_of(expected), strict=True)
    for index, (layer, right) in enumerate(layers):
        assert isinstance(layer.gate_up, PackedExperts if index == 1 else PackedExpertCodes)
        assert isinstance(layer.down, PackedExpertCodes)
        assert index != 1 or torch.equal(layer.gate_up.panels, right.gate_up.panels)
    assert "of 12 weights of layers, where all experts of one count as two, 11 have four or eight bits" in caplog.text


def test_shared_experts_and_linears_around_experts_have_four_bits(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """All linears that the file has so, of a base whose experts have neither a gate nor the features of the layer."""
    caplog.set_level("INFO", "motet.workers.models.decoder")
    sizes = {"moe_intermediate_size": 48, "moe_shared_expert_intermediate_size": 64}
    stock, oracle, _ = made("nemotron_h_moe", "int4", tmp_path, **sizes)
    with stock.engine(300) as rig:
        outputs = requested(rig)
    assert difference(outputs, oracle) < TOLERANCE
    # Two layers with experts, a shared one and two linears around them; one of Mamba, of attention and a dense one.
    assert "of 18 weights of layers, where all experts of one count as two, 18 have four or eight bits" in caplog.text


@pytest.mark.parametrize(("variant", "name"), [("llama", "gptq"), ("llama", "fp8"), ("deepseek_v3", "fp8")])
def test_a_gang_of_two_reads_its_rows_and_columns(variant: str, name: str, tmp_path: Path) -> None:
    stock, oracle, _ = made(variant, name, tmp_path)
    with gang(stock.gang_config(200, 2)) as (engine, workers):
        outputs = requested(EngineRig(engine, stock.refs))
    assert [worker.exitcode for worker in workers] == [0, 0]
    assert difference(outputs, oracle) < TOLERANCE


def test_a_base_that_lacks_scales_is_refused_as_it_is_loaded(tmp_path: Path) -> None:
    model = write_model("llama", tmp_path / "model")
    quantised, _ = write_quantised(model, "fp8", tmp_path)
    raw = json.loads((quantised / "config.json").read_text())
    raw["quantization_config"] = FORMATS["int8"][1]
    (quantised / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ValueError, match=r"has no tensor 'model\.layers\.0\.mlp\.down_proj\.weight_scale': "):
        Stock.make(quantised, {}, tmp_path / "store").engine(60)
