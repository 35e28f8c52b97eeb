"""LoRA on absorbed weights against weights with the delta merged in, for adapters in pages of random order."""

from __future__ import annotations

import pytest
import torch

from motet.kernels.latent_lora import LatentLoraBatch, add_to_queries, add_to_values, of_layer
from motet.kernels.lora import ABSENT, LoraGeometry, LoraSegment, ModuleSlice, PagedAdapter

RANK, HEADS, PLAIN, VALUE, SLAB, LAYERS = 24, 3, 6, 10, 32, 2


@pytest.mark.parametrize("layer", range(LAYERS))
def test_a_row_has_the_delta_of_its_adapter(layer: int) -> None:
    generator = torch.Generator().manual_seed(layer)
    pool = torch.full((80, LAYERS, SLAB), torch.nan)
    free, segments = torch.randperm(80, generator=generator).tolist(), list[LoraSegment]()
    deltas = dict[int, torch.Tensor]()
    num_out = HEADS * (PLAIN + VALUE)
    for start, stop, rank, before in ((0, 3, 2, 0), (3, 4, 7, 45), (5, 9, 1, 31)):
        a, b = torch.randn(rank, RANK, generator=generator), torch.randn(rank, num_out, generator=generator)
        array = torch.cat((torch.full((before,), torch.nan), a.flatten(), b.flatten()))
        pages = tuple(free.pop() for _ in range(-(-len(array) // SLAB)))
        padded = torch.full((len(pages) * SLAB,), torch.nan)
        padded[: len(array)] = array
        pool[torch.tensor(pages), layer] = padded.view(-1, SLAB)
        module = ModuleSlice(rank, rank, before, before + a.numel())
        segments.append(LoraSegment(start, stop, PagedAdapter(pages, (ABSENT, module))))
        deltas |= dict.fromkeys(range(start, stop), (b.t() @ a).view(HEADS, PLAIN + VALUE, RANK))
    segments.insert(2, LoraSegment(4, 5, PagedAdapter((), (ABSENT, ABSENT))))  # of other modules alone
    geometry = LoraGeometry(LAYERS, SLAB, 8, ((0, 0), (RANK, num_out)))
    batch = LatentLoraBatch.make(segments, geometry, 1, pool.device)
    assert batch is not None and len(batch.segments) == 3
    parts = of_layer(batch, pool, layer, HEADS, PLAIN)
    q, x = (torch.randn(10, HEADS, width, generator=generator) for width in (PLAIN, RANK))
    queries, values = torch.zeros(10, HEADS, RANK), torch.zeros(10, HEADS, VALUE)
    add_to_queries(queries, q, parts)
    add_to_values(values, x, parts)
    for row in range(10):
        keys, of_values = deltas.get(row, torch.zeros(HEADS, PLAIN + VALUE, RANK)).split([PLAIN, VALUE], 1)
        torch.testing.assert_close(queries[row], torch.einsum("hd,hdr->hr", q[row], keys), atol=1e-4, rtol=1e-5)
        torch.testing.assert_close(values[row], torch.einsum("hr,hvr->hv", x[row], of_values), atol=1e-4, rtol=1e-5)


def test_a_batch_without_such_adapters_is_none() -> None:
    geometry = LoraGeometry(LAYERS, SLAB, 8, ((0, 0), (RANK, 8)))
    other = PagedAdapter((1,), (ModuleSlice(1, 1, 0, 8), ABSENT))
    assert LatentLoraBatch.make([LoraSegment(0, 4, other)], geometry, 1, torch.device("cpu")) is None
