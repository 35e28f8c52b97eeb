"""Adapters whose update of a weight is a product of small matrices, as LoRA: VeRA, LoHa and LoKr.

Each is `B @ A` of a bounded rank, and is stored as uploaded; rows of A and columns of B are made as they are packed:

- VeRA (arXiv 2310.11454): all modules share A and B, as many columns and rows of them as a module has inputs and
  outputs; a vector scales the rows of A, and another one those of B. The rank is that of A and B.
- LoHa (arXiv 2108.06098): the elementwise product of two LoRA of rank r. Rows of A are the products of each row of one
  A with each of the other, and so are columns of B. The rank is r * r.
- LoKr (arXiv 2309.14859): the Kronecker product of two matrices, of which each may be a product. Rows of A are
  Kronecker products of rows, columns of B of columns. The rank is the product of both ranks.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from math import prod

import numpy as np

from ..adapter import MAX_RANK
from ..errors import AdapterInvalid, quote
from .peft import LOHA, LOKR, VERA
from .tensor_file import Tensor

_REMEDIES = {
    VERA: "",
    LOHA: ": its rank is r * r",
    LOKR: ": its rank is that of both factors, multiplied; set decompose_both, or a small decompose_factor",
}
SHARED = {"vera_A": "base_model.vera_A", "vera_B": "base_model.vera_B"}  # what all modules have, and its name in files
_OF_LOHA = ("hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b")
_HALVES = (("lokr_w1", "lokr_w1_a", "lokr_w1_b"), ("lokr_w2", "lokr_w2_a", "lokr_w2_b"))
Shape = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class ProductMatrices:
    """One module's matrices: `x @ A.T @ B.T * scaling` is added to the module's output, as with `LoraMatrices`.

    `tensors` are those of the file, by PEFT's name. B has their rows from `first_output` on.
    """

    kind: str
    tensors: Mapping[str, Tensor]
    num_in: int
    num_out: int
    scaling: float
    first_output: int = 0

    @property
    def rank(self) -> int:
        return rank_of(self.kind, {name: tensor.shape for name, tensor in self.tensors.items()})

    @property
    def a(self) -> Tensor:
        """`[rank, in]`, made anew."""
        return self.rows_of_a(slice(0, self.rank), slice(None))

    @property
    def b(self) -> Tensor:
        """`[out, rank]`, made anew."""
        return self.columns_of_b(slice(None), slice(0, self.rank))

    @property
    def sides(self) -> tuple[int, int]:
        """Inputs and outputs."""
        return self.num_in, self.num_out

    def outputs(self, start: int, stop: int) -> ProductMatrices:
        """Those of some outputs."""
        return replace(self, first_output=self.first_output + start, num_out=stop - start)

    def rows_of_a(self, rows: slice, inputs: slice) -> Tensor:
        """`[rows, inputs]`, float32."""
        if self.kind == VERA:
            scales = self.tensors["vera_lambda_d"][rows, None].astype(np.float32)
            return self.tensors["vera_A"][rows, : self.num_in][:, inputs].astype(np.float32) * scales
        if self.kind == LOHA:
            return _hadamard(self.tensors["hada_w1_b"], self.tensors["hada_w2_b"], rows)[:, inputs]
        (_, first), (_, second) = (_factors(self.tensors, *names) for names in _HALVES)
        return _kronecker(first, second, rows)[:, inputs]

    def columns_of_b(self, outputs: slice | Tensor, rows: slice) -> Tensor:
        """`[outputs, rows]`, float32."""
        part = slice(self.first_output, self.first_output + self.num_out)
        if self.kind == VERA:
            scales = self.tensors["vera_lambda_b"][part][outputs, None].astype(np.float32)
            return self.tensors["vera_B"][part, rows][outputs].astype(np.float32) * scales
        if self.kind == LOHA:
            return _hadamard(self.tensors["hada_w1_a"].T, self.tensors["hada_w2_a"].T, rows)[:, part][:, outputs].T
        (first, _), (second, _) = (_factors(self.tensors, *names) for names in _HALVES)
        return _kronecker(first.T, second.T, rows)[:, part][:, outputs].T


def check_product(kind: str, shapes: Mapping[str, Shape], where: str, rank: int, num_in: int, num_out: int) -> int:
    """The rank of a product of tensors of these shapes, by PEFT's name. `rank`: of the config.

    Raises AdapterInvalid unless they are those of a module with these inputs and outputs; `where` names it.
    """
    if kind == VERA:
        expected = {"vera_lambda_d": (rank,), "vera_lambda_b": (num_out,)}
        for name, vector in expected.items():
            _check_shape(f"{where}.{name}", shapes[name], vector)
        # Those that all modules share are as large as the largest needs them.
        _check_shape(SHARED["vera_A"], shapes["vera_A"], (rank, max((num_in, *shapes["vera_A"][1:]))))
        _check_shape(SHARED["vera_B"], shapes["vera_B"], (max((num_out, *shapes["vera_B"][:1])), rank))
    elif kind == LOHA:
        for name, shape in zip(_OF_LOHA, ((num_out, rank), (rank, num_in)) * 2, strict=True):
            _check_shape(f"{where}.{name}", shapes[name], shape)
    else:
        sides = [_sides(shapes, where, rank, *names) for names in _HALVES]
        got = tuple(first * second for first, second in zip(*sides, strict=True))
        if got != (num_out, num_in):
            raise AdapterInvalid(
                f"{where} has Kronecker products of {[*sides[0]]} and {[*sides[1]]}, which make {[*got]}, expected "
                f"{[num_out, num_in]}: the outputs and inputs of the module"
            )
    product_rank = rank_of(kind, shapes)
    if product_rank > MAX_RANK:
        raise AdapterInvalid(
            f"{where} is a LoRA of rank {product_rank} (peft_type {kind}, r = {rank}): at most {MAX_RANK} are "
            f"accepted{_REMEDIES[kind]}"
        )
    return product_rank


def expected_tensors(kind: str, names: Collection[str]) -> tuple[str, ...]:
    """PEFT's names of a module's tensors, of which `names` are there: LoKr has one or two for each factor."""
    if kind == VERA:
        return "vera_lambda_b", "vera_lambda_d"
    if kind == LOHA:
        return _OF_LOHA
    halves = ((whole,) if whole in names else parts for whole, *parts in _HALVES)
    return tuple(name for half in halves for name in half)


def rank_of(kind: str, shapes: Mapping[str, Shape]) -> int:
    """The rank of the LoRA that a product of tensors of these shapes is."""
    if kind == VERA:
        return shapes["vera_A"][0]
    if kind == LOHA:
        return shapes["hada_w1_b"][0] * shapes["hada_w2_b"][0]
    return prod(min(shapes[whole]) if whole in shapes else shapes[b][0] for whole, _, b in _HALVES)


def _sides(shapes: Mapping[str, Shape], where: str, rank: int, whole: str, a: str, b: str) -> Shape:
    """Outputs and inputs of a factor of a Kronecker product."""
    for name in (whole,) if whole in shapes else (a, b):
        if len(shapes[name]) != 2:
            raise AdapterInvalid(f"{where}.{name} has shape {[*shapes[name]]}: a matrix is needed")
    if whole in shapes:
        return shapes[whole]
    _check_shape(f"{where}.{a}", shapes[a], (shapes[a][0], rank))
    _check_shape(f"{where}.{b}", shapes[b], (rank, shapes[b][1]))
    return shapes[a][0], shapes[b][1]


def _check_shape(name: str, got: Shape, expected: Shape) -> None:
    if got != expected:
        raise AdapterInvalid(f"{quote(name, 160)} has shape {[*got]}, expected {[*expected]}")


def _factors(tensors: Mapping[str, Tensor], whole: str, a: str, b: str) -> tuple[Tensor, Tensor]:
    """B and A of a factor, which is their product, float32."""
    if whole not in tensors:
        return tensors[a].astype(np.float32), tensors[b].astype(np.float32)
    factor = tensors[whole].astype(np.float32)
    num_out, num_in = factor.shape
    if num_in <= num_out:
        return factor, np.eye(num_in, dtype=np.float32)
    return np.eye(num_out, dtype=np.float32), factor


def _pairs(first: Tensor, second: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
    """The rows of both that are multiplied for these rows of a product: all of the second with each of the first."""
    in_first, in_second = np.divmod(np.arange(rows.start, rows.stop), len(second))
    return first[in_first].astype(np.float32), second[in_second].astype(np.float32)


def _hadamard(first: Tensor, second: Tensor, rows: slice) -> Tensor:
    first_rows, second_rows = _pairs(first, second, rows)
    return first_rows * second_rows


def _kronecker(first: Tensor, second: Tensor, rows: slice) -> Tensor:
    first_rows, second_rows = _pairs(first, second, rows)
    products: Tensor = first_rows[:, :, None] * second_rows[:, None, :]
    return products.reshape(len(first_rows), first_rows.shape[1] * second_rows.shape[1])
