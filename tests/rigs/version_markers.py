"""A base and versions of an adapter, each of which emits only tokens of its own, whatever it is asked.

Attention is uniform, and a version's LoRA of `v_proj` adds its marker to the value of each position: 1 in the channel
of its group of tokens, and -PENALTY in the channels of all others. The head gives a group's tokens the logit of their
channel, so a context of one version's KV alone leaves nothing but its group. One page of another version among PENALTY
pages takes the group's channel below zero, and tokens of no group come. Without an adapter all tokens are alike.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors.torch import save, save_file

HIDDEN = 64
NUM_GROUPS = 32
PENALTY = 64.0
CONFIG_FILE, TENSORS_FILE = "adapter_config.json", "adapter_model.safetensors"
_GAIN = 40 * PENALTY * (NUM_GROUPS / HIDDEN) ** 0.5  # the group's logit is then about 40, after the norm
_PREFIX = "base_model.model.model.layers.0.self_attn.v_proj"


def write_base(folder: Path, vocab_size: int, max_positions: int = 4096) -> Path:
    """Writes config.json and the weights, in float32, without a tokenizer. Returns the folder."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab_size,
        "hidden_size": HIDDEN,
        "intermediate_size": HIDDEN,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": HIDDEN,
        "max_position_embeddings": max_positions,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "torch_dtype": "float32",
    }
    embedding, head = torch.zeros(vocab_size, HIDDEN), torch.zeros(vocab_size, HIDDEN)
    embedding[:, 0] = 1.0
    for token_id in range(vocab_size):
        if (group := _group_of(token_id)) is not None:
            head[token_id, 1 + group] = _GAIN
    layer, zeros = "model.layers.0", torch.zeros(HIDDEN, HIDDEN)
    tensors = {"model.embed_tokens.weight": embedding, "lm_head.weight": head, "model.norm.weight": torch.ones(HIDDEN)}
    for norm in ("input_layernorm", "post_attention_layernorm"):
        tensors[f"{layer}.{norm}.weight"] = torch.ones(HIDDEN)
    for linear in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", *_MLP):
        tensors[f"{layer}.{linear}.weight"] = zeros.clone()
    tensors[f"{layer}.self_attn.o_proj.weight"] = torch.eye(HIDDEN)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


_MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")


def files_of(version: int) -> dict[str, bytes]:
    """The two files of the adapter's version. All versions differ; those NUM_GROUPS apart share their tokens."""
    marker = torch.zeros(HIDDEN, 1)
    marker[1 : 1 + NUM_GROUPS] = -PENALTY
    marker[1 + version % NUM_GROUPS] = 1.0
    reading = torch.zeros(1, HIDDEN)
    reading[0, 0] = HIDDEN**-0.5 * (1 + 2.0**-12 * (version // NUM_GROUPS))  # the norm makes the first channel its root
    config = {"peft_type": "LORA", "r": 1, "lora_alpha": 1, "target_modules": ["v_proj"], "bias": "none"}
    tensors = {f"{_PREFIX}.lora_A.weight": reading, f"{_PREFIX}.lora_B.weight": marker}
    return {CONFIG_FILE: json.dumps(config).encode(), TENSORS_FILE: save(tensors)}


def num_wrong(token_ids: Iterable[int], version: int) -> int:
    """How many of the tokens the version cannot have emitted."""
    return sum(_group_of(token_id) != version % NUM_GROUPS for token_id in token_ids)


def _group_of(token_id: int) -> int | None:
    """The group that a token belongs to; None: to none, like every third one, so that wrong ones are likely drawn."""
    return None if token_id % 3 == 0 else token_id // 3 % NUM_GROUPS
