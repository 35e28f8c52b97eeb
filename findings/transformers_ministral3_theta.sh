#!/usr/bin/env bash
# transformers 5.24.0 ignores the rope_theta of a Ministral 3 whose config names no rope_parameters, and takes it for gpt-oss.
# Guess: a rope_theta beside the other keys, as files before version 5 have it, counts for every family, also where the family's default is yarn.
# Behaviour: Llama and gpt-oss (default yarn without a theta) take it; Ministral3Config keeps the 1000000.0 of its own default, without a warning.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check transformers==5.24.0
"$folder/venv/bin/python" -W error - <<'PY'
from transformers import GptOssConfig, LlamaConfig, Ministral3Config

classes = (LlamaConfig, GptOssConfig, Ministral3Config)
seen = {of.__name__: of(rope_theta=123456.0).rope_parameters["rope_theta"] for of in classes}
for name, theta in seen.items():
    print(f"{name}: {theta}")
expected = {"LlamaConfig": 123456.0, "GptOssConfig": 123456.0, "Ministral3Config": 1000000.0}
assert seen == expected, "the behaviour has changed"
PY
