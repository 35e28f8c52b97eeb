#!/usr/bin/env bash
# PEFT 0.21.2 ties the LoRA of an embedding and of a head (ensure_weight_tying) by memory that both share when it is made.
# Guess: they stay one through training, and a saved adapter computes what it was trained with.
# Behaviour: moving the model to a device, or casting it, gives each its own; they are trained apart, and loading takes the head's for both.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 transformers==5.24.0 peft==0.21.2
"$folder/venv/bin/python" - "$folder/adapter" <<'PY' 2>/dev/null
import sys

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM


def base():
    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, tie_word_embeddings=True))


def are_equal(model):
    ends = model.base_model.model
    own = ends.model.embed_tokens.lora_embedding_A["default"], ends.lm_head.lora_B["default"].weight.T
    return torch.equal(*own)


ids = torch.arange(20)[None]
for is_cast in (False, True):
    model = get_peft_model(base(), LoraConfig(r=4, target_modules=["embed_tokens"], ensure_weight_tying=True))
    model = model.double().float() if is_cast else model
    optimizer = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=0.5)
    for _ in range(3):
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(sys.argv[1], save_embedding_layers=False)
    again = PeftModel.from_pretrained(base(), sys.argv[1])
    apart = (again.eval()(input_ids=ids).logits - model.eval()(input_ids=ids).logits).abs().max().item()
    print(f"cast: {is_cast}; tied after training: {are_equal(model)}; logits as loaded differ by {apart:.2g}")
    assert are_equal(model) is not is_cast and (apart > 1e-2) is is_cast, "the behaviour has changed"
PY
