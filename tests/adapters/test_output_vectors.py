"""DoRA, IA3 and biases as they are uploaded: what fits, what is refused, and the base's weights that they depend on."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from redis.asyncio import Redis
from safetensors.torch import save_file

from motet.adapters.adapter import BaseShape, BaseTensor
from motet.adapters.errors import AdapterInvalid
from motet.adapters.format.base_weights import BaseWeights
from motet.adapters.format.content import AdapterContent
from motet.adapters.format.validation import validate
from motet.adapters.registry.registry import Registry
from motet.adapters.registry.registry_view import RegistryView
from motet.adapters.store.store import AdapterStore
from motet.adapters.upload import UploadLimits, UploadService
from motet.tests.rigs.lora_files import LAYOUT, SHAPE, LoraFiles, lora_files, name_of
from motet.workers.models.stored_tensor import base_tensors

Q, DOWN = (name_of(0, module, "A").removesuffix(".lora_A.weight") for module in ("q_proj", "down_proj"))


def base_of(folder: Path, dtype: torch.dtype = torch.float32, shape: BaseShape = SHAPE) -> dict[str, BaseTensor]:
    """A base with random weights, and a bias for q_proj."""
    generator, tensors = torch.Generator().manual_seed(3), {}
    for layer in range(shape.num_layers):
        for module, (num_in, num_out) in shape.modules.items():
            name = f"model.layers.{layer}.{shape.path(module)}"
            tensors[f"{name}.weight"] = torch.randn(num_out, num_in, generator=generator).to(dtype)
            if module == "q_proj":
                tensors[f"{name}.bias"] = torch.randn(num_out, generator=generator).to(dtype)
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    return base_tensors(folder, shape)


def dora_files(**config: Any) -> LoraFiles:
    files = lora_files(use_dora=True, **config)
    for name, tensor in [*files.tensors.items()]:
        if "lora_B" in name:
            magnitude = name.replace("lora_B.weight", "lora_magnitude_vector")
            files.tensors[magnitude] = torch.linspace(1, 9, tensor.shape[0])
    return files


def content_of(files: LoraFiles, folder: Path, base: dict[str, BaseTensor] | None) -> AdapterContent:
    weights = None if base is None else BaseWeights(base)
    return validate(files.config_bytes, files.write(folder), SHAPE, base=weights)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_gains_are_magnitudes_over_norms_of_the_base_with_lora(
    dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the blocks in which the base is read."""
    base, files = base_of(tmp_path / "base", dtype), dora_files()
    whole = content_of(files, tmp_path, base)
    monkeypatch.setattr("motet.adapters.format.base_weights._BLOCK_BYTES", 4 * 16 * 5)
    content = content_of(files, tmp_path, base)
    assert content.outputs.keys() == content.matrices.keys() and content.digest == whole.digest
    for (layer, module), vectors in content.outputs.items():
        lora, at = content.matrices[layer, module], base[f"model.layers.{layer}.{SHAPE.path(module)}.weight"]
        stored = np.fromfile(at.path, np.uint8, int(np.prod(at.shape)) * dtype.itemsize, offset=at.start)
        weight = torch.frombuffer(stored, dtype=dtype).view(at.shape).double()
        norms = (weight + lora.scaling * torch.tensor(lora.b).double() @ torch.tensor(lora.a).double()).norm(dim=1)
        gain = torch.linspace(1, 9, len(norms)).double() / norms - 1
        torch.testing.assert_close(torch.tensor(vectors.gain), gain.float(), atol=1e-5, rtol=1e-5)
        np.testing.assert_allclose(vectors.gain, whole.outputs[layer, module].gain, rtol=1e-6, atol=1e-6)
        assert vectors.shift.any() == (module == "q_proj"), "of the base's bias"


def test_the_digest_is_of_magnitudes_and_not_of_the_base(tmp_path: Path) -> None:
    base, files = base_of(tmp_path / "base"), dora_files()
    first = content_of(files, tmp_path, base)
    assert content_of(files, tmp_path, base_of(tmp_path / "other", torch.bfloat16)).digest == first.digest
    files.tensors[f"{Q}.lora_magnitude_vector"][0] += 1
    assert content_of(files, tmp_path, base).digest != first.digest
    plain = lora_files()
    assert content_of(plain, tmp_path, None).digest != first.digest


def _ia3(**tensors: torch.Tensor) -> LoraFiles:
    config = {"peft_type": "IA3", "target_modules": sorted(tensors), "feedforward_modules": []}
    named = {
        name_of(layer, module, "A").replace("lora_A.weight", "ia3_l"): tensor.clone()
        for module, tensor in tensors.items()
        for layer in range(SHAPE.num_layers)
    }
    return LoraFiles(config, named)


def test_a_vector_of_a_down_projections_inputs_is_one_of_the_up_projections_outputs(tmp_path: Path) -> None:
    inputs, own = torch.linspace(0, 2, 24), torch.linspace(-1, 3, 24)
    content = content_of(_ia3(down_proj=inputs.view(1, -1), up_proj=own.view(-1, 1)), tmp_path, None)
    assert {module for _, module in content.outputs} == {"up_proj"} and not content.matrices
    np.testing.assert_allclose(content.outputs[2, "up_proj"].gain, inputs * own - 1, rtol=1e-6, atol=1e-6)
    assert content.module_ranks == {"up_proj.outputs": 2}


def _spoil(case: str, files: LoraFiles) -> tuple[LoraFiles, str]:
    config, tensors = files.config, files.tensors
    match case:
        case "missing":
            del tensors[f"{Q}.lora_magnitude_vector"]
            return files, r"lacks tensors .*layers\.0\.self_attn\.q_proj\.lora_magnitude_vector"
        case "shape":
            tensors[f"{Q}.lora_magnitude_vector"] = torch.ones(1, 16)
            return files, r"has shape \[1, 16\], expected \[16\]"
        case "not finite":
            tensors[f"{Q}.lora_magnitude_vector"][3] = float("nan")
            return files, "holds NaN or infinity"
        case "too large":
            config |= {"use_dora": False, "lora_bias": True}
            names = [name for name in tensors if "magnitude" in name]
            files.tensors |= {
                name.replace("lora_magnitude_vector", "lora_B.bias"): tensors.pop(name) * 3e37 for name in names
            }
            return files, "too large"
        case "not set":
            config["use_dora"] = False
            return files, r"lora_magnitude_vector', DoRA \(use_dora\), which adapter_config.json does not name"
        case "twice":
            tensors[f"{Q}.lora_magnitude_vector.weight"] = torch.ones(16)
            return files, "holds a vector twice"
        case "another layer":
            tensors[f"{Q.replace('layers.0', 'layers.9')}.lora_magnitude_vector"] = torch.ones(16)
            return files, "a module that the base does not have"
        case "bias without":
            config["bias"] = "all"
            tensors[f"{DOWN}.base_layer.bias"] = torch.ones(16)
            return files, r"mlp\.down_proj of the base has no bias"
        case "norm bias":
            config["bias"] = "all"
            tensors["base_model.model.model.layers.0.input_layernorm.bias"] = torch.ones(16)
            return files, "a trained bias of what is no linear"
        case "inputs":
            return _ia3(o_proj=torch.ones(1, 16)), r"scales inputs of self_attn\.o_proj: .*gated MLPs"
        case "ia3 shape":
            return _ia3(k_proj=torch.ones(8)), r"expected \[8, 1\] or \[1, 16\]"
    raise AssertionError(case)


SPOILED = ("missing", "shape", "not finite", "too large", "not set", "twice", "another layer")


@pytest.mark.parametrize("case", [*SPOILED, "bias without", "norm bias", "inputs", "ia3 shape"])
def test_what_does_not_fit_is_refused_by_its_name(case: str, tmp_path: Path) -> None:
    base = base_of(tmp_path / "base")
    files, message = _spoil(case, dora_files())
    with pytest.raises(AdapterInvalid, match=message):
        content_of(files, tmp_path, base)


def test_dora_needs_a_base_whose_weights_are_numbers(tmp_path: Path) -> None:
    with pytest.raises(AdapterInvalid, match="need the base's weights"):
        content_of(dora_files(), tmp_path, None)
    base = base_of(tmp_path / "base")
    name = "model.layers.1.self_attn.q_proj.weight"
    few_bits = BaseTensor(base[name].path, "U8", base[name].shape, base[name].start)
    for changed in (base | {name: few_bits}, {key: at for key, at in base.items() if key != name}):
        with pytest.raises(AdapterInvalid, match=r"no 'model\.layers\.1\.self_attn\.q_proj\.weight' in F32, F16, BF16"):
            content_of(dora_files(), tmp_path, changed)
    other = BaseTensor(base[name].path, "F32", (16, 8), base[name].start)
    with pytest.raises(AdapterInvalid, match=r"has shape \[16, 8\], expected \[16, 16\]"):
        content_of(dora_files(), tmp_path, base | {name: other})


def test_a_bias_is_refused_where_the_base_multiplies_outputs(tmp_path: Path) -> None:
    shape, files = replace(SHAPE, output_scales={"q_proj": ((16, 0.5),)}), dora_files()
    base = base_of(tmp_path / "base")
    with pytest.raises(AdapterInvalid, match="q_proj of layer 0 has a bias, and this base multiplies its outputs"):
        validate(files.config_bytes, files.write(tmp_path), shape, base=BaseWeights(base))
    without = {name: tensor for name, tensor in base.items() if not name.endswith(".bias")}
    assert validate(files.config_bytes, files.write(tmp_path), shape, base=BaseWeights(without)).outputs


async def test_an_upload_reads_the_base_and_may_take_longer_for_it(redis_client: Redis, tmp_path: Path) -> None:
    files, base = dora_files(), base_of(tmp_path / "base")
    store, registry = AdapterStore(tmp_path / "store"), Registry(redis_client)
    view, limits = RegistryView(registry), UploadLimits(max_tensors_bytes=1 << 20)
    uploads = UploadService(store, registry, view, [LAYOUT], limits=limits, base=base)
    adapter, _ = await uploads.upload("acme", "dora", files.config_bytes, files.write(tmp_path))
    assert adapter.digest == content_of(files, tmp_path, base).digest
    assert (adapter.rank, adapter.targets) == (4, ("q_proj", "v_proj", "down_proj"))
    assert json.loads(json.dumps(dict(adapter.module_ranks)))["q_proj.outputs"] == 2
    assert store.load_packed(adapter.digest, LAYOUT).nbytes == adapter.packed_bytes
