"""Adapters made of a tenant's stored ones, each with a weight, as PEFT's `add_weighted_adapter` makes them.

`cat` and `svd` work on what adapters add to the weights, the others on A and B, as PEFT does. TIES: arXiv 2306.01708;
DARE: arXiv 2311.03099. Results are in float32. DARE drops by a generator that starts with the digests of the parts, so
that the same combination has the same digest.
"""

from __future__ import annotations

import hashlib
import math
import mmap
from collections.abc import Callable, Mapping, Sequence
from typing import BinaryIO, Literal

import msgspec
import numpy as np

from ..adapter import MAX_RANK
from ..errors import AdapterInvalid
from .content import AdapterContent, LoraMatrices, ranks_over_layers
from .products import ProductMatrices
from .tensor_file import Tensor, is_finite, tensor_bytes

CombinationType = Literal["cat", "svd", "linear", "ties", "dare_linear", "dare_ties", "magnitude_prune"]
MajoritySign = Literal["total", "frequency"]
MAX_PARTS = 8
_PRUNING = ("ties", "dare_linear", "dare_ties", "magnitude_prune")


class WeightedAdapter(msgspec.Struct, frozen=True):
    digest: str
    weight: float  # negative: its effect is taken away


class Combination(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be combined, and how. Names are those of PEFT's arguments."""

    parts: tuple[WeightedAdapter, ...]
    combination_type: CombinationType = "cat"
    density: float | None = None  # the share of the numbers that pruning keeps
    majority_sign_method: MajoritySign = "total"
    svd_rank: int | None = None  # None: the largest of the parts' ranks
    num_bytes: int = 0  # of the parts' matrices, those that modules share once for each
    base: str = ""  # that the parts name; empty: none, or not all the same


def combination_problem(combination: Combination) -> str | None:
    """Why there is no such combination; None: there is."""
    kind, density, rank = combination.combination_type, combination.density, combination.svd_rank
    if not 1 <= len(combination.parts) <= MAX_PARTS:
        return f"{len(combination.parts)} adapters are named: 1 to {MAX_PARTS} can be combined"
    if not all(math.isfinite(part.weight) and part.weight for part in combination.parts):
        return "each weight must be a finite number other than 0"
    if kind in _PRUNING and (density is None or not 0 < density <= 1):
        return f"{kind} needs a density above 0, and at most 1: the share of the numbers that it keeps"
    if kind not in _PRUNING and density is not None:
        return f"{kind} prunes nothing: density is for {', '.join(_PRUNING)}"
    if rank is not None and (kind != "svd" or not 1 <= rank <= MAX_RANK):
        return f"svd_rank is for combination_type svd, from 1 to {MAX_RANK}"
    return None


def combine(
    contents: Sequence[AdapterContent],
    combination: Combination,
    file: BinaryIO,
    check_ranks: Callable[[Mapping[str, int]], None] = lambda module_ranks: None,
) -> AdapterContent:
    """The combination of adapters of one base, whose contents are in the order of its parts.

    A module that some of them lack is combined of the others. Its matrices are written to `file`, which is empty, and
    mapped from there, so that memory holds those of one module. `check_ranks` gets its `module_ranks` before, and may
    raise. Raises AdapterInvalid if their ranks or invocations do not allow it, or its numbers overflow.
    """
    if len({content.invocation_token_ids for content in contents}) > 1:
        raise AdapterInvalid("activated LoRAs can be combined only with those of the same invocation tokens")
    if any(content.outputs for content in contents):
        raise AdapterInvalid("DoRA, IA3 and trained biases do more than add to a linear, and cannot be combined")
    if any(content.token_rows for content in contents):
        raise AdapterInvalid(
            "trained rows of embed_tokens or lm_head (modules_to_save, trainable_token_indices, a saved embedding) "
            "stand in place of the base's, and cannot be combined: LoRA of these can"
        )
    if any(content.head is not None for content in contents):
        raise AdapterInvalid("score heads cannot be combined: combine adapters without task_type SEQ_CLS")
    start = hashlib.sha256(msgspec.json.encode(combination.parts)).digest()
    generator = np.random.Generator(np.random.PCG64(int.from_bytes(start, "little")))
    max_rank = max(lora.rank for content in contents for lora in content.matrices.values())
    loras = {
        key: [
            (lora, part.weight * lora.scaling)
            for content, part in zip(contents, combination.parts, strict=True)
            if (lora := content.matrices.get(key)) is not None
        ]
        for key in sorted({key for content in contents for key in content.matrices})
    }
    num_experts = max(content.num_experts for content in contents)
    ranks: dict[tuple[int, str], int] = {}
    for (layer, module), each in loras.items():
        try:
            ranks[layer, module] = _rank(each, combination, max_rank)
        except ValueError as error:
            raise AdapterInvalid(f"{module} of layer {layer}: {error}") from error
    check_ranks(ranks_over_layers(ranks, num_experts))
    for (layer, module), each in loras.items():
        try:
            with np.errstate(over="ignore", invalid="ignore"):
                a, b = _finite(*_combined(each, combination, ranks[layer, module], generator))
        except ValueError as error:
            raise AdapterInvalid(f"{module} of layer {layer}: {error}") from error
        assert len(a) == b.shape[1] == ranks[layer, module]
        file.write(tensor_bytes(a))
        file.write(tensor_bytes(b))
    file.flush()
    numbers = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.float32)
    matrices, position = dict[tuple[int, str], LoraMatrices](), 0
    for key, each in loras.items():
        rank, (num_in, num_out) = ranks[key], each[0][0].sides
        a, b = np.split(numbers[position : position + rank * (num_in + num_out)], [rank * num_in])
        matrices[key] = LoraMatrices(a.reshape(rank, num_in), b.reshape(num_out, rank), 1.0)
        position += len(a) + len(b)
    return AdapterContent(matrices, num_experts, invocation_token_ids=contents[0].invocation_token_ids)


_Loras = Sequence[tuple[LoraMatrices | ProductMatrices, float]]  # with the weight of each, its scaling included


def _rank(loras: _Loras, combination: Combination, max_rank: int) -> int:
    """The rank of one module. Raises ValueError for ranks and kinds that do not fit. `max_rank`: of all parts."""
    kind, ranks = combination.combination_type, sorted({lora.rank for lora, _ in loras})
    if kind not in ("cat", "svd"):
        if any(isinstance(lora, ProductMatrices) for lora, _ in loras):
            raise ValueError(f"{kind} combines A and B of LoRA, and VeRA, LoHa and LoKr have others: use cat or svd")
        if len(ranks) > 1:
            raise ValueError(
                f"{kind} needs adapters of one rank, and they have {', '.join(map(str, ranks))}: use cat or svd"
            )
        return ranks[0]
    rank = sum(lora.rank for lora, _ in loras)
    if kind == "svd":
        return min(combination.svd_rank or max_rank, rank, *loras[0][0].sides)
    if rank > MAX_RANK:
        problem = f"the ranks are {rank} together, and at most {MAX_RANK} are served"
        raise ValueError(f"{problem}: use svd with a svd_rank, or linear")
    return rank


def _combined(
    loras: _Loras, combination: Combination, rank: int, generator: np.random.Generator
) -> tuple[Tensor, Tensor]:
    """A and B of one module. Raises ValueError for numbers that overflow."""
    if combination.combination_type not in ("cat", "svd"):
        return _merged(loras, combination, generator)
    a, b = _concatenated(loras)
    return (a, b) if combination.combination_type == "cat" else _truncated(a, b, rank)


def _finite(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    if not (is_finite(a) and is_finite(b)):
        raise ValueError("it overflows float32: its weights are too large")
    return a, b


def _concatenated(loras: _Loras) -> tuple[Tensor, Tensor]:
    """A and B whose product is the weighted sum of the products."""
    a = np.concatenate([lora.a.astype(np.float32) for lora, _ in loras])
    return a, np.concatenate([lora.b.astype(np.float32) * np.float32(weight) for lora, weight in loras], axis=1)


def _truncated(a: Tensor, b: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """The best approximation of `b @ a` that has this rank, by the QR decompositions of both sides."""
    a_basis, a_factor = np.linalg.qr(a.T)
    b_basis, b_factor = np.linalg.qr(_finite(a, b)[1])
    u, s, v = np.linalg.svd(_finite(a_factor, b_factor @ a_factor.T)[1])
    return v[:rank] @ a_basis.T, b_basis @ (u[:, :rank] * s[:rank])


def _merged(loras: _Loras, combination: Combination, generator: np.random.Generator) -> tuple[Tensor, Tensor]:
    """A and B by themselves, each with the root of the weight."""
    roots = np.array([math.sqrt(abs(weight)) for _, weight in loras], np.float32)
    signs = np.array([math.copysign(1.0, weight) for _, weight in loras], np.float32)
    a = np.stack([lora.a.astype(np.float32) for lora, _ in loras])
    b = np.stack([lora.b.astype(np.float32) for lora, _ in loras])
    return _tensor(a, signs * roots, combination, generator), _tensor(b, roots, combination, generator)


def _tensor(tensors: Tensor, weights: Tensor, combination: Combination, generator: np.random.Generator) -> Tensor:
    """One tensor of several, stacked `[num_parts, rows, columns]`."""
    kind, density = combination.combination_type, combination.density
    if density is not None and density < 1:
        keep: Callable[[Tensor], Tensor] = (
            (lambda tensor: _dropped(tensor, density, generator))
            if kind.startswith("dare")
            else (lambda tensor: _largest(tensor, density))
        )
        tensors = np.stack([keep(tensor) for tensor in tensors])
    weighted = tensors * weights[:, None, None]
    if not kind.endswith("ties"):
        return np.asarray(weighted.sum(axis=0))
    signs = np.sign(tensors)
    votes = (tensors if combination.majority_sign_method == "total" else signs).sum(axis=0)
    agrees = signs == np.where(votes >= 0, 1, -1)
    num_agreeing = np.maximum(agrees.sum(axis=0), 1).astype(np.float32)
    return np.asarray((weighted * agrees).sum(axis=0) / num_agreeing)


def _largest(tensor: Tensor, density: float) -> Tensor:
    """The tensor with zeros in place of all but the largest numbers."""
    count, flat = int(density * tensor.size), tensor.reshape(-1)
    mask = np.zeros(flat.shape, np.bool_)
    if count:
        mask[np.argpartition(-np.abs(flat), count - 1)[:count]] = True
    return np.asarray(tensor * mask.reshape(tensor.shape))


def _dropped(tensor: Tensor, density: float, generator: np.random.Generator) -> Tensor:
    """The tensor with zeros in place of random numbers, and the others enlarged so that its mean stays."""
    mask = generator.random(tensor.shape, np.float32) < density
    return np.asarray(tensor * mask / np.float32(density))
