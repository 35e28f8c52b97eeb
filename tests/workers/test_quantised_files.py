"""Files of quantised bases: what each format's own library says that its tensors stand for, and what is refused.

The files in `quantised/` were written by these libraries (`scripts/quantised_files.py`).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from motet.workers.models.config import ModelConfig
from motet.workers.models.quantised_config import Quantisation, read_quantisation
from motet.workers.models.quantised_weights import QuantisedCheckpoint

CPU = torch.device("cpu")
FILES = sorted((Path(__file__).parent / "quantised").glob("*.safetensors"))
LINEARS = [path for path in FILES if path.stem != "mxfp4"]
WEIGHT = "model.layers.0.self_attn.q_proj.weight"
EXPERTS = "model.layers.0.mlp.experts.gate_up_proj"
Tensors = dict[str, torch.Tensor]


def opened(path: Path) -> tuple[Tensors, torch.Tensor, dict[str, Any]]:
    """The stored tensors, what they stand for, and the quantization_config."""
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        config: dict[str, Any] = json.loads(file.metadata()["quantization_config"])
    return tensors, tensors.pop("expected"), config


def quantisation_of(config: dict[str, Any]) -> Quantisation:
    quantisation = read_quantisation({"quantization_config": config})
    assert quantisation is not None
    return quantisation


def checkpoint(folder: Path, tensors: Tensors, config: dict[str, Any]) -> QuantisedCheckpoint:
    save_file(tensors, folder / "model.safetensors")
    return QuantisedCheckpoint(folder, torch.float32, CPU, quantisation_of(config))


@pytest.mark.parametrize("path", LINEARS, ids=lambda path: path.stem)
def test_a_linear_is_what_its_library_says(path: Path, tmp_path: Path) -> None:
    """To the last bit in float32: whole, and each part that a worker of a gang of two or three has."""
    tensors, expected, config = opened(path)
    num_out, num_in = expected.shape
    for rows, columns in (
        *((None, None), ((0, 12), None), ((12, 24), None), ((8, 16), None), ((0, 0), None)),
        *((None, (0, 48)), (None, (48, 96)), (None, (32, 64))),
    ):
        source = checkpoint(tmp_path, tensors, config)
        taken = source.take(WEIGHT, (num_out, num_in), rows, columns)
        assert torch.equal(taken, expected[slice(*(rows or (None,))), slice(*(columns or (None,)))])
        source.finish()


@pytest.mark.parametrize("path", LINEARS, ids=lambda path: path.stem)
def test_a_fused_linear_is_split_by_its_rows(path: Path, tmp_path: Path) -> None:
    tensors, expected, config = opened(path)
    source = checkpoint(tmp_path, tensors, config)
    source.split(WEIGHT, {"q": 10, "k": 6, "v": 8})
    num_in = expected.shape[1]
    assert torch.equal(source.take("k", (6, num_in), rows=(3, 6)), expected[13:16])
    assert torch.equal(source.take("q", (10, num_in)), expected[:10])
    with pytest.raises(ValueError, match=r"1 weights that this model has no place for: v"):
        source.finish()
    source.take("v", (8, num_in), columns=(0, 32))
    source.finish()


def test_experts_in_blocks_of_four_bits_are_what_transformers_says(tmp_path: Path) -> None:
    (path,) = (path for path in FILES if path.stem == "mxfp4")
    tensors, expected, config = opened(path)  # `[experts, in, out]`
    shape = tuple(expected.shape)
    assert torch.equal(checkpoint(tmp_path, tensors, config).take(EXPERTS, shape), expected)
    assert torch.equal(checkpoint(tmp_path, tensors, config).take(EXPERTS, shape, rows=(1, 2)), expected[1:])
    source = checkpoint(tmp_path, tensors, config)
    source.split(EXPERTS, {"first": 1, "second": 1})
    assert torch.equal(source.take("second", (1, *shape[1:]), rows=(0, 1)), expected[1:])
    assert source.take("first", (1, *shape[1:]), rows=(0, 0)).shape == (0, *shape[1:])
    source.finish()


@pytest.mark.parametrize("suffix", ["_blocks", "_scales"])
def test_experts_whose_axes_are_in_another_order_are_refused(suffix: str, tmp_path: Path) -> None:
    (path,) = (path for path in FILES if path.stem == "mxfp4")
    tensors, expected, config = opened(path)
    stored = tensors[EXPERTS + suffix]
    for axis, other in ((1, 2), (-1, 0), (-2, -1)):
        transposed = stored.transpose(axis, other).contiguous()
        if transposed.shape != stored.shape:
            with pytest.raises(ValueError, match=rf"{suffix}' has shape "):
                checkpoint(tmp_path, tensors | {EXPERTS + suffix: transposed}, config).take(
                    EXPERTS, tuple(expected.shape)
                )


def test_a_linear_of_16_bits_is_read_as_it_is(tmp_path: Path) -> None:
    tensors, _, config = opened(LINEARS[0])
    plain = torch.randn(4, 8).bfloat16()
    source = checkpoint(tmp_path, tensors | {"lm_head.weight": plain}, config)
    assert torch.equal(source.take("lm_head.weight", (4, 8)), plain.float())


def test_biases_of_zeros_are_no_biases_and_others_are_missed(tmp_path: Path) -> None:
    """AutoGPTQ wrote them for linears that have none."""
    (path,) = (path for path in FILES if path.stem == "gptq_int4")
    tensors, expected, config = opened(path)
    bias = WEIGHT.replace("weight", "bias")
    source = checkpoint(tmp_path, tensors | {bias: torch.zeros(24)}, config)
    source.take(WEIGHT, tuple(expected.shape))
    source.finish()
    source = checkpoint(tmp_path, tensors | {bias: torch.ones(24)}, config)
    source.take(WEIGHT, tuple(expected.shape))
    with pytest.raises(ValueError, match=r"has 1 tensors that this model has no place for: .*q_proj\.bias"):
        source.finish()


def without(suffix: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {name: tensor for name, tensor in tensors.items() if not name.endswith(suffix)}


def changed(suffix: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {
        name: change(tensor).contiguous() if name.endswith(suffix) else tensor for name, tensor in tensors.items()
    }


@pytest.mark.parametrize(
    ("stem", "change", "message"),
    [
        ("fp8_block", without("weight_scale_inv"), r"no tensor .*q_proj.weight_scale_inv': .* fp8 \(float8 in blocks"),
        ("ct_int8_channel", without("weight_scale"), r"no tensor .*q_proj.weight_scale'"),
        ("ct_int4_zeros", without("zero_point"), r"no tensor .*q_proj.weight_zero_point'"),
        ("gptq_int4", without("qzeros"), r"no tensor .*q_proj.qzeros': .* gptq \(int4 in groups of 32\)"),
        ("gptq_int4_act_order", without("g_idx"), r"no tensor .*q_proj.g_idx'"),
        ("awq_int4", changed("qweight", lambda x: x[:, :2]), r"q_proj.qweight' has shape \(96, 2\): .* need \(96, 3\)"),
        ("gptq_int4", changed("scales", lambda x: x[:2]), r"q_proj.scales' has shape \(2, 24\): .* need \(3, 24\)"),
        ("gptq_int4", changed("scales", lambda x: x.int()), r"q_proj.scales' has the dtype I32: F32"),
        ("gptq_int4", changed("g_idx", lambda x: x.flip(0)), r"q_proj.g_idx' has another order .* desc_act = true"),
        ("gptq_int4_act_order", changed("g_idx", lambda x: x - 1), "q_proj.g_idx' has a group that is not: .* 0 to 2"),
        ("gptq_int4_act_order", changed("g_idx", lambda x: x + 1), "q_proj.g_idx' has a group that is not: .* 0 to 2"),
        (
            "ct_int4_group",
            lambda tensors: tensors | {WEIGHT + "_g_idx": torch.arange(96).flip(0) // 32},
            r"q_proj.weight_g_idx' has another order .* actorder = 'group'",
        ),
    ],
)
def test_missing_and_misshapen_tensors_are_refused_by_name(
    stem: str, change: Callable[[Tensors], Tensors], message: str, tmp_path: Path
) -> None:
    (path,) = (path for path in FILES if path.stem == stem)
    tensors, expected, config = opened(path)
    with pytest.raises(ValueError, match=message):
        checkpoint(tmp_path, change(tensors), config).take(WEIGHT, tuple(expected.shape))


def config_of(stem: str) -> dict[str, Any]:
    (path,) = (path for path in FILES if path.stem == stem)
    return opened(path)[2]


def weights_of(stem: str, **changes: Any) -> dict[str, Any]:
    """The quantization_config of a file of compressed-tensors with other keys of its weights."""
    config = config_of(stem)
    group = config["config_groups"]["group_0"]
    return config | {"config_groups": {"group_0": group | {"weights": group["weights"] | changes}}}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"bits": 4}, "quant_method = None is not supported: fp8, compressed-tensors, gptq, awq, mxfp4 are accepted"),
        ({"quant_method": "bitsandbytes"}, "'bitsandbytes' is not supported: .* the base in bfloat16, or one in"),
        ({"quant_method": "gguf"}, "'gguf' is not supported: .* the base in bfloat16"),
        ({"quant_method": "modelopt"}, "'modelopt' is not supported: NVFP4"),
        (config_of("gptq_int4") | {"bits": 3}, "bits = 3: 4 or 8 is accepted"),
        (config_of("gptq_int4") | {"group_size": 12}, "group_size = 12: a multiple of 8, or -1"),
        (config_of("gptq_int4") | {"format": "gptq_p", "checkpoint_format": None}, "format = 'gptq_p': 'gptq' or"),
        (config_of("gptq_int4") | {"format": "gptq_v2"}, "checkpoint_format = 'gptq': it contradicts format"),
        (config_of("gptq_int4") | {"dynamic": {"+:.*mlp": {"bits": 8}}}, "dynamic = .* left out"),
        (config_of("gptq_int4") | {"sym": "yes"}, "sym = 'yes': True or False is accepted"),
        (config_of("gptq_int4") | {"new_key": 1}, "new_key = 1: this key is not known"),
        (config_of("awq_int4") | {"version": "gemv"}, "version = 'gemv': 'gemm'"),
        (config_of("awq_int4") | {"desc_act": True}, "desc_act = True: AWQ has no act-order"),
        (config_of("fp8_block") | {"weight_block_size": [128]}, r"weight_block_size = \[128\]: the outputs and"),
        (config_of("fp8_block") | {"scale_fmt": "e5m2"}, "scale_fmt = 'e5m2'"),
        (config_of("ct_int4_group") | {"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme = .* null is accepted"),
        (config_of("ct_int4_group") | {"transform_config": {"R1": {}}}, "transform_config = .* changes what linears"),
        (
            config_of("ct_int4_group") | {"quantization_status": "initialized"},
            "quantization_status = 'initialized': 'compressed'",
        ),
        (config_of("ct_int4_group") | {"ignore": ["re:("]}, r"ignore = 're:\(': no regular expression"),
        (weights_of("ct_int4_group", num_bits=2), r"group_0\.weights: num_bits = 2: 4 or 8"),
        (weights_of("ct_int4_group", strategy="tensor_group"), "strategy = 'tensor_group'"),
        (weights_of("ct_int4_group", group_size=None), "group_size = None: strategy = 'group' needs one"),
        (weights_of("ct_int4_group", type="float"), "format = 'pack-quantized': for weights of type float"),
        (weights_of("ct_fp8_channel", symmetric=False), "symmetric = False: floats have no zero points"),
    ],
)
def test_configs_that_no_weight_was_seen_with_are_refused_by_key(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_quantisation({"quantization_config": config})


@pytest.mark.parametrize("stored", [[], False, "fp8", {"quant_method": []}, {"quant_method": None}])
def test_what_is_no_quantisation_is_refused(stored: Any) -> None:
    with pytest.raises(ValueError, match=r"^quantization_config.* is (needed|not supported)"):
        read_quantisation({"quantization_config": stored})


def test_nvfp4_is_refused_with_what_would_be_right() -> None:
    config = json.loads(json.dumps(config_of("ct_mxfp4")).replace("mxfp4-pack", "nvfp4-pack"))
    with pytest.raises(ValueError, match=r"format = 'nvfp4-pack-quantized': .* of NVFP4 the base in bfloat16"):
        read_quantisation({"quantization_config": config})


def test_groups_of_a_config_name_linears_by_class_name_or_pattern() -> None:
    config = config_of("ct_int4_group")
    group = config["config_groups"]["group_0"]
    down = group | {"targets": ["re:.*down_proj"], "weights": group["weights"] | {"group_size": 64}}
    quantisation = quantisation_of(config | {"config_groups": {"group_0": group, "group_1": down}})
    assert quantisation.format_of("model.layers.1.mlp.down_proj").group_size == 64
    assert quantisation.format_of("model.layers.1.mlp.up_proj").group_size == 32
    with pytest.raises(ValueError, match=r"'model\.layers\.1\.mlp\.up_proj' has quantised tensors, and no targets"):
        quantisation_of(config | {"config_groups": {"group_1": down}}).format_of("model.layers.1.mlp.up_proj")


def test_a_config_of_16_bits_has_no_quantisation() -> None:
    assert read_quantisation({}) is None and read_quantisation({"quantization_config": {}}) is None
    assert ModelConfig.quantisation is None
