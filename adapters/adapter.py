"""Facts of adapters and of the base that they fit, as plain data."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Final

from .errors import OtherBase, quote

# The seven linear projections of a decoder layer, in the order in which an adapter is packed.
MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
# The linear projections of layers with a recurrent state, in this order after those of attention. A base has some.
RECURRENT_MODULES = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "in_proj_qkvz", "in_proj_ba", "out_proj")
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
    order = (*MODULES[:4], *RECURRENT_MODULES, *MODULES[4:], *EXPERT_MODULES)
    place = order.index(family_of_module(module))
    return place, int(match[1]) if match else 0


def _block(module: str) -> str:
    """The part of a layer that has a module."""
    if module in RECURRENT_MODULES:
        return "linear_attn"
    return "self_attn" if module in MODULES[:4] else "mlp"


@dataclass(frozen=True)
class ExpertShape:
    """Which layers of a base have experts, and the names of their modules there: `block.experts.3.name`."""

    num_experts: int
    layers: tuple[int, ...]
    block: str  # the name of the mixture of experts within a layer
    names: Mapping[str, str]  # by entry of EXPERT_MODULES
    are_parameters: bool = False  # of the layer, and no modules: `target_parameters` alone can name them
    takes_turns: bool = False  # outputs of the first parameter are those of gate and of up in turn


@dataclass(frozen=True)
class OutputGroups:
    """A module's outputs come group after group, each with parts of these widths. Workers have them part after part."""

    widths: tuple[int, ...]

    def order(self, start: int, stop: int) -> list[int]:
        """The outputs of the groups from `start` to `stop`, part after part.

        >>> OutputGroups((1, 2)).order(3, 9)
        [3, 6, 4, 5, 7, 8]
        """
        firsts, at, outputs = range(start, stop, sum(self.widths)), 0, list[int]()
        for width in self.widths:
            outputs += [first + at + place for first in firsts for place in range(width)]
            at += width
        return outputs


@dataclass(frozen=True)
class BaseShape:
    """What an adapter must fit: the base's layers and the (in, out) features of its modules, unsharded."""

    num_layers: int
    modules: Mapping[str, tuple[int, int]]  # the modules that adapters of this base may have, in packing order
    experts: ExpertShape | None = None
    fused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # modules that are one in the base's files
    head_order: tuple[int, ...] = ()  # which output of q and k each row of a head is; empty: as they are stored
    gated_head_dim: int | None = None  # q_proj gives each head's q and then its gate, of so many columns; None: q alone
    recurrent_layers: tuple[int, ...] = ()  # layers with a recurrent state, which have RECURRENT_MODULES for attention
    output_groups: Mapping[str, OutputGroups] = field(default_factory=dict)  # by module; else as they stand
    is_wrapped: bool = False  # the text model of a base that takes pictures too: names of modules may say so

    def count(self, module: str) -> int:
        """How many matrices a layer has of an entry of `modules`."""
        return self.experts.num_experts if self.experts is not None and module in EXPERT_MODULES else 1

    @property
    def num_matrices(self) -> int:
        """The most that an adapter can have: an A and a B of each module of each layer."""
        layers = dict.fromkeys(self.modules, self.num_layers)
        if self.experts is not None:
            layers |= dict.fromkeys(set(EXPERT_MODULES) & layers.keys(), len(self.experts.layers))
        layers |= dict.fromkeys(set(RECURRENT_MODULES) & layers.keys(), len(self.recurrent_layers))
        return 2 * sum(num_layers * self.count(module) for module, num_layers in layers.items())

    @property
    def dense_modules(self) -> tuple[str, ...]:
        """The modules, in the order of kernels' tables, that all rows go through in the layers that have them."""
        return (*MODULES, *self.recurrent_modules)

    @property
    def recurrent_modules(self) -> tuple[str, ...]:
        """The modules of layers with a recurrent state; the last one gives what such a layer computes."""
        return tuple(module for module in RECURRENT_MODULES if module in self.modules)

    def members(self, module: str) -> tuple[str, ...]:
        """The modules of a layer that belong to an entry of `modules`."""
        if module not in EXPERT_MODULES:
            return (module,)
        return tuple(module.replace(".", f".{expert}.") for expert in range(self.count(module)))

    @property
    def names(self) -> tuple[str, ...]:
        """The modules that PEFT finds in a layer, as entries of `modules` or of `fused`."""
        whole = {part: name for name, parts in self.fused.items() for part in parts}
        hidden = EXPERT_MODULES if self.experts is not None and self.experts.are_parameters else ()
        return tuple(dict.fromkeys(whole.get(module, module) for module in self.modules if module not in hidden))

    def sides(self, name: str) -> tuple[int, int] | None:
        """Inputs and outputs of an entry of `names`; None: it is none."""
        if name not in self.fused:
            return None if name not in self.names else self.modules[name]
        parts = [self.modules[part] for part in self.fused[name]]
        return parts[0][0], sum(num_out for _, num_out in parts)

    def path(self, module: str) -> str:
        """The name of a module within a layer of this base."""
        match = _EXPERT.fullmatch(module)
        if match is None or self.experts is None:
            return f"{_block(self.fused.get(module, (module,))[0])}.{module}"
        return f"{self.experts.block}.experts.{match[1]}.{self.experts.names[family_of_module(module)]}"

    def has(self, layer: int, module: str) -> bool:
        """Whether adapters of this base may have the module in this layer."""
        entry = family_of_module(module)
        if entry not in self.modules or layer >= self.num_layers:
            return False
        if self.recurrent_layers and entry in (*MODULES[:4], *RECURRENT_MODULES):
            return (layer in self.recurrent_layers) == (entry in RECURRENT_MODULES)
        if self.experts is None or entry not in EXPERT_MODULES:
            return True
        return layer in self.experts.layers and packing_order(module)[1] < self.experts.num_experts


@dataclass(frozen=True)
class AdapterVersion:
    """One immutable upload. `module_ranks` holds, for each target, its largest rank over the layers.

    Of experts it may have entries for some of them.
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
        return tuple(module for module in (*MODULES, *RECURRENT_MODULES, *EXPERT_MODULES) if module in targets)

    @property
    def stored_bytes(self) -> int:
        """What it counts for quotas of storage: on disk lie its tensors and its pages."""
        return self.num_bytes + self.packed_bytes

    @property
    def pinned_bytes(self) -> int:
        """What it counts for quotas of pins, for each gang that keeps it."""
        return self.packed_bytes or self.num_bytes


# The identity of a base, which a store and a registry record.


@dataclass(frozen=True)
class BaseIdentity:
    """`fingerprint` is a hash of the base's content and decides; `name` is for people. One base may have two names."""

    fingerprint: str
    name: str

    def __str__(self) -> str:
        return f"{self.fingerprint} {self.name}"

    @classmethod
    def parse(cls, text: str) -> BaseIdentity:
        """The identity that `str` wrote as `text`. Raises ValueError for other text."""
        fingerprint, space, name = text.rstrip("\n").partition(" ")
        if not space:
            raise ValueError(f"{quote(text)} names no base: its fingerprint and its name are needed")
        return cls(fingerprint, name)

    def check(self, other: BaseIdentity, place: str, remedy: str) -> None:
        """Raises OtherBase unless `other`, the base that `place` belongs to, is this one.

        `place` and `remedy` are for the message; `remedy` says what to use instead of `place`.
        """
        if other.fingerprint != self.fingerprint:
            raise OtherBase(
                f"{place} belongs to another base: {quote(other.name)} with the fingerprint {other.fingerprint[:12]}, "
                f"and this is {quote(self.name)} with {self.fingerprint[:12]}. Adapters work only on the very base "
                "that they were trained on, and a model that was trained again is another one. Serve the former base, "
                f"or {remedy}"
            )


# Ranks of a layer's experts as entries of `module_ranks`.
#
# Experts that all have one rank are the entry of their module, "experts.up_proj". Others are grouped by rank, as in
# "experts.0-3,7.up_proj". An expert that no entry names has no LoRA of this module, and takes no room.

_MAX_GROUPS: Final = 8  # of a module, so that a record stays small whatever is uploaded
_SOME = re.compile(r"experts\.([0-9,-]+)\.\w+")


def expert_entries(module: str, ranks: Mapping[int, int], num_experts: int) -> dict[str, int]:
    """Entries of the module "experts.…" for `ranks`, by expert. The base has `num_experts`.

    If there are too many ranks they are padded to powers of two, of which there are few.
    """
    if len(set(ranks.values())) > _MAX_GROUPS:
        ranks = {expert: 1 << (rank - 1).bit_length() for expert, rank in ranks.items()}
    groups: dict[int, list[int]] = {}
    for expert in sorted(ranks):
        groups.setdefault(ranks[expert], []).append(expert)
    if len(groups) == 1 and len(ranks) == num_experts:
        return {module: next(iter(groups))}
    return {module.replace(".", f".{_ranges(experts)}."): rank for rank, experts in groups.items()}


@lru_cache(1024)
def named_experts(entry: str) -> tuple[int, ...] | None:
    """The experts that an entry of `module_ranks` names; None: it is of all, or of no experts."""
    match = _SOME.fullmatch(entry)
    if match is None:
        return None
    edges = ([int(edge) for edge in part.split("-")] for part in match[1].split(","))
    return tuple(expert for edge in edges for expert in range(edge[0], edge[-1] + 1))


def _ranges(experts: Iterable[int]) -> str:
    """Ascending numbers as "0-3,7"."""
    runs: list[list[int]] = []
    for expert in experts:
        if runs and runs[-1][1] == expert - 1:
            runs[-1][1] = expert
        else:
            runs.append([expert, expert])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
