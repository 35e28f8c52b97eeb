"""The figures of docs/size.md are those of the code that cuts pages and packs adapters."""

from __future__ import annotations

import re
from math import ceil
from pathlib import Path

import pytest

from motet.adapters.adapter import BaseShape
from motet.adapters.packing.layout import AdapterLayout

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "size.md").read_text()
MIB = 1 << 20
# hidden, features of the MLP, layers, heads, KV heads, size of a head
BASES = {
    "Llama-3-8B": (4096, 14336, 32, 32, 8, 128),
    "Llama-3-70B": (8192, 28672, 80, 64, 8, 128),
    "Llama-3.2-1B": (2048, 8192, 16, 32, 8, 64),
}


def layout_of(base: str) -> AdapterLayout:
    hidden, features, num_layers, num_heads, num_kv_heads, head_dim = BASES[base]
    modules = {
        "q_proj": (hidden, num_heads * head_dim),
        "k_proj": (hidden, num_kv_heads * head_dim),
        "v_proj": (hidden, num_kv_heads * head_dim),
        "o_proj": (num_heads * head_dim, hidden),
        "gate_proj": (hidden, features),
        "up_proj": (hidden, features),
        "down_proj": (features, hidden),
    }
    return AdapterLayout(BaseShape(num_layers, modules), slab=16 * 2 * num_kv_heads * head_dim, dtype="bfloat16")


def page_bytes(base: str) -> int:
    *_, num_layers, _, num_kv_heads, head_dim = BASES[base]
    return 16 * 2 * num_kv_heads * head_dim * num_layers * 2


@pytest.mark.parametrize("base", BASES)
def test_pages_and_adapters(base: str) -> None:
    layout, page = layout_of(base), page_bytes(base)
    num_pages = layout.num_pages(dict.fromkeys(layout.shape.modules, 16))
    cells = f"{page / MIB:g} MiB", f"{page / 16 / 1024:g} KiB", f"{num_pages} pages, {num_pages * page / MIB:g} MiB"
    assert f"| {base} | {' | '.join(cells)} |" in PAGE


def test_the_example() -> None:
    page, num_pages = page_bytes("Llama-3-8B"), 40
    least = 64 * ceil(2000 / 16) + 64 * num_pages
    assert f"= {least:,}` pages = {least * page / (1 << 30):.1f} GiB" in PAGE
    (kept,) = re.findall(r"keeps some (\d+) adapters", PAGE)
    room = (40 << 30) // page - 64 * ceil(2000 / 16)
    assert room // num_pages == pytest.approx(int(kept), abs=5)
    assert f"{300 * num_pages * page / (1 << 30):.1f} GiB a gang" in PAGE
    assert f"= {10_000 * 2 * num_pages * page / (1 << 40):.2f} TiB" in PAGE
    assert f"= {ceil(6000 / (0.8 * 1500)) + 1}`" in PAGE
