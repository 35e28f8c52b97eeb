"""Whatever one key of config.json is changed to, the answer is that of transformers, or the base is refused.

Each model is loaded by transformers once for each change, and by an engine once for each config that differs.
"""

from __future__ import annotations

import dataclasses
import json
import random
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedConfig

from motet.kernels.norms import ACTIVATIONS, UNGATED
from motet.tests.rigs.engine_rig import Stock
from motet.tests.rigs.oracle import VARIANTS, WRAPPED, write_model
from motet.workers.models.config import ModelConfig
from motet.workers.models.config_keys import DECODER_KEYS
from motet.workers.wire.messages import SamplingParams

PROMPT = [(7 * place + 3) % 150 for place in range(40)]
TOLERANCE = 2e-3  # of a logit, float32
NUM_CHANGES = 4  # of each model, in CI
_ABSENT = object()
# Of other families, and of the base's own class: what a person or a tool may have left in a file.
FOREIGN: Mapping[str, Any] = {
    "final_logit_softcapping": 3.0,
    "attn_logit_softcapping": 3.0,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "rope_scaling": {"rope_type": "linear", "factor": 4.0},
    "rope_theta": 77.0,
    "sliding_window": 5,
    "attention_bias": True,
    "mlp_bias": True,
    "qkv_bias": True,
    "partial_rotary_factor": 0.5,
    "llama_4_scaling": {"beta": 0.1},
    "logit_scale": 0.5,
    "attention_chunk_size": 8,
    "original_max_position_embeddings": 16,
    "per_layer_config": {"0": {"rms_norm_eps": 0.1}},
    "rope_local_base_freq": 50.0,
    "query_pre_attn_scalar": 3,
    "use_bidirectional_attention": True,
    "is_causal": False,
    "max_window_layers": 2,
    "use_sliding_window": True,
}
UNRELATED = frozenset({"transformers_version", "architectures", "dtype", "id2label", "label2id", "return_dict"}) | {
    "output_hidden_states",
    "problem_type",
    "max_position_embeddings",  # a bound of the context; what it does to a stretched one is in test_model_config.py
}


def _values(key: str, value: Any, num_layers: int) -> Iterator[Any]:
    yield from (_ABSENT, None, "false", -1)
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, int):
        yield from (0, 1, value + 1, value * 2, float(value))
    elif isinstance(value, float):
        yield from (value * 3, 0.0, str(value))
    if key in ("hidden_act", "hidden_activation", "mlp_hidden_act", "mamba_hidden_act"):
        yield from (name for name in (*ACTIVATIONS, *UNGATED) if name != value)
    if key == "layer_types":
        yield from (["sliding_attention"], ["full_attention"] * num_layers, ["sliding_attention"] * num_layers)
        yield from (["chunked_attention"] * num_layers, ["full_attention"] * (num_layers + 1))
    if key == "rope_parameters":
        flat = {"rope_type": "default", "rope_theta": 90.0}
        yield from (flat, {"rope_type": "linear", "rope_theta": 90.0, "factor": 3.0}, {"rope_type": "dynamic"})
        yield from ({"full_attention": flat, "sliding_attention": flat}, {**flat, "factor": 2.0})
        yield {**flat, "rope_type": "dynamic", "factor": 3.0}
        yield {**flat, "rope_type": "yarn", "factor": 4.0, "beta_fast": 16, "llama_4_scaling_beta": 0.1}
        yield {**flat, "rope_type": "yarn", "factor": 4.0, "beta_slow": 2, "truncate": False, "mscale": 1.0}
        yield {**flat, "rope_type": "llama3", "factor": 4.0, "low_freq_factor": 4.0, "high_freq_factor": 1.0}


def _changes(raw: Mapping[str, Any], path: Path) -> list[tuple[str, Any, Mapping[str, Any]]]:
    """Keys, their values, and config.json with each."""
    config = AutoConfig.from_pretrained(path)
    if "text_config" not in raw:
        return [(key, value, _changed(raw, key, value)) for key, value in _values_of_keys(raw, config)]
    text = _values_of_keys(raw["text_config"], config.text_config)
    ties = [("tie_word_embeddings", value) for value in _values("", raw["tie_word_embeddings"], 3)]
    return [
        *((key, value, {**raw, "text_config": _changed(raw["text_config"], key, value)}) for key, value in text),
        *((key, value, _changed(raw, key, value)) for key, value in ties),
    ]


def _values_of_keys(raw: Mapping[str, Any], config: PreTrainedConfig) -> list[tuple[str, Any]]:
    keys = {one.name for one in dataclasses.fields(config)} | raw.keys() - UNRELATED
    values = [
        (key, value)
        for key in sorted(keys - UNRELATED)
        for value in _values(key, raw.get(key), config.num_hidden_layers)
    ]
    return [*values, *FOREIGN.items()]


def _changed(raw: Mapping[str, Any], key: str, value: Any) -> dict[str, Any]:
    others = {other: one for other, one in raw.items() if other != key}
    return others if value is _ABSENT else {**others, key: value}


def _transformers(path: Path) -> torch.Tensor | None:
    """The logits; None: it takes no such file, or weights that the file does not have."""
    raw = (path / "config.json").read_text()
    try:
        loader = AutoModelForImageTextToText if "vision_config" in json.loads(raw) else AutoModelForCausalLM
        model, info = loader.from_pretrained(
            path, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
        )
        if info["missing_keys"] or info["unexpected_keys"] or info["mismatched_keys"]:
            return None
        if model.config.model_type == "llama4":  # the whole model raises without a picture
            model = model.language_model
        with torch.inference_mode():
            logits: torch.Tensor = model.eval()(input_ids=torch.tensor([PROMPT]), use_cache=False).logits[0, -1]
        return logits
    except Exception:  # of any kind: strict dataclasses, wrong shapes, divisions by zero
        return None


class _Motet:
    def __init__(self, scratch: Path) -> None:
        self._scratch = scratch
        self._made: list[tuple[ModelConfig, torch.Tensor]] = []

    def logits(self, path: Path) -> torch.Tensor | None:
        """None: refused, with a ValueError."""
        try:
            config = ModelConfig.from_folder(path)
            known = next((logits for other, logits in self._made if other == config), None)
            if known is not None:
                return known
            with Stock.make(path, {}, self._scratch / f"store-{len(self._made)}").engine(40) as rig:
                rig.tap_logits()
                rig.submit(0, PROMPT, None, SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True))
                rig.finish()
            self._made.append((config, rig.outputs[0].logits[0]))
            return rig.outputs[0].logits[0]
        except ValueError:
            return None


def _ends_in_a_fault_of_transformers(name: str, key: str, value: Any) -> bool:
    """YaRN takes the heads' size from `head_dim`, which MixtralConfig leaves null. Cohere 2 multiplies by a null.

    So do bases with latent attention, which need no such key.
    """
    if name.startswith(("cohere2", "deepseek_v3", "mistral4")):
        return key == "head_dim" and value is None
    if name.startswith("deepseek_v2"):
        return key in ("head_dim", "mlp_bias", "topk_method") and value is None
    return name == "mixtral" and isinstance(value, dict) and value.get("rope_type") == "yarn"


@pytest.mark.parametrize("name", [*VARIANTS, *WRAPPED])
def test_a_changed_key_is_followed_or_refused(name: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    base, changed = write_model(name, tmp_path / "base"), tmp_path / "changed"
    raw, motet = json.loads((base / "config.json").read_text()), _Motet(tmp_path)
    shutil.copytree(base, changed)
    changes = _changes(raw, base)
    if not request.config.option.thorough:
        names = [*VARIANTS, *WRAPPED]
        draw = random.Random(request.config.option.first_seed * len(names) + names.index(name))
        changes = draw.sample(changes, NUM_CHANGES)
    wrong, unchanged = [], motet.logits(base)
    for key, value, document in changes:
        (changed / "config.json").write_text(json.dumps(document))
        answer = motet.logits(changed)
        if answer is None:
            continue
        expected = _transformers(changed)
        if expected is None and (key not in DECODER_KEYS or _ends_in_a_fault_of_transformers(name, key, value)):
            expected = (
                answer if key in DECODER_KEYS else unchanged
            )  # a value of another type, of a key with which no decoder computes
        if expected is None or not torch.allclose(answer, expected, atol=TOLERANCE, rtol=0):
            wrong.append((key, "absent" if value is _ABSENT else value, "refused" if expected is None else "other"))
    assert not wrong, f"of {len(changes)} changes, (key, value, what transformers does): {wrong}"


def test_values_that_are_made_of_keys_have_their_bias(tmp_path: Path) -> None:
    """Gemma 4 with `attention_bias`, of which no base is published."""
    base = write_model("gemma4_dense", tmp_path / "base", attention_bias=True)
    answer, expected = _Motet(tmp_path).logits(base), _transformers(base)
    assert answer is not None and expected is not None
    torch.testing.assert_close(answer, expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("glm4", {"head_dim": 23}, "heads of 23 dimensions are not supported: an even number is needed"),
        ("minimax_m2", {"head_dim": 25}, "heads of 25 dimensions are not supported: an even number is needed"),
        ("nemotron_h", {"head_dim": 15}, "heads of 15 dimensions are not supported: an even number is needed"),
        ("falcon_h1", {"hidden_act": "gelu_pytorch_tanh"}, "hidden_act = 'gelu_pytorch_tanh': .* 'silu' alone"),
        ("granite_hybrid", {"hidden_act": "gelu_pytorch_tanh"}, "hidden_act = 'gelu_pytorch_tanh': .* 'silu' alone"),
    ],
)
def test_what_is_not_computed_is_refused(name: str, changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    base = write_model(name, tmp_path / "base")
    raw = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(raw | changes))
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_folder(base)


@pytest.mark.parametrize("name", ["llama4_stretched", "hunyuan_moe"])
def test_the_epsilon_of_a_norm_behind_the_rotation_is_followed(name: str, tmp_path: Path) -> None:
    """It is beside the amplitude of a stretched rotation, which the norm takes away else."""
    base = write_model(name, tmp_path / "base")
    raw = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(raw | {"rms_norm_eps": 1.0}))
    answer, expected = _Motet(tmp_path).logits(base), _transformers(base)
    assert answer is not None and expected is not None
    torch.testing.assert_close(answer, expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("name", ["qwen3", "mistral"])
def test_a_head_beside_a_tied_embedding_is_the_embedding(name: str, tmp_path: Path) -> None:
    """Else transformers computes with the head, whatever the key says."""
    base = write_model(name, tmp_path / "base")
    raw, paths = json.loads((base / "config.json").read_text()), sorted(base.glob("*.safetensors"))
    (base / "config.json").write_text(json.dumps(raw | {"tie_word_embeddings": True}))
    tensors = {key: value for path in paths for key, value in load_file(path).items()}
    for path in (*paths, *base.glob("*.index.json")):
        path.unlink()
    embedding = tensors["model.embed_tokens.weight"]
    save_file(tensors | {"lm_head.weight": embedding.clone()}, base / "model.safetensors")
    answer, expected = _Motet(tmp_path).logits(base), _transformers(base)
    assert answer is not None and expected is not None
    torch.testing.assert_close(answer, expected, atol=TOLERANCE, rtol=0)
    save_file(tensors | {"lm_head.weight": embedding * 2}, base / "model.safetensors")
    with pytest.raises(
        ValueError, match=r"tie_word_embeddings = true, and lm_head\.weight is not the embedding: false"
    ):
        Stock.make(base, {}, tmp_path / "store").engine(40)


def test_weights_of_integers_are_refused(tmp_path: Path) -> None:
    base = write_model("llama", tmp_path / "base")
    tensors = load_file(base / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.int8)
    save_file(tensors, base / "model.safetensors")
    with pytest.raises(ValueError, match=r"tensor 'model\.norm\.weight' has the dtype I8: BF16, F16, F32"):
        Stock.make(base, {}, tmp_path / "store").engine(40)
