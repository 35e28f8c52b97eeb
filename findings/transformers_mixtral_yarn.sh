#!/usr/bin/env bash
# transformers 5.24.0 makes no Mixtral with YaRN unless its config names head_dim, which it may leave out.
# Guess: a model without head_dim takes hidden_size / num_attention_heads with every kind of rotary positions, as it does
# with the plain one and as Mistral and Llama do with YaRN.
# Behaviour: MixtralConfig keeps head_dim None, and YaRN multiplies it: a TypeError before any weight is made.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 transformers==5.24.0
"$folder/venv/bin/python" - <<'PY'
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

SIZES = dict(vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2)
YARN = {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1e4, "original_max_position_embeddings": 32}


def made(model, config, **more):
    try:
        model(config(**SIZES, max_position_embeddings=64, **more))
    except TypeError as error:
        return f"TypeError: {error}"
    return "made"


seen = {
    "Mixtral": made(MixtralForCausalLM, MixtralConfig, num_local_experts=2),
    "Mixtral, YaRN": made(MixtralForCausalLM, MixtralConfig, num_local_experts=2, rope_parameters=YARN),
    "Mixtral, YaRN, head_dim": made(MixtralForCausalLM, MixtralConfig, num_local_experts=2, rope_parameters=YARN, head_dim=8),
    "Llama, YaRN": made(LlamaForCausalLM, LlamaConfig, rope_parameters=YARN),
}
for name, value in seen.items():
    print(f"{name}: {value}")
assert seen == {
    "Mixtral": "made",
    "Mixtral, YaRN": "TypeError: unsupported operand type(s) for *: 'NoneType' and 'float'",
    "Mixtral, YaRN, head_dim": "made",
    "Llama, YaRN": "made",
}, "the behaviour has changed"
PY
