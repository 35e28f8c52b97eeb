"""What adapters change of a model's embedding and head, for the rows of a step, on any device.

An adapter's end pages are one flat array, in which `adapters/packing/layout.py` places LoRA of both ends, and rows that
stand in place of the base's for some tokens. A row's embedding and a token's logit are by the adapter's row for the
token, else by the base's, plus LoRA. A row's result depends on nothing but the row and its own adapter. Tables may have
a row for each token of the vocabulary, so kernels read them where they lie, or in pieces.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import gcd
from typing import Protocol
from weakref import WeakKeyDictionary

import torch
from torch.nn.functional import linear

from .lora import LoraGeometry, LoraKernels, LoraSegment, PagedAdapter, PagedEnd, PagedEnds
from .staging import staged

# Of a table that is read at once: on a CPU as much as its caches hold, on a GPU enough that few launches read it all.
_PIECE_BYTES = {"cpu": 2 << 20, "cuda": 32 << 20}
_MAX_RUNS = 1 << 20  # that are gathered at once
_ID_BASE = 256  # of the digits of tokens' ids, which bfloat16 holds exactly


@dataclass(frozen=True)
class EndGeometry:
    """The sizes that end pages of all adapters of a base share."""

    vocab_size: int
    padded_vocab: int  # elements of a row of B of the head
    hidden_size: int
    page: int  # elements

    @cached_property
    def lora(self) -> LoraGeometry:
        """Of the head, whose pages are those of a model of one layer."""
        tile = gcd(self.page, self.hidden_size, self.padded_vocab)
        return LoraGeometry(1, self.page, tile, ((self.hidden_size, self.padded_vocab),))

    def head_adapter(self, ends: PagedEnds) -> PagedAdapter:
        """LoRA of the head, which lies in the first end pages."""
        at = ends.head.lora
        return PagedAdapter(ends.pages[: -(-(at.b + at.rank * self.padded_vocab) // self.page)], (at,))


@dataclass(frozen=True)
class RowTable:
    """A table `[num_rows, width]` in an adapter's end pages, from element `start` of their flat array on."""

    pool: torch.Tensor  # [num_pages, elements of a page]
    pages: torch.Tensor  # int64, of the adapter
    start: int
    num_rows: int
    width: int


class EndKernels(Protocol):
    def set_columns(self, y: torch.Tensor, x: torch.Tensor, table: RowTable, columns: torch.Tensor) -> None:
        """y[:, columns] = x tableᵀ, of y float32 and x `[n, width]`. `columns`: int64, of the rows of the table."""

    def add(self, y: torch.Tensor, vectors: torch.Tensor, table: RowTable) -> None:
        """y += vectors table, of y `[n, width]` and vectors `[n, num_rows]`."""


class ModelEnds:
    """Prepares the ends of steps' adapters on one device."""

    def __init__(self, kernels: EndKernels, lora: LoraKernels, geometry: EndGeometry) -> None:
        self.kernels, self.lora, self.geometry = kernels, lora, geometry
        self._tables: WeakKeyDictionary[PagedEnds, _Tables] = WeakKeyDictionary()

    def prepare(self, segments: Sequence[LoraSegment]) -> StepEnds | None:
        """None: no row's adapter changes an end. `segments`: as for `LoraKernels.prepare`."""
        having = tuple(segment for segment in segments if segment.adapter.ends is not None)
        return StepEnds(self, having) if having else None

    def tables(self, ends: PagedEnds, pool: torch.Tensor) -> _Tables:
        if ends not in self._tables:
            self._tables[ends] = _Tables(ends.pages, pool.view(len(pool), -1))
        return self._tables[ends]


@dataclass(frozen=True)
class StepEnds:
    """The rows of a step whose adapters change an end."""

    of: ModelEnds
    segments: tuple[LoraSegment, ...]

    def at(self, rows: Sequence[int]) -> StepEnds | None:
        """The same of these ascending rows of the step, which are numbered from 0 then; None: none has such ends."""
        places = [(bisect_left(rows, each.start), bisect_left(rows, each.end)) for each in self.segments]
        segments = [
            LoraSegment(start, end, each.adapter)
            for each, (start, end) in zip(self.segments, places, strict=True)
            if start < end
        ]
        return replace(self, segments=tuple(segments)) if segments else None

    def embed(self, x: torch.Tensor, token_ids: torch.Tensor, pool: torch.Tensor, *, is_whole: bool) -> None:
        """Changes embeddings x `[num_rows, hidden]` in place, before the base scales them.

        `is_whole`: else x is a partial sum to which another worker adds what adapters have.
        """
        hidden = self.of.geometry.hidden_size
        for segment, ends in self._each():
            end, tokens, x_rows = ends.embedding, token_ids[segment.start : segment.end], x[segment.start : segment.end]
            tables = self.of.tables(ends, pool)
            if end.num_rows:
                ids = tables.token_ids(end)
                places = torch.searchsorted(ids, tokens).clamp_(max=end.num_rows - 1)
                is_trained = (ids[places] == tokens).unsqueeze(1)
                trained = tables.gather(end.rows, places, hidden) if is_whole else torch.zeros_like(x_rows)
                x_rows.copy_(torch.where(is_trained, trained, x_rows))
            if end.lora.rank and is_whole:
                vectors = tables.gather(end.lora.a, tokens, end.lora.rank)
                self.of.kernels.add(x_rows, vectors, tables.table(end.lora.b, end.lora.rank, hidden))

    def add_to_logits(self, logits: torch.Tensor, states: torch.Tensor, pool: torch.Tensor) -> None:
        """Changes logits `[num_rows, vocab]` float32 of the last layer's states `[num_rows, hidden]` in place."""
        geometry = self.of.geometry
        for segment, ends in self._each():
            if not ends.head.num_rows:
                continue
            tables, rows = self.of.tables(ends, pool), slice(segment.start, segment.end)
            trained = tables.table(ends.head.rows, ends.head.num_rows, geometry.hidden_size)
            self.of.kernels.set_columns(logits[rows], states[rows], trained, tables.token_ids(ends.head))
        if lora := [(segment, ends) for segment, ends in self._each() if ends.head.lora.rank]:
            first, last = lora[0][0].start, lora[-1][0].end
            moved = [
                LoraSegment(segment.start - first, segment.end - first, geometry.head_adapter(ends))
                for segment, ends in lora
            ]
            batch = self.of.lora.prepare(moved, geometry.lora, states.device)
            added = states.new_zeros(last - first, geometry.padded_vocab)
            self.of.lora.add(added, states[first:last], pool.view(len(pool), 1, -1), 0, batch, (0,))
            logits[first:last].add_(added[:, : geometry.vocab_size])

    def _each(self) -> Iterator[tuple[LoraSegment, PagedEnds]]:
        for segment in self.segments:
            assert segment.adapter.ends is not None, "only segments that have ends"
            yield segment, segment.adapter.ends


class PlainEnds:
    """`EndKernels` in plain torch, for any device: tables are read in pieces."""

    def set_columns(self, y: torch.Tensor, x: torch.Tensor, table: RowTable, columns: torch.Tensor) -> None:
        for rows, piece in _pieces(table):
            y.index_copy_(1, columns[rows], linear(x, piece).to(y.dtype))

    def add(self, y: torch.Tensor, vectors: torch.Tensor, table: RowTable) -> None:
        for rows, piece in _pieces(table):
            y.addmm_(vectors[:, rows], piece)


def _pieces(table: RowTable) -> Iterator[tuple[slice, torch.Tensor]]:
    """Some rows at a time: which these are, and `[n, width]`."""
    width, pool = table.width, table.pool
    step = max(_PIECE_BYTES[pool.device.type] // (width * pool.itemsize), 1)
    for first in range(0, table.num_rows, step):
        last = min(first + step, table.num_rows)
        piece = _read(pool, table.pages, table.start + first * width, (last - first) * width)
        yield slice(first, last), piece.view(-1, width)


def _read(pool: torch.Tensor, pages: torch.Tensor, start: int, count: int) -> torch.Tensor:
    """So many elements of an adapter's flat array."""
    page = pool.shape[1]
    first, last = start // page, (start + count - 1) // page + 1
    return pool.index_select(0, pages[first:last]).view(-1)[start - first * page :][:count]


class _Tables:
    """The tables of an adapter's end pages."""

    def __init__(self, pages: tuple[int, ...], pool: torch.Tensor) -> None:
        """`pool`: `[num_pages, elements of a page]`."""
        self._pool = pool
        (self._pages,) = staged(pool.device, torch.tensor(pages, dtype=torch.int64))
        self._token_ids: dict[PagedEnd, torch.Tensor] = {}

    def table(self, start: int, num_rows: int, width: int) -> RowTable:
        return RowTable(self._pool, self._pages, start, num_rows, width)

    def token_ids(self, end: PagedEnd) -> torch.Tensor:
        """Of its rows, ascending int64."""
        if end not in self._token_ids:
            digits = _read(self._pool, self._pages, end.token_ids, 3 * end.num_rows).view(3, -1).long()
            self._token_ids[end] = digits[0] + _ID_BASE * (digits[1] + _ID_BASE * digits[2])
        return self._token_ids[end]

    def gather(self, start: int, rows: torch.Tensor, width: int) -> torch.Tensor:
        """These rows `[n, width]` of the table from element `start` on."""
        page = self._pool.shape[1]
        run = gcd(page, width, start)  # elements, which never cross the end of a page
        runs, per_row, per_page = self._pool.view(-1, run), width // run, page // run
        within = torch.arange(per_row, device=rows.device)

        def of(some: torch.Tensor) -> torch.Tensor:
            places = (start // run + some.unsqueeze(1) * per_row + within).flatten()
            pages = self._pages[places // per_page]
            return runs.index_select(0, pages * per_page + places % per_page).view(-1, width)

        return torch.cat([of(some) for some in rows.split(max(_MAX_RUNS // per_row, 1))])
