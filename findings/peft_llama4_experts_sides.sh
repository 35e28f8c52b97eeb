#!/usr/bin/env bash
# peft 0.21.2 with transformers 5.24.0: LoRA of Llama 4's experts has its inputs and outputs swapped.
#
# Guess: Llama 4's fused experts, gate_up_proj [experts, hidden, 2 * width] that are multiplied as x @ W, get LoRA as those
# of gpt-oss, which have the same form: A [experts * rank, inputs], B [outputs, rank * experts].
# Seen: of gpt-oss lora_A has as many columns as gate_up_proj has inputs; of Llama 4 it has as many as outputs, and lora_B has
# as many rows as inputs. A reader that takes both alike refuses one of them, or, where sides are equal, computes nonsense.
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/environment"
"$folder/environment/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 transformers==5.24.0 peft==0.21.2
"$folder/environment/bin/python" - <<'PYTHON'
import warnings

from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, GptOssConfig, Llama4TextConfig

warnings.simplefilter("ignore")
HIDDEN, WIDTH, EXPERTS, RANK = 32, 24, 4, 2
SHAPE = {"hidden_size": HIDDEN, "intermediate_size": WIDTH, "num_hidden_layers": 1, "num_attention_heads": 4} | {
    **{"num_key_value_heads": 2, "head_dim": 8, "vocab_size": 50, "num_local_experts": EXPERTS, "pad_token_id": None},
}
bases = {
    "gpt_oss": (GptOssConfig(**SHAPE, num_experts_per_tok=2), "mlp.experts.gate_up_proj"),
    "llama4": (Llama4TextConfig(**SHAPE, intermediate_size_mlp=WIDTH), "feed_forward.experts.gate_up_proj"),
}
sides = {}
for name, (config, parameter) in bases.items():
    lora = LoraConfig(r=RANK, target_modules=[], target_parameters=[parameter])
    model = get_peft_model(AutoModelForCausalLM.from_config(config), lora)
    shapes = {key: tuple(value.shape) for key, value in model.named_parameters() if ".lora_" in key}
    sides[name] = [next(shape for key, shape in shapes.items() if letter in key) for letter in ("lora_A", "lora_B")]
    print(name, sides[name])
ranks = EXPERTS * RANK
assert sides["gpt_oss"] == [(ranks, HIDDEN), (2 * WIDTH, ranks)], "gpt-oss has other sides now"
assert sides["llama4"] == [(ranks, 2 * WIDTH), (HIDDEN, ranks)], "Llama 4 has other sides now"
PYTHON
