"""Bases that take pictures too are served as their text models: exact against transformers + PEFT of all of it."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText

from motet.adapters.adapter import LATENT_MODULES, RECURRENT_MODULES
from motet.adapters.errors import AdapterInvalid
from motet.adapters.format.validation import validate
from motet.tests.rigs.engine_rig import Stock
from motet.tests.rigs.oracle import ALL_LINEAR, WRAPPED, write_model
from motet.workers.models.config import ModelConfig
from motet.workers.models.stored_tensor import named_in_full
from motet.workers.wire.messages import SamplingParams

TOLERANCE = 1e-3  # of a logit, float32
NUM_TOKENS = 8
OF_TEXT = r".*language_model.*\.((q|k|v|o|gate|up|down|out|q_a|q_b|kv_b)_proj|kv_a_proj_with_mqa|in_proj_(qkv|z|b|a))"
LISTED = [*ALL_LINEAR, *LATENT_MODULES, *RECURRENT_MODULES]
_OWN_PREFIX = re.compile(r"(base_model\.model\.)(?:model\.language_model\.|language_model\.model\.)")
PROMPTS = [[(11 * place + 5 * number) % 140 for place in range(9 + 13 * number)] for number in range(4)]


@pytest.fixture(scope="module", params=WRAPPED)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base, and beside it adapters of PEFT: of its text alone, and of all that a list of names matches."""
    folder = tmp_path_factory.mktemp(request.param)
    write_model(request.param, folder / "base")
    generator = torch.Generator().manual_seed(3)
    for name, targets in (("text", OF_TEXT), ("listed", LISTED), ("all", "all-linear")):
        model = AutoModelForImageTextToText.from_pretrained(folder / "base", dtype=torch.float32)
        # PEFT refuses linears of Gemma 4's vision by a list, and takes the router of Llama 4 for a linear.
        excluded = {"gemma4_vision": r".*vision_tower.*", "llama4_vision": r".*router"}.get(request.param)
        peft = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules=targets, exclude_modules=excluded))
        for key, parameter in peft.named_parameters():
            if "lora_A" in key or ("lora_B" in key and "language_model" in key):  # training on text leaves others at 0
                _draw(parameter, 0.3, generator)
        peft.save_pretrained(folder / name)
    return folder


def _draw(parameter: torch.Tensor, std: float, generator: torch.Generator) -> None:
    parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * std)


@torch.inference_mode()
def _expected(folder: Path, adapter: str | None, prompt: list[int]) -> tuple[list[int], torch.Tensor]:
    """Greedy tokens of the whole model, and the logits of each."""
    model = AutoModelForImageTextToText.from_pretrained(
        folder / "base", dtype=torch.float32, attn_implementation="eager"
    )
    model = model if adapter is None else PeftModel.from_pretrained(model, folder / adapter)
    token_ids, rows, text = [*prompt], [], model.eval()
    if "llama4" in folder.name:  # of transformers the whole model raises without a picture
        text = model.language_model if adapter is None else model.base_model.model.language_model
    for _ in range(NUM_TOKENS):
        rows.append(text(input_ids=torch.tensor([token_ids]), use_cache=False).logits[0, -1])
        token_ids.append(int(rows[-1].argmax()))
    return token_ids[len(prompt) :], torch.stack(rows)


def test_a_mixed_batch_is_that_of_the_whole_model(folder: Path, tmp_path: Path) -> None:
    adapters = {name: folder / name for name in ("text", "listed", "all")}
    with Stock.make(folder / "base", adapters, tmp_path / "store").engine(200, max_tokens_per_step=16) as rig:
        rig.tap_logits()
        for number, (adapter, prompt) in enumerate(zip((None, *adapters), PROMPTS, strict=True)):
            rig.submit(number, prompt, adapter, SamplingParams(max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True))
        rig.finish()
    for number, (adapter, prompt) in enumerate(zip((None, *adapters), PROMPTS, strict=True)):
        token_ids, logits = _expected(folder, adapter, prompt)
        torch.testing.assert_close(torch.stack(rig.outputs[number].logits), logits, atol=TOLERANCE, rtol=0)
        assert rig.outputs[number].token_ids == token_ids
        if adapter is not None:
            without = _expected(folder, None, prompt)[1]
            assert (logits[0] - without[0]).abs().max() > 0.1, "the adapter changes nothing"


@pytest.mark.parametrize("prefix", ["language_model.model.", "language_model.", "model."])
def test_adapters_of_older_names_and_of_the_text_model_alone(folder: Path, tmp_path: Path, prefix: str) -> None:
    shape = ModelConfig.from_folder(folder / "base").shape
    tensors = load_file(folder / "text" / "adapter_model.safetensors")
    renamed = {_OWN_PREFIX.sub(rf"\1{prefix}", name): value for name, value in tensors.items()}
    config = json.loads((folder / "text" / "adapter_config.json").read_text()) | {"target_modules": LISTED}
    save_file(renamed, tmp_path / "tensors")
    digest = validate(json.dumps(config).encode(), tmp_path / "tensors", shape).digest
    whole_config, whole_tensors = folder / "text" / "adapter_config.json", folder / "text" / "adapter_model.safetensors"
    whole = validate(whole_config.read_bytes(), whole_tensors, shape)
    assert digest == whole.digest
    if renamed.keys() == tensors.keys():
        return
    mixed = {name: value for name, value in tensors.items() if ".layers.0." in name}
    mixed |= {name: value for name, value in renamed.items() if ".layers.1." in name}
    save_file(mixed, tmp_path / "mixed")
    with pytest.raises(AdapterInvalid, match="names modules in two ways"):
        validate(json.dumps(config).encode(), tmp_path / "mixed", shape)


def test_lora_of_vision_that_computes_something_is_reported(folder: Path, tmp_path: Path) -> None:
    shape = ModelConfig.from_folder(folder / "base").shape
    tensors = load_file(folder / "all" / "adapter_model.safetensors")
    name = next(name for name in sorted(tensors) if "lora_B" in name and "language_model" not in name)
    save_file(tensors | {name: tensors[name] + 1e-6}, tmp_path / "tensors")
    config = (folder / "all" / "adapter_config.json").read_bytes()
    content = validate(config, tmp_path / "tensors", shape)
    assert re.search(r"changes how the base reads pictures, .* train with target_modules", content.left_out)
    without = validate(config, folder / "all" / "adapter_model.safetensors", shape)
    assert (content.digest, without.left_out) == (without.digest, "")


@pytest.mark.parametrize("prefixes", [("language_model.model.", "language_model."), ("model.language_model.", "")])
def test_tensors_have_one_of_three_names(folder: Path, tmp_path: Path, prefixes: tuple[str, str]) -> None:
    def logits(base: Path) -> torch.Tensor:
        with Stock.make(base, {}, tmp_path / f"store-{base.name}").engine(100) as rig:
            rig.tap_logits()
            rig.submit(0, PROMPTS[1], None, SamplingParams(max_tokens=1, temperature=0, ignore_eos=True))
            rig.finish()
        return rig.outputs[0].logits[0]

    stored = load_file(folder / "base" / "model.safetensors")
    text = named_in_full(stored)
    renamed = {
        (prefixes[0] + name.removeprefix("model.") if name.startswith("model.") else prefixes[1] + name): tensor
        for name, tensor in text.items()
        if name == "lm_head.weight"
        or name.startswith(("model.layers", "model.norm", "model.embed_tokens", "model.per_layer"))
    }
    shutil.copytree(folder / "base", tmp_path / "renamed")
    save_file(renamed | {"vision_tower.patch.weight": torch.ones(2)}, tmp_path / "renamed" / "model.safetensors")
    torch.testing.assert_close(logits(tmp_path / "renamed"), logits(folder / "base"), atol=0, rtol=0)


def test_older_files_have_the_same_keys_elsewhere(folder: Path, tmp_path: Path) -> None:
    raw = json.loads((folder / "base" / "config.json").read_text())
    if not raw["model_type"].startswith("qwen2"):
        pytest.skip("only these two were published so")
    config = ModelConfig.from_folder(folder / "base")
    text = raw.pop("text_config")
    rope = text.pop("rope_parameters")
    flat = raw | {key: value for key, value in text.items() if key != "model_type"}
    flat |= {"rope_theta": rope["rope_theta"], "rope_scaling": {"type": "mrope", "mrope_section": [1, 2, 3]}}
    (tmp_path / "config.json").write_text(json.dumps(flat))
    assert ModelConfig.from_folder(tmp_path) == config


def test_a_head_of_its_own_counts_where_ties_are_left_open(folder: Path, tmp_path: Path) -> None:
    """Mistral Small 3.1 is published so; transformers takes what the file has."""
    raw = json.loads((folder / "base" / "config.json").read_text())
    del raw["tie_word_embeddings"]
    raw["text_config"].pop("tie_word_embeddings", None)
    (tmp_path / "config.json").write_text(json.dumps(raw))
    embedding = named_in_full(load_file(folder / "base" / "model.safetensors"))["model.embed_tokens.weight"]
    is_tied = raw["architectures"][0].startswith(("Gemma3", "Gemma4", "Mistral3"))
    for has_head in (False, True):
        head = {"lm_head.weight": embedding + 1} if has_head else {}
        save_file({"model.embed_tokens.weight": embedding} | head, tmp_path / "model.safetensors")
        assert ModelConfig.from_folder(tmp_path).tie_word_embeddings == (is_tied and not has_head)


def test_a_key_of_the_text_model_is_followed_or_refused(folder: Path, tmp_path: Path) -> None:
    """As in test_config_keys.py, of the keys that a wrapper treats differently."""
    raw = json.loads((folder / "base" / "config.json").read_text())
    changes: list[tuple[str, Any, str]] = [
        ("text_config", {**raw["text_config"], "model_type": "llama"}, "text_config.model_type = 'llama'"),
        ("text_config", {**raw["text_config"], "qkv_bias": True}, "qkv_bias"),
        ("text_config", {**raw["text_config"], "use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("model_type", "llava", "model_type = 'llava' contradicts"),
        ("quantization_config", {"quant_method": "bitsandbytes"}, "'bitsandbytes' is not supported"),
        ("text_config", 5, "cannot be read"),
    ]
    if raw["model_type"].startswith("qwen2"):  # whose q, k and v have biases, whatever it says
        changes = [change for change in changes if "qkv_bias" not in str(change[1])]
    for key, value, problem in changes:
        (tmp_path / "config.json").write_text(json.dumps(raw | {key: value}))
        with pytest.raises(ValueError, match=problem):
            ModelConfig.from_folder(tmp_path)
