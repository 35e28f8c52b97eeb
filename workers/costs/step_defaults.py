"""Sizes of a gang that no setting gives, by the cost model, each with its reason for `motet status`.

`tests/workers/test_plan.py` holds the numbers against the catalogue of devices.
"""

from __future__ import annotations

from dataclasses import dataclass

CPU_TOKENS, GPU_TOKENS = 512, 2048
CPU_SEQUENCES, GPU_SEQUENCES = 128, 256
WEIGHTS_SHARE = 1 / 5  # of the time of a step's products, that reading weights may take: the device computes otherwise
CPU_MEMORY_SHARE = 1 / 8  # for pools; the base, adapters and KV in host memory, and routers have the rest
CPU_POOL_BYTES = 1 << 30  # at most, where it is not known how many share the memory


@dataclass(frozen=True)
class StepLimits:
    """`reasons`: by setting."""

    max_tokens_per_step: int
    max_num_sequences: int
    reasons: dict[str, str]


def step_limits(on_gpu: bool, max_tokens_per_step: int | None, max_num_sequences: int | None) -> StepLimits:
    """The sizes that are given, else those of the device."""
    reasons = {}
    if max_tokens_per_step is None:
        max_tokens_per_step = GPU_TOKENS if on_gpu else CPU_TOKENS
        reasons["max-tokens-per-step"] = (
            f"a GPU reads the weights in less than a fifth of the time in which it computes {GPU_TOKENS} tokens"
            if on_gpu
            else f"on CPUs a step of more than {CPU_TOKENS} tokens takes longer, and computes no token sooner"
        )
    else:
        reasons["max-tokens-per-step"] = "as the settings say"
    if max_num_sequences is None:
        max_num_sequences = min(GPU_SEQUENCES if on_gpu else CPU_SEQUENCES, max_tokens_per_step)
        reasons["max-num-sequences"] = (
            f"an H100 gives {GPU_SEQUENCES} sequences of an 8B base a token in 50 ms, and not twice as many"
            if on_gpu
            else "on CPUs more at once make each wait longer for its next token"
        )
    else:
        reasons["max-num-sequences"] = "as the settings say"
    return StepLimits(max_tokens_per_step, max_num_sequences, reasons)


def cpu_pool_bytes(memory_bytes: int, num_workers: int | None) -> int:
    """Of each of the workers that share a machine's, or a container's, memory.

    `num_workers`: None: it is not known, as on a cluster, where Ray may put any number of gangs on a node.
    """
    share = int(CPU_MEMORY_SHARE * memory_bytes)
    return min(share, CPU_POOL_BYTES) if num_workers is None else share // num_workers
