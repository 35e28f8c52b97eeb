"""Where an adapter's matrices lie in the pages of the unified pool.

Per layer an adapter is one virtual array: for each present module, A `[rank, in]` then B transposed `[rank, out]`,
row after row, then two vectors `[2, out]` if it scales and shifts the module's outputs. The array is cut into slabs of
`slab` elements; slab i of every layer lies in the adapter's i-th page, a block `[num_layers, slab]`. Therefore one page
table and one table of offsets are valid for all layers. A module whose rank differs between layers is padded with zero
rows to its largest rank. Each expert has its own offsets and rank, and an expert without LoRA takes no room. One paged
pool for KV and adapters is S-LoRA's idea (arXiv 2311.03285, §5.1); because pages are plain bytes, it works with
grouped-query attention, too.

What an adapter has of the embedding and of the head lies in end pages behind these, each of which is one flat run of
`num_layers * slab` elements: of the head A `[rank, hidden]` and B transposed `[rank, vocab]`, of the embedding B
transposed `[rank, hidden]` and A transposed `[vocab, rank]`, so that a token's part of it is one run, and of both their
rows of tokens: the tokens' ids, as three digits below 256 each `[3, n]`, which bfloat16 holds exactly, and the rows
`[n, hidden]`. Each part begins where a tile does.

In a gang each worker packs its own part (`sharding.py`), and end pages whole. All parts have the same length, so that
an adapter has the same page ids on all workers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from math import gcd
from typing import Literal, NamedTuple
from zlib import crc32

from ..adapter import (
    EMBEDDING,
    END_MODULES,
    HEAD,
    NUM_OUTPUT_VECTORS,
    OUTPUTS,
    ROUTER,
    ROWS,
    WHOLE_MODULES,
    BaseShape,
    family_of_module,
    named_experts,
)

# How the modules of a base are cut into parts for the workers of a gang, and every adapter with them.
#
# Column-parallel modules are cut along their outputs, row-parallel ones along their inputs (Megatron-LM, arXiv
# 1909.08053, §3). Adapters are cut to match, where the base is cut, so that workers exchange nothing for them:
#
# - column-parallel: A is whole on every worker, B is cut by outputs, and each worker has its outputs of both.
# - row-parallel: A is cut by inputs, B is whole. Each worker adds what its inputs give to its partial sum of the base,
#   and the base's own all-reduce completes both.
#
# S-LoRA (arXiv 2311.03285, §6) cuts the other matrix of each pair, too, and exchanges rank-sized vectors: less memory,
# and four more collectives a layer, each of which takes as long as the base's when rows are few.


@dataclass(frozen=True)
class Sharding:
    """The part of worker `rank` among `degree` workers. A module in neither mapping is whole on every worker."""

    degree: int
    rank: int
    outputs: Mapping[str, tuple[int, int]]  # column-parallel: start and stop of the module's outputs
    inputs: Mapping[str, tuple[int, int]]  # row-parallel: start and stop of the module's inputs
    # Column-parallel too: several starts and stops of the module's outputs, side by side here.
    pieces: Mapping[str, tuple[tuple[int, int], ...]] = field(default_factory=dict)

    def key(self, modules: Iterable[str]) -> str:
        """The part's name. Parts with equal keys cut the modules alike."""
        cut = self.outputs.keys() | self.inputs.keys() | self.pieces.keys()
        uncut = any(module not in cut for module in modules)
        return f"gang{self.degree}-{self.rank}{'-uncut' if uncut else ''}"


Dtype = Literal["float32", "bfloat16"]
ELEMENT_BYTES: Mapping[Dtype, int] = {"float32": 4, "bfloat16": 2}


class ModuleOffsets(NamedTuple):
    """Offsets of one module in the virtual array of a layer, in elements."""

    rank: int
    a: int  # A [rank, in]
    b: int  # B transposed [rank, out]
    outputs: int | None = None  # gains, then shifts of the outputs [2, out]; None: there are none


NUM_ID_DIGITS, ID_BASE = 3, 256  # of the ids of tokens that have rows


class EndOffsets(NamedTuple):
    """Offsets of what an adapter has of the embedding or of the head in its end pages, in elements."""

    rank: int
    a: int  # A [rank, hidden] of the head, A transposed [vocab, rank] of the embedding
    b: int  # B transposed [rank, hidden], or [rank, vocab and padding] of the head
    num_rows: int
    token_ids: int  # [NUM_ID_DIGITS, num_rows], the lowest digits first
    rows: int  # [num_rows, hidden]


@dataclass(frozen=True)
class ModulePart:
    """The part of one module that a layout packs."""

    inputs: tuple[int, int]  # start, stop
    outputs: tuple[tuple[int, int], ...]  # starts and stops, side by side
    padding: int = 0  # columns of zeros behind them

    @property
    def widths(self) -> tuple[int, int]:
        """Elements of a row of A and of a row of B."""
        return self.inputs[1] - self.inputs[0], self.padding + sum(stop - start for start, stop in self.outputs)


@dataclass(frozen=True)
class AdapterLayout:
    """How adapters of one base are packed for one worker's part, page size and dtype."""

    shape: BaseShape  # unsharded
    slab: int  # elements that a page of this worker holds in one layer
    dtype: Dtype
    sharding: Sharding | None = None  # None: a gang of one worker

    @property
    def tile(self) -> int:
        """Elements of the widest run that never straddles a slab at any row of any module."""
        return gcd(self.slab, *(width for module in self.shape.modules for width in self.part(module).widths))

    @cached_property
    def key(self) -> str:
        """The layout's name. Layouts with equal keys pack an adapter into the same bytes."""
        cut = (module for module in self.shape.modules if module not in WHOLE_MODULES)
        worker = "tp1" if self.sharding is None else self.sharding.key(cut)
        experts = "" if self.shape.experts is None else f"-experts{self.shape.experts.num_experts}"
        if ROUTER in self.shape.modules:
            experts += f"-router{self.part(ROUTER).widths[1]}"
        order = f"-order{crc32(repr(self.shape.head_order).encode()):08x}" if self.shape.head_order else ""
        gated = f"-gated{self.shape.gated_head_dim}" if self.shape.gated_head_dim is not None else ""
        # What decides where entries lie, which layers have them and what is done to their B, where layers differ.
        parts = self.shape.layers, self.shape.copies, self.shape.output_groups, self.shape.output_scales
        kinds = f"-kinds{crc32(repr([sorted(part.items()) for part in parts]).encode()):08x}" if any(parts) else ""
        return f"{worker}-slab{self.slab}-layers{self.shape.num_layers}{experts}{order}{gated}{kinds}-{self.dtype}"

    @property
    def page_bytes(self) -> int:
        return self.page_elements * ELEMENT_BYTES[self.dtype]

    @property
    def page_elements(self) -> int:
        return self.shape.num_layers * self.slab

    def part(self, module: str) -> ModulePart:
        """This worker's part of a module."""
        (num_in, num_out), padding = self.shape.modules[module], self.shape.padding(module)
        if self.sharding is None:
            return ModulePart((0, num_in), ((0, num_out),), padding)
        inputs = self.sharding.inputs.get(module, (0, num_in))
        outputs = (self.sharding.outputs.get(module, (0, num_out)),)
        return ModulePart(inputs, self.sharding.pieces.get(module, outputs), padding)

    def output_order(self, module: str) -> list[int] | None:
        """Which outputs of the module the rows of its B are, in order; None: those of its one part as they stand."""
        outputs, shape = self.part(module).outputs, self.shape
        if module in shape.output_groups:
            return shape.output_groups[module].order(*outputs[0])
        is_ordered = bool(shape.head_order) and module in ("q_proj", "k_proj")
        is_gated = shape.gated_head_dim is not None and module == "q_proj"
        if len(outputs) == 1 and not is_ordered and not is_gated:
            return None
        rows, gates = [row for part in outputs for row in range(*part)], list[int]()
        if is_gated:
            dim = shape.gated_head_dim or 0
            heads = [rows[start : start + dim] for start in range(0, len(rows), dim)]  # a head, then its gate
            rows, gates = [*chain(*heads[::2])], [*chain(*heads[1::2])]
        if is_ordered:
            dim = len(shape.head_order)
            rows = [rows[start + row] for start in range(0, len(rows), dim) for row in shape.head_order]
        return gates + rows

    def offsets(self, module_ranks: Mapping[str, int]) -> dict[str, ModuleOffsets]:
        """Offsets of the present entries of the base's modules, of each expert its own, in packing order.

        Entries that no layer has side by side lie in one place.
        """
        ranks: dict[str, int] = {}
        for entry, rank in module_ranks.items():
            if entry.endswith(OUTPUTS):
                continue
            experts = named_experts(entry)
            ranks |= {entry: rank} if experts is None else {_member(entry, expert): rank for expert in experts}
        starts, _ = self._places(self._sizes(module_ranks))
        offsets: dict[str, ModuleOffsets] = {}
        for entry, start in starts.items():
            source = self.shape.source(entry)
            a_width, b_width = self.part(entry).widths
            has_outputs = f"{source}{OUTPUTS}" in module_ranks
            for module in self.shape.members(entry):
                rank = ranks.get(source if module == entry else module) or ranks.get(source, 0)
                end = start + rank * (a_width + b_width)
                if rank or has_outputs:
                    offsets[module] = ModuleOffsets(rank, start, start + rank * a_width, end if has_outputs else None)
                start = end + (NUM_OUTPUT_VECTORS * b_width if has_outputs else 0)
        return offsets

    def num_elements(self, module_ranks: Mapping[str, int]) -> int:
        """Elements of the virtual array of one layer."""
        return self._places(self._sizes(module_ranks))[1]

    def _sizes(self, module_ranks: Mapping[str, int]) -> dict[str, int]:
        """Elements that the entries of the base's modules take."""
        sums: dict[str, int] = {}  # of the ranks, by module as adapters know it
        vectors: dict[str, int] = {}  # of outputs
        for entry, rank in module_ranks.items():
            if entry.endswith(OUTPUTS):
                vectors[entry.removesuffix(OUTPUTS)] = rank
                continue
            experts = named_experts(entry)
            module = entry if experts is None else family_of_module(entry)
            sums[module] = sums.get(module, 0) + rank * (self.shape.count(module) if experts is None else len(experts))
        return {
            entry: sums.get(source, 0) * (a_width + b_width) + vectors.get(source, 0) * b_width
            for entry, source, (a_width, b_width) in self._rows
            if source in sums or source in vectors
        }

    @cached_property
    def _rows(self) -> tuple[tuple[str, str, tuple[int, int]], ...]:
        """Of each entry of the base's modules: its source, and elements of a row of A and of a row of B."""
        shape = self.shape
        return tuple((entry, shape.source(entry), self.part(entry).widths) for entry in shape.modules)

    def _places(self, sizes: Mapping[str, int]) -> tuple[dict[str, int], int]:
        """Where each entry starts, behind those before it that some layer has too, and where the last one ends."""
        starts: dict[str, int] = {}
        kinds = self.shape.kinds
        ends = [0] * len(kinds)
        for entry, size in sizes.items():
            places = [place for place, kind in enumerate(kinds) if entry in kind]
            starts[entry] = max((ends[place] for place in places), default=0)
            for place in places:
                ends[place] = starts[entry] + size
        return starts, max(ends)

    def end_offsets(self, module_ranks: Mapping[str, int]) -> dict[str, EndOffsets]:
        """By EMBEDDING and HEAD; empty: the adapter changes neither."""
        return self._end_places(module_ranks)[0]

    def _end_places(self, module_ranks: Mapping[str, int]) -> tuple[dict[str, EndOffsets], int]:
        """The same, and where the last of them ends."""
        ranks = {module: module_ranks.get(module, 0) for module in END_MODULES}
        num_rows = {module: module_ranks.get(f"{module}{ROWS}", 0) for module in END_MODULES}
        if not any((*ranks.values(), *num_rows.values())):
            return {}, 0
        ends = self.shape.ends
        assert ends is not None, "an adapter that changes an end is of a base that lets it"
        vocab, hidden = ends.vocab_size, ends.hidden_size
        head, embedding = ranks[HEAD], ranks[EMBEDDING]
        # Of LoRA those parts come first whose places kernels count in 32 bits.
        sizes = {
            (HEAD, "a"): head * hidden,
            (HEAD, "b"): head * (vocab + self.shape.padding(HEAD)),
            (EMBEDDING, "b"): embedding * hidden,
            (EMBEDDING, "a"): embedding * vocab,
        }
        for module, number in num_rows.items():
            sizes |= {(module, "token_ids"): NUM_ID_DIGITS * number, (module, "rows"): number * hidden}
        unit, end, starts = gcd(self.page_elements, hidden), 0, dict[tuple[str, str], int]()
        for part, size in sizes.items():
            starts[part] = end
            end += -(-size // unit) * unit
        offsets = {
            module: EndOffsets(
                ranks[module],
                starts[module, "a"],
                starts[module, "b"],
                num_rows[module],
                starts[module, "token_ids"],
                starts[module, "rows"],
            )
            for module in END_MODULES
            if ranks[module] or num_rows[module]
        }
        return offsets, end

    def num_layer_pages(self, module_ranks: Mapping[str, int]) -> int:
        """Pages of the virtual arrays of the layers, which come before the end pages."""
        return -(-self.num_elements(module_ranks) // self.slab)

    def num_pages(self, module_ranks: Mapping[str, int]) -> int:
        """Pages that an adapter takes, the same on every worker of a gang."""
        return self.num_layer_pages(module_ranks) + -(-self._end_places(module_ranks)[1] // self.page_elements)


def packed_bytes(layouts: Sequence[AdapterLayout], module_ranks: Mapping[str, int]) -> int:
    """Bytes of an adapter's pages on all workers of a gang, whose layouts these are."""
    return layouts[0].num_pages(module_ranks) * sum(layout.page_bytes for layout in layouts)


def _member(entry: str, expert: int) -> str:
    return family_of_module(entry).replace(".", f".{expert}.")
