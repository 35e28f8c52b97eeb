"""What an adapter is, outside the accelerator: plain facts that travel."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

# The seven linear projections of a decoder layer, in the order in which an adapter is packed.
MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
MAX_RANK = 256


@dataclass(frozen=True)
class BaseShape:
    """What an adapter must fit: the base's layers and the (in, out) features of its modules, unsharded."""

    num_layers: int
    modules: Mapping[
        str, tuple[int, int]
    ]  # in the order of MODULES; those that adapters of this base may have


@dataclass(frozen=True)
class AdapterVersion:
    """One immutable upload. `module_ranks` holds, for each target, its largest rank over the layers."""

    tenant: str
    name: str
    version: int  # 1, 2, …
    digest: str  # SHA-256, hex
    module_ranks: Mapping[str, int]
    num_bytes: int  # of the uploaded tensors
    created_at: float  # Unix time, seconds

    @property
    def rank(self) -> int:
        return max(self.module_ranks.values())

    @property
    def targets(self) -> tuple[str, ...]:
        return tuple(module for module in MODULES if module in self.module_ranks)
