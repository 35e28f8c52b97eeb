"""Decodes with adapters that scale and shift outputs (DoRA), or change embedding and head, against plain LoRA.

The adapters are the same but for what a kind has beside LoRA: "scaled" vectors of all outputs, "ends" LoRA of embedding
and head at the rank of the other modules and rows of 64 tokens in each, "saved" a row of every token in the head.

A real engine in this process with SmolLM2-135M's shape (bfloat16, pages of 16 tokens). Rounds of both take turns, and
of the base: each sequence of a round has an adapter of its own. Prints CPU time over that of plain LoRA.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from motet.adapters.adapter import END_MODULES, EXPERT_MODULES, HEAD, OUTER
from motet.adapters.format.content import AdapterContent, LoraMatrices, OutputVectors, TokenRows
from motet.adapters.packing.layout import AdapterLayout
from motet.adapters.store.store import AdapterStore
from motet.benchmarks.rigs import random_model
from motet.benchmarks.rigs.engine_side import BLOCK_SIZE, EngineSide, fill_store
from motet.benchmarks.rigs.workload import Job
from motet.workers.models.config import ModelConfig
from motet.workers.wire.messages import AdapterRef


def with_vectors(content: AdapterContent, model: ModelConfig, chance: np.random.Generator) -> AdapterContent:
    """Vectors of all outputs, as DoRA has them."""
    outputs = {
        (layer, module): OutputVectors(*chance.normal(0, 0.02, (2, model.shape.modules[module][1])).astype("f4"))
        for layer, module in content.matrices
        if module not in EXPERT_MODULES
    }
    return replace(content, outputs=outputs, outputs_source=content.digest)


def with_ends(content: AdapterContent, model: ModelConfig, chance: np.random.Generator) -> AdapterContent:
    """LoRA of both ends, and rows of some tokens."""
    rank, matrices = max(content.module_ranks.values()), dict(content.matrices)
    for module in END_MODULES:
        num_in, num_out = model.shape.sides(OUTER, module) or (0, 0)
        a, b = (chance.normal(0, 0.02, size).astype("f4") for size in ((rank, num_in), (num_out, rank)))
        matrices[OUTER, module] = LoraMatrices(a, b, 1.0)
    rows = {module: _rows(64, model, chance) for module in END_MODULES}
    return replace(content, matrices=matrices, token_rows=rows)


def with_saved_head(content: AdapterContent, model: ModelConfig, chance: np.random.Generator) -> AdapterContent:
    return replace(content, token_rows={HEAD: _rows(model.vocab_size, model, chance)})


def _rows(count: int, model: ModelConfig, chance: np.random.Generator) -> TokenRows:
    token_ids = np.sort(chance.choice(model.vocab_size, count, replace=False))
    return TokenRows(token_ids, chance.normal(0, 0.02, (count, model.hidden_size)).astype("f4"))


KINDS = {"scaled": with_vectors, "ends": with_ends, "saved": with_saved_head}


def add_kind(kind: str, root: Path, model_path: Path, refs: Sequence[AdapterRef]) -> list[AdapterRef]:
    """The same adapters with what a kind has beside LoRA."""
    model, store, chance = ModelConfig.from_folder(model_path), AdapterStore(root), np.random.default_rng(0)
    layout, refs_of_kind = AdapterLayout(model.shape, model.slab(BLOCK_SIZE), "bfloat16"), list[AdapterRef]()
    for ref in refs:
        content = KINDS[kind](store.load_content(ref.digest), model, chance)
        store.put(content, [layout])
        refs_of_kind.append(AdapterRef(content.digest, content.module_ranks))
    return refs_of_kind


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
        saved = -(-number // 4)  # of which each takes as much as the base's head
        refs, kinds = [*plain], {"plain": [*range(number)], "base": [None] * number}
        for kind in KINDS:
            of_kind = add_kind(kind, store_path, model_path, plain[:saved] if kind == "saved" else plain)
            kinds[kind] = [len(refs) + index % len(of_kind) for index in range(number)]
            refs += of_kind
        side = EngineSide(model_path, store_path, refs, arguments.threads)
        rounds = [
            {
                kind: side.run([Job([5, 6, 7, 8], arguments.tokens, adapter) for adapter in adapters]).cpu_s
                for kind, adapters in kinds.items()
            }
            for _ in range(arguments.repetitions)
        ]
    for kind in (*KINDS, "base"):
        ratio = statistics.median(times[kind] / times["plain"] for times in rounds)
        result[f"{kind}_over_plain"] = round(ratio, 3)
        print(f"{kind}: {ratio:.3f} of the CPU time of plain LoRA, {number} sequences")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
