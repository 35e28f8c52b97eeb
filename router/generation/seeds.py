"""The seeds of the sequences of one prompt."""

from __future__ import annotations

from typing import Final

import msgspec

from ...workers.wire.messages import SamplingParams

_NUM_SEEDS: Final = 2**64


def seeded(sampling: SamplingParams, index: int) -> SamplingParams:
    """The sampling of the index-th sequence of a prompt: its seed is the request's plus `index`, modulo 2**64."""
    if sampling.seed is None or index == 0:
        return sampling
    half = _NUM_SEEDS // 2
    return msgspec.structs.replace(sampling, seed=(sampling.seed + index + half) % _NUM_SEEDS - half)
