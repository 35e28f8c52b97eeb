#!/usr/bin/env bash
# PEFT 0.21.2 computes a head with trained tokens (trainable_token_indices with lm_head) without the head's bias.
# Guess: rows of the named tokens are replaced, and all else of the linear stays.
# Behaviour: once an adapter is on, the bias is added to no token's logit.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 transformers==5.24.0 peft==0.21.2
"$folder/venv/bin/python" - <<'PY' 2>/dev/null
from copy import deepcopy

import torch
from peft import LoraConfig, get_peft_model
from transformers import PhiConfig, PhiForCausalLM

torch.manual_seed(0)
sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
base = PhiForCausalLM(PhiConfig(**sizes, num_attention_heads=2, tie_word_embeddings=False)).eval()
torch.nn.init.normal_(base.lm_head.bias)
config = LoraConfig(r=4, target_modules=["q_proj"], trainable_token_indices={"lm_head": [3]})
model = get_peft_model(deepcopy(base), config).eval()  # not trained: it is the base
ids = torch.arange(9)[None]
apart = base(input_ids=ids).logits - model(input_ids=ids).logits
print(f"logits differ from the base's by its bias: {torch.allclose(apart, base.lm_head.bias, atol=1e-5)}")
assert torch.allclose(apart, base.lm_head.bias.expand_as(apart), atol=1e-5), "the behaviour has changed"
PY
