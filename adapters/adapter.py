"""Facts of adapters and of the base that they fit, as plain data."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from math import gcd
from typing import Final

from .errors import OtherBase, quote

# The seven linear projections of a decoder layer, in the order in which an adapter is packed.
MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
# The linear projections of latent attention beside o_proj (DeepSeek): those of q, then those of the latent. A base has
# q_proj, or both of q_a_proj and q_b_proj.
LATENT_MODULES = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj")
ABSORBED: Final = LATENT_MODULES[3]  # multiplied with queries and with what is attended to, not with its input
# The linear projections of layers with a recurrent state, in this order after those of attention. A base has some.
RECURRENT_MODULES = (
    *("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"),  # Gated DeltaNet
    *("in_proj_qkvz", "in_proj_ba"),  # of Qwen3-Next
    "in_proj",  # short convolutions, Mamba-2
    "out_proj",
)
# The linear projections of what each layer takes of its token beside the residual (Gemma 4). The last one is a single
# one for all layers: each has its outputs, one layer after the other.
PER_LAYER_MODULES = ("per_layer_input_gate", "per_layer_projection", "per_layer_model_projection")
OUTER_MODULES = PER_LAYER_MODULES[2:]
OUTER = -1  # the layer of modules that are outside of the layers
# What adapters may change of a model beside its layers: LoRA at the layer OUTER, and rows of tokens.
EMBEDDING, HEAD = "embed_tokens", "lm_head"
END_MODULES: Final = (EMBEDDING, HEAD)
# The projections of a layer's experts. Each entry stands for one module of every expert: `experts.3.up_proj` and so on.
EXPERT_MODULES = ("experts.gate_proj", "experts.up_proj", "experts.down_proj")
# The projections of the expert that computes every row, in layers that have one beside the chosen experts.
SHARED_MODULES = ("shared_expert.gate_proj", "shared_expert.up_proj", "shared_expert.down_proj")
# Linears of layers with experts that have few outputs: the gate of that expert, and the router.
ROUTER: Final = "router"
NARROW_MODULES = ("shared_expert_gate", ROUTER)
# Linears around a layer's experts, which read and give fewer features than the layer (Nemotron-H).
LATENT_EXPERT_MODULES = ("fc1_latent_proj", "fc2_latent_proj")
# On every worker of a gang.
WHOLE_MODULES = (*NARROW_MODULES, LATENT_MODULES[0], LATENT_MODULES[2], *LATENT_EXPERT_MODULES)
_MAX_UNIT: Final = 256  # columns that a GPU's kernels read at once, at most
# Where a layer has them, in packing order.
PATHS: Final = {
    **{module: f"self_attn.{module}" for module in (*MODULES[:4], *LATENT_MODULES)},
    **{module: f"linear_attn.{module}" for module in RECURRENT_MODULES},
    **{module: f"mlp.{module}" for module in MODULES[4:]},
    **{module: module for module in PER_LAYER_MODULES},
    **{module: f"mlp.{module}" for module in (*EXPERT_MODULES, *SHARED_MODULES)},
    **{"shared_expert_gate": "mlp.shared_expert_gate", ROUTER: "mlp.gate"},
    **{module: f"mlp.{module}" for module in LATENT_EXPERT_MODULES},
}
_ORDER: Final = {module: place for place, module in enumerate((*PATHS, *END_MODULES))}
MAX_RANK = 1024  # kernels have no bound; pages are counted, and graphs of GPUs record lower ones
# Ends the entry of `module_ranks` that says that a module's outputs are scaled and shifted, by so many vectors.
OUTPUTS: Final = ".outputs"
NUM_OUTPUT_VECTORS: Final = 2
ROWS: Final = ".rows"  # ends the entry that says of how many tokens the embedding or the head has rows of the adapter's
_EXPERT = re.compile(r"experts\.(\d+)\.(\w+)")
_SOME_EXPERTS = re.compile(r"experts\.[0-9,-]+\.(\w+)")


def family_of_module(module: str) -> str:
    """The entry of MODULES, EXPERT_MODULES or END_MODULES that a module belongs to, or an entry of `module_ranks`."""
    return _SOME_EXPERTS.sub(r"experts.\1", module.removesuffix(OUTPUTS).removesuffix(ROWS))


def packing_order(module: str) -> tuple[int, int]:
    """A sort key for modules, in the order in which they are packed: the place of the entry, then the expert."""
    match = _EXPERT.fullmatch(module)
    return _ORDER[family_of_module(module)], int(match[1]) if match else 0


def lora_ranks(module_ranks: Mapping[str, int]) -> list[int]:
    """The entries of `module_ranks` that are ranks of LoRA."""
    return [rank for entry, rank in module_ranks.items() if not entry.endswith((OUTPUTS, ROWS))]


@dataclass(frozen=True)
class ExpertShape:
    """Which layers of a base have experts, and the names of their modules there: `block.experts.3.name`."""

    num_experts: int
    layers: tuple[int, ...]
    block: str  # the name of the mixture of experts within a layer
    names: Mapping[str, str]  # by entry of EXPERT_MODULES
    are_parameters: bool = False  # of the layer, and no modules: `target_parameters` alone can name them
    takes_turns: bool = False  # outputs of the first parameter are those of gate and of up in turn
    parameters: str = "mlp.experts"  # where a layer has the parameters of all experts, in the model
    swaps_sides: bool = False  # PEFT takes these parameters' inputs for outputs (Llama 4)

    @property
    def fused(self) -> Mapping[str, tuple[str, ...]]:
        """The parameters of all experts, as PEFT wraps them, and the projections that each one holds."""
        if EXPERT_MODULES[0] in self.names:
            return {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
        return {"up_proj": ("up_proj",), "down_proj": ("down_proj",)}


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
class BaseEnds:
    """The embedding and the head of a base `[vocab, hidden]`."""

    vocab_size: int
    hidden_size: int
    is_tied: bool  # the head is the embedding
    head_has_bias: bool


@dataclass(frozen=True)
class BaseShape:
    """What an adapter must fit: the base's layers and the (in, out) features of its modules, unsharded.

    A module whose size differs between layers has an entry of `modules` for each size, such as "q_proj" and
    "full:q_proj", of different layers. Adapters know it by the part behind the colon alone.
    """

    num_layers: int
    modules: Mapping[str, tuple[int, int]]  # the modules that adapters of this base may have, in packing order
    experts: ExpertShape | None = None
    fused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # modules that are one in the base's files
    head_order: tuple[int, ...] = ()  # which output of q and k each row of a head is; empty: as they are stored
    gated_head_dim: int | None = None  # q_proj gives each head's q and then its gate, of so many columns; None: q alone
    layers: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # of entries that not all layers have
    copies: Mapping[str, str] = field(default_factory=dict)  # entries that have the LoRA of another module of the layer
    paths: Mapping[str, str] = field(default_factory=dict)  # within a layer, where they are not those of PATHS
    output_groups: Mapping[str, OutputGroups] = field(default_factory=dict)  # by module; else as they stand
    # By module, what its outputs are multiplied by, in runs of so many: B is kept so, as the base's weights are.
    output_scales: Mapping[str, tuple[tuple[int, float], ...]] = field(default_factory=dict)
    is_wrapped: bool = False  # the text model of a base that takes pictures too: names of modules may say so
    ends: BaseEnds | None = None  # None: adapters cannot change them

    def count(self, module: str) -> int:
        """How many matrices a layer has of an entry of `modules`."""
        return self.experts.num_experts if self.experts is not None and module in EXPERT_MODULES else 1

    def layers_of(self, entry: str) -> Collection[int]:
        """The layers that have an entry of `modules`."""
        if self.experts is not None and entry in EXPERT_MODULES:
            return self.experts.layers
        return self.layers.get(entry, range(self.num_layers))

    @property
    def num_matrices(self) -> int:
        """The most that an adapter can have: an A and a B of each module of each layer."""
        return 2 * sum(len(self.layers_of(entry)) * self.count(entry) for entry in self.modules)

    @property
    def dense_modules(self) -> tuple[str, ...]:
        """The entries, in the order of kernels' tables, that all rows go through in the layers that have them."""
        extra = (entry for entry in self.modules if entry not in MODULES and entry not in EXPERT_MODULES)
        return (*MODULES, *extra)

    @cached_property
    def _unit(self) -> int:
        """The largest power of two, up to `_MAX_UNIT`, that divides all sides of modules with many outputs."""
        sides = (side for entry, both in self.modules.items() if entry not in NARROW_MODULES for side in both)
        divisor = gcd(_MAX_UNIT, *sides)
        return divisor & -divisor

    def padding(self, entry: str) -> int:
        """Columns of zeros behind the outputs of an entry of `modules` or of HEAD, so that tiles stay wide."""
        if entry == HEAD:
            assert self.ends is not None, "only where adapters can change the head"
            return -self.ends.vocab_size % self._unit
        return -self.modules[entry][1] % self._unit if entry in NARROW_MODULES else 0

    @cached_property
    def kinds(self) -> tuple[frozenset[str], ...]:
        """The entries of each kind of layer."""
        by_layer: list[set[str]] = [set() for _ in range(self.num_layers)]
        for entry in self.modules:
            for layer in self.layers_of(entry):
                by_layer[layer].add(entry)
        return tuple(dict.fromkeys(map(frozenset, by_layer)))

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
        """The modules that PEFT finds in a layer: modules as adapters know them, and entries of `fused`."""
        whole = {part: name for name, parts in self.fused.items() for part in parts}
        hidden = EXPERT_MODULES if self.experts is not None and self.experts.are_parameters else ()
        modules = (name_of(entry) for entry in self.modules if entry not in hidden)
        return tuple(dict.fromkeys(whole.get(module, module) for module in modules))

    @property
    def target_names(self) -> tuple[str, ...]:
        """The entries of `names` as this base calls them, for messages."""
        of_experts = {} if self.experts is None else self.experts.names
        called = (
            f"experts.{of_experts[name]}" if name in of_experts else self.path(name).rpartition(".")[2]
            for name in self.names
        )
        return tuple(dict.fromkeys(called))

    def entry(self, layer: int, module: str) -> str | None:
        """The entry of `modules` that a module has in a layer; None: the layer has no such module."""
        name = family_of_module(module)
        entry = next((entry for entry in self._entries.get(name, ()) if layer in self.layers_of(entry)), None)
        if entry in EXPERT_MODULES and packing_order(module)[1] >= self.count(entry):
            return None
        return entry

    def placed(self, layer: int, module: str) -> str:
        """The entry of `dense_modules` that a linear of a layer has, also one that has the LoRA of another."""
        entries = (entry for entry in self.modules if name_of(entry) == module and layer in self.layers_of(entry))
        return next(entries, module)

    @cached_property
    def _entries(self) -> Mapping[str, tuple[str, ...]]:
        """By the name that adapters know them by."""
        names = dict.fromkeys(map(name_of, self.modules))
        sources = [entry for entry in self.modules if entry not in self.copies]
        return {name: tuple(entry for entry in sources if name_of(entry) == name) for name in names}

    def source(self, entry: str) -> str:
        """The module, as adapters know it, whose LoRA an entry of `modules` has."""
        return self.copies.get(entry, name_of(entry))

    def sides(self, layer: int, name: str) -> tuple[int, int] | None:
        """Inputs and outputs of a module, or of an entry of `fused`, in a layer; None: it has none.

        `layer` OUTER: of one of OUTER_MODULES as a whole, or of one of END_MODULES.
        """
        if name in END_MODULES:
            ends = self.ends if layer == OUTER else None
            sides = None if ends is None else (ends.vocab_size, ends.hidden_size)
            return sides if sides is None or name == EMBEDDING else sides[::-1]
        if layer == OUTER:
            num_in, num_out = self.modules[name]
            return num_in, num_out * self.num_layers
        entries = [self.entry(layer, part) for part in self.fused.get(name, (name,))]
        parts = [self.modules[entry] for entry in entries if entry is not None]
        return (parts[0][0], sum(num_out for _, num_out in parts)) if len(parts) == len(entries) else None

    def path(self, module: str) -> str:
        """The name of a module within a layer of this base, or outside of them."""
        if module in END_MODULES:
            return self.paths.get(module, module)
        match = _EXPERT.fullmatch(module)
        if match is not None and self.experts is not None:
            block = f"{self.experts.block}." if self.experts.block else ""
            return f"{block}experts.{match[1]}.{self.experts.names[family_of_module(module)]}"
        if module in self.fused:
            return f"{self.path(self.fused[module][0]).rpartition('.')[0]}.{module}"
        return self.paths.get(module) or PATHS.get(module, f"mlp.{module}")

    @cached_property
    def modules_by_path(self) -> Mapping[str, str]:
        """The entries of `names` by their path within a layer or outside of them, without those of experts.

        A router is also known where the base's files have it, as before transformers 5.
        """
        paths = {self.path(name): name for name in self.names if name not in EXPERT_MODULES}
        if self.experts is not None and self.experts.block and ROUTER in self.modules:
            paths[f"{self.experts.block}.{self.path(ROUTER).rpartition('.')[2]}"] = ROUTER
        return paths

    def has(self, layer: int, module: str) -> bool:
        """Whether adapters of this base may have the module in this layer."""
        return self.entry(layer, module) is not None


@dataclass(frozen=True)
class BaseTensor:
    """Where a tensor of the base lies: in row-major order, little-endian, from byte `start` of a file on."""

    path: str
    dtype: str  # as safetensors names it
    shape: tuple[int, ...]
    start: int


def name_of(entry: str) -> str:
    """The name by which adapters know an entry of `BaseShape.modules`."""
    return entry.rpartition(":")[2]


@dataclass(frozen=True)
class AdapterVersion:
    """One immutable upload. `module_ranks` holds, for each target, its largest rank over the layers.

    Of experts it may have entries for some of them. Where the adapter scales and shifts outputs of a module there is an
    entry `module.outputs`, with the number of its vectors. Where it has rows of tokens for the embedding or the head
    there is an entry `embed_tokens.rows` or `lm_head.rows`, with their number.
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
    # Of an activated LoRA: the base computes what stands before their last occurrence in a prompt. Empty: it is plain.
    invocation_token_ids: tuple[int, ...] = ()
    own_text: str = ""  # digest of its `OwnText`, which the store has beside its tensors; empty: all is the base's
    num_labels: int = 0  # of its score head, which the store has beside its tensors; 0: it has none
    # Of the record of the name that this was read from. They are no part of what the version is.
    revision: int = field(default=0, compare=False)  # of two records of a name the one with the higher is newer
    rollout: bytes = field(default=b"", compare=False, repr=False)  # JSON of a `Rollout`; empty: one without anything

    @property
    def order(self) -> tuple[int, int]:
        """Of two records of a name the one with the higher order is newer. Old records have no revision."""
        return self.revision, self.version

    @property
    def rank(self) -> int:
        return max(lora_ranks(self.module_ranks), default=0)

    @property
    def targets(self) -> tuple[str, ...]:
        targets = set(map(family_of_module, self.module_ranks))
        return tuple(sorted(targets, key=packing_order))

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
    return {module.replace(".", f".{written_ranges(experts)}."): rank for rank, experts in groups.items()}


@lru_cache(1024)
def named_experts(entry: str) -> tuple[int, ...] | None:
    """The experts that an entry of `module_ranks` names; None: it is of all, or of no experts."""
    match = _SOME.fullmatch(entry)
    return None if match is None else read_ranges(match[1])


def written_ranges(numbers: Iterable[int]) -> str:
    """Ascending numbers as "0-3,7"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def read_ranges(text: str) -> tuple[int, ...]:
    """The numbers that `written_ranges` wrote as `text`."""
    edges = ([int(edge) for edge in part.split("-")] for part in text.split(","))
    return tuple(number for edge in edges for number in range(edge[0], edge[-1] + 1))
