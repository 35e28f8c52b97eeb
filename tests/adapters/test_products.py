"""VeRA, LoHa and LoKr as they are uploaded: what PEFT computes, in any slices, stored as it came; what is refused."""

from __future__ import annotations

import dataclasses
import json
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import IA3Config, LoHaConfig, LoKrConfig, PeftConfig, VeraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from motet.adapters.errors import AdapterInvalid
from motet.adapters.format.content import AdapterContent
from motet.adapters.format.peft import HARMLESS, IA3, KINDS, LOHA, LOKR, OF_LORA_ALONE, REFUSED, VERA
from motet.adapters.format.products import ProductMatrices
from motet.adapters.format.validation import validate
from motet.adapters.packing.packing import pack, packed_chunks
from motet.adapters.store.store import AdapterStore
from motet.tests.adapters.test_peft import llama
from motet.tests.rigs.lora_files import LAYOUT, SHAPE
from motet.tests.rigs.oracle import write_model
from motet.workers.models.config import ModelConfig

CONFIGS: dict[str, PeftConfig] = {
    "vera": VeraConfig(r=5, target_modules=["q_proj", "k_proj", "down_proj"]),
    "loha": LoHaConfig(r=3, alpha=2, target_modules=["q_proj", "down_proj"], rank_pattern={"down_proj": 2}),
    "lokr": LoKrConfig(r=1, alpha=3, target_modules=["q_proj", "down_proj"], decompose_both=True),
    "lokr_whole": LoKrConfig(r=8, target_modules=["q_proj", "down_proj"], decompose_factor=2),
}


def _saved(name: str, folder: Path) -> dict[tuple[int, str], torch.Tensor]:
    """Saves the adapter as PEFT does, with random numbers. Returns what each weight is changed by."""
    model, generator = get_peft_model(llama(), CONFIGS[name]), torch.Generator().manual_seed(5)
    for key, parameter in model.named_parameters():
        if any(part in key for part in ("vera_lambda", "hada_w", "lokr_w")):
            parameter.data = torch.randn(parameter.shape, generator=generator)
    model.save_pretrained(folder)
    layers = model.base_model.model.model.layers
    return {
        (index, module): layer.get_submodule(SHAPE.path(module)).get_delta_weight("default").detach()
        for index, layer in enumerate(layers)
        for module in CONFIGS[name].target_modules
    }


def _content(folder: Path) -> AdapterContent:
    return validate((folder / "adapter_config.json").read_bytes(), folder / "adapter_model.safetensors", SHAPE)


@pytest.mark.parametrize("name", CONFIGS)
def test_the_product_is_what_peft_computes_whatever_the_slices(name: str, tmp_path: Path) -> None:
    deltas = _saved(name, tmp_path)
    content = _content(tmp_path)
    assert content.matrices.keys() == deltas.keys()
    for key, delta in deltas.items():
        product = content.matrices[key]
        assert isinstance(product, ProductMatrices)
        whole = torch.tensor(product.b) @ torch.tensor(product.a) * product.scaling
        torch.testing.assert_close(whole, delta, atol=1e-5, rtol=1e-5)
        assert product.a.shape == (product.rank, product.num_in)
        rows, outputs = slice(1, product.rank - 1), np.array([3, 0, 2])
        assert (product.rows_of_a(rows, slice(2, 9)) == product.a[rows, 2:9]).all()
        assert (product.columns_of_b(outputs, rows) == product.b[outputs, rows]).all()
        part = product.outputs(2, 7)
        assert (part.b == product.b[2:7]).all() and (part.outputs(1, 3).b == product.b[3:5]).all()
        assert product.rows_of_a(slice(1, 1), slice(None)).shape == (0, product.num_in)
    chunks = np.concatenate([*packed_chunks(content, LAYOUT, chunk_bytes=1)])
    assert (chunks == pack(content, LAYOUT)).all()


@pytest.mark.parametrize("name", CONFIGS)
def test_it_is_stored_as_uploaded(name: str, tmp_path: Path) -> None:
    """Of VeRA the shared matrices once. The digest is of all that decides the product."""
    _saved(name, tmp_path)
    content, store = _content(tmp_path), AdapterStore(tmp_path / "store")
    store.put(content, [LAYOUT])
    stored = store.load_content(content.digest)
    assert stored.module_ranks == content.module_ranks
    assert (pack(stored, LAYOUT) == store.load_packed(content.digest, LAYOUT)).all()
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    assert content.num_bytes == stored.num_bytes == sum(tensor.nbytes for tensor in tensors.values())
    digests = {content.digest}
    for key in tensors:
        changed = {**tensors, key: tensors[key] + 1}
        save_file(changed, tmp_path / "adapter_model.safetensors")
        digests.add(_content(tmp_path).digest)
    assert len(digests) == 1 + len(tensors)


KEY = "base_model.model.model.layers.1.self_attn.q_proj."
SPOILED: dict[str, tuple[str, dict[str, torch.Tensor | None], dict[str, Any], str]] = {
    "not shared": ("vera", {"base_model.vera_A": None}, {}, r"lacks base_model\.vera_A or .*save_projection=True"),
    "narrow": ("vera", {"base_model.vera_A": torch.ones(5, 15)}, {}, r"has shape \[5, 15\], expected \[5, 16\]"),
    "vector": ("vera", {f"{KEY}vera_lambda_b": torch.ones(9)}, {}, r"q_proj\.vera_lambda_b' has shape \[9\], expected"),
    "missing": ("loha", {f"{KEY}hada_w2_a": None}, {}, r"lacks tensors .*layers\.1\.self_attn\.q_proj\.hada_w2_a"),
    "extra": ("loha", {KEY.replace("q_proj", "k_proj") + "hada_w1_a": torch.ones(3)}, {}, "k_proj.*does not target"),
    "another kind": ("loha", {f"{KEY}vera_lambda_b": torch.ones(16)}, {}, "LOHA. does not target"),
    "rank": ("loha", {}, {"r": 4}, r"hada_w1_a' has shape \[16, 3\], expected \[16, 4\]"),
    "not finite": ("loha", {f"{KEY}hada_w1_b": torch.full((3, 16), torch.inf)}, {}, "NaN or infinity"),
    "both": ("lokr", {f"{KEY}lokr_w1": torch.ones(4, 4)}, {}, r"lokr_w1"),
    "sides": ("lokr_whole", {f"{KEY}lokr_w1": torch.ones(2, 4)}, {}, r"which make \[16, 32\], expected \[16, 16\]"),
    "no matrix": ("lokr_whole", {f"{KEY}lokr_w1": torch.ones(2)}, {}, "a matrix is needed"),
    "scalar": ("lokr", {f"{KEY}lokr_w1_a": torch.tensor(1.0)}, {}, r"lokr_w1_a has shape \[\]: a matrix is needed"),
    "shared scalar": ("vera", {"base_model.vera_A": torch.tensor(1.0)}, {}, r"has shape \[\], expected \[5, 16\]"),
    "shared vector": ("vera", {"base_model.vera_B": torch.ones(99)}, {}, r"has shape \[99\], expected \[99, 5\]"),
    "modules to save": ("vera", {}, {"modules_to_save": ["lm_head"]}, "modules_to_save"),
}


@pytest.mark.parametrize("case", SPOILED)
def test_what_does_not_fit_is_refused_by_its_name(case: str, tmp_path: Path) -> None:
    name, changes, fields, message = SPOILED[case]
    _saved(name, tmp_path)
    tensors = {**load_file(tmp_path / "adapter_model.safetensors"), **changes}
    kept = {key: tensor for key, tensor in tensors.items() if tensor is not None}
    save_file(kept, tmp_path / "adapter_model.safetensors")
    path = tmp_path / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_bytes()), **fields}))
    with pytest.raises(AdapterInvalid, match=message):
        _content(tmp_path)


def test_a_field_of_another_kind_is_none_of_this_one(tmp_path: Path) -> None:
    _saved("lokr", tmp_path)
    path = tmp_path / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_bytes()), "use_dora": True}))
    assert "use_dora' = True, which is no field of PEFT for LOKR" in _content(tmp_path).unknown_field


def test_the_rank_as_lora_is_bounded(tmp_path: Path) -> None:
    config = LoHaConfig(r=33, target_modules=["q_proj"])
    get_peft_model(llama(), config).save_pretrained(tmp_path)
    with pytest.raises(AdapterInvalid, match=r"a LoRA of rank 1089 .*at most 1024 are accepted: its rank is r . r"):
        _content(tmp_path)


@pytest.mark.parametrize(
    ("kind", "config"), [(IA3, IA3Config), (VERA, VeraConfig), (LOHA, LoHaConfig), (LOKR, LoKrConfig)]
)
def test_every_field_of_the_installed_peft_has_its_place(kind: str, config: type[Any]) -> None:
    fields = {field.name for field in dataclasses.fields(config)} - {"peft_type"}
    assert fields <= KINDS[kind] | set(HARMLESS) | set(REFUSED) | set(OF_LORA_ALONE), (
        "look at what each new field changes"
    )
    assert KINDS[kind] <= fields, "PEFT has no such field"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {name: tmp_path_factory.mktemp(name) for name in CONFIGS}
    for name, folder in found.items():
        _saved(name, folder)
    return found


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_any_shape_fits_or_is_refused(folders: dict[str, Path], data: st.DataObject) -> None:
    folder = folders[data.draw(st.sampled_from(sorted(folders)))]
    tensors = load_file(folder / "adapter_model.safetensors")
    key = data.draw(st.sampled_from(sorted(tensors)))
    changed = torch.ones(data.draw(st.lists(st.integers(1, 17), max_size=3)))
    with TemporaryDirectory() as other:
        path = Path(other) / "tensors"
        save_file({**tensors, key: changed}, path)
        config = (folder / "adapter_config.json").read_bytes()
        if changed.shape == tensors[key].shape:
            validate(config, path, SHAPE)
        else:
            with suppress(AdapterInvalid):
                validate(config, path, SHAPE)
                assert "vera_" in key, "but those that all modules share may be larger"


@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_any_slice_of_a_product(data: st.DataObject) -> None:
    """Against the whole matrices, of whole and of decomposed factors."""
    size, generator = st.integers(1, 5), np.random.default_rng(data.draw(st.integers(0, 2**31)))
    tensors, sides = dict[str, Any](), []
    for half in ("lokr_w1", "lokr_w2"):
        num_out, num_in, rank = data.draw(size), data.draw(size), data.draw(size)
        sides.append((num_out, num_in))
        if data.draw(st.booleans()):
            tensors[half] = generator.standard_normal((num_out, num_in), np.float32)
        else:
            tensors[f"{half}_a"] = generator.standard_normal((num_out, rank), np.float32)
            tensors[f"{half}_b"] = generator.standard_normal((rank, num_in), np.float32)
    names = ("lokr_w1", "lokr_w2")
    halves = [tensors[half] if half in tensors else tensors[f"{half}_a"] @ tensors[f"{half}_b"] for half in names]
    (first_out, first_in), (second_out, second_in) = sides
    product = ProductMatrices(LOKR, tensors, first_in * second_in, first_out * second_out, 1.0)
    np.testing.assert_allclose(product.b @ product.a, np.kron(*halves), rtol=1e-4, atol=1e-4)
    start = data.draw(st.integers(0, product.rank))
    rows = slice(start, data.draw(st.integers(start, product.rank)))
    assert (product.rows_of_a(rows, slice(None)) == product.a[rows]).all()
    assert (product.columns_of_b(slice(None), rows) == product.b[:, rows]).all()


@pytest.mark.parametrize(
    "config",
    [
        LoKrConfig(r=3, target_modules=["gate_proj"]),
        LoHaConfig(r=3, target_modules=["gate_proj"]),
        VeraConfig(r=8, target_modules=["gate_proj"]),
        IA3Config(target_modules=["gate_proj"], feedforward_modules=[]),
    ],
    ids=lambda config: config.peft_type.value,
)
def test_names_of_mlps_are_not_those_of_experts_that_are_parameters(config: PeftConfig, tmp_path: Path) -> None:
    """As PEFT has them with transformers 5."""
    model = write_model("qwen2_moe", tmp_path / "model")
    get_peft_model(AutoModelForCausalLM.from_pretrained(model), config).save_pretrained(tmp_path)
    config_bytes = (tmp_path / "adapter_config.json").read_bytes()
    content = validate(config_bytes, tmp_path / "adapter_model.safetensors", ModelConfig.from_folder(model).shape)
    modules = {module for _, module in content.matrices.keys() | content.outputs.keys()}
    assert modules == {"gate_proj", "shared_expert.gate_proj"}
