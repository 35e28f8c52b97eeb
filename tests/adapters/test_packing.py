from __future__ import annotations

import tracemalloc
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from motet.adapters.adapter import (
    EMBEDDING,
    EXPERT_MODULES,
    HEAD,
    MODULES,
    OUTER,
    AdapterVersion,
    BaseEnds,
    BaseShape,
    ExpertShape,
    OutputGroups,
    family_of_module,
)
from motet.adapters.errors import AdapterInvalid
from motet.adapters.format.content import AdapterContent, LoraMatrices, OutputVectors, TokenRows
from motet.adapters.packing.layout import AdapterLayout, Dtype, packed_bytes
from motet.adapters.packing.packed_file import (
    PackedFileDamaged,
    PagesPart,
    read_packed,
    read_packed_part,
    write_packed,
)
from motet.adapters.packing.packing import pack, packed_chunks
from motet.tests.rigs.tensor_twins import as_numpy, identical
from motet.workers.memory.host_adapter_cache import as_torch

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@st.composite
def adapters(draw: st.DrawFn) -> tuple[AdapterContent, AdapterLayout]:
    """A base with some of the modules, an adapter for it with any targets and ranks, and a layout."""
    sizes, num_layers = st.integers(1, 9), draw(st.integers(1, 3))
    experts, present = None, MODULES
    if draw(st.booleans()):
        layers = draw(st.sets(st.integers(0, num_layers - 1), min_size=1))
        experts = ExpertShape(draw(st.integers(1, 4)), tuple(sorted(layers)), "mlp", {})
        present = (*MODULES[:4], *EXPERT_MODULES)
    shape = BaseShape(num_layers, {module: (draw(sizes), draw(sizes)) for module in present}, experts)
    keys = [
        (layer, module)
        for layer in range(num_layers)
        for entry in present
        for module in shape.members(entry)
        if shape.has(layer, module)
    ]
    chosen = draw(st.lists(st.sampled_from(keys), min_size=1, unique=True))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    matrices = {}
    for key in chosen:
        num_in, num_out = shape.modules[family_of_module(key[1])]
        rank, dtype = draw(st.integers(1, 5)), draw(st.sampled_from(DTYPES))
        a = as_numpy(torch.randn(rank, num_in, generator=generator).to(dtype))
        b = as_numpy(torch.randn(num_out, rank, generator=generator).to(dtype))
        matrices[key] = LoraMatrices(a, b, draw(st.floats(-4, 4)))
    dense = [key for key in keys if "experts" not in key[1]]
    outputs = {
        key: OutputVectors(*torch.randn(2, shape.modules[key[1]][1], generator=generator).numpy())
        for key in (draw(st.lists(st.sampled_from(dense), unique=True)) if dense else ())
    }
    layout_dtype: Dtype = draw(st.sampled_from(["float32", "bfloat16"]))
    num_experts = 0 if experts is None or draw(st.booleans()) else experts.num_experts  # 0: as older ones were packed
    content = AdapterContent(matrices, num_experts, outputs=outputs, outputs_source="of these" if outputs else "")
    return content, AdapterLayout(shape, draw(st.integers(1, 64)), layout_dtype)


@settings(max_examples=100, deadline=None)
@given(adapters())
def test_pages_hold_the_padded_scaled_matrices_and_nothing_else(case: tuple[AdapterContent, AdapterLayout]) -> None:
    content, layout = case
    pages = as_torch(pack(content, layout))
    dtype: torch.dtype = getattr(torch, layout.dtype)
    assert pages.dtype == dtype
    assert pages.shape == (layout.num_pages(content.module_ranks), layout.shape.num_layers, layout.slab)
    for layer in range(layout.shape.num_layers):
        array = pages[:, layer].reshape(-1)
        end = 0
        for module, place in layout.offsets(content.module_ranks).items():
            num_in, num_out = layout.shape.modules[family_of_module(module)]
            assert place.a == end
            assert place.b == place.a + place.rank * num_in
            end = place.b + place.rank * num_out
            if place.outputs is not None:
                assert place.outputs == end
                vectors = torch.zeros(2, num_out)
                if (own := content.outputs.get((layer, module))) is not None:
                    vectors = torch.stack([torch.tensor(own.gain), torch.tensor(own.shift)])
                assert torch.equal(array[end:][: 2 * num_out].view(2, num_out), vectors.to(dtype))
            a, b = torch.zeros(place.rank, num_in, dtype=dtype), torch.zeros(place.rank, num_out, dtype=dtype)
            found = content.matrices.get((layer, module))
            if found is not None:
                rank = found.a.shape[0]
                a[:rank] = as_torch(found.a).to(dtype)
                b[:rank] = (as_torch(found.b).float() * found.scaling).T.to(dtype)
            assert torch.equal(array[place.a : place.b].view(place.rank, num_in), a)
            assert torch.equal(array[place.b : end].view(place.rank, num_out), b)
            end += 0 if place.outputs is None else 2 * num_out
        assert end == layout.num_elements(content.module_ranks)
        assert not array[end:].any()


@settings(max_examples=40, deadline=None)
@given(adapters())
def test_an_expert_takes_its_own_rank_and_without_lora_no_room(case: tuple[AdapterContent, AdapterLayout]) -> None:
    content, layout = case
    largest: dict[str, int] = {}
    for (_, module), found in content.matrices.items():
        largest[module] = max(largest.get(module, 0), found.a.shape[0])
    offsets = layout.offsets(content.module_ranks)
    assert {module for module, place in offsets.items() if place.outputs is not None} == {
        module for _, module in content.outputs
    }
    taken = {module: place.rank for module, place in offsets.items() if place.rank}
    if layout.shape.experts is None or content.num_experts:
        assert taken == largest
    else:
        assert all(taken[module] >= rank for module, rank in largest.items())


def content_of(layer: int = 0, num_in: int = 4, num_out: int = 6, factor: float = 1.0) -> AdapterContent:
    return AdapterContent(
        {
            (layer, "q_proj"): LoraMatrices(
                np.ones((2, num_in), np.float32), np.full((num_out, 2), factor, np.float32), 2.0
            )
        }
    )


LAYOUT = AdapterLayout(BaseShape(2, dict.fromkeys(MODULES, (4, 6))), slab=8, dtype="bfloat16")


def test_orders_of_heads_of_any_size_have_keys_of_their_own() -> None:
    orders = ((), tuple(range(511, -1, -1)), (*range(0, 512, 2), *range(1, 512, 2)))
    layouts = (replace(LAYOUT, shape=replace(LAYOUT.shape, head_order=order)) for order in orders)
    assert len({layout.key for layout in layouts}) == len(orders)


@pytest.mark.parametrize("content", [content_of(layer=2), content_of(num_in=5), content_of(num_out=5)])
def test_refuses_an_adapter_of_another_base(content: AdapterContent) -> None:
    with pytest.raises(AdapterInvalid, match="does not fit the base"):
        pack(content, LAYOUT)


def test_refuses_numbers_that_overflow_once_scaled() -> None:
    pack(content_of(factor=1e38), LAYOUT)
    with pytest.raises(AdapterInvalid, match="overflows bfloat16"):
        pack(content_of(factor=3e38), LAYOUT)


@settings(max_examples=30, deadline=None)
@given(adapters(), st.integers(1, 9), st.integers(0, 1 << 30))
def test_a_file_has_the_bytes_that_ranks_say_and_gives_them_in_parts(
    case: tuple[AdapterContent, AdapterLayout], part_pages: int, harm: int
) -> None:
    content, layout = case
    num_pages = layout.num_pages(content.module_ranks)
    with TemporaryDirectory() as folder:
        path = Path(folder) / "packed"
        with path.open("wb") as file:
            write_packed(file, "d", layout, num_pages, packed_chunks(content, layout))
        num_bytes = path.stat().st_size
        assert 0 < num_bytes - packed_bytes([layout], content.module_ranks) < 2000  # the header
        whole = read_packed(path, "d", layout)
        parts = [
            PagesPart(start, min(start + part_pages, num_pages), num_pages) for start in range(0, num_pages, part_pages)
        ]
        assert identical(np.concatenate([read_packed_part(path, "d", layout, part) for part in parts]), whole)
        assert identical(whole, pack(content, layout))
        damaged = bytearray(path.read_bytes())
        damaged[harm % num_bytes] ^= 1
        path.write_bytes(damaged)
        with pytest.raises(PackedFileDamaged):
            read_packed_part(path, "d", layout, parts[0])
        with pytest.raises(PackedFileDamaged):
            read_packed(path, "d", layout)


@pytest.mark.parametrize(
    "other",
    [
        {"layers": {"q_proj": (0,), "o_proj": (1,)}},
        {"copies": {"v_proj": "k_proj"}},
        {"output_groups": {"q_proj": OutputGroups((1, 2))}},
        {"output_scales": {"q_proj": ((0.5, 6),)}},
    ],
)
def test_layouts_that_pack_otherwise_have_other_names(other: dict[str, Any]) -> None:
    shape = BaseShape(2, dict.fromkeys(MODULES, (4, 6)), layers={"q_proj": (0,)})
    key, changed = (AdapterLayout(each, 8, "bfloat16").key for each in (shape, replace(shape, **other)))
    assert key != changed and LAYOUT.key == "tp1-slab8-layers2-bfloat16"


def test_ranks_of_the_ends_and_numbers_of_rows_are_entries_behind_all_others() -> None:
    def lora(num_in: int, num_out: int, rank: int) -> LoraMatrices:
        return LoraMatrices(np.ones((rank, num_in), np.float32), np.ones((num_out, rank), np.float32), 1.0)

    def rows(count: int) -> TokenRows:
        return TokenRows(np.arange(count), np.ones((count, 4), np.float32))

    matrices = {(OUTER, HEAD): lora(4, 9, 3), (OUTER, EMBEDDING): lora(9, 4, 5), (0, "q_proj"): lora(4, 6, 2)}
    vectors = {(0, "v_proj"): OutputVectors(np.ones(6, np.float32), np.ones(6, np.float32))}
    of_rows = {HEAD: rows(7), EMBEDDING: rows(8)}
    content = AdapterContent(matrices, outputs=vectors, outputs_source="of these", token_rows=of_rows)
    expected = {
        **{"q_proj": 2, "embed_tokens": 5, "lm_head": 3, "v_proj.outputs": 2},
        **{"embed_tokens.rows": 8, "lm_head.rows": 7},
    }
    assert [*content.module_ranks.items()] == [*expected.items()]
    version = AdapterVersion("t", "a", 1, "d", content.module_ranks, 1, 0.0)
    assert (version.rank, version.targets) == (5, ("q_proj", "v_proj", EMBEDDING, HEAD))
    assert AdapterContent({}, token_rows=of_rows).module_ranks == {"embed_tokens.rows": 8, "lm_head.rows": 7}


def test_end_pages_are_packed_in_bounded_memory() -> None:
    """Of a whole embedding and a whole head, which take 46 MB."""
    vocab, hidden = 20_000, 512
    ends = BaseEnds(vocab, hidden, is_tied=False, head_has_bias=False)
    layout = AdapterLayout(BaseShape(4, dict.fromkeys(MODULES, (64, 64)), ends=ends), 32_768, "bfloat16")
    a, b = np.ones((64, vocab), np.float32), np.ones((hidden, 64), np.float32)
    rows = TokenRows(np.arange(vocab), np.ones((vocab, hidden), np.float32))
    lora = {(OUTER, EMBEDDING): LoraMatrices(a, b, 1.0), (OUTER, HEAD): LoraMatrices(b.T, a.T, 1.0)}
    content = AdapterContent(lora, token_rows=dict.fromkeys((EMBEDDING, HEAD), rows))
    tracemalloc.start()
    try:
        num_bytes = sum(chunk.nbytes for chunk in packed_chunks(content, layout, 1 << 20))
        assert num_bytes == packed_bytes([layout], content.module_ranks) > 44 << 20
        assert tracemalloc.get_traced_memory()[1] < 10 << 20
    finally:
        tracemalloc.stop()
