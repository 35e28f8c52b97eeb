"""A long prompt on a gang: cut by heads, as motet computes it, or by tokens (Ulysses, arXiv 2309.14509).

By the cost model; nothing runs. Where workers outnumber the KV heads, those that hold the same one may each project
the keys and values of a part of the tokens, and exchange them ("shared"). Or all workers hold all weights, compute
their own tokens, and exchange queries, keys, values and results before and after attention, which stays cut by heads
("tokens"): two all-reduces a layer less.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass, replace

from motet.benchmarks.rigs.published_bases import published_base
from motet.workers.costs.devices import DEVICES, Device
from motet.workers.costs.operations import Chunk, Operation, StepBatch, kv_copies, model_size, step_operations
from motet.workers.models.config import ModelConfig

ELEMENT_BYTES = 2
LENGTHS = (8192, 131072)
LLAMA = published_base("Llama-3-8B")
GANGS = {
    "Llama-3-8B": (LLAMA, 8),
    "Llama-3-8B, more workers than KV heads": (LLAMA, 16),
    "the same with one KV head": (replace(LLAMA, num_kv_heads=1), 8),
    "Llama-2-70B": (published_base("Llama-2-70B"), 8),
}


@dataclass(frozen=True)
class Prefill:
    heads_s: float
    shared_s: float
    tokens_s: float
    weights_bytes: int  # of a worker, where it computes its own tokens


def prefill(model: ModelConfig, num_tokens: int, device: Device, degree: int) -> Prefill:
    """The least time of a prompt of so many tokens in one step, cut in each way."""
    batch = StepBatch(chunks=(Chunk(0, num_tokens),))
    by_heads = step_operations(model, batch, degree)
    copies = kv_copies(model.num_kv_heads, degree)
    query, kv = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    moved = model.num_layers * num_tokens * ELEMENT_BYTES  # for each feature
    # Each key and value goes to all others that hold its head.
    shared = [_projected_once(one, query, kv, copies) if one.name == "KQV" else one for one in by_heads]
    shared.append(Operation("exchange", 0, 0, 0, moved * 2 * kv * (copies - 1)))
    by_tokens = [
        one if "attention" in one.name else replace(alone, read_bytes=degree * alone.read_bytes)
        for one, alone in zip(_but_collectives(by_heads), step_operations(model, batch), strict=True)
    ]
    exchanged = moved * (2 * query + 2 * kv * copies) * (degree - 1) / degree
    by_tokens.append(Operation("exchange", 0, 0, 0, exchanged))
    heads_s, shared_s, tokens_s = (
        sum(one.seconds(device, degree) for one in way) for way in (by_heads, shared, by_tokens)
    )
    return Prefill(heads_s, shared_s, tokens_s, model_size(model).weights_bytes())


def _projected_once(one: Operation, query: int, kv: int, copies: int) -> Operation:
    share = (query + 2 * kv) / (query + 2 * kv * copies)
    return replace(one, flops=share * one.flops, activation_bytes=share * one.activation_bytes)


def _but_collectives(operations: tuple[Operation, ...]) -> list[Operation]:
    return [one for one in operations if one.name != "communication"]


def main() -> None:
    argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0]).parse_args()
    gains = {}
    print("a prompt's milliseconds by heads; times as fast: keys and values projected once, cut by tokens")
    for name, (model, degree) in GANGS.items():
        for device in (DEVICES["H100 SXM"], DEVICES["H100 PCIe"]):
            for num_tokens in LENGTHS:
                found = prefill(model, num_tokens, device, degree)
                shared, tokens = found.heads_s / found.shared_s, found.heads_s / found.tokens_s
                gains[f"{name}, {degree} {device.name}, {num_tokens}"] = round(shared, 3), round(tokens, 3)
                print(
                    f"{name:40} {degree:2} {device.name:10} {num_tokens:7} {found.heads_s * 1e3:9.1f} "
                    f"{shared:6.3f} {tokens:6.3f}  {found.weights_bytes / 1e9:5.1f} GB of weights a worker"
                )
    print(json.dumps({"shared_and_tokens_over_heads": gains}))


if __name__ == "__main__":
    main()
