"""LoRA on the weights that latent attention absorbs, by each row's own adapter, in plain torch for any device.

A head's key weights `[plain_dim, rank]` and value weights `[value_dim, rank]` are multiplied with queries and with what
is attended to, not with the latents of tokens, which are the same for all adapters. A delta B A of both is multiplied
there, too: q B A is added to a head's query, and B A x to its values, with products as small as the adapter's rank.
A page thus holds nothing of an adapter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .lora import LoraGeometry, LoraSegment


@dataclass(frozen=True)
class LatentLoraBatch:
    """The segments of a batch whose adapters have a module with these weights."""

    geometry: LoraGeometry
    module: int
    segments: tuple[LoraSegment, ...]
    pages: tuple[torch.Tensor, ...]  # of each segment's adapter those with the module, on the pool's device

    @staticmethod
    def make(
        segments: Sequence[LoraSegment], geometry: LoraGeometry, module: int, device: torch.device
    ) -> LatentLoraBatch | None:
        """None: no row has such an adapter."""
        some, pages = list[LoraSegment](), list[torch.Tensor]()
        for segment in segments:
            at = segment.adapter.modules[module]
            if at.rank:
                first, end = at.a // geometry.slab, at.b + at.rank * geometry.sides[module][1]
                some.append(segment)
                pages.append(torch.tensor(segment.adapter.pages[first : -(-end // geometry.slab)], device=device))
        return LatentLoraBatch(geometry, module, tuple(some), tuple(pages)) if some else None


@dataclass(frozen=True)
class LatentLora:
    """Rows `start : stop` of a batch, and what is added to the weights of a layer for them."""

    start: int
    stop: int
    a: torch.Tensor  # [lora_rank, rank]
    keys: torch.Tensor  # B of each head's key weights, [heads, plain_dim, lora_rank]
    values: torch.Tensor  # of its value weights, [heads, value_dim, lora_rank]


def of_layer(
    batch: LatentLoraBatch, pool: torch.Tensor, layer: int, num_heads: int, plain_dim: int
) -> tuple[LatentLora, ...]:
    """A and B of all segments, read from their pages. Of each head B has `plain_dim` rows, then those of its values."""
    geometry, (num_in, num_out) = batch.geometry, batch.geometry.sides[batch.module]
    parts = []
    for segment, pages in zip(batch.segments, batch.pages, strict=True):
        at = segment.adapter.modules[batch.module]
        assert at.a_rows == at.rank, "A is whole on every worker"
        array = pool[:, layer].index_select(0, pages).flatten()[at.a % geometry.slab :]
        a = array[: at.rank * num_in].view(at.rank, num_in)
        b = array[at.b - at.a :][: at.rank * num_out].view(at.rank, num_heads, -1).permute(1, 2, 0)
        parts.append(LatentLora(segment.start, segment.end, a, b[:, :plain_dim], b[:, plain_dim:]))
    return tuple(parts)


def add_to_queries(y: torch.Tensor, q: torch.Tensor, parts: Sequence[LatentLora]) -> None:
    """y `[num_rows, heads, rank]` += q B A of q `[num_rows, heads, plain_dim]`, in place."""
    for part in parts:
        rows = slice(part.start, part.stop)
        y[rows] += (torch.bmm(q[rows].transpose(0, 1), part.keys) @ part.a).transpose(0, 1)


def add_to_values(y: torch.Tensor, x: torch.Tensor, parts: Sequence[LatentLora]) -> None:
    """y `[num_rows, heads, value_dim]` += B A x of x `[num_rows, heads, rank]`, in place."""
    for part in parts:
        rows = slice(part.start, part.stop)
        shrunk = (x[rows] @ part.a.t()).transpose(0, 1)  # [heads, rows, lora_rank]
        y[rows] += torch.bmm(shrunk, part.values.transpose(1, 2)).transpose(0, 1)
