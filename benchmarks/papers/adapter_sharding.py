"""How an adapter may be cut over a gang, and what its workers then exchange and hold: counted as they compute.

- "S-LoRA" (arXiv 2311.03285 §6): both matrices of each pair are cut, and vectors of the rank's size exchanged.
- "block-diagonal" (arXiv 2510.23346): adapters that were trained with blocks of zeros, so that nothing is exchanged.
- "motet" (`adapters/packing/layout.py`): any adapter; one matrix of a pair is whole on each worker.

Each computes what an adapter adds to the seven projections of a layer. The sum over a row-parallel projection's workers
is the base's own. What motet exchanges in a step is counted in its real code by `benchmarks/tensor_parallel.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from motet.benchmarks.rigs.thread_gang import ThreadGroup, run_threads

Matrices = tuple[torch.Tensor, torch.Tensor]  # A [rank, inputs], B [outputs, rank]
TOGETHER = (("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",))  # in one step
ROW_PARALLEL = ("o_proj", "down_proj")


@dataclass(frozen=True)
class Part:
    """A worker's parts of an adapter's matrices."""

    group: ThreadGroup
    adapter: Mapping[str, Matrices]

    def columns(self, x: torch.Tensor, modules: tuple[str, ...]) -> list[torch.Tensor]:
        """This worker's outputs, of inputs that every worker has."""
        raise NotImplementedError

    def rows(self, x: torch.Tensor, module: str) -> torch.Tensor:
        """This worker's part of a sum of all outputs, of its own inputs."""
        raise NotImplementedError

    def held(self, module: str) -> Matrices:
        """What this worker holds."""
        raise NotImplementedError

    def _cut(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        return x.chunk(self.group.degree, dim)[self.group.rank]


class Motet(Part):
    def columns(self, x: torch.Tensor, modules: tuple[str, ...]) -> list[torch.Tensor]:
        return [x @ a.T @ b.T for a, b in map(self.held, modules)]

    def rows(self, x: torch.Tensor, module: str) -> torch.Tensor:
        a, b = self.held(module)
        return x @ a.T @ b.T

    def held(self, module: str) -> Matrices:
        a, b = self.adapter[module]
        return (self._cut(a, 1), b) if module in ROW_PARALLEL else (a, self._cut(b, 0))


class SLoRA(Part):
    def columns(self, x: torch.Tensor, modules: tuple[str, ...]) -> list[torch.Tensor]:
        """The parts of all modules' vectors are gathered together."""
        parts = [self.held(module) for module in modules]
        gathered = self.group.all_gather(torch.cat([x @ a.T for a, _ in parts], 1))  # [degree, rows, ranks]
        apart = gathered.split([a.shape[0] for a, _ in parts], 2)
        return [torch.cat([*each], 1) @ b.T for each, (_, b) in zip(apart, parts, strict=True)]

    def rows(self, x: torch.Tensor, module: str) -> torch.Tensor:
        a, b = self.held(module)
        found = x.new_zeros(x.shape[0], b.shape[0] * self.group.degree)
        self._cut(found, 1)[:] = self.group.all_reduce(x @ a.T) @ b.T
        return found

    def held(self, module: str) -> Matrices:
        a, b = self.adapter[module]
        return self._cut(a, 1 if module in ROW_PARALLEL else 0), self._cut(b, 0)


class BlockDiagonal(Motet):
    """Of an adapter whose other blocks are zero (`with_blocks`)."""

    def held(self, module: str) -> Matrices:
        a, b = super().held(module)
        return self._cut(a, 0), self._cut(b, 1)


WAYS: Mapping[str, type[Part]] = {"motet": Motet, "S-LoRA": SLoRA, "block-diagonal": BlockDiagonal}


def random_adapter(shapes: Mapping[str, tuple[int, int]], rank: int, dtype: torch.dtype) -> dict[str, Matrices]:
    """`shapes`: inputs and outputs of each projection."""
    chance = torch.Generator().manual_seed(rank)
    return {
        module: (
            torch.randn(rank, num_in, generator=chance, dtype=dtype),
            torch.randn(num_out, rank, generator=chance, dtype=dtype),
        )
        for module, (num_in, num_out) in shapes.items()
    }


def with_blocks(adapter: Mapping[str, Matrices], degree: int) -> dict[str, Matrices]:
    """The same, with zeros where a block-diagonal adapter has none: B by outputs, and A of row-parallel projections."""
    found = {}
    for module, (a, b) in adapter.items():
        cut = a if module in ROW_PARALLEL else b
        mask = torch.block_diag(*[torch.ones([size // degree for size in cut.shape])] * degree).to(cut.dtype)
        found[module] = (a * mask, b) if module in ROW_PARALLEL else (a, b * mask)
    return found


@dataclass(frozen=True)
class Exchanged:
    """Of one worker, for an adapter's part in a layer."""

    outputs: dict[str, torch.Tensor]  # of column-parallel projections its own, of the others a part of their sum
    num_collectives: int
    bytes_of_a_token: float
    share_held: float  # of the adapter's elements


def exchange(
    way: str, adapter: Mapping[str, Matrices], inputs: Callable[[str], torch.Tensor], degree: int
) -> list[Exchanged]:
    """By rank. `inputs`: all of a projection's, `[rows, inputs]`."""
    whole = sum(a.numel() + b.numel() for a, b in adapter.values())

    def work(group: ThreadGroup) -> Exchanged:
        part, outputs = WAYS[way](group, adapter), dict[str, torch.Tensor]()
        for modules in TOGETHER:
            x = inputs(modules[0])
            if modules[0] in ROW_PARALLEL:
                outputs[modules[0]] = part.rows(part._cut(x, 1), modules[0])
            else:
                outputs |= zip(modules, part.columns(x, modules), strict=True)
        held = sum(a.numel() + b.numel() for a, b in map(part.held, adapter))
        traffic = group.traffic
        return Exchanged(outputs, traffic.num_collectives, traffic.sent_bytes / x.shape[0], held / whole)

    return run_threads(degree, work)
