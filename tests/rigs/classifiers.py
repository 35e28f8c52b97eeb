"""Sequence classifiers as PEFT trains and saves them, and what transformers and PEFT compute with them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftConfig, PeftModel, get_peft_model
from transformers import AutoModelForSequenceClassification

from motet.tests.rigs.oracle import patterns_may_match_nothing


def write_classifier(
    model_path: Path, folder: Path, num_labels: int, config: PeftConfig | None = None, seed: int = 5, **more: Any
) -> Path:
    """A PEFT folder of a classifier on the base. `config`: None: LoRA of two modules. `more`: fields of the latter."""
    config = config or LoraConfig(
        **{"task_type": "SEQ_CLS", "r": 3, "lora_alpha": 6, "target_modules": ["q_proj", "down_proj"], **more}
    )
    with patterns_may_match_nothing():
        model = get_peft_model(_base(model_path, num_labels), config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += torch.randn(parameter.shape, generator=generator) * 0.3
    model.save_pretrained(folder)
    return folder


@torch.inference_mode()
def classifier_logits(
    model_path: Path, folder: Path, num_labels: int, prompts: Sequence[Sequence[int]]
) -> list[torch.Tensor]:
    """`[num_labels]` of each prompt alone, as whoever loads the folder with PEFT gets them."""
    with patterns_may_match_nothing():
        model = PeftModel.from_pretrained(_base(model_path, num_labels), folder).eval()
    return [model(input_ids=torch.tensor([[*prompt]]), use_cache=False).logits[0] for prompt in prompts]


def _base(model_path: Path, num_labels: int) -> Any:
    return AutoModelForSequenceClassification.from_pretrained(
        model_path, num_labels=num_labels, dtype=torch.float32, attn_implementation="eager"
    )
