"""Writes a store with thousands of adapters within a minute, for engine benchmarks, without thousands of uploads.

Adapters of one rank differ in a few numbers only; each has a digest and a packed file of its own, with its own
checksum. Only packed files are written, and no sources from which they could be packed again.
"""

from __future__ import annotations

import bisect
import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import numpy as np

from motet.adapters.format.tensor_file import BFLOAT16, Tensor
from motet.adapters.packing.layout import AdapterLayout
from motet.adapters.packing.packed_file import write_packed
from motet.benchmarks.rigs.random_model import NUM_LAYERS
from motet.workers.models.config import ModelConfig
from motet.workers.wire.messages import AdapterRef

# Of adapter i: RANKS[i % 4]. In this order the mean rank by popularity is nearly the same for 5 adapters as for 2,000.
RANKS = (16, 64, 32, 8)
MODULES = ("q_proj", "k_proj", "v_proj", "o_proj")  # S-LoRA's choice; 0.23 MB a rank


@dataclass(frozen=True)
class StoredAdapter:
    ref: AdapterRef
    num_pages: int


def write_store(root: Path, model_path: Path, count: int, block_size: int) -> list[StoredAdapter]:
    """Packs `count` adapters of RANKS in turn into a store, for bfloat16: 6.9 MB each on average."""
    model = ModelConfig.from_folder(model_path)
    layout = AdapterLayout(model.shape, model.slab(block_size), "bfloat16")
    rng = np.random.default_rng(0)
    kinds: dict[int, tuple[dict[str, int], Tensor]] = {}
    for rank in RANKS:
        ranks = dict.fromkeys(MODULES, rank)
        shape = (layout.num_pages(ranks), NUM_LAYERS, layout.slab)
        pages = (rng.standard_normal(shape, np.float32) * 0.02).astype(BFLOAT16)
        kinds[rank] = ranks, pages
    adapters = []
    for index in range(count):
        ranks, pages = kinds[RANKS[index % len(RANKS)]]
        pages[0, 0, :8] = rng.standard_normal(8, np.float32) * 0.02
        digest = sha256(f"adapter {index}".encode()).hexdigest()
        folder = root / digest[:2] / digest
        folder.mkdir(parents=True)
        with (folder / f"{layout.key}.packed").open("wb") as file:
            write_packed(file, digest, layout, len(pages), [pages])
        adapters.append(StoredAdapter(AdapterRef(digest, ranks), len(pages)))
    return adapters


def draw_adapters(count: int, num_adapters: int, exponent: float, seed: int) -> Sequence[int]:
    """Which adapter each of `count` requests asks for: i in proportion to (i + 1) ** -exponent."""
    generator = random.Random(seed)
    shares = list(itertools.accumulate(place**-exponent for place in range(1, num_adapters + 1)))
    return [bisect.bisect(shares, generator.random() * shares[-1]) for _ in range(count)]
