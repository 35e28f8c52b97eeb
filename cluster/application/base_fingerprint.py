"""A base's identity, from its files, without reading all of them."""

from __future__ import annotations

import json
from hashlib import sha256
from pathlib import Path
from typing import BinaryIO

from ...adapters.base_identity import BaseIdentity
from ...workers.models.config import ModelConfig

NUM_SAMPLES = 64  # of each file
SAMPLE_BYTES = 4096
MAX_HEADER_BYTES = 100 << 20  # as the format has it


def identify_base(folder: Path, name: str) -> BaseIdentity:
    """Equal fingerprints mean: the same shape, the same weight files by name and size, and the same weights.

    Of each weight file the header is read, and samples all over the file: training the model further or again changes
    these. Raises ValueError for a model that cannot be served.
    """
    config = ModelConfig.from_folder(folder)
    facts = {
        "family": config.family.name,
        "vocab_size": config.vocab_size,
        "num_layers": config.num_layers,
        "num_heads": config.num_heads,
        "num_kv_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "modules": {module: list(sides) for module, sides in config.shape.modules.items()},
        "tie_word_embeddings": config.tie_word_embeddings,
    }
    hasher = sha256(b"motet base 1\n" + json.dumps(facts, sort_keys=True).encode() + b"\n")
    for path in sorted(folder.glob("*.safetensors")):
        num_bytes = path.stat().st_size
        hasher.update(json.dumps([path.name, num_bytes]).encode() + b"\n")
        with path.open("rb") as file:
            for part in _parts(file, num_bytes):
                hasher.update(sha256(part).digest())
    return BaseIdentity(hasher.hexdigest(), name)


def _parts(file: BinaryIO, num_bytes: int) -> list[bytes]:
    """The header, and samples of what follows it."""
    header_bytes = int.from_bytes(file.read(8), "little")
    header = file.read(min(header_bytes, MAX_HEADER_BYTES))
    start = 8 + len(header)
    step = max((num_bytes - start) // NUM_SAMPLES, SAMPLE_BYTES)
    parts = [header]
    for position in range(start, num_bytes, step):
        file.seek(position)
        parts.append(file.read(SAMPLE_BYTES))
    return parts
