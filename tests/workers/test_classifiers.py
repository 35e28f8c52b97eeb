"""Sequence classifiers of many families: heads make of a gang's states what transformers and PEFT compute."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from motet.tests.rigs.classifiers import classifier_logits, write_classifier
from motet.tests.rigs.engine_rig import EngineRig, Stock
from motet.tests.rigs.gang_rig import gang
from motet.tests.rigs.oracle import write_model
from motet.workers.wire.messages import SamplingParams, SequenceUpdate
from motet.workers.wire.prompt_scores import unpacked_vector

pytestmark = pytest.mark.slow  # models of transformers, and engines
FAMILIES = (
    *("llama", "mistral_window", "ministral3", "mixtral", "smollm3", "seed_oss", "hunyuan_dense", "starcoder2"),
    *("gemma", "gemma3", "gemma3_vision", "qwen2", "qwen3", "qwen3_moe", "qwen3_5", "qwen3_5_vision", "qwen3_next"),
    *("phi3", "olmo2", "olmo3", "glm4", "exaone4", "gpt_oss", "deepseek_v3"),
)
PROMPTS = [[5, 80, 33, 120, 7, 99, 140, 2], [66, 12, 150, 41, 23], [3]]
NUM_LABELS = 3


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    model = write_model(family, tmp_path / "model")
    folder = write_classifier(model, tmp_path / "classifier", NUM_LABELS, target_modules="all-linear")
    stock = Stock.make(model, {"classifier": folder}, tmp_path / "store")
    with stock.engine(200, max_tokens_per_step=16) as rig:
        check(rig, stock, model, folder)


def test_logits_of_a_gang(tmp_path: Path) -> None:
    model = write_model("llama", tmp_path / "model")
    folder = write_classifier(model, tmp_path / "classifier", NUM_LABELS, target_modules="all-linear")
    stock = Stock.make(model, {"classifier": folder}, tmp_path / "store")
    with gang(stock.gang_config(200, 2, max_tokens_per_step=16)) as (engine, _):
        check(EngineRig(engine, stock.refs), stock, model, folder)


def check(rig: EngineRig, stock: Stock, model: Path, folder: Path) -> None:
    for index, prompt in enumerate(PROMPTS):
        rig.submit(index, prompt, "classifier", SamplingParams(max_tokens=0, pooling="last"))
    updates: list[SequenceUpdate] = []
    while rig.engine.has_work():
        updates += rig.step()
    states = {one.sequence_id: unpacked_vector(one.embedding) for one in updates if one.embedding is not None}
    found = stock.heads["classifier"].logits([states[index] for index in range(len(PROMPTS))])
    for own, expected in zip(found, classifier_logits(model, folder, NUM_LABELS, PROMPTS), strict=True):
        np.testing.assert_allclose(own, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    "fields", [{"trainable_token_indices": [5, 23]}, {"modules_to_save": ["embed_tokens"]}, {"use_dora": True}]
)
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_other_kinds_beside_a_head(family: str, fields: dict[str, Any], tmp_path: Path) -> None:
    model = write_model(family, tmp_path / "model")
    folder = write_classifier(model, tmp_path / "classifier", NUM_LABELS, **fields)
    stock = Stock.make(model, {"classifier": folder}, tmp_path / "store")
    with stock.engine(400, max_tokens_per_step=16) as rig:
        check(rig, stock, model, folder)
