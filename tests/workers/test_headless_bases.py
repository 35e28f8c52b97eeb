"""Bases that were saved without their head, as models of embeddings are, and adapters that were trained on such."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForImageTextToText

from motet.tests.rigs.engine_rig import EngineRig, Stock
from motet.tests.rigs.gang_rig import gang
from motet.tests.rigs.oracle import ALL_LINEAR, VOCAB_SIZE, WRAPPED, write_model
from motet.tests.rigs.stand_in_gpu.gpu_worker import gpu_of_twins
from motet.workers.wire.messages import SamplingParams, SequenceUpdate
from motet.workers.wire.prompt_scores import pooled_positions, unpacked_vector

pytestmark = pytest.mark.slow  # models of transformers, and engines
PROMPTS = [[5, 80, 33, 120, 7, 99, 140, 2, 17, 4, 88], [66, 12, 150, 41, 23]]
ADAPTER = "embedder"


@dataclass(frozen=True)
class Base:
    path: Path
    stock: Stock

    @torch.inference_mode()
    def states(self, token_ids: list[int], adapter: str | None) -> torch.Tensor:
        model = AutoModel.from_pretrained(self.path, dtype=torch.float32, attn_implementation="eager")
        if adapter is not None:
            model = PeftModel.from_pretrained(model, self.path.parent / adapter)
        states: torch.Tensor = model(input_ids=torch.tensor([token_ids]), use_cache=False).last_hidden_state[0]
        return states

    def check(self, rig: EngineRig) -> None:
        """Raises AssertionError unless embeddings of all prompts are those of transformers and PEFT."""
        requested = [(prompt, adapter) for prompt in PROMPTS for adapter in (None, ADAPTER)]
        for index, (prompt, adapter) in enumerate(requested):
            rig.submit(index, prompt, adapter, SamplingParams(max_tokens=0, pooling="last" if index % 2 else "mean"))
        updates: list[SequenceUpdate] = []
        while rig.engine.has_work():
            updates += rig.step()
        found = {update.sequence_id: update.embedding for update in updates if update.embedding is not None}
        for index, (prompt, adapter) in enumerate(requested):
            rows = pooled_positions("last" if index % 2 else "mean", len(prompt))
            expected = self.states(prompt, adapter)[rows.start : rows.stop].mean(0)
            np.testing.assert_allclose(unpacked_vector(found[index]), expected, atol=1e-4, rtol=1e-4)


# The variant, and whether config.json names the class with the head, as Qwen3-Embedding's does.
@pytest.fixture(
    scope="module",
    params=[("mistral", False), ("qwen3", True), ("gemma3", False), ("qwen3_vl", False), ("qwen3_5_vision", False)],
    ids=lambda one: one[0],
)
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Base:
    name, names_head = request.param
    folder = tmp_path_factory.mktemp(name)
    model = AutoModel.from_pretrained(write_model(name, folder / "whole"), dtype=torch.float32)
    model.save_pretrained(folder / "base", max_shard_size="100KB" if name == "mistral" else "1GB")
    config = folder / "base" / "config.json"
    if names_head:
        config.write_text(config.read_text().replace("Qwen3Model", "Qwen3ForCausalLM"))
        assert "Qwen3ForCausalLM" in config.read_text()
    lora = LoraConfig(task_type="FEATURE_EXTRACTION", r=3, lora_alpha=6, target_modules=list(ALL_LINEAR))
    adapted = get_peft_model(model, lora)
    generator = torch.Generator().manual_seed(3)
    for parameter_name, parameter in adapted.named_parameters():
        if "lora_" in parameter_name:
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    adapted.save_pretrained(folder / ADAPTER)
    names = load_file(folder / ADAPTER / "adapter_model.safetensors")
    wrapped = "language_model." if name in WRAPPED else ""
    assert next(iter(names)).startswith(f"base_model.model.{wrapped}layers")
    path = folder / "base"
    return Base(path, Stock.make(path, {ADAPTER: folder / ADAPTER}, folder / "store"))


@pytest.mark.parametrize("device", ["cpu", "cuda", "two workers"])
def test_embeddings_are_those_of_transformers(base: Base, device: str) -> None:
    if device == "cuda":
        with gpu_of_twins(), base.stock.engine(400, device="cuda", max_tokens_per_step=8) as rig:
            base.check(rig)
    elif device == "cpu":
        with base.stock.engine(400, max_tokens_per_step=8) as rig:
            base.check(rig)
    else:
        with gang(base.stock.gang_config(400, 2, max_tokens_per_step=16)) as (engine, _):
            base.check(EngineRig(engine, base.stock.refs))


def test_tokens_come_where_the_embedding_is_the_head(base: Base) -> None:
    """Elsewhere they are refused, and so are scores."""
    is_tied = json.loads((base.path / "config.json").read_text())["tie_word_embeddings"]
    requested = [SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)]
    requested.append(SamplingParams(max_tokens=0, num_prompt_logprobs=0))
    with base.stock.engine(400) as rig:
        for index, sampling in enumerate(requested):
            rig.submit(index, PROMPTS[0], None, sampling)
        rig.finish()
    if not is_tied:
        for output in rig.outputs.values():
            assert output.error is not None and output.error.kind == "invalid_request"
            assert "/v1/embeddings" in output.error.message
        return
    loader = (
        AutoModelForImageTextToText
        if "vision_config" in (base.path / "config.json").read_text()
        else AutoModelForCausalLM
    )
    model = loader.from_pretrained(base.path, dtype=torch.float32)
    tokens = torch.tensor([PROMPTS[0]])
    with torch.inference_mode():
        for _ in range(4):
            tokens = torch.cat([tokens, model(input_ids=tokens).logits[:, -1:].argmax(-1)], dim=1)
    assert rig.outputs[0].token_ids == tokens[0, len(PROMPTS[0]) :].tolist()
    assert max(rig.outputs[0].token_ids) < VOCAB_SIZE and rig.outputs[1].finish_reason == "length"
