"""Every field of the installed PEFT's configs: computed, harmless, or refused by its name."""

from __future__ import annotations

import dataclasses
import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig as PeftLoraConfig
from peft import PeftModel, PeftType, get_peft_model
from transformers import LlamaForCausalLM

from motet.adapters.errors import AdapterInvalid
from motet.adapters.format.content import AdapterContent
from motet.adapters.format.peft import COMPUTED, HARMLESS, REFUSED, parse_config
from motet.adapters.format.validation import validate
from motet.tests.adapters.test_peft import llama
from motet.tests.rigs.lora_files import SHAPE

TOKEN_IDS = torch.arange(9).unsqueeze(0)


def config_bytes(**changes: Any) -> bytes:
    saved = PeftLoraConfig(r=4, lora_alpha=8, target_modules=["q_proj"], task_type="CAUSAL_LM").to_dict()
    saved["target_modules"] = ["q_proj"]
    return json.dumps({**saved, "peft_type": "LORA", **changes}).encode()


def test_every_field_of_the_installed_peft_has_its_place() -> None:
    fields = {field.name for field in dataclasses.fields(PeftLoraConfig)} - {"peft_type", "init_lora_weights"}
    assert fields <= COMPUTED | set(HARMLESS) | set(REFUSED), "look at what each new field changes"
    assert not COMPUTED & set(HARMLESS) and not COMPUTED & set(REFUSED) and not set(HARMLESS) & set(REFUSED)


def test_every_initialisation_of_the_installed_peft_has_been_looked_at() -> None:
    (field,) = [field for field in dataclasses.fields(PeftLoraConfig) if field.name == "init_lora_weights"]
    named = {"gaussian", "eva", "olora", "pissa", "pissa_niter_[number of iters]", "corda", "loftq", "orthogonal"}
    assert all(f"'{name}'" in str(field.type) for name in (*named, "mica"))
    assert str(field.type).count("'") == 2 * (len(named) + 1), "PEFT has an initialisation that is not named here"


@pytest.mark.parametrize("peft_type", [kind.value for kind in PeftType if kind is not PeftType.LORA])
def test_other_kinds_of_adapters_are_refused(peft_type: str) -> None:
    with pytest.raises(AdapterInvalid, match=f"peft_type is '{peft_type}': only LORA"):
        parse_config(config_bytes(peft_type=peft_type))


def test_defaults_of_the_installed_peft_are_accepted() -> None:
    assert parse_config(config_bytes()).r == 4


@pytest.mark.parametrize("field", sorted(REFUSED))
def test_a_refused_field_is_refused_by_name_and_may_be_unset(field: str) -> None:
    for value in (True, 1, "all", [1], {"a": 1}):
        with pytest.raises(AdapterInvalid, match=f"{field} = .* is not supported"):
            parse_config(config_bytes(**{field: value}))
    for value in REFUSED[field].unset:
        parse_config(config_bytes(**{field: value}))


@pytest.mark.parametrize("field", ["arrow_config", "kasa_config", "monteclora_config", "use_bdlora"])
def test_an_empty_object_turns_a_feature_on_in_peft(field: str) -> None:
    with pytest.raises(AdapterInvalid, match=field):
        parse_config(config_bytes(**{field: {}}))


@pytest.mark.parametrize("value", [0, "", [], {}, 1])
def test_an_unknown_field_may_only_be_unset(value: Any) -> None:
    parse_config(config_bytes(unknown_field=None))
    parse_config(config_bytes(unknown_field=False))
    with pytest.raises(AdapterInvalid, match="unknown_field"):
        parse_config(config_bytes(unknown_field=value))


@pytest.mark.parametrize("name", ["pissa", "pissa_niter_16", "PiSSA", "olora", "corda", "lora_ga"])
def test_an_initialisation_that_changes_the_base_is_refused(name: str) -> None:
    with pytest.raises(AdapterInvalid, match=r"init_lora_weights = .*path_initial_model_for_weight_conversion"):
        parse_config(config_bytes(init_lora_weights=name))


@pytest.mark.parametrize("name", ["loftq", "brand_new", 7, {"a": 1}, [], ""])
def test_other_initialisations_are_refused_by_name(name: Any) -> None:
    with pytest.raises(AdapterInvalid, match="init_lora_weights"):
        parse_config(config_bytes(init_lora_weights=name))


@pytest.mark.parametrize("init", [True, False, "gaussian", "orthogonal", "eva", "mica"])
def test_a_plain_initialisation_leaves_the_base_as_it_is(init: Any, tmp_path: Path) -> None:
    """PEFT's model, with the very matrices that were saved, is the base plus their product."""
    trained = _trained(init)
    trained.save_pretrained(tmp_path)
    _assert_computes(_content(tmp_path), _logits(trained))


@pytest.mark.parametrize("init", ["pissa", "pissa_niter_4", "olora"])
@pytest.mark.parametrize("use_rslora", [False, True])
def test_a_converted_adapter_is_taken_and_one_that_was_not_is_refused(
    init: str, use_rslora: bool, tmp_path: Path
) -> None:
    model = _model(init, use_rslora)
    model.peft_config["default"].init_lora_weights = True  # as PEFT's documentation says
    model.save_pretrained(tmp_path / "initial")
    model.peft_config["default"].init_lora_weights = init
    _train(model)
    model.save_pretrained(tmp_path / "unconverted")
    expected = _logits(model)
    with pytest.raises(AdapterInvalid, match="init_lora_weights"):
        _content(tmp_path / "unconverted")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT reports that the base was changed, for the adapter beside it
        model.save_pretrained(
            tmp_path / "converted", path_initial_model_for_weight_conversion=str(tmp_path / "initial")
        )
    _assert_computes(_content(tmp_path / "converted"), expected)


def _model(init: Any, use_rslora: bool = False) -> PeftModel:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT reports that eva needs data, and of conversions
        return get_peft_model(
            llama(),
            PeftLoraConfig(
                r=4,
                lora_alpha=6,
                use_rslora=use_rslora,
                init_lora_weights=init,
                task_type="CAUSAL_LM",
                target_modules=["q_proj", "down_proj"],
            ),
        ).eval()


def _train(model: PeftModel) -> None:
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data += 0.3 * torch.randn(parameter.shape, generator=generator)


def _trained(init: Any) -> PeftModel:
    model = _model(init)
    _train(model)
    return model


def _content(folder: Path) -> AdapterContent:
    return validate((folder / "adapter_config.json").read_bytes(), folder / "adapter_model.safetensors", SHAPE)


def _assert_computes(content: AdapterContent, expected: torch.Tensor) -> None:
    """The untouched base with the content's products added to its weights gives these logits."""
    base = llama().eval()
    for (layer, module), found in content.matrices.items():
        linear = base.get_submodule(f"model.layers.{layer}.{SHAPE.path(module)}")
        linear.weight.data += found.scaling * torch.tensor(found.b) @ torch.tensor(found.a)
    torch.testing.assert_close(_logits(base), expected, atol=1e-5, rtol=0)
    assert (_logits(llama().eval()) - expected).abs().max() > 1e-3, "the adapter makes no difference to compare"


@torch.inference_mode()
def _logits(model: LlamaForCausalLM | PeftModel) -> torch.Tensor:
    logits: torch.Tensor = model(input_ids=TOKEN_IDS).logits
    return logits
