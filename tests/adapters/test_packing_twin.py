"""Packing with numpy gives what torch, which computes with the pages, would: bit by bit."""

from __future__ import annotations

import io
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from motet.adapters.adapter import EMBEDDING, END_MODULES, HEAD, MODULES, OUTER, BaseEnds, BaseShape
from motet.adapters.errors import AdapterInvalid
from motet.adapters.format.content import AdapterContent, LoraMatrices, TokenRows
from motet.adapters.format.tensor_file import BFLOAT16, Tensor, is_finite
from motet.adapters.format.validation import validate
from motet.adapters.packing.layout import AdapterLayout, Dtype, Sharding
from motet.adapters.packing.packed_file import write_packed
from motet.adapters.packing.packing import pack, packed_chunks
from motet.tests.rigs.tensor_twins import as_numpy, identical
from motet.workers.memory.host_adapter_cache import as_torch
from motet.workers.models.config import ModelConfig
from motet.workers.models.sharding import layouts_of_gang

DEMO = Path(__file__).resolve().parents[2] / "examples" / "demo"
DTYPES = [np.dtype(np.float32), np.dtype(np.float16), BFLOAT16]
LARGEST = {np.dtype(np.float32): 0x7F7FFFFF, np.dtype(np.float16): 0x7BFF, BFLOAT16: 0x7F7F}  # finite, as bits


def pack_by_torch(content: AdapterContent, layout: AdapterLayout) -> torch.Tensor | None:
    """What `pack` is to give; None if it is to refuse."""
    dtype: torch.dtype = getattr(torch, layout.dtype)
    ranks = content.module_ranks
    num_pages, num_layers = layout.num_layer_pages(ranks), layout.shape.num_layers
    arrays = torch.zeros(num_layers, num_pages * layout.slab, dtype=dtype)
    for (layer, module), found in content.matrices.items():
        if layer == OUTER:
            continue
        part, place = layout.part(module), layout.offsets(ranks)[module]
        a = as_torch(found.a)[:, slice(*part.inputs)].to(dtype).flatten()
        scaled = (
            as_torch(found.b)[layout.output_order(module) or slice(*part.outputs[0])].to(torch.float32) * found.scaling
        )
        b = scaled.T.flatten().to(dtype)
        arrays[layer, place.a : place.a + len(a)] = a
        arrays[layer, place.b : place.b + len(b)] = b
    pages = arrays.view(num_layers, num_pages, layout.slab).transpose(0, 1)
    pages = torch.cat((pages, end_pages_by_torch(content, layout, dtype)))
    return pages if torch.isfinite(pages).all() else None


def end_pages_by_torch(content: AdapterContent, layout: AdapterLayout, dtype: torch.dtype) -> torch.Tensor:
    ranks = content.module_ranks
    num_pages = layout.num_pages(ranks) - layout.num_layer_pages(ranks)
    flat, end = torch.zeros(num_pages * layout.page_elements, dtype=dtype), 0
    taken = torch.zeros(len(flat), dtype=torch.bool)

    def put(start: int, part: torch.Tensor) -> None:
        nonlocal end
        assert not taken[start : start + part.numel()].any(), "parts lie side by side"
        flat[start : start + part.numel()] = part.flatten()
        taken[start : start + part.numel()] = True
        end = max(end, start + part.numel())

    for module, at in layout.end_offsets(ranks).items():
        if at.rank:
            found = content.matrices[OUTER, module]
            a, b = as_torch(found.a).to(dtype), (as_torch(found.b).to(torch.float32) * found.scaling).to(dtype)
            put(at.a, a if module == HEAD else a.T)
            b = torch.nn.functional.pad(b, (0, 0, 0, layout.shape.padding(HEAD))) if module == HEAD else b
            put(at.b, b.T)
        if at.num_rows:
            trained = content.token_rows[module]
            ids = torch.tensor(trained.token_ids)
            put(at.token_ids, torch.stack([ids % 256, ids // 256 % 256, ids // 65536]).to(dtype))
            put(at.rows, as_torch(trained.rows).to(dtype))
    assert len(flat) - layout.page_elements < end <= len(flat) or not num_pages, "no page without anything"
    return flat.view(num_pages, layout.shape.num_layers, layout.slab)


def any_finite(shape: tuple[int, int], dtype: np.dtype[np.generic], seed: int) -> Tensor:
    """Any bits but NaN and infinity: halves between two numbers of a shorter type, the tiniest and the largest too."""
    rng = np.random.default_rng(seed)
    bits = rng.integers(0, LARGEST[dtype], shape, np.uint32, endpoint=True)
    if dtype == np.float32:
        bits[rng.random(shape) < 0.3] &= 0xFFFF8000  # half of bfloat16's last place, or none
    signs = rng.integers(0, 2, shape, np.uint32) << (8 * dtype.itemsize - 1)
    values: Tensor = (bits | signs).astype(f"uint{8 * dtype.itemsize}").view(dtype)
    return values


@st.composite
def cases(draw: st.DrawFn) -> tuple[AdapterContent, AdapterLayout]:
    """An adapter of any numbers, and the layout of one worker of a gang."""
    degree = draw(st.integers(1, 3))
    sizes = st.integers(1, 4).map(lambda size: size * degree)
    ends = BaseEnds(draw(st.sampled_from([3, 40, 300])), draw(sizes), is_tied=False, head_has_bias=False)
    modules = {module: (draw(sizes), draw(sizes)) for module in MODULES}
    shape = BaseShape(draw(st.integers(1, 2)), modules, ends=ends)
    worker = draw(st.integers(0, degree - 1))

    def share(size: int) -> tuple[int, int]:
        return worker * size // degree, (worker + 1) * size // degree

    row_parallel = ("o_proj", "down_proj")
    outputs = {name: share(num_out) for name, (_, num_out) in shape.modules.items() if name not in row_parallel}
    inputs = {name: share(shape.modules[name][0]) for name in row_parallel}
    sharding = Sharding(degree, worker, outputs, inputs) if degree > 1 else None
    keys = [(layer, module) for layer in range(shape.num_layers) for module in MODULES]
    matrices = {}
    keys += [(OUTER, module) for module in END_MODULES]
    for index, (layer, module) in enumerate(draw(st.lists(st.sampled_from(keys), min_size=1, unique=True))):
        num_in, num_out = shape.sides(layer, module) or (0, 0)
        rank, dtype, seed = draw(st.integers(1, 5)), draw(st.sampled_from(DTYPES)), draw(st.integers(0, 1 << 31))
        a, b = any_finite((rank, num_in), dtype, seed), any_finite((num_out, rank), dtype, seed + index)
        matrices[layer, module] = LoraMatrices(a, b, draw(st.floats(-1.5, 1.5)))
    token_rows = {}
    for module in draw(st.lists(st.sampled_from(END_MODULES), unique=True)):
        token_ids = sorted(draw(st.sets(st.integers(0, ends.vocab_size - 1), min_size=1)))
        rows = any_finite((len(token_ids), ends.hidden_size), draw(st.sampled_from(DTYPES)), draw(st.integers(0, 99)))
        token_rows[module] = TokenRows(np.array(token_ids), rows)
    content = AdapterContent(matrices, token_rows=token_rows)
    layout_dtype: Dtype = draw(st.sampled_from(["float32", "bfloat16"]))
    return content, AdapterLayout(shape, draw(st.integers(1, 64)), layout_dtype, sharding)


@settings(max_examples=200, deadline=None)
@given(cases(), st.integers(1, 4000))
def test_pages_are_those_of_torch(case: tuple[AdapterContent, AdapterLayout], chunk_bytes: int) -> None:
    """However few are packed at a time."""
    content, layout = case
    expected = pack_by_torch(content, layout)
    if expected is None:
        with pytest.raises(AdapterInvalid, match="overflow"):
            list(packed_chunks(content, layout, chunk_bytes))
    else:
        assert identical(pack(content, layout), as_numpy(expected))
        chunks = list(packed_chunks(content, layout, chunk_bytes))
        assert identical(np.concatenate(chunks), as_numpy(expected))
        assert all(len(chunk) == 1 or chunk.nbytes <= chunk_bytes for chunk in chunks)


def test_what_does_not_fit_the_ends_of_a_base_is_refused() -> None:
    modules = dict.fromkeys(MODULES, (4, 6))
    ends = BaseEnds(300, 4, is_tied=False, head_has_bias=False)
    layout = AdapterLayout(BaseShape(2, modules, ends=ends), 8, "bfloat16")

    def content(token_ids: list[int], width: int = 4) -> AdapterContent:
        rows = TokenRows(np.array(token_ids), np.ones((len(token_ids), width), np.float32))
        return AdapterContent({}, token_rows={EMBEDDING: rows})

    pack(content([0, 299]), layout)
    for wrong in (content([0, 300]), content([-1, 5]), content([5, 5]), content([0, 1], width=5)):
        with pytest.raises(AdapterInvalid, match=EMBEDDING):
            pack(wrong, layout)


def test_pages_without_ends_are_named_as_before() -> None:
    """And lie where they did: stores keep the packed files of adapters that change no ends."""
    modules = dict.fromkeys(MODULES, (4, 6))
    ends = BaseEnds(300, 4, is_tied=False, head_has_bias=False)
    plain, with_ends = (AdapterLayout(BaseShape(2, modules, ends=each), 8, "bfloat16") for each in (None, ends))
    assert plain.key == with_ends.key and plain.tile == with_ends.tile
    assert plain.num_pages({"q_proj": 3}) == with_ends.num_pages({"q_proj": 3})


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_number_is_distinguished_from_those_that_are_none(dtype: np.dtype[np.generic]) -> None:
    """All of 16 bits, and of 32 the first half of the bits, with which a few that matter are joined."""
    bits = np.arange(1 << 16, dtype=np.uint32)
    if dtype == np.float32:
        bits = np.concatenate([bits << 16, np.array([0x7F7FFFFF, 0x7F800001, 0x7FFFFFFF, 0x00000001], np.uint32)])
    for one in bits.astype(f"uint{8 * dtype.itemsize}").view(dtype)[:, None]:
        assert is_finite(one) == bool(torch.isfinite(as_torch(one)))


DIGESTS = {  # as stores have them that were filled before numpy packed: digest, SHA-256 of the packed file
    "json": (
        "c7f0c00886566639e8ffc68db40bd08be95a65396f11f13924cc30f704c2db0d",
        "0d9c60944e84e5537c8641b41e12ab582fb587789e940cf65e5ed0ca803fb2de",
    ),
    "pirate": (
        "1d7bac6c8ae3511f1a7cda10361c58d6bab8695be6d10cadeab90706007c0e8e",
        "734ab1bc29ed7c78e776f7732d59d8af8cf3d166e1e25a14fc84500352bc2460",
    ),
    "shout": (
        "85ebae79f0f70deaa1071386b479702fecbee447c42771d2def71bd62ca76e88",
        "28c4987edfa8377ce3b0b391dbc42faec6b19702f3e695eaddf3b670782402d4",
    ),
    "spanish": (
        "4c97e82d2edc109ea9219a71bfd8bcc15e0d158940725258a4a1e51fbd078a0f",
        "58e1a6b7816cbc5528408271e35d7cfe182004a6b8f99cccc5facc883caa737b",
    ),
}


@pytest.mark.parametrize("name", DIGESTS)
def test_what_is_stored_keeps_its_digest_and_its_bytes(name: str) -> None:
    (layout,) = layouts_of_gang(ModelConfig.from_folder(DEMO / "base"), 1, 16, "bfloat16")
    folder = DEMO / "adapters" / name
    config = (folder / "adapter_config.json").read_bytes()
    content = validate(config, folder / "adapter_model.safetensors", layout.shape)
    file = io.BytesIO()
    num_pages = layout.num_pages(content.module_ranks)
    write_packed(file, content.digest, layout, num_pages, packed_chunks(content, layout, chunk_bytes=100_000))
    assert (content.digest, sha256(file.getvalue()).hexdigest()) == DIGESTS[name]
