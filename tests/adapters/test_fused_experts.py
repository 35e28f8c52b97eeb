"""Uploads of LoRA on fused experts: what is taken apart how, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from motet.adapters.adapter import EXPERT_MODULES, BaseShape, ExpertShape
from motet.adapters.errors import AdapterInvalid
from motet.adapters.format.content import AdapterContent
from motet.adapters.format.peft import PREFIXES
from motet.adapters.format.validation import validate

HIDDEN, WIDTH, NUM_EXPERTS, RANK = 12, 5, 3, 2
NAMES = {name: name.removeprefix("experts.") for name in EXPERT_MODULES}
SHAPE = BaseShape(
    num_layers=2,
    modules={
        "q_proj": (HIDDEN, HIDDEN),
        "experts.gate_proj": (HIDDEN, WIDTH),
        "experts.up_proj": (HIDDEN, WIDTH),
        "experts.down_proj": (WIDTH, HIDDEN),
    },
    experts=ExpertShape(NUM_EXPERTS, (0, 1), "mlp", NAMES),
)
GATE_UP, DOWN = ".base_layer", ""  # which wrapper of PEFT's has the parameter, if both have LoRA


def name_of(layer: int, wrapper: str, letter: str) -> str:
    return f"base_model.model.model.layers.{layer}.mlp.experts{wrapper}.lora_{letter}.weight"


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    found = {}
    for layer in (0, 1):
        for wrapper, num_in, num_out in ((GATE_UP, HIDDEN, 2 * WIDTH), (DOWN, WIDTH, HIDDEN)):
            found[name_of(layer, wrapper, "A")] = torch.randn(NUM_EXPERTS * RANK, num_in, generator=generator)
            found[name_of(layer, wrapper, "B")] = torch.randn(num_out, RANK * NUM_EXPERTS, generator=generator)
    return found


def content(folder: Path, found: dict[str, torch.Tensor], **changes: Any) -> AdapterContent:
    config = {
        "peft_type": "LORA",
        "r": RANK,
        "lora_alpha": 3,
        "target_modules": None,
        "target_parameters": ["experts.gate_up_proj", "experts.down_proj"],
        **changes,
    }
    save_file(found, folder / "tensors")
    return validate(json.dumps(config).encode(), folder / "tensors", SHAPE)


def test_products_are_those_of_peft(tmp_path: Path) -> None:
    """`einsum("o r e, e r i -> e o i")` of B and A, as PEFT's ParamWrapper computes."""
    found = tensors()
    taken = content(tmp_path, found)
    assert taken.num_bytes == sum(tensor.nbytes for tensor in found.values())
    assert taken.module_ranks == dict.fromkeys(EXPERT_MODULES, RANK)
    for layer in (0, 1):
        for wrapper, modules in ((GATE_UP, ("gate_proj", "up_proj")), (DOWN, ("down_proj",))):
            a = found[name_of(layer, wrapper, "A")]
            a = a.reshape(NUM_EXPERTS, RANK, a.shape[1])
            b = found[name_of(layer, wrapper, "B")].reshape(-1, RANK, NUM_EXPERTS)
            expected = torch.einsum("o r e, e r i -> e o i", b, a) * 1.5
            for expert in range(NUM_EXPERTS):
                own = [taken.matrices[layer, f"experts.{expert}.{module}"] for module in modules]
                products = [torch.tensor(each.b) @ torch.tensor(each.a) * each.scaling for each in own]
                torch.testing.assert_close(torch.cat(products), expected[expert], atol=1e-5, rtol=0)


def test_the_header_alone_says_the_ranks(tmp_path: Path) -> None:
    """Those that the content turns out to have, of fused experts and of a single one."""
    seen: list[dict[str, int]] = []
    found = {name_of(1, "", letter): tensors()[name_of(1, GATE_UP, letter)] for letter in ("A", "B")}
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": 3, "target_modules": ["experts.1.up_proj"]}
    fused = {**config, "target_modules": None, "target_parameters": ["1.mlp.experts.gate_up_proj"]}
    save_file(found, tmp_path / "fused")
    read = validate(json.dumps(fused).encode(), tmp_path / "fused", SHAPE, lambda ranks: seen.append(dict(ranks)))
    assert seen == [read.module_ranks] == [{"experts.gate_proj": RANK, "experts.up_proj": RANK}]
    single: dict[str, torch.Tensor] = {}
    for layer in (0, 1):
        path = f"base_model.model.model.layers.{layer}.mlp.experts.1.up_proj.lora_"
        single |= {f"{path}A.weight": torch.ones(RANK, HIDDEN), f"{path}B.weight": torch.ones(WIDTH, RANK)}
    save_file(single, tmp_path / "single")
    read = validate(json.dumps(config).encode(), tmp_path / "single", SHAPE, lambda ranks: seen.append(dict(ranks)))
    assert seen[1] == read.module_ranks == {"experts.1.up_proj": RANK}


def test_the_same_matrices_for_each_expert_are_the_same_adapter(tmp_path: Path) -> None:
    taken = content(tmp_path, tensors())
    (tmp_path / "each").mkdir()
    found = {}
    for (layer, module), matrices in taken.matrices.items():
        prefix = f"base_model.model.model.layers.{layer}.mlp.{module}.lora_"
        found[f"{prefix}A.weight"] = torch.tensor(matrices.a)
        found[f"{prefix}B.weight"] = torch.tensor(matrices.b).contiguous()
    names = ["gate_proj", "up_proj", "down_proj"]
    assert content(tmp_path / "each", found, target_modules=names, target_parameters=None).digest == taken.digest


@pytest.mark.parametrize("prefix", PREFIXES)
def test_names_of_a_base_that_takes_pictures_too(prefix: str, tmp_path: Path) -> None:
    """PEFT matches whole names of parameters as the base has them, also in patterns."""
    renamed = {name.replace(".model.layers.", f".{prefix}layers."): tensor for name, tensor in tensors().items()}
    save_file(renamed, tmp_path / "tensors")
    parameters = [
        f"{prefix}layers.{layer}.mlp.experts.{name}" for layer in (0, 1) for name in ("gate_up_proj", "down_proj")
    ]
    config = {
        **{"peft_type": "LORA", "r": RANK, "lora_alpha": 3, "target_parameters": parameters},
        "alpha_pattern": {parameters[0]: 8, parameters[3]: 5},
    }
    taken = validate(json.dumps(config).encode(), tmp_path / "tensors", replace(SHAPE, is_wrapped=True))
    scalings = {(layer, module.rpartition(".")[2]): each.scaling for (layer, module), each in taken.matrices.items()}
    assert scalings == {
        **{(0, "gate_proj"): 4.0, (0, "up_proj"): 4.0, (0, "down_proj"): 1.5},
        **{(1, "gate_proj"): 1.5, (1, "up_proj"): 1.5, (1, "down_proj"): 2.5},
    }


def _with(**changed: Any) -> dict[str, torch.Tensor]:
    """Tensors, some of which are replaced (by layer, wrapper and letter) or left out."""
    found = tensors()
    for key, tensor in changed.items():
        name = name_of(int(key[1]), GATE_UP if "inner" in key else DOWN, key[-1])
        if tensor is None:
            del found[name]
        else:
            found[name] = tensor
    return found


NAN = torch.full((NUM_EXPERTS * RANK, HIDDEN), float("nan"))
REFUSED: dict[str, tuple[dict[str, torch.Tensor], dict[str, Any], str]] = {
    "missing": (_with(l1_inner_B=None), {}, r"lacks tensors.*layers\.1\.mlp\.experts\.base_layer\.lora_B"),
    "not a number": (_with(l0_inner_A=NAN), {}, "NaN"),
    "a rank": (_with(l0_A=torch.ones(NUM_EXPERTS, WIDTH)), {}, r"shape \[3, 5\], expected \[6, 5\]"),
    "a width": (_with(l0_inner_B=torch.ones(WIDTH, 6)), {}, r"shape \[5, 6\], expected \[10, 6\]"),
    "one dimension": (_with(l0_inner_B=torch.ones(60)), {}, r"expected \[10, 6\]"),
    "another layer": ({**tensors(), name_of(2, DOWN, "A"): torch.ones(6, WIDTH)}, {}, "names no such parameter"),
    "doubled": (
        {**tensors(), name_of(0, DOWN, "A").replace(".weight", ".default.weight"): torch.ones(6, WIDTH)},
        {},
        "holds a matrix twice",
    ),
    "not named": (tensors(), {"target_parameters": ["experts.down_proj"]}, "names no such parameter"),
    "no parameters": (tensors(), {"target_parameters": None, "target_modules": ["q_proj"]}, "names no such parameter"),
    "rank of a pattern": (tensors(), {"rank_pattern": {"gate_up_proj": 4}}, r"expected \[12, 12\]"),
    "too large a rank": (tensors(), {"rank_pattern": {"gate_up_proj": 1300}}, "rank_pattern"),
    "router alone": (tensors(), {"target_parameters": ["gate.weight"]}, "matches nothing: mlp.experts"),
    "projection as a parameter": (
        tensors(),
        {"target_parameters": ["q_proj.weight"]},
        "names no such parameter of experts",
    ),
    "part of a name": (
        tensors(),
        {"target_parameters": ["xperts.down_proj"]},
        "matches nothing: .*gate.weight and weights of linears such as",
    ),
    "named both ways": (tensors(), {"target_modules": ["down_proj"]}, "both name the experts of layer 0"),
    "one expert named both ways": (
        tensors(),
        {"target_modules": ["layers.1.mlp.experts.2.up_proj"]},
        "both name the experts of layer 1",
    ),
    "nothing": ({}, {"target_parameters": []}, "target_modules is missing"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refuses_by_name(case: str, tmp_path: Path) -> None:
    found, changes, message = REFUSED[case]
    with pytest.raises(AdapterInvalid, match=message):
        content(tmp_path, found, **changes)
