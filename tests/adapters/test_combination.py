"""Combinations of adapters against PEFT's `add_weighted_adapter`."""

from __future__ import annotations

import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from motet.adapters.adapter import EMBEDDING, END_MODULES, OUTER
from motet.adapters.errors import AdapterInvalid
from motet.adapters.format.combination import Combination, WeightedAdapter, combination_problem
from motet.adapters.format.combination import combine as combine_into
from motet.adapters.format.content import AdapterContent, LoraMatrices
from motet.adapters.format.validation import validate
from motet.workers.models.config import ModelConfig

TOLERANCE = 2e-5  # of the weights that are added, in float32; they are up to 6
KINDS = {  # name: rank, alpha, targets, rsLoRA
    "first": (4, 8, ["q_proj", "v_proj"], False),
    "second": (4, 3, ["v_proj", "down_proj"], True),
    "third": (6, 6, ["q_proj", "down_proj"], False),
    "ends": (4, 5, ["embed_tokens", "lm_head"], False),
    "end": (4, 2, ["v_proj", "embed_tokens"], True),
}
SAME_RANK = ("first", "second")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """base/, and a folder of each of KINDS."""
    folder = tmp_path_factory.mktemp("combination")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=40,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    LlamaForCausalLM(config).save_pretrained(folder / "base")
    for name, (rank, alpha, targets, use_rslora) in KINDS.items():
        base = LlamaForCausalLM.from_pretrained(folder / "base")
        lora = LoraConfig(
            r=rank, lora_alpha=alpha, target_modules=targets, use_rslora=use_rslora, init_lora_weights=False
        )
        get_peft_model(base, lora).save_pretrained(folder / name, save_embedding_layers=False)  # the base's
    return folder


def contents_of(folder: Path, names: tuple[str, ...]) -> list[AdapterContent]:
    shape = ModelConfig.from_folder(folder / "base").shape
    return [
        validate(
            (folder / name / "adapter_config.json").read_bytes(), folder / name / "adapter_model.safetensors", shape
        )
        for name in names
    ]


def combination_of(weights: list[float], **fields: Any) -> Combination:
    return Combination(
        parts=tuple(WeightedAdapter(f"{place:064x}", weight) for place, weight in enumerate(weights)), **fields
    )


def combine(contents: Sequence[AdapterContent], combination: Combination) -> AdapterContent:
    with TemporaryFile() as file:
        return combine_into(contents, combination, file)


CASES = [
    (("first", "second", "third"), [0.7, -0.4, 1.5], {"combination_type": "cat"}),
    (("first", "second", "third"), [0.7, -0.4, 1.5], {"combination_type": "svd"}),
    (("first", "second"), [1.0, 0.5], {"combination_type": "svd", "svd_rank": 3}),
    (SAME_RANK, [0.7, -0.4], {"combination_type": "linear"}),
    (("first",), [0.25], {"combination_type": "linear"}),
    (SAME_RANK, [0.7, 2.0], {"combination_type": "magnitude_prune", "density": 0.4}),
    (SAME_RANK, [0.7, 2.0], {"combination_type": "ties", "density": 0.6}),
    (SAME_RANK, [0.7, -2.0], {"combination_type": "ties", "density": 0.6, "majority_sign_method": "frequency"}),
    (SAME_RANK, [0.7, 2.0], {"combination_type": "dare_linear", "density": 1.0}),
    (SAME_RANK, [0.7, 2.0], {"combination_type": "dare_ties", "density": 1.0}),
    (("ends", "third", "end"), [0.7, 1.5, -0.4], {"combination_type": "cat"}),
    (("ends", "end"), [0.7, -0.4], {"combination_type": "svd", "svd_rank": 3}),
    (("ends", "end"), [0.7, -0.4], {"combination_type": "linear"}),
    (("ends", "end"), [0.7, 2.0], {"combination_type": "ties", "density": 0.6}),
]


@pytest.mark.parametrize(("names", "weights", "fields"), CASES)
@pytest.mark.filterwarnings("ignore:The density")
def test_it_adds_what_pefts_combination_adds(
    folder: Path, names: tuple[str, ...], weights: list[float], fields: dict[str, Any]
) -> None:
    base = LlamaForCausalLM.from_pretrained(folder / "base")
    model = PeftModel.from_pretrained(base, folder / names[0], adapter_name=names[0])
    for name in names[1:]:
        model.load_adapter(folder / name, adapter_name=name)
    model.add_weighted_adapter([*names], weights, "mixed", **fields)
    content = combine(contents_of(folder, names), combination_of(weights, **fields))
    assert content.matrices
    for (layer, module), lora in content.matrices.items():
        place = "" if layer == OUTER else f".layers.{layer}."
        (linear,) = (each for path, each in model.named_modules() if place in path and path.endswith(f".{module}"))
        expected = linear.get_delta_weight("mixed")
        expected = expected.T if module == EMBEDDING else expected
        added = torch.from_numpy(lora.b @ lora.a * lora.scaling)
        assert lora.a.dtype == lora.b.dtype == np.float32
        assert (added - expected).abs().max() < TOLERANCE, (layer, module)
    targets = {module for name in names for module in KINDS[name][2]}
    assert {*content.matrices} == {
        (layer, module) for module in targets for layer in ((OUTER,) if module in END_MODULES else range(2))
    }


@given(seed=st.integers(0, 1 << 16), density=st.floats(0.2, 0.9), signed=st.booleans())
@settings(max_examples=20, deadline=None)
def test_dare_keeps_some_numbers_enlarged_and_always_the_same(seed: int, density: float, signed: bool) -> None:
    numbers = np.random.default_rng(seed)
    contents = [
        AdapterContent({(0, "q_proj"): LoraMatrices(_random(numbers, 8, 300), _random(numbers, 200, 8), 1.0)})
        for _ in range(2)
    ]
    parts = (WeightedAdapter(f"{seed:064x}", 1.0), WeightedAdapter("f" * 64, 1.0))
    kind = "dare_ties" if signed else "dare_linear"
    combination = Combination(parts=parts, combination_type=kind, density=density)  # type: ignore[arg-type]
    mixed = combine(contents, combination).matrices[0, "q_proj"]
    again = combine(contents, combination)
    assert again.digest == combine(contents, combination).digest
    a, b = (content.matrices[0, "q_proj"].a / np.float32(density) for content in contents)
    if signed:  # 0, one of them, or, where they have one sign, their mean
        candidates = np.stack([np.zeros_like(a), a, b, (a + b) / 2])
    else:
        candidates = np.stack([np.zeros_like(a), a, b, a + b])
    assert np.abs(mixed.a - candidates).min(axis=0).max() < 1e-5
    assert abs(np.mean(mixed.a != 0) - (1 - (1 - density) ** 2)) < 0.06 or signed


def _random(numbers: np.random.Generator, *shape: int) -> Any:
    return numbers.standard_normal(shape, np.float32)


def test_what_cannot_be_combined_is_refused_by_its_module(folder: Path) -> None:
    first, third = contents_of(folder, ("first", "third"))
    with pytest.raises(
        AdapterInvalid, match=r"q_proj of layer 0: linear needs adapters of one rank, and they have 4, 6"
    ):
        combine([first, third], combination_of([1.0, 1.0], combination_type="linear"))
    many = AdapterContent(
        {(0, "q_proj"): LoraMatrices(np.ones((600, 4), np.float32), np.ones((4, 600), np.float32), 1.0)}
    )
    with pytest.raises(AdapterInvalid, match=r"the ranks are 1200 together, and at most 1024 are served: use svd"):
        combine([many, many], combination_of([1.0, 1.0]))
    assert len(combine([many, many], combination_of([1.0, 1.0], combination_type="svd")).matrices[0, "q_proj"].a) <= 4
    for kind in ("cat", "svd"):
        with pytest.raises(AdapterInvalid, match="q_proj of layer 0: it overflows float32"):
            combine([first], combination_of([1e39], combination_type=kind))
    activated = AdapterContent(first.matrices, invocation_token_ids=(3, 5))
    with pytest.raises(AdapterInvalid, match="only with those of the same invocation tokens"):
        combine([activated, third], combination_of([1.0, 1.0]))
    assert combine([activated, activated], combination_of([1.0, 1.0])).invocation_token_ids == (3, 5)


@pytest.mark.parametrize(
    ("weights", "fields", "problem"),
    [
        ([], {}, "0 adapters are named: 1 to 8"),
        ([1.0] * 9, {}, "9 adapters are named: 1 to 8"),
        ([1.0, 0.0], {}, "a finite number other than 0"),
        ([float("inf")], {}, "a finite number"),
        ([1.0], {"combination_type": "ties"}, "ties needs a density above 0"),
        ([1.0], {"combination_type": "dare_linear", "density": 1.5}, "dare_linear needs a density"),
        ([1.0], {"density": 0.5}, "cat prunes nothing"),
        ([1.0], {"svd_rank": 4}, "svd_rank is for combination_type svd, from 1 to 1024"),
        ([1.0], {"combination_type": "svd", "svd_rank": 3000}, "from 1 to 1024"),
        ([1.0, -2.0], {"combination_type": "svd", "svd_rank": 3}, None),
    ],
)
def test_problems_are_named(weights: list[float], fields: dict[str, Any], problem: str | None) -> None:
    said = combination_problem(combination_of(weights, **fields))
    assert said == problem or (said is not None and problem is not None and problem in said)


def test_parts_are_read_from_the_file_that_peft_wrote(folder: Path) -> None:
    (content,) = contents_of(folder, ("first",))
    stored = load_file(folder / "first" / "adapter_model.safetensors")
    combined = combine([content], combination_of([1.0])).matrices[1, "v_proj"]
    expected = stored["base_model.model.model.layers.1.self_attn.v_proj.lora_A.weight"]
    assert np.array_equal(combined.a, expected.numpy())


@pytest.mark.parametrize("kind", ["cat", "svd", "linear", "dare_ties"])
def test_memory_holds_one_module_of_the_result(kind: str) -> None:
    rank, width, num_layers = 8, 4000, 24
    numbers = np.random.default_rng(0)
    a, b = _random(numbers, rank, width), _random(numbers, width, rank)
    part = AdapterContent({(layer, "q_proj"): LoraMatrices(a, b, 1.0) for layer in range(num_layers)})
    density = 0.5 if kind == "dare_ties" else None
    combination = combination_of([1.0, 1.0], combination_type=kind, density=density)
    tracemalloc.start()
    try:
        combined = combine([part, part], combination)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert combined.num_bytes >= num_layers * (a.nbytes + b.nbytes)
    assert peak_bytes < combined.num_bytes


def test_ranks_are_checked_before_anything_is_written(folder: Path) -> None:
    contents = contents_of(folder, ("first", "third"))

    def refuse(module_ranks: Any) -> None:
        assert module_ranks == {"q_proj": 10, "v_proj": 4, "down_proj": 6}
        raise AdapterInvalid("too many pages")

    with TemporaryFile() as file:
        with pytest.raises(AdapterInvalid, match="too many pages"):
            combine_into(contents, combination_of([1.0, 1.0]), file, refuse)
        assert file.tell() == 0


@pytest.mark.parametrize("size", [1e38, 1e-38, 1e-45])
@pytest.mark.parametrize("kind", ["cat", "svd", "linear", "ties", "dare_ties"])
def test_numbers_of_any_size_make_finite_ones_or_are_refused(kind: str, size: float) -> None:
    part = AdapterContent(
        {(0, "q_proj"): LoraMatrices(np.full((2, 4), size, np.float32), np.full((3, 2), size, np.float32), 1.0)}
    )
    density = 0.5 if "ties" in kind else None
    combination = combination_of([3.0, 5.0], combination_type=kind, density=density)
    try:
        combined = combine([part, part], combination)
    except AdapterInvalid:
        with pytest.raises(AdapterInvalid, match="overflows float32"):
            combine([part, part], combination)
        return
    lora = combined.matrices[0, "q_proj"]
    assert np.isfinite(lora.a).all() and np.isfinite(lora.b).all()
