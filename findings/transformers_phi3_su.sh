#!/usr/bin/env bash
# transformers 5.24.0 does not read the first published files of Phi-3 with long contexts, though its code renames what they say.
# Guess: `rope_scaling` of the type "su" is read as "longrope", since Phi3Config turns the one name into the other.
# Behaviour: with the same lists and lengths "longrope" is read; "su" raises KeyError for original_max_position_embeddings, which the config names.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check transformers==5.24.0
"$folder/venv/bin/python" - <<'PY'
from transformers import Phi3Config

LISTS = {"short_factor": [1.0] * 48, "long_factor": [2.0] * 48}


def read(kind):
    try:
        config = Phi3Config(
            rope_scaling={"type": kind, **LISTS}, max_position_embeddings=131072, original_max_position_embeddings=4096
        )
    except KeyError as error:
        return f"KeyError: {error.args[0]}"
    return config.rope_parameters["rope_type"]


seen = {kind: read(kind) for kind in ("longrope", "su")}
for kind, value in seen.items():
    print(f"{kind}: {value}")
assert seen["longrope"] == "longrope", "the behaviour has changed"
assert seen["su"].startswith("KeyError") and "original_max_position_embeddings" in seen["su"], "the behaviour has changed"
PY
