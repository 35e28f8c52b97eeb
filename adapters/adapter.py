"""Facts of adapters and of the base that they fit, as plain data."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

# The seven linear projections of a decoder layer, in the order in which an adapter is packed.
MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
# The projections of a layer's experts. Each entry stands for one module of every expert: `experts.3.up_proj` and so on.
EXPERT_MODULES = ("experts.gate_proj", "experts.up_proj", "experts.down_proj")
MAX_RANK = 256
_EXPERT = re.compile(r"experts\.(\d+)\.(\w+)")
_SOME_EXPERTS = re.compile(r"experts\.[0-9,-]+\.(\w+)")


def family_of_module(module: str) -> str:
    """The entry of MODULES or EXPERT_MODULES that a module belongs to, or an entry of `module_ranks`."""
    return _SOME_EXPERTS.sub(r"experts.\1", module)


def packing_order(module: str) -> tuple[int, int]:
    """A sort key for modules, in the order in which they are packed: the place of the entry, then the expert."""
    match = _EXPERT.fullmatch(module)
    place = (*MODULES, *EXPERT_MODULES).index(family_of_module(module))
    return place, int(match[1]) if match else 0


@dataclass(frozen=True)
class ExpertShape:
    """Which layers of a base have experts, and the names of their modules there: `block.experts.3.name`."""

    num_experts: int
    layers: tuple[int, ...]
    block: str  # the name of the mixture of experts within a layer
    names: Mapping[str, str]  # by entry of EXPERT_MODULES


@dataclass(frozen=True)
class BaseShape:
    """What an adapter must fit: the base's layers and the (in, out) features of its modules, unsharded."""

    num_layers: int
    modules: Mapping[str, tuple[int, int]]  # the modules that adapters of this base may have, in packing order
    experts: ExpertShape | None = None

    def count(self, module: str) -> int:
        """How many matrices a layer has of an entry of `modules`."""
        return self.experts.num_experts if self.experts is not None and module in EXPERT_MODULES else 1

    @property
    def num_matrices(self) -> int:
        """The most that an adapter can have: an A and a B of each module of each layer."""
        layers = dict.fromkeys(self.modules, self.num_layers)
        if self.experts is not None:
            layers |= dict.fromkeys(set(EXPERT_MODULES) & layers.keys(), len(self.experts.layers))
        return 2 * sum(num_layers * self.count(module) for module, num_layers in layers.items())

    def members(self, module: str) -> tuple[str, ...]:
        """The modules of a layer that belong to an entry of `modules`."""
        if module not in EXPERT_MODULES:
            return (module,)
        return tuple(module.replace(".", f".{expert}.") for expert in range(self.count(module)))

    def path(self, module: str) -> str:
        """The name of a module within a layer of this base."""
        match = _EXPERT.fullmatch(module)
        if match is None or self.experts is None:
            return f"{'self_attn' if module in MODULES[:4] else 'mlp'}.{module}"
        return f"{self.experts.block}.experts.{match[1]}.{self.experts.names[family_of_module(module)]}"

    def has(self, layer: int, module: str) -> bool:
        """Whether adapters of this base may have the module in this layer."""
        entry = family_of_module(module)
        if entry not in self.modules or layer >= self.num_layers:
            return False
        if self.experts is None or entry not in EXPERT_MODULES:
            return True
        return layer in self.experts.layers and packing_order(module)[1] < self.experts.num_experts


@dataclass(frozen=True)
class AdapterVersion:
    """One immutable upload. `module_ranks` holds, for each target, its largest rank over the layers.

    Of experts it may have entries for some of them: see `expert_ranks.py`.
    """

    tenant: str
    name: str
    version: int  # 1, 2, …
    digest: str  # SHA-256, hex
    module_ranks: Mapping[str, int]
    num_bytes: int  # of the uploaded tensors
    created_at: float  # Unix time, seconds
    packed_bytes: int = 0  # of its pages on all workers of a gang; 0: from before they were recorded
    base: str = ""  # that its config names; empty: none, or from before it was recorded
    response_template: str = ""  # name of the form in which it writes calls and thoughts; empty: in the base's
    # Of the record of the name that this was read from. They are no part of what the version is.
    revision: int = field(default=0, compare=False)  # of two records of a name the one with the higher is newer
    rollout: bytes = field(default=b"", compare=False, repr=False)  # JSON of a `Rollout`; empty: one without anything

    @property
    def order(self) -> tuple[int, int]:
        """Of two records of a name the one with the higher order is newer. Old records have no revision."""
        return self.revision, self.version

    @property
    def rank(self) -> int:
        return max(self.module_ranks.values())

    @property
    def targets(self) -> tuple[str, ...]:
        targets = set(map(family_of_module, self.module_ranks))
        return tuple(module for module in (*MODULES, *EXPERT_MODULES) if module in targets)

    @property
    def stored_bytes(self) -> int:
        """What it counts for quotas of storage: on disk lie its tensors and its pages."""
        return self.num_bytes + self.packed_bytes

    @property
    def pinned_bytes(self) -> int:
        """What it counts for quotas of pins, for each gang that keeps it."""
        return self.packed_bytes or self.num_bytes
