#!/usr/bin/env bash
# transformers 5.24.0: what takes pictures too does not cap the logits that its text model caps.
# Guess: `final_logit_softcapping` in `text_config` bounds the logits of Gemma3ForConditionalGeneration as it bounds those of Gemma3ForCausalLM.
# Behaviour: with the same weights and the same tokens the text model's logits stay below the cap, and the whole model's do not.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check transformers==5.24.0 torch==2.13.0
"$folder/venv/bin/python" - <<'PY'
import torch
from transformers import Gemma3Config, Gemma3ForCausalLM, Gemma3ForConditionalGeneration

CAP = 0.5
text = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "final_logit_softcapping": CAP,
}
vision = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28, "patch_size": 14}
config = Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4, image_token_index=63, boi_token_index=61, eoi_token_index=62)
torch.manual_seed(0)
whole = Gemma3ForConditionalGeneration(config).eval()
for parameter in whole.parameters():
    torch.nn.init.normal_(parameter, std=0.5)
alone = Gemma3ForCausalLM(config.text_config).eval()
alone.model.load_state_dict(whole.model.language_model.state_dict())
alone.tie_weights()
tokens = torch.tensor([[2, 5, 9, 11]])
with torch.inference_mode():
    of_whole, of_text = whole(input_ids=tokens).logits, alone(input_ids=tokens).logits
print(f"the largest logit: whole model {of_whole.abs().max():.2f}, its text model {of_text.abs().max():.2f}, the cap {CAP}")
capped = CAP * torch.tanh(of_whole / CAP)
print(f"the whole model's, capped by hand, differ from the text model's by {(capped - of_text).abs().max():.1e}")
assert of_text.abs().max() <= CAP < of_whole.abs().max(), "the behaviour has changed"
assert torch.allclose(capped, of_text, atol=1e-5), "the behaviour has changed"
PY
