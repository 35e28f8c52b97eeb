"""Every field of the installed PEFT's configs: computed, harmless, or refused by its name."""

from __future__ import annotations

import dataclasses
import json
import warnings
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from peft import LoraConfig as PeftLoraConfig
from peft import LoraRuntimeConfig, PeftModel, PeftType, get_peft_model
from peft.tuners.lora.config import BdLoraConfig, EvaConfig, KasaConfig, MontecloraConfig, VeloraConfig
from transformers import LlamaForCausalLM

from motet.adapters.adapter import EMBEDDING, HEAD, BaseEnds
from motet.adapters.errors import AdapterInvalid
from motet.adapters.format.base_weights import BaseWeights
from motet.adapters.format.content import AdapterContent
from motet.adapters.format.peft import COMPUTED, HARMLESS, KINDS, REFUSED, UnknownFields, parse_config
from motet.adapters.format.validation import validate
from motet.tests.adapters.test_peft import llama
from motet.tests.rigs.lora_files import SHAPE as SHAPE_OF_LINEARS
from motet.workers.models.stored_tensor import base_tensors

SHAPE = dataclasses.replace(SHAPE_OF_LINEARS, ends=BaseEnds(32, 16, is_tied=False, head_has_bias=False))
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


@pytest.mark.parametrize("peft_type", [kind.value for kind in PeftType if kind.value not in KINDS])
def test_other_kinds_of_adapters_are_refused(peft_type: str) -> None:
    with pytest.raises(AdapterInvalid, match=f"peft_type is '{peft_type}': LORA, IA3, VERA, LOHA, LOKR are accepted"):
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


@pytest.mark.parametrize("field", ["arrow_config", "kasa_config", "monteclora_config"])
def test_an_empty_object_turns_a_feature_on_in_peft(field: str) -> None:
    with pytest.raises(AdapterInvalid, match=field):
        parse_config(config_bytes(**{field: {}}))


@pytest.mark.parametrize("value", [None, False, 0, 0.0, "", [], {}])
def test_an_unknown_field_may_be_unset(value: Any) -> None:
    assert parse_config(config_bytes(brand_new_trick=value)).unknown == UnknownFields()


@pytest.mark.parametrize("value", [True, 1, -0.5, [0], {"a": None}])
def test_an_unknown_field_may_change_what_is_computed(value: Any) -> None:
    unknown = parse_config(config_bytes(brand_new_trick=value, also_new=1)).unknown
    assert f"'brand_new_trick' = {value!r}, which is no field of PEFT" in unknown.problem
    assert not unknown.warnings


def test_a_text_in_an_unknown_field_is_a_note() -> None:
    unknown = parse_config(config_bytes(trained_by="a trainer")).unknown
    assert unknown == UnknownFields("", ("'trained_by' = 'a trainer' is no field of PEFT: it is taken for a note",))


# For each field of LoraConfig: values other than the default that PEFT takes for a Llama, and the field that refuses an
# adapter that was trained with them; None: its products are computed.
SAVED: dict[str, tuple[dict[str, Any], str | None]] = {
    "alora_invocation_tokens": ({"alora_invocation_tokens": [0, 1]}, None),  # the prompt's first ones: it computes all
    "alpha_pattern": ({"alpha_pattern": {"q_proj": 3}}, None),
    "arrow_config": ({}, None),  # made from several adapters, of which this is none
    "auto_mapping": ({}, None),  # PEFT's own
    "base_model_name_or_path": ({"base_model_name_or_path": "some/base"}, None),
    "bias": ({"bias": "all"}, None),  # a Llama has none
    "corda_config": ({}, None),  # with init_lora_weights, below
    "ensure_weight_tying": ({"ensure_weight_tying": True}, None),
    "eva_config": ({"eva_config": EvaConfig()}, None),
    "exclude_modules": ({"exclude_modules": ["layers.0.self_attn.q_proj"]}, None),
    "fan_in_fan_out": ({}, None),  # PEFT sets it to False for linears
    "inference_mode": ({"inference_mode": True}, None),
    "init_lora_weights": ({"init_lora_weights": "gaussian"}, None),
    "kasa_config": ({"kasa_config": KasaConfig()}, "kasa_config"),
    "layer_replication": ({"layer_replication": [[0, 2], [1, 3]]}, "layer_replication"),
    "layers_pattern": ({"layers_pattern": "layers", "layers_to_transform": [1]}, None),
    "layers_to_transform": ({"layers_to_transform": 2}, None),
    "loftq_config": ({"loftq_config": {"loftq_bits": 4}}, None),
    "lora_alpha": ({"lora_alpha": 3}, None),
    "lora_bias": ({"lora_bias": True}, None),
    "lora_dropout": ({"lora_dropout": 0.5}, None),
    "lora_ga_config": ({}, None),
    "megatron_config": ({}, None),  # needs Megatron
    "megatron_core": ({"megatron_core": "another.core"}, None),
    "modules_to_save": ({"modules_to_save": ["lm_head"]}, None),
    "monteclora_config": ({"monteclora_config": MontecloraConfig()}, "monteclora_config"),
    "peft_version": ({}, None),
    "qalora_group_size": ({"qalora_group_size": 8}, None),
    "r": ({"r": 3}, None),
    "rank_pattern": ({"rank_pattern": {"layers.1.self_attn.q_proj": 2}}, None),
    "revision": ({"revision": "main"}, None),
    "runtime_config": ({"runtime_config": LoraRuntimeConfig()}, None),
    "target_modules": ({"target_modules": ["v_proj", "up_proj", "no_such_module"]}, None),
    "target_parameters": ({"target_parameters": ["down_proj.weight"], "target_modules": ["q_proj"]}, None),
    "task_type": ({"task_type": "SEQ_2_SEQ_LM"}, None),
    "trainable_token_indices": ({"trainable_token_indices": [3]}, None),
    "use_bdlora": (
        {"use_bdlora": BdLoraConfig(target_modules_bd_a=["q_proj"], nblocks=2, match_strict=False)},
        None,
    ),
    "use_dora": ({"use_dora": True}, None),
    "use_qalora": ({}, None),  # of quantised bases
    "use_rslora": ({"use_rslora": True}, None),
    "velora_config": ({"velora_config": VeloraConfig(num_groups=4)}, None),
}


def test_both_kinds_of_block_diagonal_matrices(tmp_path: Path) -> None:
    blocks = BdLoraConfig(target_modules_bd_a=["q_proj"], target_modules_bd_b=["down_proj"], nblocks=2)
    config = PeftLoraConfig(r=4, lora_alpha=6, target_modules=["q_proj", "down_proj"], use_bdlora=blocks)
    model = get_peft_model(llama(), config).eval()
    _train(model)
    model.save_pretrained(tmp_path)
    _assert_computes(_content(tmp_path), _logits(model))
    saved = json.loads((tmp_path / "adapter_config.json").read_bytes())
    saved["use_bdlora"]["nblocks"] = 4
    (tmp_path / "adapter_config.json").write_text(json.dumps(saved))
    with pytest.raises(AdapterInvalid, match=r"has shape \[\d+, \d+\], expected"):
        _content(tmp_path)


@pytest.mark.parametrize("value", [True, 2, {"nblocks": 0}, {"nblocks": "2"}, {"nblocks": 2000}])
def test_a_wrong_number_of_blocks_is_named(value: Any) -> None:
    with pytest.raises(AdapterInvalid, match=r"use_bdlora = .* an object with nblocks"):
        parse_config(config_bytes(use_bdlora=value))


def test_each_field_of_the_installed_peft_has_an_adapter() -> None:
    fields = {field.name for field in dataclasses.fields(PeftLoraConfig)} - {"peft_type"}
    assert SAVED.keys() == fields


@pytest.mark.parametrize("field", SAVED)
def test_an_adapter_with_each_field_of_peft(field: str, tmp_path: Path) -> None:
    """As PEFT trains and saves it."""
    values, refusal = SAVED[field]
    config = {"r": 4, "lora_alpha": 6, "task_type": "CAUSAL_LM", "target_modules": ["q_proj", "down_proj"], **values}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT reports what is experimental
        model = get_peft_model(llama(), PeftLoraConfig(**config)).eval()
        _train(model)
        model.save_pretrained(tmp_path)
        if refusal is None:
            _assert_computes(_content(tmp_path), _logits(model))
            return
    with pytest.raises(AdapterInvalid, match=f"^{refusal} = .* is not supported"):
        _content(tmp_path)


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
        if parameter.requires_grad or "lora_" in name:
            parameter.data += 0.3 * torch.randn(parameter.shape, generator=generator)


def _trained(init: Any) -> PeftModel:
    model = _model(init)
    _train(model)
    return model


def _content(folder: Path) -> AdapterContent:
    with TemporaryDirectory() as base:
        llama().save_pretrained(base)
        tensors = BaseWeights(base_tensors(Path(base), SHAPE))
        config, path = (folder / "adapter_config.json").read_bytes(), folder / "adapter_model.safetensors"
        return validate(config, path, SHAPE, base=tensors)


def _assert_computes(content: AdapterContent, expected: torch.Tensor) -> None:
    """The untouched base with the content's products added to its weights gives these logits."""
    base = llama().eval()
    for (layer, module), found in content.matrices.items():
        linear = base.get_submodule(f"model.layers.{layer}.{SHAPE.path(module)}")
        linear.weight.data += found.scaling * torch.tensor(found.b) @ torch.tensor(found.a)
    for end, rows in content.token_rows.items():
        weight = {EMBEDDING: base.model.embed_tokens, HEAD: base.lm_head}[end].weight
        weight.data[torch.tensor(rows.token_ids)] = torch.tensor(rows.rows)
    for (layer, module), vectors in content.outputs.items():
        linear = base.get_submodule(f"model.layers.{layer}.{SHAPE.path(module)}")
        linear.weight.data *= 1 + torch.tensor(vectors.gain)[:, None]
        linear.bias = torch.nn.Parameter(torch.tensor(vectors.shift))
    torch.testing.assert_close(_logits(base), expected, atol=1e-5, rtol=0)
    assert (_logits(llama().eval()) - expected).abs().max() > 1e-3, "the adapter makes no difference to compare"


@torch.inference_mode()
def _logits(model: LlamaForCausalLM | PeftModel) -> torch.Tensor:
    logits: torch.Tensor = model(input_ids=TOKEN_IDS).logits
    return logits
