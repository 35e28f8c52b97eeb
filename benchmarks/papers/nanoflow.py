"""NanoFlow (arXiv 2408.12757): its table of operations, the optimum, and what limits which base on which device.

All by the cost model in `workers/costs/`; nothing runs.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from dataclasses import dataclass, replace

from motet.benchmarks.papers.step_balance import (
    Balance,
    Lengths,
    full_batch,
    memory_over_compute,
    most_tokens_per_s,
    step_balance,
)
from motet.benchmarks.rigs.published_bases import published_base
from motet.workers.costs.devices import DEVICES
from motet.workers.costs.operations import Chunk, StepBatch, step_operations

DEGREE = 8
A100 = replace(DEVICES["A100 SXM 80GB"], bytes_per_s=2e12)  # as the paper rounds it
LENGTHS = {  # means of the paper's three loads, table 4
    "Splitwise": Lengths(1155, 211),
    "LMSYS": Lengths(102, 222),
    "ShareGPT": Lengths(246, 322),
}
# B = 2,048 of prompts of 512 tokens and answers of 1,024, halfway through: two of three rows decode.
BATCH = StepBatch((512 + 1024 // 2,) * 1365, (Chunk(0, 512), Chunk(0, 171)))


@dataclass(frozen=True)
class Published:
    """A row of the paper's table 2, of Llama-2-70B on eight A100 80GB at B = 2,048."""

    gflop: float
    gigabytes: float
    milliseconds: float


PUBLISHED = {
    "KQV": Published(27487.8, 19.5, 11.01),
    "O": Published(21990.2, 16.1, 8.81),
    "UG": Published(153931.6, 96.6, 61.67),
    "D": Published(76965.8, 49.7, 30.84),
    "decode attention": Published(3665.9, 462.2, 28.89),
    "prefill attention": Published(916.3, 2.1, 0.37),
    "communication": Published(18.8, 75.2, 31.33),
}
PARAMETERS = 70e9  # as the paper counts them


def table() -> dict[str, tuple[Published, Published]]:
    """Ours and theirs of each row."""
    operations = {one.name: one for one in step_operations(published_base("Llama-2-70B"), BATCH, DEGREE)}
    found = {}
    for name, theirs in PUBLISHED.items():
        one = operations[name]
        ours = Published(one.flops / 1e9, one.memory_bytes / 1e9, one.seconds(A100, DEGREE) * 1e3)
        found[name] = ours, theirs
    return found


MAPPED = {"Llama-2-7B": 1, "Llama-3-8B": 1, "Mixtral-8x7B": 2, "Llama-2-70B": 8, "Qwen2-72B": 8}  # devices of each
MAPPED_DEVICES = ("A100 SXM 80GB", "H100 PCIe", "H100 SXM", "B200", "MI300X")


def balances(base: str) -> dict[tuple[str, str], Balance]:
    """By device and load: the step of a gang whose memory is full of sequences."""
    model, degree = published_base(base), MAPPED[base]
    found = {}
    for device in MAPPED_DEVICES:
        for load, lengths in LENGTHS.items():
            batch = full_batch(model, DEVICES[device], lengths, degree)
            found[device, load] = step_balance(model, batch, DEVICES[device], degree)
    return found


def main() -> None:
    argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0]).parse_args()
    of_each = f"{'GFLOP':>10} {'theirs':>10} {'GB':>8} {'theirs':>7} {'ms':>7} {'theirs':>7}"
    print(f"{'Llama-2-70B, 8 A100, B 2,048':30} {of_each}")
    rows = table()
    for name, (ours, theirs) in rows.items():
        print(
            f"{name:30} {ours.gflop:10.1f} {theirs.gflop:10.1f} {ours.gigabytes:8.2f} {theirs.gigabytes:7.1f} "
            f"{ours.milliseconds:7.2f} {theirs.milliseconds:7.2f}"
        )
    gang = replace(
        A100, flops_per_s=A100.flops_per_s * DEGREE, bytes_per_s=A100.bytes_per_s * DEGREE, memory_bytes=80e9 * DEGREE
    )
    ratio = memory_over_compute(gang, PARAMETERS, BATCH.num_rows)
    optimum = {f"{flops / 1e12:.0f}": most_tokens_per_s(flops, PARAMETERS) for flops in (260e12, 280e12)}
    print(f"\nT_R {ratio:.3f}; tokens/s of a GPU at most, by TFLOP/s that products reach: {optimum}\n")
    print("memory/compute, network/compute of a step that fills the gang's memory; above 1 the device waits for it")
    print(f"{'':26}" + "".join(f"{f'{base}, {degree}':>17}" for base, degree in MAPPED.items()))
    maps = {base: balances(base) for base in MAPPED}
    for device, load in next(iter(maps.values())):
        cells = [found[device, load] for found in maps.values()]
        ratios = [f"{one.memory_s / one.compute_s:.2f}, {one.network_s / one.compute_s:.2f}" for one in cells]
        print(f"{device:14} {load:11}" + "".join(f"{ratio:>17}" for ratio in ratios))
    limits = Counter(one.limit for found in maps.values() for one in found.values())
    products = max(
        abs(getattr(ours, field) / getattr(theirs, field) - 1)
        for name in ("KQV", "O", "UG", "D", "communication")
        for ours, theirs in (rows[name],)
        for field in ("gflop", "gigabytes", "milliseconds")
    )
    decode, published = rows["decode attention"]
    summary = {
        "rows_error": round(products, 5),
        "decode_attention_error": round(abs(decode.milliseconds / published.milliseconds - 1), 5),
        "memory_over_compute": round(ratio, 3),
        "optimum_260": round(optimum["260"], 1),
        "optimum_280": round(optimum["280"], 1),
        "limits": dict(limits),
    }
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
