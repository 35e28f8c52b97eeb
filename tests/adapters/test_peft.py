"""How motet reads adapter_config.json, against PEFT's own code."""

from __future__ import annotations

import json
import math
import random
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from motet.adapters.adapter import EMBEDDING, HEAD, OUTER
from motet.adapters.errors import AdapterInvalid
from motet.adapters.format.peft import parse_config, parse_tensor_name, tensor_name
from motet.adapters.format.targets import PatternTime, resolve_targets
from motet.adapters.format.validation import resolve_parameters, validate
from motet.tests.rigs.lora_files import SHAPE


def config_bytes(**changes: Any) -> bytes:
    facts = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], **changes}
    return json.dumps(facts).encode()


def llama() -> LlamaForCausalLM:
    """A model of SHAPE."""
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=32,
            tie_word_embeddings=False,
        )
    )


PEFT_CONFIGS: dict[str, dict[str, Any]] = {
    "list": {"target_modules": ["q_proj", "down_proj"]},
    "all linear": {"target_modules": "all-linear"},
    "suffix with parent": {"target_modules": ["self_attn.q_proj", "mlp.up_proj"]},
    "whole names": {"target_modules": ["model.layers.1.self_attn.q_proj", "v_proj"], "layers_to_transform": [0]},
    "expression": {"target_modules": r".*\.(?:[02])\..*(q|gate)_proj"},
    "plain expression": {"target_modules": r"model.layers.0.self_attn.k_proj"},
    "layers": {"target_modules": ["q_proj", "v_proj"], "layers_to_transform": [0, 2]},
    "layers, one of which is not there": {"target_modules": ["q_proj", "v_proj"], "layers_to_transform": [1, 7]},
    "one layer": {"target_modules": ["q_proj"], "layers_to_transform": 1, "layers_pattern": "layers"},
    "excluded list": {"target_modules": "all-linear", "exclude_modules": ["q_proj", "layers.1.mlp.up_proj"]},
    "excluded expression": {"target_modules": ["q_proj", "o_proj"], "exclude_modules": r".*\.0\..*"},
    "rslora": {"target_modules": ["q_proj"], "use_rslora": True, "rank_pattern": {"layers.1.self_attn.q_proj": 9}},
    "patterns": {
        "target_modules": ["q_proj", "v_proj", "up_proj"],
        "rank_pattern": {r"layers\.[12]\..*q_proj": 3, "q_proj": 5, "^model.layers.0.mlp.up_proj": 1},
        "alpha_pattern": {"v_proj": 32, r".*\.2\.mlp\.up_proj": 0.5},
    },
}


def ranks_and_scalings(model: torch.nn.Module) -> dict[tuple[int, str], tuple[int, float]]:
    """PEFT's own, by layer and module."""
    expected = {}
    for name, module in model.named_modules():
        if hasattr(module, "lora_A"):
            key = parse_tensor_name(f"{name}.lora_A.weight")
            assert key is not None, name
            expected[key[:2]] = (module.r["default"], module.scaling["default"])
    return expected


@pytest.mark.parametrize("case", PEFT_CONFIGS)
def test_targets_ranks_and_scalings_are_those_of_peft(case: str, tmp_path: Path) -> None:
    model = get_peft_model(llama(), LoraConfig(r=4, lora_alpha=12, task_type="CAUSAL_LM", **PEFT_CONFIGS[case]))
    expected = ranks_and_scalings(model)
    model.save_pretrained(tmp_path)
    saved = (tmp_path / "adapter_config.json").read_bytes()

    targets = resolve_targets(parse_config(saved), SHAPE)
    assert {key: (target.rank, target.scaling) for key, target in targets.items()} == expected
    content = validate(saved, tmp_path / "adapter_model.safetensors", SHAPE)
    assert set(content.matrices) == set(expected)


LINEARS: list[str] = [name for name, module in llama().named_modules() if isinstance(module, torch.nn.Linear)][:-1]
EXPRESSIONS = (
    r".*\.(q|v)_proj",
    r".*layers\.[01]\..*proj",
    r"model\.layers\.\d+\.self_attn\.[qkvo]_proj",
    r".*self_attn.*",
    r"(?!.*q_proj).*layers.*proj",
    r".*[0-2]\.mlp\.(gate|down)_proj$",
)
PATTERNS = (
    *EXPRESSIONS,
    r"layers\.[02]\..*",
    "^model.layers.0.self_attn.q_proj",
    "^q_proj",
    r"(self_attn|mlp)\.[a-z_]+",
)


def _random_config(rng: random.Random) -> dict[str, Any]:
    def name() -> str:
        whole = rng.choice(LINEARS)
        return rng.choice([whole, whole.rpartition(".")[2], ".".join(whole.split(".")[-2:]), "no_such"])

    def numbers() -> dict[str, int]:
        return {rng.choice([name(), rng.choice(PATTERNS)]): rng.randint(1, 6) for _ in range(rng.randint(0, 3))}

    config: dict[str, Any] = {
        "r": rng.randint(1, 8),
        "lora_alpha": rng.randint(1, 16),
        "use_rslora": rng.random() < 0.3,
    }
    names = [name() for _ in range(rng.randint(1, 4))]
    config["target_modules"] = rng.choice([names, names, "all-linear", rng.choice(EXPRESSIONS)])
    config |= {"rank_pattern": numbers(), "alpha_pattern": numbers()} if rng.random() < 0.7 else {}
    if rng.random() < 0.3:
        config["exclude_modules"] = rng.choice([rng.choice(EXPRESSIONS), [name(), name()]])
    if rng.random() < 0.3 and config["target_modules"] is names:
        config["layers_to_transform"] = rng.choice([0, [0, 2], [1], [2, 7]])
        config |= {"layers_pattern": rng.choice(["layers", ["h", "layers"], "blocks"])} if rng.random() < 0.5 else {}
    if rng.random() < 0.2:
        config["target_parameters"] = [f"{name()}.weight"]
    return config


def test_any_config_is_read_as_peft_reads_it(tmp_path: Path) -> None:
    """It saves patterns in alphabetical order: another may be the first that matches than in training."""
    num_read = num_unreadable = 0
    for seed in range(120):
        config = _random_config(random.Random(seed))
        model: PeftModel | None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PEFT reports names that match nothing
            try:
                model = get_peft_model(llama(), LoraConfig(task_type="CAUSAL_LM", **config))
            except ValueError:
                continue  # it finds nothing to train
            model.save_pretrained(tmp_path)
            try:
                model = PeftModel.from_pretrained(llama(), tmp_path)
            except RuntimeError:  # the tensors have other ranks than the config says
                model = None
        data, tensors = (tmp_path / "adapter_config.json").read_bytes(), tmp_path / "adapter_model.safetensors"
        if model is None:
            with pytest.raises(AdapterInvalid, match=r"adapter_config.json gives rank"):
                validate(data, tensors, SHAPE)
            num_unreadable += 1
            continue
        expected = ranks_and_scalings(model)
        content = validate(data, tensors, SHAPE)
        assert {key: (len(lora.a), lora.scaling) for key, lora in content.matrices.items()} == expected, config
        num_read += 1
    assert num_read > 60 and num_unreadable > 0, (num_read, num_unreadable)


HEADLESS_CONFIGS: dict[str, dict[str, Any]] = {
    "patterns that name what a head stands before": {
        "target_modules": ["q_proj", "v_proj"],
        "rank_pattern": {"^model.layers.0.self_attn.q_proj": 2},
        "alpha_pattern": {"model.layers.1.self_attn.q_proj": 3},
    },
    "patterns of the names in the file": {
        "target_modules": ["q_proj", "v_proj"],
        "rank_pattern": {"^layers.0.self_attn.q_proj": 2},
        "alpha_pattern": {"layers.1.self_attn.q_proj": 3},
    },
    "expression": {"target_modules": r"layers\.[01]\.self_attn\.[qv]_proj"},
    "excluded": {"target_modules": ["q_proj", "v_proj"], "exclude_modules": ["layers.0.self_attn.q_proj"]},
    "excluded expression": {"target_modules": ["q_proj", "v_proj"], "exclude_modules": r"model\.layers\.0\..*"},
    "layers": {"target_modules": ["q_proj"], "layers_to_transform": [1], "layers_pattern": "layers"},
}


@pytest.mark.parametrize("case", HEADLESS_CONFIGS)
def test_patterns_match_the_names_that_the_tensors_have(case: str, tmp_path: Path) -> None:
    """Of a base that was loaded without its head, as AutoModel does: its names begin with the layers'."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT reports names that match nothing
        model = get_peft_model(llama().model, LoraConfig(r=4, lora_alpha=12, **HEADLESS_CONFIGS[case]))
    expected = ranks_and_scalings(model)
    model.save_pretrained(tmp_path)
    content = validate((tmp_path / "adapter_config.json").read_bytes(), tmp_path / "adapter_model.safetensors", SHAPE)
    assert {key: (len(lora.a), lora.scaling) for key, lora in content.matrices.items()} == expected


def test_lora_of_a_linears_weight_is_that_of_the_linear(tmp_path: Path) -> None:
    """PEFT's `target_parameters` of what is no expert: it adds the product to the weight itself."""
    config = LoraConfig(
        r=4,
        lora_alpha=12,
        target_modules=["q_proj"],
        target_parameters=["down_proj.weight", "layers.1.mlp.up_proj.weight"],
    )
    model = get_peft_model(llama(), config).eval()
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    model.save_pretrained(tmp_path)
    data = (tmp_path / "adapter_config.json").read_bytes()
    content = validate(data, tmp_path / "adapter_model.safetensors", SHAPE)
    assert {module for _, module in content.matrices} == {"q_proj", "down_proj", "up_proj"}
    base, token_ids = llama().eval(), torch.arange(9).unsqueeze(0)
    for (layer, module), lora in content.matrices.items():
        linear = base.get_submodule(f"model.layers.{layer}.{SHAPE.path(module)}")
        linear.weight.data += lora.scaling * torch.tensor(lora.b) @ torch.tensor(lora.a)
    torch.testing.assert_close(base(token_ids).logits, model(token_ids).logits, atol=1e-5, rtol=0)
    both = json.dumps({**json.loads(data), "target_modules": ["q_proj", "down_proj"]}).encode()
    with pytest.raises(AdapterInvalid, match=r"both name mlp\.down_proj of layer 0: name it in one"):
        validate(both, tmp_path / "adapter_model.safetensors", SHAPE)


def test_all_linear_as_a_string_reads_like_the_list_that_peft_saves() -> None:
    targets = resolve_targets(parse_config(config_bytes(target_modules="all-linear")), SHAPE)
    assert len(targets) == 7 * SHAPE.num_layers


def test_rslora_divides_by_the_root() -> None:
    targets = resolve_targets(parse_config(config_bytes(use_rslora=True, r=16)), SHAPE)
    assert targets[0, "q_proj"].scaling == 8 / math.sqrt(16)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"peft_type": "ADALORA"}, "ADALORA"),
        ({"peft_type": None}, "peft_type"),
        ({"use_dora": True, "lora_bias": True}, "use_dora and lora_bias"),
        ({"use_dora": True, "use_bdlora": {"nblocks": 2}}, "use_dora and use_bdlora"),
        ({"use_dora": True, "alora_invocation_tokens": [5]}, "use_dora and alora_invocation_tokens"),
        ({"bias": "all", "alora_invocation_tokens": [5]}, "bias and alora_invocation_tokens"),
        ({"use_dora": "yes"}, "use_dora"),
        ({"modules_to_save": "lm_head"}, "modules_to_save = 'lm_head': a list of names is needed"),
        ({"ensure_weight_tying": 1}, "ensure_weight_tying"),
        ({"lora_bias": 1}, "lora_bias"),
        ({"use_qalora": True}, "use_qalora"),
        ({"megatron_config": {"a": 1}}, "megatron_config"),
        ({"layer_replication": [[0, 2]]}, "layer_replication"),
        ({"trainable_token_indices": [1.0]}, "trainable_token_indices = [1.0]: a list of token ids"),
        ({"target_parameters": ["mlp.experts.down_proj"], "target_modules": []}, "such as self_attn.q_proj.weight"),
        ({"target_parameters": "down_proj"}, "a list of names"),
        ({"target_parameters": ["x"] * 3000}, "at most 2048"),
        ({"alora_invocation_tokens": [5, -1]}, "alora_invocation_tokens"),
        ({"alora_invocation_tokens": "invoke"}, "a list of at most 64 token ids"),
        ({"alora_invocation_tokens": [5] * 65}, "a list of at most 64 token ids"),
        ({"arrow_config": {"top_k": 1}}, "arrow_config"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out"),
        ({"target_modules": ["q_proj", "embed_tokens"]}, "embed_tokens"),
        ({"target_modules": ["lm_head"]}, "lm_head"),
        ({"target_modules": ".*"}, "embed_tokens"),
        ({"target_modules": ["c_attn"]}, "c_attn"),
        ({"target_modules": None}, "target_modules"),
        ({"target_modules": []}, "target_modules"),
        ({"target_modules": [1]}, "target_modules"),
        ({"target_modules": "nothing"}, "matches no module"),
        ({"target_modules": ["nothing"]}, "matches no module"),
        ({"target_modules": "q_proj, v_proj"}, 'if a list was meant, write ["q_proj", "v_proj"]'),
        ({"target_modules": "(q_proj"}, "not a regular expression"),
        ({"layers_to_transform": [3]}, "layers 3"),
        ({"layers_to_transform": "1"}, "layers_to_transform"),
        ({"r": 0}, "r = 0"),
        ({"r": 1025}, "1024"),
        ({"r": True}, "r = True"),
        ({"r": 4.0}, "r = 4.0"),
        ({"rank_pattern": {"q_proj": 1300}}, "rank_pattern"),
        ({"rank_pattern": [1]}, "rank_pattern"),
        ({"alpha_pattern": {"q_proj": "8"}}, "alpha_pattern"),
        ({"lora_alpha": 1e300}, "lora_alpha"),
        ({"use_rslora": "yes"}, "use_rslora"),
    ],
)
def test_refuses_by_name(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(AdapterInvalid) as refusal:
        _resolve(config_bytes(**changes))
    assert named in str(refusal.value)


def _resolve(data: bytes) -> None:
    config = parse_config(data)
    resolve_targets(config, SHAPE)
    resolve_parameters(config, SHAPE)


def test_training_keys_and_unset_features_are_let_through() -> None:
    parse_config(
        config_bytes(
            init_lora_weights="gaussian",
            loftq_config={"loftq_bits": 4},
            eva_config={"rho": 2.0},
            lora_dropout=0.1,
            task_type="CAUSAL_LM",
            use_dora=False,
            modules_to_save=None,
            megatron_core="megatron.core",
            unknown_field=None,
        )
    )


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b"\xff\xfe",
        b'{"r": 1, "r": 2}',
        b'{"peft_type": "LORA", "r": NaN}',
        b'{"a":' * 100_000,
        b'{"r": ' + b"9" * 5000 + b"}",
        b"\x80\x04\x95pickle",
    ],
)
def test_refuses_what_is_not_one_json_object(data: bytes) -> None:
    with pytest.raises(AdapterInvalid, match=r"adapter_config\.json"):
        parse_config(data)


def test_a_hostile_expression_is_refused_and_does_not_stop_the_process() -> None:
    ticks = 0
    began = time.process_time()
    for pattern in (r"(.*.*)*(.*.*)*(.*.*)*(.*.*)*x", r"(\w+|[a-z._0-9]+)+!"):
        with pytest.raises(AdapterInvalid, match="takes too long"):
            resolve_targets(parse_config(config_bytes(target_modules=pattern)), SHAPE)
        ticks += 1
    assert ticks == 2
    assert time.process_time() - began < 1.0  # the work was the child's, which has a limit of its own


def test_all_expressions_of_an_upload_share_their_time() -> None:
    time_left = PatternTime()
    slow = r"(\w+|[a-z._0-9]+)+!"
    config = parse_config(config_bytes(target_modules=slow))
    with pytest.raises(AdapterInvalid, match="takes too long"):
        resolve_targets(config, SHAPE, time_left)
    assert time_left.left_s < 0.3
    time_left.left_s = 0.0
    for changes in ({"exclude_modules": r"x|y"}, {"rank_pattern": {r"x|y": 3}}, {"target_modules": r".*\.q_proj|x"}):
        with pytest.raises(AdapterInvalid, match="takes too long"):
            resolve_targets(parse_config(config_bytes(**changes)), SHAPE, time_left)
    assert resolve_targets(parse_config(config_bytes(rank_pattern={"layers.0.self_attn.q_proj": 3})), SHAPE, time_left)


def test_too_many_patterns_are_refused() -> None:
    with pytest.raises(AdapterInvalid, match="rank_pattern is too large"):
        resolve_targets(parse_config(config_bytes(rank_pattern={f"p{i}": 1 for i in range(3000)})), SHAPE)


def test_tensor_names() -> None:
    assert parse_tensor_name(tensor_name(2, "down_proj", "B")) == (2, "down_proj", "B")
    assert parse_tensor_name(tensor_name(OUTER, EMBEDDING, "A")) == (OUTER, EMBEDDING, "A")
    assert parse_tensor_name(tensor_name(OUTER, HEAD, "B")) == (OUTER, HEAD, "B")
    infix = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight"
    assert parse_tensor_name(infix) == (0, "q_proj", "A")
    for wrong in (
        "base_model.model.model.layers.00.self_attn.q_proj.lora_A.weight",
        "base_model.model.model.layers.0.mlp.q_proj.lora_A.weight",
        "base_model.model.model.layers.0.self_attn.q_proj.lora_C.weight",
        "base_model.model.model.layers.٣.self_attn.q_proj.lora_A.weight",
        "base_model.model.lm_head.lora_embedding_A",
        "base_model.model.model.embed_tokens.lora_A.weight",
        "model.layers.0.self_attn.q_proj.lora_A.weight",
    ):
        assert parse_tensor_name(wrong) is None, wrong
