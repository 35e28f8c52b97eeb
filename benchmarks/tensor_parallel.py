"""Collectives of a gang's step, and bytes that its workers exchange for each token: counted, and by formula.

A model of hidden size 4,096 in a Llama's shape (one layer, a narrow MLP and a small vocabulary: none of these changes
what is exchanged in a layer) runs on 2, 4 and 8 workers that are threads; without adapters, and with one of rank 16 on
all seven projections, which adds nothing to what is exchanged. Bytes are those that one worker sends over a ring.
"""

from __future__ import annotations

import json
import tempfile
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
DEGREES = (2, 4, 8)


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


def count(model_path: Path, degree: int, with_adapters: bool) -> tuple[int, int]:
    """Collectives of a step of NUM_ROWS prompt tokens that samples nothing, and bytes that one worker sends."""
    config = MotetConfig.of(
        model_path=model_path, data_dir=model_path, pool_bytes=64 << 20, tensor_parallel=degree, num_threads=1
    ).engine

    def work(group: ThreadGroup) -> tuple[int, int]:
        executor = build_executor(config, group, None)
        group.traffic.num_collectives = group.traffic.sent_bytes = 0
        ranks = dict.fromkeys(MODULES, RANK)
        residence = Residence("digest", ranks, tuple(range(1, 600)))
        adapter = residence.digest if with_adapters else None
        sequence = SequencePlan(0, (1,) * NUM_ROWS, 0, packed([0]), adapter, None)
        executor.runner.run(StepPlan(1, (sequence,), (residence,) if with_adapters else (), ()))
        executor.close()
        return group.traffic.num_collectives, group.traffic.sent_bytes

    counted = run_threads(degree, work)
    assert all(each == counted[0] for each in counted), "the workers disagree about what they exchanged"
    return counted[0]


def expected(degree: int) -> float:
    """Bytes per token of one layer and the embedding, which is cut along the vocabulary, 2 to an element."""
    return 2 * (2 + 1) * 2 * (degree - 1) / degree * HIDDEN


def main() -> None:
    """Prints the table and the line of JSON."""
    rows: list[tuple[int, tuple[int, int], tuple[int, int], float]] = []
    with tempfile.TemporaryDirectory() as name:
        model_path = write_model(Path(name))
        for degree in DEGREES:
            without, with_adapters = (count(model_path, degree, adapters) for adapters in (False, True))
            rows.append((degree, without, with_adapters, NUM_ROWS * expected(degree)))
    print("degree | collectives | with adapters | bytes a token | with adapters | formula")
    for degree, without, with_adapters, formula in rows:
        print(
            f"{degree:6} | {without[0]:11} | {with_adapters[0]:13} | {without[1] / NUM_ROWS:13.0f} "
            f"| {with_adapters[1] / NUM_ROWS:13.0f} | {formula / NUM_ROWS:7.0f}"
        )
    print(
        json.dumps(
            {
                "bytes_over_formula": {row[0]: round(row[1][1] / row[3], 4) for row in rows},
                "collectives_with_adapters_over_without": {row[0]: round(row[2][0] / row[1][0], 4) for row in rows},
                "bytes_with_adapters_over_without": {row[0]: round(row[2][1] / row[1][1], 4) for row in rows},
            }
        )
    )


if __name__ == "__main__":
    main()
