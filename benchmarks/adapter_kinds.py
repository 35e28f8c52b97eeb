"""Decodes with adapters that scale and shift outputs (DoRA), against the same ones as plain LoRA.

A real engine in this process with SmolLM2-135M's shape (bfloat16, pages of 16 tokens). Rounds of both take turns, and
of the base: each sequence of a round has an adapter of its own. Prints CPU time over that of plain LoRA.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np

from motet.adapters.adapter import EXPERT_MODULES
from motet.adapters.format.content import OutputVectors
from motet.adapters.packing.layout import AdapterLayout
from motet.adapters.store.store import AdapterStore
from motet.benchmarks.rigs import random_model
from motet.benchmarks.rigs.engine_side import BLOCK_SIZE, EngineSide, fill_store
from motet.benchmarks.rigs.workload import Job
from motet.workers.models.config import ModelConfig
from motet.workers.wire.messages import AdapterRef


def add_vectors(root: Path, model_path: Path, refs: list[AdapterRef]) -> list[AdapterRef]:
    """The same adapters, and vectors of all outputs, as DoRA has them."""
    model, store, chance = ModelConfig.from_folder(model_path), AdapterStore(root), np.random.default_rng(0)
    layout, scaled = AdapterLayout(model.shape, model.slab(BLOCK_SIZE), "bfloat16"), list[AdapterRef]()
    for ref in refs:
        content = store.load_content(ref.digest)
        outputs = {
            (layer, module): OutputVectors(*chance.normal(0, 0.02, (2, model.shape.modules[module][1])).astype("f4"))
            for layer, module in content.matrices
            if module not in EXPERT_MODULES
        }
        content = replace(content, outputs=outputs, outputs_source=ref.digest)
        store.put(content, [layout])
        scaled.append(AdapterRef(content.digest, content.module_ranks))
    return scaled


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, default=16, help="of a round, each with an adapter of its own")
    parser.add_argument("--tokens", type=int, default=24, help="of each answer")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    number, result = arguments.sequences, dict[str, float]()
    with tempfile.TemporaryDirectory(prefix="motet-bench-") as folder:
        model_path, store_path = random_model.write_model(Path(folder) / "model"), Path(folder) / "data" / "store"
        plain = fill_store(store_path, model_path, random_model.write_adapters(Path(folder) / "adapters", number))
        side = EngineSide(model_path, store_path, plain + add_vectors(store_path, model_path, plain), arguments.threads)
        kinds = {"plain": range(number), "scaled": range(number, 2 * number), "base": [None] * number}
        rounds = [
            {
                kind: side.run([Job([5, 6, 7, 8], arguments.tokens, adapter) for adapter in adapters]).cpu_s
                for kind, adapters in kinds.items()
            }
            for _ in range(arguments.repetitions)
        ]
    for kind in ("scaled", "base"):
        ratio = statistics.median(times[kind] / times["plain"] for times in rounds)
        result[f"{kind}_over_plain"] = round(ratio, 3)
        print(f"{kind}: {ratio:.3f} of the CPU time of plain LoRA, {number} sequences")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
