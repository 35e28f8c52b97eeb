#!/usr/bin/env bash
# PEFT 0.21.2 sorts the keys of rank_pattern and alpha_pattern as it saves a config, though the first one that matches a module decides.
# Guess: `save_pretrained` keeps their order, so that a saved adapter computes what it was trained with.
# Behaviour: with an exact name before a general pattern that sorts first, the adapter that is loaded again has another scaling.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 transformers==5.24.0 peft==0.21.2
"$folder/venv/bin/python" - "$folder/adapter" <<'PY' 2>/dev/null
import json
import sys

import torch
from peft import LoraConfig, PeftModel, get_peft_model


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.query = torch.nn.Linear(8, 8)


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList([Block(), Block()])


# The first key names one module, the second one all of them.
config = LoraConfig(r=4, lora_alpha=4, target_modules=["query"], alpha_pattern={"blocks.0.query": 32, ".*query": 8})
model = get_peft_model(Model(), config)
trained = model.base_model.model.blocks[0].query.scaling["default"]
model.save_pretrained(sys.argv[1])
saved = [*json.load(open(f"{sys.argv[1]}/adapter_config.json"))["alpha_pattern"]]
again = PeftModel.from_pretrained(Model(), sys.argv[1]).base_model.model.blocks[0].query.scaling["default"]
print(f"keys as saved: {saved}; scaling of the first module: {trained} in training, {again} as loaded")
assert saved == [".*query", "blocks.0.query"] and (trained, again) == (8.0, 2.0), "the behaviour has changed"
PY
