"""A model of SmolLM2-135M's shape and PEFT adapters for it, with random weights: speed without a download.

Run it to keep them: `python benchmarks/rigs/random_model.py FOLDER --adapters 64` writes
FOLDER/model and FOLDER/adapters/*.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from safetensors.torch import save_file

RANKS = (8, 16, 32, 64)  # adapter i has rank RANKS[i % 4]
HIDDEN, INTERMEDIATE, NUM_LAYERS, NUM_HEADS, NUM_KV_HEADS, VOCAB_SIZE = 576, 1536, 30, 9, 3, 49152
HEAD_DIM = HIDDEN // NUM_HEADS
LINEARS = {  # name under the layer: (in, out)
    "self_attn.q_proj": (HIDDEN, NUM_HEADS * HEAD_DIM),
    "self_attn.k_proj": (HIDDEN, NUM_KV_HEADS * HEAD_DIM),
    "self_attn.v_proj": (HIDDEN, NUM_KV_HEADS * HEAD_DIM),
    "self_attn.o_proj": (NUM_HEADS * HEAD_DIM, HIDDEN),
    "mlp.gate_proj": (HIDDEN, INTERMEDIATE),
    "mlp.up_proj": (HIDDEN, INTERMEDIATE),
    "mlp.down_proj": (INTERMEDIATE, HIDDEN),
}
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": HIDDEN,
    "intermediate_size": INTERMEDIATE,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": NUM_HEADS,
    "num_key_value_heads": NUM_KV_HEADS,
    "head_dim": HEAD_DIM,
    "hidden_act": "silu",
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000,
    "rope_scaling": None,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "torch_dtype": "bfloat16",
}
NUM_EXPERTS, NUM_CHOSEN = 8, 2  # an expert is 1 / NUM_CHOSEN as wide as the MLP
EXPERT_LINEARS = {
    **{name: size for name, size in LINEARS.items() if name.startswith("self_attn")},
    "block_sparse_moe.gate": (HIDDEN, NUM_EXPERTS),
    **{
        f"block_sparse_moe.experts.{expert}.{name}": size
        for expert in range(NUM_EXPERTS)
        for name, size in (
            ("w1", (HIDDEN, INTERMEDIATE // NUM_CHOSEN)),
            ("w2", (INTERMEDIATE // NUM_CHOSEN, HIDDEN)),
            ("w3", (HIDDEN, INTERMEDIATE // NUM_CHOSEN)),
        )
    },
}
EXPERTS_CONFIG = {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "intermediate_size": INTERMEDIATE // NUM_CHOSEN,
    "num_local_experts": NUM_EXPERTS,
    "num_experts_per_tok": NUM_CHOSEN,
    "sliding_window": None,
}


def write_model(folder: Path, seed: int = 0, has_experts: bool = False) -> Path:
    """Writes the base in bfloat16 (270 MB) and returns its folder.

    With experts it is Mixtral's kind (750 MB), and as many parameters are active.
    """
    generator = torch.Generator().manual_seed(seed)
    tensors = {"model.embed_tokens.weight": _random((VOCAB_SIZE, HIDDEN), 0.05, generator)}
    tensors["model.norm.weight"] = torch.ones(HIDDEN, dtype=torch.bfloat16)
    for layer in range(NUM_LAYERS):
        prefix = f"model.layers.{layer}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}.{norm}.weight"] = torch.ones(HIDDEN, dtype=torch.bfloat16)
        linears = EXPERT_LINEARS if has_experts else LINEARS
        for name, (num_in, num_out) in linears.items():
            tensors[f"{prefix}.{name}.weight"] = _random((num_out, num_in), num_in**-0.5, generator)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(CONFIG | (EXPERTS_CONFIG if has_experts else {}), indent=1))
    return folder


def write_adapters(folder: Path, count: int, seed: int = 0) -> list[Path]:
    """Writes `count` PEFT folders that target all seven projections (0.6 MB per rank each) and returns them."""
    return [_write_adapter(folder / f"adapter-{i:03d}", RANKS[i % len(RANKS)], seed + i) for i in range(count)]


def _write_adapter(folder: Path, rank: int, seed: int) -> Path:
    generator = torch.Generator().manual_seed(1_000_000 + seed)
    tensors = {}
    for layer in range(NUM_LAYERS):
        for name, (num_in, num_out) in LINEARS.items():
            prefix = f"base_model.model.model.layers.{layer}.{name}"
            tensors[f"{prefix}.lora_A.weight"] = _random((rank, num_in), num_in**-0.5, generator)
            tensors[f"{prefix}.lora_B.weight"] = _random((num_out, rank), 0.1 * rank**-0.5, generator)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": 2 * rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": [name.split(".")[1] for name in LINEARS],
        "inference_mode": True,
    }
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=1))
    return folder


def _random(shape: tuple[int, int], std: float, generator: torch.Generator) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.bfloat16).normal_(0.0, std, generator=generator)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--adapters", type=int, default=64, help="how many (default 64)")
    arguments = parser.parse_args()
    print(write_model(arguments.folder / "model"))
    for path in write_adapters(arguments.folder / "adapters", arguments.adapters):
        print(path)


if __name__ == "__main__":
    main()
