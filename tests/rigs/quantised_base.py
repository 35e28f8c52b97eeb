"""A base with quantised files beside the base that it stands for: every linear of a layer rounded, and packed here."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from motet.kernels.quantised import FLOAT4

Stored = tuple[dict[str, torch.Tensor], torch.Tensor]  # tensors by suffix, and the weight that they stand for
GROUP = 16  # inputs, so that all linears of the tests' small models, and halves of them, are whole groups


def in_groups(weight: torch.Tensor, top: int, group: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes from 0 to `top` `[out, in]`, and scales and zero points `[out, groups]`."""
    parts = weight.view(weight.shape[0], -1, group)
    low, high = parts.amin(2).clamp_max(0), parts.amax(2).clamp_min(0)
    scales = ((high - low) / top).half().float()
    zeros = (-low / scales).round().clamp(1, top)
    codes = (parts / scales.unsqueeze(2) + zeros.unsqueeze(2)).round().clamp(0, top)
    return codes.view(weight.shape), scales, zeros


def packed(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """`[rows, numbers]` as int32 words, the first numbers lowest."""
    shifts = torch.arange(0, 32, bits)
    words = (codes.long().view(len(codes), -1, 32 // bits) << shifts).sum(2)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def of_four_bits(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    codes, scales, zeros = in_groups(weight, 15, GROUP)
    wide = [each.repeat_interleave(GROUP, 1) for each in (scales, zeros)]
    return codes, scales, zeros, (codes - wide[1]) * wide[0]


def gptq(weight: torch.Tensor) -> Stored:
    codes, scales, zeros, expected = of_four_bits(weight)
    order = torch.arange(weight.shape[1], dtype=torch.int32) // GROUP
    stored = {
        "qweight": packed(codes, 4).t(),
        "qzeros": packed(zeros.t() - 1, 4),
        "scales": scales.t().half(),
        "g_idx": order,
    }
    return stored, expected


def awq(weight: torch.Tensor) -> Stored:
    codes, scales, zeros, expected = of_four_bits(weight)
    order = [0, 2, 4, 6, 1, 3, 5, 7]  # which of eight outputs is at each place of a word

    def words(numbers: torch.Tensor) -> torch.Tensor:
        return packed(numbers.t().unflatten(1, (-1, 8))[..., order].flatten(1), 4)

    return {"qweight": words(codes), "qzeros": words(zeros), "scales": scales.t().half()}, expected


def int4(weight: torch.Tensor) -> Stored:
    codes, scales, zeros, expected = of_four_bits(weight)
    padded = torch.nn.functional.pad(zeros, (0, 0, 0, -len(zeros) % 8))
    stored = {
        "weight_packed": packed(codes, 4),
        "weight_zero_point": packed(padded.t(), 4).t(),
        "weight_scale": scales.half(),
        "weight_shape": torch.tensor(weight.shape),
    }
    return stored, expected


def int8(weight: torch.Tensor) -> Stored:
    scales = (weight.abs().amax(1, keepdim=True) / 127).bfloat16().float()
    codes = (weight / scales).round().clamp(-128, 127)
    return {"weight": codes.to(torch.int8), "weight_scale": scales.bfloat16()}, codes * scales


def fp8(weight: torch.Tensor) -> Stored:
    parts = weight.view(len(weight) // 8, 8, -1, 8)
    scales = parts.abs().amax((1, 3)) / 448
    wide = scales.repeat_interleave(8, 0).repeat_interleave(8, 1)
    codes = (weight / wide).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale_inv": scales}, codes.float() * wide


def mxfp4(weight: torch.Tensor) -> Stored:
    """Of the experts of a layer, `[experts, in, out]`."""
    parts = weight.transpose(1, 2).unflatten(2, (-1, 32))
    exponents = (parts.abs().amax(3, keepdim=True) / 6).log2().ceil()
    codes = (parts / exponents.exp2()).unsqueeze(4).sub(torch.tensor(FLOAT4)).abs().argmin(4).to(torch.uint8)
    expected = (torch.tensor(FLOAT4)[codes.long()] * exponents.exp2()).flatten(2).transpose(1, 2)
    blocks = codes[..., 0::2] | codes[..., 1::2] << 4
    return {"blocks": blocks, "scales": (exponents.squeeze(3) + 127).to(torch.uint8)}, expected.contiguous()


def _of_compressed_tensors(file_format: str, inputs: dict[str, Any] | None = None, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"type": "int", **weights}, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "format": file_format,
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }


TOKENS = {"num_bits": 8, "type": "int", "dynamic": True, "strategy": "token", "symmetric": True}
FORMATS: dict[str, tuple[Callable[[torch.Tensor], Stored], dict[str, Any]]] = {
    "gptq": (gptq, {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": False}),
    "awq": (awq, {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}),
    "int4": (
        int4,
        _of_compressed_tensors("pack-quantized", num_bits=4, strategy="group", group_size=GROUP, symmetric=False),
    ),
    "int8": (int8, _of_compressed_tensors("int-quantized", num_bits=8, strategy="channel")),
    "w8a8": (int8, _of_compressed_tensors("int-quantized", TOKENS, num_bits=8, strategy="channel")),
    "mxfp4": (mxfp4, {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}),
    "fp8": (fp8, {"quant_method": "fp8", "weight_block_size": [8, 8], "activation_scheme": "dynamic"}),
}


def write_quantised(model: Path, name: str, folder: Path) -> tuple[Path, Path]:
    """The base of `model` with files in this format, and the same base of what those stand for, in float32."""
    pack, config = FORMATS[name]
    stored: dict[str, torch.Tensor] = {}
    expected: dict[str, torch.Tensor] = {}
    ends = ("_proj",) if name == "mxfp4" else ("_proj.weight", "_proj_with_mqa.weight")
    for path, tensor in load_all(model).items():
        start = path + "_" if name == "mxfp4" else path.removesuffix("weight")
        is_linear = ".layers." in path and path.endswith(ends)
        tensors, expected[path] = pack(tensor) if is_linear else ({}, tensor)
        stored |= {start + key: part.contiguous() for key, part in tensors.items()}
        if not is_linear:
            stored[path] = tensor
    folders = []
    for kind, weights, changes in (("quantised", stored, {"quantization_config": config}), ("expected", expected, {})):
        to = folder / f"{name}-{kind}"
        shutil.copytree(model, to, ignore=shutil.ignore_patterns("*.safetensors*"))
        raw = json.loads((model / "config.json").read_text())
        (to / "config.json").write_text(json.dumps(raw | changes))
        save_file(weights, to / "model.safetensors", {"format": "pt"})
        folders.append(to)
    return folders[0], folders[1]


def load_all(model: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in sorted(model.glob("*.safetensors")) for name, tensor in load_file(path).items()}
