#!/usr/bin/env bash
# transformers 5.24.0: Llama4ForConditionalGeneration computes no prompt of text alone by its own forward.
#
# Guess: as with Gemma 3, Mistral 3 and Qwen-VL, a forward pass with input_ids and no picture gives the text's logits.
# Seen: an AttributeError that names image_outputs. Its language_model, called directly, computes the same prompt. So what
# compares with the whole model has to call the text model, and PEFT around the whole one cannot be asked for text.
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/environment"
"$folder/environment/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 transformers==5.24.0
"$folder/environment/bin/python" - <<'PYTHON'
import torch
from transformers import Llama4Config, Llama4ForConditionalGeneration

TEXT = {"hidden_size": 32, "intermediate_size": 24, "intermediate_size_mlp": 24, "num_hidden_layers": 1, "vocab_size": 50} | {
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "num_local_experts": 2, "pad_token_id": None},
}
VISION = {"hidden_size": 16, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2} | {
    **{"image_size": 28, "patch_size": 14, "vision_output_dim": 16, "projector_input_dim": 16, "projector_output_dim": 16},
}
model = Llama4ForConditionalGeneration(Llama4Config(text_config=TEXT, vision_config=VISION)).eval()
prompt = torch.tensor([[1, 2, 3]])
print("language_model:", tuple(model.language_model(input_ids=prompt).logits.shape))
try:
    model(input_ids=prompt)
except AttributeError as error:
    print("whole model:", error)
    assert "image_outputs" in str(error), "another error now"
else:
    raise SystemExit("the whole model computes text alone now")
PYTHON
