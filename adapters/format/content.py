"""The content of an adapter, and the digest of it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import sha256
from types import MappingProxyType

from ..adapter import (
    EXPERT_MODULES,
    NUM_OUTPUT_VECTORS,
    OUTPUTS,
    ROWS,
    expert_entries,
    family_of_module,
    packing_order,
)
from .products import ProductMatrices
from .score_head import ScoreHead
from .tensor_file import DTYPE_NAMES, Tensor, tensor_bytes


@dataclass(frozen=True, eq=False)
class LoraMatrices:
    """One module's matrices as uploaded: `x @ a.T @ b.T * scaling` is added to the module's output."""

    a: Tensor  # [rank, in]
    b: Tensor  # [out, rank]
    scaling: float  # lora_alpha / rank, or lora_alpha / sqrt(rank) for rsLoRA

    @property
    def rank(self) -> int:
        return len(self.a)

    @property
    def sides(self) -> tuple[int, int]:
        """Inputs and outputs."""
        return self.a.shape[1], self.b.shape[0]

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        return {"A": self.a, "B": self.b}

    def outputs(self, start: int, stop: int) -> LoraMatrices:
        """Those of some outputs, with the same A."""
        return LoraMatrices(self.a, self.b[start:stop], self.scaling)

    def rows_of_a(self, rows: slice, inputs: slice) -> Tensor:
        return self.a[rows, inputs]

    def columns_of_b(self, outputs: slice | Tensor, rows: slice) -> Tensor:
        return self.b[outputs, rows]


@dataclass(frozen=True, eq=False)
class OutputVectors:
    """What an adapter makes of a module's outputs y, with its LoRA in them: `y * (1 + gain) + shift`."""

    gain: Tensor  # [out] float32
    shift: Tensor  # [out] float32


@dataclass(frozen=True, eq=False)
class TokenRows:
    """Rows that stand in place of the base's, in its embedding or its head. LoRA adds to them as to the base's."""

    token_ids: Tensor  # [n] int64, ascending
    rows: Tensor  # [n, hidden]

    @property
    def num_bytes(self) -> int:
        return self.token_ids.nbytes + self.rows.nbytes


@dataclass(frozen=True, eq=False)
class AdapterContent:
    """Everything that decides what an adapter computes. Keys of `matrices` and `outputs` are (layer, module).

    At the layer OUTER, LoRA of EMBEDDING has A `[rank, vocab]` and B `[hidden, rank]`, LoRA of HEAD A `[rank, hidden]`
    and B `[vocab, rank]`. `token_rows`: by EMBEDDING and HEAD, which share one where they are one in the base.

    `num_experts`: of each layer of the base. 0: it has none, or the adapter was stored when all experts were packed at
    one rank, and stays packed so. `outputs_source`: SHA-256, hex, of the tensors that `outputs` were made of, which
    with the base decide them; empty: there are no outputs. `left_out`: why the uploaded file computes otherwise than
    this; empty: it does not. `unknown_field`: which field of the config nobody knows, that may say so; empty: there is
    none.
    """

    matrices: Mapping[tuple[int, str], LoraMatrices | ProductMatrices]
    num_experts: int = 0
    left_out: str = ""
    unknown_field: str = ""
    warnings: tuple[str, ...] = ()
    invocation_token_ids: tuple[int, ...] = ()  # of an activated LoRA: see `AdapterVersion`
    outputs: Mapping[tuple[int, str], OutputVectors] = field(default_factory=dict)
    outputs_source: str = ""
    token_rows: Mapping[str, TokenRows] = field(default_factory=dict)
    head: ScoreHead | None = None  # of a sequence classifier

    @cached_property
    def module_ranks(self) -> dict[str, int]:
        """Each target's largest rank over the layers, in packing order; experts as in `adapter.py`."""
        ranks = {key: lora.rank for key, lora in self.matrices.items()}
        num_rows = {module: len(rows.token_ids) for module, rows in self.token_rows.items()}
        return ranks_over_layers(ranks, self.num_experts, (module for _, module in self.outputs), num_rows)

    @cached_property
    def num_bytes(self) -> int:
        """Bytes of the tensors as uploaded: what several modules share counts once."""
        tensors = [tensor for lora in self.matrices.values() for tensor in lora.tensors.values()]
        tensors += [tensor for vectors in self.outputs.values() for tensor in (vectors.gain, vectors.shift)]
        of_rows = {id(rows): rows.num_bytes for rows in self.token_rows.values()}
        of_head = 0 if self.head is None else self.head.num_bytes
        return sum({id(tensor): tensor.nbytes for tensor in tensors}.values()) + sum(of_rows.values()) + of_head

    @cached_property
    def digest(self) -> str:
        """SHA-256, hex: equal for two uploads exactly when scalings, targets, invocation, tensors and dtypes are."""
        hasher = sha256(b"motet adapter 1\n")
        for part in () if self.head is None else self.head.identity():
            hasher.update(part)
        if self.invocation_token_ids:
            hasher.update(json.dumps(["invocation", *self.invocation_token_ids]).encode() + b"\n")
        if self.outputs_source:
            hasher.update(json.dumps(["outputs", self.outputs_source]).encode() + b"\n")
        shared: dict[int, str] = {}  # of a product's tensors, which several modules may have
        for layer, module in sorted(self.matrices, key=lambda key: (key[0], packing_order(key[1]))):
            lora = self.matrices[layer, module]
            if isinstance(lora, ProductMatrices):
                hasher.update(json.dumps([layer, module, lora.kind, *lora.sides, lora.first_output]).encode() + b"\n")
            for name, tensor in sorted(lora.tensors.items()):
                facts = [layer, module, name, DTYPE_NAMES[tensor.dtype], list(tensor.shape), lora.scaling.hex()]
                hasher.update(json.dumps(facts).encode() + b"\n")
                if isinstance(lora, ProductMatrices):
                    if id(tensor) not in shared:
                        shared[id(tensor)] = sha256(tensor_bytes(tensor)).hexdigest()
                    hasher.update(shared[id(tensor)].encode())
                else:
                    hasher.update(tensor_bytes(tensor))
        for module, each in sorted(self.token_rows.items()):
            facts = [module, "rows", DTYPE_NAMES[each.rows.dtype], list(each.rows.shape)]
            hasher.update(json.dumps(facts).encode() + b"\n")
            hasher.update(tensor_bytes(each.token_ids.astype("<i8")))
            hasher.update(tensor_bytes(each.rows))
        return hasher.hexdigest()


def ranks_over_layers(
    ranks: Mapping[tuple[int, str], int],
    num_experts: int,
    outputs: Iterable[str] = (),
    num_rows: Mapping[str, int] = MappingProxyType({}),
) -> dict[str, int]:
    """The `module_ranks` of an adapter with these ranks by (layer, module). `num_experts`: as in `AdapterContent`.

    `outputs`: modules whose outputs it scales and shifts. `num_rows`: of its rows of tokens, by EMBEDDING and HEAD.
    """
    members: dict[str, int] = {}
    for (_, module), rank in ranks.items():
        entry = module if num_experts else family_of_module(module)
        members[entry] = max(members.get(entry, 0), rank)
    ranks_by_entry: dict[str, int] = {}
    by_expert: dict[str, dict[int, int]] = {}
    for entry in sorted(members, key=packing_order):
        family, expert = family_of_module(entry), packing_order(entry)[1]
        if num_experts and family in EXPERT_MODULES:
            by_expert.setdefault(family, {})[expert] = members[entry]
        else:
            ranks_by_entry[entry] = members[entry]
    for family, of_experts in by_expert.items():
        ranks_by_entry |= expert_entries(family, of_experts, num_experts)
    ranks_by_entry |= {f"{module}{OUTPUTS}": NUM_OUTPUT_VECTORS for module in sorted(set(outputs), key=packing_order)}
    return ranks_by_entry | {f"{module}{ROWS}": num_rows[module] for module in sorted(num_rows, key=packing_order)}
