"""Heads of sequence classifiers: what PEFT saves of them, what is refused, and how the store keeps them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import IA3Config, LoHaConfig
from safetensors.torch import load_file, save_file

from motet.adapters.adapter import BaseShape
from motet.adapters.errors import AdapterCorrupt, AdapterInvalid, StoreUnavailable
from motet.adapters.format.combination import Combination, WeightedAdapter, combine
from motet.adapters.format.content import AdapterContent
from motet.adapters.format.score_head import MAX_HEAD_BYTES, MAX_LABELS, ScoreHead
from motet.adapters.format.validation import validate
from motet.adapters.store.store import AdapterStore
from motet.tests.rigs.classifiers import write_classifier
from motet.tests.rigs.oracle import SHAPE, write_adapters, write_model
from motet.workers.models.config import ModelConfig
from motet.workers.models.sharding import ModelSharding

WEIGHT = "base_model.model.score.weight"
CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model("llama", tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def shape(base: Path) -> BaseShape:
    return ModelConfig.from_folder(base).shape


@pytest.fixture
def folder(base: Path, tmp_path: Path) -> Path:
    return write_classifier(base, tmp_path / "classifier", 3)


def read(folder: Path, shape: BaseShape) -> AdapterContent:
    return validate((folder / CONFIG).read_bytes(), folder / TENSORS, shape)


def change_config(folder: Path, **fields: Any) -> None:
    (folder / CONFIG).write_text(json.dumps({**json.loads((folder / CONFIG).read_text()), **fields}))


def change_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / TENSORS)
    change(tensors)
    save_file(tensors, folder / TENSORS)


@pytest.mark.parametrize(
    "config",
    [
        {"target_modules": ["q_proj"]},
        {"target_modules": ["q_proj"], "modules_to_save": ["score"]},
        {"target_modules": "all-linear"},
        {"target_modules": ["q_proj", "score"]},
        {"target_modules": ["q_proj"], "use_rslora": True},
    ],
)
def test_what_peft_saves(base: Path, shape: BaseShape, tmp_path: Path, config: dict[str, Any]) -> None:
    folder = write_classifier(base, tmp_path / "classifier", 3, **config)
    saved = load_file(folder / TENSORS)
    content = read(folder, shape)
    assert content.head is not None and content.head.bias is None and content.head.num_labels == 3
    np.testing.assert_array_equal(content.head.weight, saved[WEIGHT].numpy())
    assert content.num_bytes == sum(tensor.nbytes for tensor in saved.values())


def test_other_kinds_have_heads_too(base: Path, shape: BaseShape, tmp_path: Path) -> None:
    config = IA3Config(task_type="SEQ_CLS", target_modules=["k_proj"], feedforward_modules=[])
    content = read(write_classifier(base, tmp_path / "ia3", 2, config), shape)
    assert content.head is not None and content.head.num_labels == 2
    loha = LoHaConfig(task_type="SEQ_CLS", r=2, target_modules=["v_proj"])
    assert read(write_classifier(base, tmp_path / "loha", 1, loha), shape).head is not None


def test_files_of_older_peft(folder: Path, shape: BaseShape) -> None:
    """Whose config does not name the head, or whose tensors have the wrapper's name."""
    digest = read(folder, shape).digest
    change_config(folder, modules_to_save=None)
    assert read(folder, shape).digest == digest
    name = "base_model.model.score.modules_to_save.default.weight"
    change_tensors(folder, lambda tensors: tensors.update({name: tensors.pop(WEIGHT)}))
    assert read(folder, shape).digest == digest


def test_the_head_is_a_part_of_the_digest(folder: Path, shape: BaseShape) -> None:
    digest = read(folder, shape).digest
    change_tensors(folder, lambda tensors: tensors[WEIGHT].__setitem__((1, 2), 7))
    other = read(folder, shape)
    assert other.digest != digest != replace(other, head=None).digest != other.digest
    change_tensors(folder, lambda tensors: tensors.update({WEIGHT: tensors[WEIGHT].bfloat16()}))
    assert read(folder, shape).digest not in (digest, other.digest)


def doubled(tensors: dict[str, torch.Tensor]) -> None:
    tensors["base_model.model.score.modules_to_save.weight"] = tensors[WEIGHT].clone()


@pytest.mark.parametrize(
    ("fields", "change", "problem"),
    [
        ({"task_type": "TOKEN_CLS"}, None, "task_type 'TOKEN_CLS'"),
        ({"task_type": None}, None, "task_type None"),
        ({"task_type": "CAUSAL_LM", "modules_to_save": None}, None, "a head other than that of a sequence classifier"),
        ({"modules_to_save": ["score", "norm"]}, None, "modules_to_save names 'norm'"),
        ({}, lambda tensors: tensors.pop(WEIGHT), f"lacks {WEIGHT}"),
        ({}, lambda tensors: tensors.update({WEIGHT: torch.ones(3, 63)}), "expected [number of labels, 64]"),
        ({}, lambda tensors: tensors.update({WEIGHT: torch.ones(64)}), "expected [number of labels, 64]"),
        ({}, lambda tensors: tensors[WEIGHT].__setitem__((0, 0), float("nan")), "NaN"),
        ({}, doubled, "twice"),
        ({}, lambda tensors: tensors.update({WEIGHT: torch.ones(MAX_LABELS + 1, 64)}), f"at most {MAX_LABELS} labels"),
        ({}, lambda tensors: tensors.update({"base_model.model.score.bias": torch.ones(4)}), "expected [3]"),
        ({}, lambda tensors: tensors.update({"base_model.model.classifier.weight": torch.ones(3, 64)}), "classifier"),
        ({}, lambda tensors: tensors.update({"base_model.model.score.0.weight": torch.ones(3, 64)}), "score.0.weight"),
    ],
)
def test_what_is_refused(
    folder: Path, shape: BaseShape, fields: dict[str, Any], change: Callable[[Any], object] | None, problem: str
) -> None:
    change_config(folder, **fields)
    if change is not None:
        change_tensors(folder, change)
    with pytest.raises(AdapterInvalid) as refused:
        read(folder, shape)
    assert problem in str(refused.value)


def test_heads_are_bounded_in_bytes(folder: Path, shape: BaseShape) -> None:
    assert shape.ends is not None
    wide = replace(shape, ends=replace(shape.ends, hidden_size=1 << 13))
    num_labels = MAX_HEAD_BYTES // (4 << 13) + 1
    change_tensors(folder, lambda tensors: tensors.update({WEIGHT: torch.ones(num_labels, 1 << 13)}))
    with pytest.raises(AdapterInvalid, match=f"{MAX_HEAD_BYTES} bytes are served"):
        read(folder, wide)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("has_bias", [False, True])
def test_the_store_keeps_a_head(
    base: Path, folder: Path, shape: BaseShape, tmp_path: Path, dtype: torch.dtype, has_bias: bool
) -> None:
    change_tensors(folder, lambda tensors: tensors.update({WEIGHT: tensors[WEIGHT].to(dtype)}))
    if has_bias:
        bias = torch.tensor([1.0, -2.0, 3.0]).to(dtype)
        change_tensors(folder, lambda tensors: tensors.update({"base_model.model.score.bias": bias}))
    content, store = read(folder, shape), AdapterStore(tmp_path / "store")
    layout = ModelSharding(ModelConfig.from_folder(base)).layout(8, "float32")
    store.put(content, [layout])
    head, tensors = store.load_head(content.digest), load_file(folder / TENSORS)
    np.testing.assert_array_equal(head.weight, tensors[WEIGHT].float().numpy())
    assert (head.bias is not None) == has_bias
    states = np.random.default_rng(3).normal(size=(4, SHAPE["hidden_size"])).astype(np.float32)
    rows = [*states]
    expected = torch.nn.functional.linear(
        torch.from_numpy(states), tensors[WEIGHT].float(), bias.float() if has_bias else None
    )
    np.testing.assert_allclose(head.logits(rows), expected.numpy(), rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(head.logits(rows)[2:3], head.logits(rows[2:3]))
    again = store.load_content(content.digest)
    assert again.digest == content.digest and again.head is not None
    (packed,) = (tmp_path / "store").rglob("*.packed")
    packed.unlink()
    assert len(store.load_packed(content.digest, layout)) == layout.num_pages(content.module_ranks)


def test_a_damaged_head(base: Path, folder: Path, shape: BaseShape, tmp_path: Path) -> None:
    content, store = read(folder, shape), AdapterStore(tmp_path / "store")
    store.put(content, [])
    (path,) = (tmp_path / "store").rglob("score_head.safetensors")
    data = path.read_bytes()
    for damaged in (data[:-1], data[:-4] + b"abcd", b"", data + b"1"):
        path.write_bytes(damaged)
        with pytest.raises(AdapterCorrupt, match="upload it again"):
            store.load_head(content.digest)
        with pytest.raises(AdapterCorrupt, match="upload it again"):
            store.load_content(content.digest)
    path.unlink()
    with pytest.raises(AdapterCorrupt, match="missing"):
        store.load_head(content.digest)
    path.mkdir()  # as of a file that cannot be read
    with pytest.raises(StoreUnavailable):
        store.load_head(content.digest)
    path.rmdir()
    store.put(content, [])
    assert store.load_head(content.digest).num_labels == 3
    (tmp_path / "store").rename(tmp_path / "elsewhere")
    with pytest.raises(StoreUnavailable):
        store.load_head(content.digest)


def test_heads_are_not_combined(base: Path, folder: Path, shape: BaseShape, tmp_path: Path) -> None:
    plain = read(write_adapters(base, tmp_path / "adapters")["rank8"], shape)
    contents = [plain, read(folder, shape)]
    parts = Combination(parts=tuple(WeightedAdapter(content.digest, 1.0) for content in contents))
    with open(tmp_path / "combined", "w+b") as file, pytest.raises(AdapterInvalid, match="score heads"):
        combine(contents, parts, file)


def test_a_head_of_float64_becomes_float32(folder: Path, shape: BaseShape) -> None:
    change_tensors(folder, lambda tensors: tensors.update({WEIGHT: tensors[WEIGHT].double()}))
    head = read(folder, shape).head
    assert isinstance(head, ScoreHead) and head.weight.dtype == np.float32
