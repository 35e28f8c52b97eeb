"""Bytes that the workers of a gang exchange for each token, for the base and for adapters: counted, and by formula.

A model of hidden size 4,096 in a Llama's shape (one layer, a narrow MLP and a small vocabulary: none of these changes
what is exchanged in a layer) runs on 1, 2, 4 and 8 workers that are threads; each row has an adapter of rank 16 on all
seven projections. The formula is S-LoRA's (arXiv 2311.03285) §6.2, in bytes that one worker sends over a ring.
"""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from pathlib import Path

import torch
from safetensors.torch import save_file

from motet.adapters.adapter import MODULES
from motet.benchmarks.rigs.thread_gang import ThreadGroup, run_threads
from motet.cluster.config import MotetConfig
from motet.workers.plan import Residence, SequencePlan, StepPlan, packed
from motet.workers.worker_builder import build_executor

HIDDEN, NUM_HEADS, NUM_KV_HEADS, INTERMEDIATE, VOCAB_SIZE, RANK = 4096, 32, 8, 512, 256, 16
NUM_ROWS = 16
DEGREES = (1, 2, 4, 8)


def write_model(folder: Path) -> Path:
    """A random model in bfloat16."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": VOCAB_SIZE,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": 1,
        "num_attention_heads": NUM_HEADS,
        "num_key_value_heads": NUM_KV_HEADS,
        "max_position_embeddings": 128,
        "tie_word_embeddings": True,
    }
    kv = HIDDEN // NUM_HEADS * NUM_KV_HEADS
    shapes = {"q": (HIDDEN, HIDDEN), "k": (kv, HIDDEN), "v": (kv, HIDDEN), "o": (HIDDEN, HIDDEN)}
    mlp = {"gate": (INTERMEDIATE, HIDDEN), "up": (INTERMEDIATE, HIDDEN), "down": (HIDDEN, INTERMEDIATE)}
    layer = "model.layers.0."
    tensors = {f"{layer}self_attn.{name}_proj.weight": torch.randn(shape) * 0.02 for name, shape in shapes.items()}
    tensors |= {f"{layer}mlp.{name}_proj.weight": torch.randn(shape) * 0.02 for name, shape in mlp.items()}
    norms = (f"{layer}input_layernorm.weight", f"{layer}post_attention_layernorm.weight", "model.norm.weight")
    tensors |= {name: torch.ones(HIDDEN) for name in norms}
    tensors["model.embed_tokens.weight"] = torch.randn(VOCAB_SIZE, HIDDEN)
    save_file({name: tensor.bfloat16() for name, tensor in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def count(model_path: Path, degree: int, with_adapters: bool) -> Counter[str]:
    """Bytes that one worker sends for a step of NUM_ROWS prompt tokens that samples nothing."""
    config = MotetConfig(
        model_path=model_path, data_dir=model_path, pool_bytes=64 << 20, tensor_parallel=degree, num_threads=1
    ).engine

    def work(group: ThreadGroup) -> Counter[str]:
        executor = build_executor(config, group, None)
        ranks = dict.fromkeys(MODULES, RANK)
        residence = Residence("digest", ranks, tuple(range(1, 400)))
        adapter = residence.digest if with_adapters else None
        sequence = SequencePlan(0, (1,) * NUM_ROWS, 0, packed([0]), adapter, None)
        executor.runner.run(StepPlan(1, (sequence,), (residence,) if with_adapters else (), ()))
        executor.close()
        return group.traffic.sent_bytes

    counted = run_threads(degree, work)
    assert all(each == counted[0] for each in counted), "the workers disagree about what they exchanged"
    return counted[0]


def expected(degree: int) -> dict[str, float]:
    """Bytes per token of one layer and the embedding, 2 to an element."""
    share = (degree - 1) / degree
    all_reduce, all_gather = 2 * share, share
    return {
        # Outputs of attention and MLP, and the embedding, which is cut along the vocabulary.
        "base": 2 * (2 + 1) * all_reduce * HIDDEN,
        # q, k, v, gate, up gather their ranks; o and down add theirs up.
        "adapters": 2 * RANK * (5 * all_gather + 2 * all_reduce),
    }


def main() -> None:
    """Prints the table and the line of JSON."""
    rows: list[tuple[int, float, float, dict[str, float]]] = []
    with tempfile.TemporaryDirectory() as name:
        model_path = write_model(Path(name))
        for degree in DEGREES:
            counted = count(model_path, degree, with_adapters=True) if degree > 1 else Counter[str]()
            formula = expected(degree)
            rows.append((degree, counted["base"] / NUM_ROWS, counted["adapters"] / NUM_ROWS, formula))
    print("degree | base counted | formula | adapters counted | formula | adapters' share   (bytes a token and worker)")
    for degree, base, adapters, formula in rows:
        share = adapters / (base + adapters) if base else 0.0
        print(
            f"{degree:6} | {base:12.0f} | {formula['base']:7.0f} | {adapters:16.0f} | {formula['adapters']:7.0f} "
            f"| {share:.2%}"
        )
    several = [row for row in rows if row[0] > 1]
    print(
        json.dumps(
            {
                "base_over_formula": {row[0]: round(row[1] / row[3]["base"], 4) for row in several},
                "adapters_over_formula": {row[0]: round(row[2] / row[3]["adapters"], 4) for row in several},
                "adapters_share": {row[0]: round(row[2] / (row[1] + row[2]), 4) for row in several},
            }
        )
    )


if __name__ == "__main__":
    main()
