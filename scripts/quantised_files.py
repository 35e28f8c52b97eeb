"""Writes tests/workers/quantised/: one linear in each format of quantised files, by the libraries that publish them.

Beside the stored tensors each file has what the library itself says that they stand for, in float32, and the
quantization_config that the library writes for them. The libraries need an environment of their own:

    python -m venv /tmp/quantised && /tmp/quantised/bin/pip install torch==2.13.0 transformers==5.24.0 \\
        compressed-tensors==0.20.1 gptqmodel==7.7.0 autoawq==0.2.9
    /tmp/quantised/bin/python scripts/quantised_files.py tests/workers/quantised

(gptqmodel imports pypcre, logbar, device-smi, tokenicer, random-word and defuser too.)
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import save_file

NUM_OUT, NUM_IN = 24, 96
MODULE = "model.layers.0.self_attn.q_proj"
Case = tuple[str, str, dict[str, Any], dict[str, torch.Tensor], torch.Tensor]  # name, library, config, stored, expected


def weight() -> torch.Tensor:
    """Rows and groups of unlike sizes, so that a scale in a wrong place is seen."""
    generator = torch.Generator().manual_seed(5)
    sizes = torch.rand(NUM_OUT, NUM_IN // 32, generator=generator).repeat_interleave(32, 1) + 0.1
    return torch.randn(NUM_OUT, NUM_IN, generator=generator) * sizes


def of_transformers() -> Iterator[Case]:
    from transformers import FineGrainedFP8Config
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize

    for name, options in (
        ("fp8_block", {"weight_block_size": (8, 32)}),
        ("fp8_block_e8m0", {"weight_block_size": (8, 32), "scale_fmt": "ue8m0"}),
        ("fp8_tensor", {"weight_block_size": None, "activation_scheme": "static"}),
    ):
        config = FineGrainedFP8Config(**options)
        quantizer = SimpleNamespace(quantization_config=config)
        stored = Fp8Quantize(quantizer)._quantize_one("weight", weight())
        scales = stored["weight_scale_inv"]
        expected = Fp8Dequantize(quantizer)._dequantize_one(stored["weight"], scales, torch.float32)
        if name == "fp8_tensor":
            stored |= {"weight_scale_inv": scales.reshape(()), "activation_scale": torch.tensor(0.5)}
        yield name, "transformers", config.to_dict(), stored, expected


def of_mxfp4() -> Iterator[Case]:
    """gpt-oss's experts: `[experts, outputs, groups, 16]`, of which transformers makes `[experts, inputs, outputs]`."""
    from transformers import Mxfp4Config
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    generator = torch.Generator().manual_seed(6)
    blocks = torch.randint(0, 256, (2, NUM_OUT, NUM_IN // 32, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(115, 130, (2, NUM_OUT, NUM_IN // 32), generator=generator, dtype=torch.uint8)
    made = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    stored = {"_blocks": blocks, "_scales": scales}
    yield "mxfp4", "transformers", Mxfp4Config().to_dict(), stored, made


def of_compressed_tensors() -> Iterator[Case]:
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams

    w8a8 = QuantizationArgs(num_bits=8, strategy="token", dynamic=True)
    fp8 = QuantizationArgs(num_bits=8, type="float", strategy="token", dynamic=True)
    for name, file_format, inputs, options in (
        ("ct_fp8_tensor", "float-quantized", fp8, {"num_bits": 8, "type": "float", "strategy": "tensor"}),
        ("ct_fp8_channel", "float-quantized", fp8, {"num_bits": 8, "type": "float", "strategy": "channel"}),
        (
            "ct_fp8_block",
            "float-quantized",
            fp8,
            {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [16, 64]},
        ),
        ("ct_int8_channel", "int-quantized", w8a8, {"num_bits": 8, "strategy": "channel"}),
        ("ct_int8_zeros", "int-quantized", None, {"num_bits": 8, "strategy": "channel", "symmetric": False}),
        ("ct_int4_group", "pack-quantized", None, {"num_bits": 4, "strategy": "group", "group_size": 32}),
        (
            "ct_int4_zeros",
            "pack-quantized",
            None,
            {"num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": False},
        ),
        ("ct_int4_channel", "pack-quantized", None, {"num_bits": 4, "strategy": "channel"}),
        ("ct_int8_group", "pack-quantized", None, {"num_bits": 8, "strategy": "group", "group_size": 48}),
        (
            "ct_mxfp4",
            "mxfp4-pack-quantized",
            None,
            {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "scale_dtype": torch.uint8},
        ),
    ):
        args = QuantizationArgs(**options)
        scheme = QuantizationScheme(targets=["Linear"], weights=args, input_activations=inputs, format=file_format)
        low, high = extremes(weight(), args)
        scale, zero = calculate_qparams(low, high, args)
        if scale.dtype != torch.uint8:
            scale = scale.to(torch.bfloat16)
        compressor = BaseCompressor.get_value_from_registry(file_format)
        given = {"weight": weight(), "weight_scale": scale.float(), "weight_zero_point": zero}
        stored = compressor.compress(given, scheme)
        expected = compressor.decompress({**stored}, scheme)["weight"]
        if stored["weight_scale"].dtype == torch.float32:
            stored["weight_scale"] = stored["weight_scale"].to(torch.bfloat16)
        config = QuantizationConfig(config_groups={"group_0": scheme}, format=file_format, ignore=["lm_head"])
        yield (
            name,
            "compressed-tensors",
            json.loads(config.model_dump_json()) | {"quantization_status": "compressed"},
            stored,
            expected.float(),
        )


def extremes(weight: torch.Tensor, args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The smallest and largest number of all that share a scale."""
    if args.strategy == "tensor":
        parts = weight.reshape(1, -1)
        return parts.amin(1), parts.amax(1)
    if args.strategy == "channel":
        return weight.amin(1, keepdim=True), weight.amax(1, keepdim=True)
    if args.strategy == "block":
        rows, columns = args.block_structure
        padded = torch.nn.functional.pad(weight, (0, -NUM_IN % columns, 0, -NUM_OUT % rows))
        parts = padded.view(padded.shape[0] // rows, rows, padded.shape[1] // columns, columns)
        return parts.amin((1, 3)), parts.amax((1, 3))
    parts = weight.view(NUM_OUT, -1, args.group_size)
    return parts.amin(2), parts.amax(2)


def of_gptqmodel() -> Iterator[Case]:
    from gptqmodel import QuantizeConfig
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear
    from gptqmodel.nn_modules.qlinear.torch_awq import AwqTorchLinear
    from gptqmodel.quantization import FORMAT, METHOD
    from gptqmodel.utils.model import convert_gptq_v2_to_v1_format_module

    for name, bits, group_size, sym, desc_act, file_format in (
        ("gptq_int4", 4, 32, True, False, FORMAT.GPTQ),
        ("gptq_int4_v2", 4, 32, False, False, FORMAT.GPTQ_V2),
        ("gptq_int4_act_order", 4, 32, True, True, FORMAT.GPTQ),
        ("gptq_int8", 8, -1, True, False, FORMAT.GPTQ),
    ):
        config = QuantizeConfig(
            bits=bits, group_size=group_size, sym=sym, desc_act=desc_act, format=file_format, act_group_aware=False
        )
        size = NUM_IN if group_size == -1 else group_size
        order = torch.arange(NUM_IN) // size
        if desc_act:
            order = order[torch.randperm(NUM_IN, generator=torch.Generator().manual_seed(7))]
        scales, zeros = grouped(order, bits, sym)
        linear = torch.nn.Linear(NUM_IN, NUM_OUT, bias=False)
        linear.weight.data = weight()
        made = TorchLinear(
            bits=bits, group_size=group_size, sym=sym, desc_act=desc_act, in_features=NUM_IN, out_features=NUM_OUT
        )
        made.pack_original(linear, scales, zeros, order.to(torch.int32))
        made.scales = made.scales.float()
        made.post_init()
        expected = made.dequantize_weight().t().float()
        if file_format == FORMAT.GPTQ:
            made = convert_gptq_v2_to_v1_format_module(made, quantize_config=config) or made
        stored = {key: getattr(made, key) for key in ("qweight", "qzeros", "scales", "g_idx")}
        stored["scales"] = stored["scales"].to(torch.float16)
        yield name, "gptqmodel", written(config), stored, expected

    awq = load_awq()
    for name, sym in (("awq_int4", False), ("awq_int4_sym", True)):
        config = QuantizeConfig(bits=4, group_size=32, sym=sym, method=METHOD.AWQ, format=FORMAT.GEMM)
        scales, zeros = grouped(torch.arange(NUM_IN) // 32, 4, sym)
        linear = torch.nn.Linear(NUM_IN, NUM_OUT, bias=False)
        linear.weight.data = weight()
        made = AwqTorchLinear(bits=4, group_size=32, sym=sym, desc_act=False, in_features=NUM_IN, out_features=NUM_OUT)
        made.pack(linear, scales, zeros)
        stored = {key: getattr(made, key) for key in ("qweight", "qzeros", "scales")}
        expected = awq.dequantize_gemm(stored["qweight"], stored["qzeros"], stored["scales"].float(), 4, 32)
        yield name, "gptqmodel", written(config), stored, expected.t()


def written(config: Any) -> dict[str, Any]:
    """The config as it is published, without folders of this machine."""
    document: dict[str, Any] = json.loads(json.dumps(config.to_dict(), default=str))
    document["meta"].pop("offload_to_disk_path", None)
    return document


def load_awq() -> Any:
    """AutoAWQ's unpacking alone: the rest of it imports parts of transformers that are gone."""
    root = importlib.metadata.distribution("autoawq").locate_file("awq/utils/packing_utils.py")
    spec = importlib.util.spec_from_file_location("packing_utils", str(root))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def grouped(order: torch.Tensor, bits: int, sym: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales that float16 holds and zero points, `[out, groups]`."""
    top, columns = (1 << bits) - 1, []
    for group in range(int(order.max()) + 1):
        part = weight()[:, order == group]
        low, high = part.amin(1).clamp_max(0), part.amax(1).clamp_min(0)
        if sym:
            scale = (torch.maximum(-low, high) * 2 / top).half().float()
            columns.append((scale, torch.full_like(scale, float((top + 1) // 2))))
        else:
            scale = ((high - low) / top).half().float()
            columns.append((scale, (-low / scale).round().clamp(1, top)))
    return torch.stack([scale for scale, _ in columns], 1), torch.stack([zero for _, zero in columns], 1)


def main() -> None:
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for cases in (of_transformers, of_mxfp4, of_compressed_tensors, of_gptqmodel):
        for name, library, config, stored, expected in cases():
            prefix = "model.layers.0.mlp.experts.gate_up_proj" if name == "mxfp4" else f"{MODULE}."
            tensors = {f"{prefix}{key}": tensor.contiguous() for key, tensor in stored.items() if tensor is not None}
            note = {"library": f"{library} {importlib.metadata.version(library)}"}
            config = json.loads(json.dumps(config, default=str))
            save_file(
                {**tensors, "expected": expected.contiguous()},
                folder / f"{name}.safetensors",
                note | {"quantization_config": json.dumps(config)},
            )
            print(name, {key: (tuple(t.shape), t.dtype) for key, t in stored.items()}, json.dumps(config)[:300])


if __name__ == "__main__":
    main()
