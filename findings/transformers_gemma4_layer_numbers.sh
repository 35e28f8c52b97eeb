#!/usr/bin/env bash
# transformers 5.24.0 writes the numbers of layers in per_layer_config of a Gemma 4 with as many digits as the last one has.
#
# Guess: config.json of a Gemma 4 with 30 layers names the layers with larger heads by "5", "11", "17" and so on, since
# the config class is given them as whole numbers, and json.dumps would write these.
# Seen: "05", "11", "17", "23", "29". With at most ten layers it is "5". A reader that looks for str(layer) gives layer 5
# heads of 256 in place of 512, and the shapes of its tensors then contradict the config. transformers itself reads "5"
# and "05" alike.
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/environment"
"$folder/environment/bin/pip" install --quiet --disable-pip-version-check transformers==5.24.0
"$folder/environment/bin/python" - "$folder" <<'PYTHON'
import json
import sys
from pathlib import Path

from transformers import Gemma4TextConfig

for layers, expected in ((30, ["05", "11", "17", "23", "29"]), (6, ["5"])):
    folder = Path(sys.argv[1]) / str(layers)
    Gemma4TextConfig(num_hidden_layers=layers).save_pretrained(folder)
    written = json.loads((folder / "config.json").read_text())
    print(layers, "layers:", sorted(written["per_layer_config"]))
    assert sorted(written["per_layer_config"]) == expected, "transformers writes them otherwise now"
    for name in ("5", "05"):
        written["per_layer_config"] = {name: {"head_dim": 512}}
        (folder / "config.json").write_text(json.dumps(written))
        read = Gemma4TextConfig.from_pretrained(folder)
        assert read.per_layer_config[5].head_dim == 512, name
        assert read.per_layer_config[4].head_dim == 256, name
PYTHON
