"""Embeddings and heads of adapters over pages against one row at a time."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from motet.adapters.adapter import EMBEDDING, END_MODULES, HEAD, MODULES, OUTER, BaseEnds, BaseShape
from motet.adapters.format.content import AdapterContent, LoraMatrices, TokenRows
from motet.adapters.packing.layout import AdapterLayout, Dtype
from motet.adapters.packing.packing import pack
from motet.kernels import model_ends
from motet.kernels.backend import plain_kernels
from motet.kernels.lora import ABSENT, LoraSegment, ModuleSlice, PagedAdapter, PagedEnd, PagedEnds
from motet.kernels.model_ends import EndGeometry, ModelEnds
from motet.tests.rigs.native_builds import BUILDS, EXAMPLES, Build, load_build
from motet.workers.memory.host_adapter_cache import as_torch

VOCAB, HIDDEN = 45, 24
SHAPE = BaseShape(2, dict.fromkeys(MODULES, (8, 8)), ends=BaseEnds(VOCAB, HIDDEN, is_tied=False, head_has_bias=False))
DTYPES: dict[torch.dtype, tuple[Dtype, float]] = {
    torch.float32: ("float32", 1e-5),
    torch.bfloat16: ("bfloat16", 6e-2),  # several roundings of numbers of up to 4
}
adapters = st.none() | st.tuples(
    st.dictionaries(st.sampled_from(END_MODULES), st.integers(1, 5)),
    st.dictionaries(st.sampled_from(END_MODULES), st.sets(st.integers(0, VOCAB - 1), min_size=1)),
)


def content_of(case: tuple[dict[str, int], dict[str, set[int]]], generator: np.random.Generator) -> AdapterContent:
    ranks, tokens = case
    matrices = {}
    for module, rank in ranks.items():
        num_in, num_out = SHAPE.sides(OUTER, module) or (0, 0)
        a, b = (generator.normal(0, 0.5, size).astype(np.float32) for size in ((rank, num_in), (num_out, rank)))
        matrices[OUTER, module] = LoraMatrices(a, b, 0.5)
    rows = {
        module: TokenRows(np.array(sorted(ids)), generator.normal(0, 1, (len(ids), HIDDEN)).astype(np.float32))
        for module, ids in tokens.items()
    }
    return AdapterContent(matrices, token_rows=rows)


@pytest.mark.parametrize("build", [torch.float32, torch.bfloat16, *BUILDS], ids=str)
@settings(deadline=None, max_examples=8 * EXAMPLES)
@given(
    batch=st.lists(st.tuples(adapters, st.integers(1, 4)), min_size=1, max_size=6),
    slab=st.sampled_from([5, 12, 48, 400]),
    is_whole=st.booleans(),
    seed=st.integers(0, 2**20),
    data=st.data(),
)
def test_rows_get_their_own_adapters_ends(
    build: torch.dtype | Build,
    batch: list[tuple[tuple[dict[str, int], dict[str, set[int]]] | None, int]],
    slab: int,
    is_whole: bool,
    seed: int,
    data: st.DataObject,
) -> None:
    """Whatever lies in other pages. Logits are of some of the rows. `build`: a dtype of the plain twin, or a build."""
    kernels = plain_kernels() if isinstance(build, torch.dtype) else load_build(build)
    torch_dtype = build if isinstance(build, torch.dtype) else build[0]
    dtype, tolerance = DTYPES[torch_dtype]
    numpy = np.random.default_rng(seed)
    layout = AdapterLayout(SHAPE, slab, dtype)
    contents = [None if case is None else content_of(case, numpy) for case, _ in batch]
    needed = sum(0 if each is None else layout.num_pages(each.module_ranks) for each in contents)
    pool = torch.full((needed + 3, 2, slab), float("nan"), dtype=torch_dtype)
    free, segments, of_row, start = numpy.permutation(len(pool)).tolist(), list[LoraSegment](), [], 0
    for content, (_, num_rows) in zip(contents, batch, strict=True):
        if content is not None:
            packed = as_torch(pack(content, layout))
            pages = tuple(free.pop() for _ in packed)
            pool[list(pages)] = packed
            at = layout.end_offsets(content.module_ranks)
            ends = {
                module: PagedEnd(ModuleSlice(own.rank, own.rank, own.a, own.b), own.num_rows, own.token_ids, own.rows)
                for module, own in at.items()
            }
            paged = PagedEnds(pages, ends.get(EMBEDDING, PagedEnd()), ends.get(HEAD, PagedEnd())) if ends else None
            segments.append(LoraSegment(start, start + num_rows, PagedAdapter((), (ABSENT,) * 7, ends=paged)))
        of_row += [content] * num_rows
        start += num_rows
    rows = sorted(data.draw(st.sets(st.integers(0, start - 1))))
    table, states = (
        torch.tensor(numpy.normal(0, 1, size)).to(torch_dtype) for size in ((VOCAB, HIDDEN), (start, HIDDEN))
    )
    tokens = torch.tensor(numpy.integers(0, VOCAB, start))
    x, logits = table[tokens], torch.tensor(numpy.normal(0, 1, (len(rows), VOCAB))).float()
    expected_x, expected_logits = x.float(), logits.clone()
    for row, content in enumerate(of_row):
        if content is not None:
            expected_x[row] = embedded(content, int(tokens[row]), expected_x[row], is_whole)
            if row in rows:
                place = rows.index(row)
                expected_logits[place] = with_head(content, states[row].float(), expected_logits[place])

    geometry = EndGeometry(VOCAB, VOCAB + SHAPE.padding(HEAD), HIDDEN, layout.page_elements)
    step = ModelEnds(kernels.ends, kernels.lora, geometry).prepare(segments)
    assert (step is None) == all(segment.adapter.ends is None for segment in segments)
    if step is None:
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_ends, "_PIECE_BYTES", {"cpu": 300})
        patch.setattr(model_ends, "_MAX_RUNS", 3)
        by_row, logits_by_row = x.clone(), logits.clone()
        step.embed(x, tokens, pool, is_whole=is_whole)
        if (of_rows := step.at(rows)) is not None:
            of_rows.add_to_logits(logits, states[rows], pool)
        for row in range(start):
            if (alone := step.at([row])) is not None:
                alone.embed(by_row[row : row + 1], tokens[row : row + 1], pool, is_whole=is_whole)
                if row in rows:
                    own = logits_by_row[rows.index(row) :][:1]
                    alone.add_to_logits(own, states[row : row + 1], pool)
    if kernels.name == "native":
        same = torch.equal(x, by_row) and torch.equal(logits, logits_by_row)
        assert same, "a row's result is the same in any batch, to the last bit"
    torch.testing.assert_close(x.float(), expected_x, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(logits, expected_logits, atol=tolerance, rtol=tolerance)


def embedded(content: AdapterContent, token: int, x: torch.Tensor, is_whole: bool) -> torch.Tensor:
    if (trained := content.token_rows.get(EMBEDDING)) is not None and token in trained.token_ids:
        row = torch.tensor(trained.rows[trained.token_ids.tolist().index(token)])
        x = row if is_whole else torch.zeros_like(row)
    if is_whole and (lora := content.matrices.get((OUTER, EMBEDDING))) is not None:
        x = x + torch.tensor(lora.columns_of_b(slice(None), slice(None)) @ lora.a[:, token] * lora.scaling)
    return x


def with_head(content: AdapterContent, state: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    if (trained := content.token_rows.get(HEAD)) is not None:
        logits[torch.tensor(trained.token_ids)] = torch.tensor(trained.rows) @ state
    if (lora := content.matrices.get((OUTER, HEAD))) is not None:
        logits = logits + torch.tensor(lora.b) @ (torch.tensor(lora.a) @ state) * lora.scaling
    return logits
