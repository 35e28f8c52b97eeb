"""The content of an adapter, and the digest of it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256

from ..adapter import family_of_module, packing_order
from .tensor_file import DTYPE_NAMES, Tensor, tensor_bytes


@dataclass(frozen=True, eq=False)
class LoraMatrices:
    """One module's matrices as uploaded: `x @ a.T @ b.T * scaling` is added to the module's output."""

    a: Tensor  # [rank, in]
    b: Tensor  # [out, rank]
    scaling: float  # lora_alpha / rank, or lora_alpha / sqrt(rank) for rsLoRA


@dataclass(frozen=True, eq=False)
class AdapterContent:
    """Everything that decides what an adapter computes. Keys of `matrices` are (layer, module)."""

    matrices: Mapping[tuple[int, str], LoraMatrices]

    @cached_property
    def module_ranks(self) -> dict[str, int]:
        """Each target's largest rank over layers and experts, in packing order."""
        ranks: dict[str, int] = {}
        for (_, module), found in self.matrices.items():
            entry = family_of_module(module)
            ranks[entry] = max(ranks.get(entry, 0), found.a.shape[0])
        return {entry: ranks[entry] for entry in sorted(ranks, key=packing_order)}

    @cached_property
    def num_bytes(self) -> int:
        """Of the tensors as uploaded: a matrix that several modules share counts once."""
        tensors = [tensor for found in self.matrices.values() for tensor in (found.a, found.b)]
        return sum({id(tensor): tensor.nbytes for tensor in tensors}.values())

    @cached_property
    def digest(self) -> str:
        """SHA-256, hex: equal for two uploads exactly when scalings, targets and tensors are equal, dtypes included."""
        hasher = sha256(b"motet adapter 1\n")
        for (layer, module), letter, tensor, scaling in self._parts():
            facts = [layer, module, letter, DTYPE_NAMES[tensor.dtype], list(tensor.shape), scaling.hex()]
            hasher.update(json.dumps(facts).encode() + b"\n")
            hasher.update(tensor_bytes(tensor))
        return hasher.hexdigest()

    def _parts(self) -> Iterator[tuple[tuple[int, str], str, Tensor, float]]:
        for key in sorted(self.matrices, key=lambda key: (key[0], packing_order(key[1]))):
            found = self.matrices[key]
            yield key, "A", found.a, found.scaling
            yield key, "B", found.b, found.scaling
