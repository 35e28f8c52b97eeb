"""Paged attention and the write of KV: checked against float64, timed against floors and torch's own attention."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import accumulate

import torch
from torch.nn.functional import scaled_dot_product_attention

from motet.benchmarks.gpu.machine import Machine, Row, relative_error
from motet.kernels.attention import AttentionBatch
from motet.kernels.backend import Kernels, with_float8_kv
from motet.kernels.float8_kv import float8_view
from motet.kernels.plain.float8_kv import numbers_of

BLOCK = 16
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 1e-2}
_OF_FLOAT8 = 0.04  # of normal numbers, rounded: some 2.7 % of their norm


class PagedCase:
    """Sequences of `(context, newest rows)` with KV in pages of random order; everything else in the pool is NaN."""

    def __init__(
        self,
        machine: Machine,
        sequences: Sequence[tuple[int, int]],
        heads: int,
        kv_heads: int,
        head_dim: int,
        num_layers: int = 2,
        seed: int = 0,
    ) -> None:
        generator = torch.Generator(machine.device).manual_seed(seed)
        self.sequences, self.head_dim = sequences, head_dim
        counts = [-(-context // BLOCK) for context, _ in sequences]
        self.num_pages = sum(counts) + 7
        free = list(range(self.num_pages))
        random.Random(seed).shuffle(free)
        owned = [[free.pop() for _ in range(count)] for count in counts]
        shape = (self.num_pages, num_layers, 2, BLOCK, kv_heads, head_dim)
        self.pool = torch.full(shape, torch.nan, dtype=machine.dtype, device=machine.device)
        for (context, _), pages in zip(sequences, owned, strict=True):
            content = torch.randn(
                (len(pages), *shape[1:]), dtype=machine.dtype, device=machine.device, generator=generator
            )
            if context % BLOCK:
                content[-1, :, :, context % BLOCK :] = torch.nan
            self.pool[torch.tensor(pages, device=machine.device)] = content
        self.batch = _batch(sequences, owned, machine.device)
        num_rows = self.batch.query_starts[-1]
        rows = torch.randn(
            (num_rows, heads + 2 * kv_heads, head_dim), dtype=machine.dtype, device=machine.device, generator=generator
        )
        self.q, self.k, self.v = rows.split([heads, kv_heads, kv_heads], dim=1)

    def reference(self, layer: int, scale: float, window: int | None, softcap: float | None) -> torch.Tensor:
        """Attention in float64, one sequence at a time."""
        out = torch.empty(self.q.shape, dtype=torch.float64, device=self.q.device)
        for index, (context, rows) in enumerate(self.sequences):
            first_page = int(self.batch.page_starts[index])
            pages = self.batch.pages[first_page : first_page - (-context // BLOCK)]
            k, v = (self.pool[pages, layer, i].flatten(0, 1)[:context].double() for i in (0, 1))
            start = self.batch.query_starts[index]
            q = self.q[start : start + rows].double().unflatten(1, (k.shape[1], -1))  # [rows, kv_heads, group, dim]
            scores = torch.einsum("rkgd,ckd->kgrc", q, k) * scale
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            position = torch.arange(context - rows, context, device=k.device).unsqueeze(1)
            key = torch.arange(context, device=k.device)
            hidden = key > position
            if window is not None:
                hidden |= key <= position - window
            weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
            out[start : start + rows] = torch.einsum("kgrc,ckd->rkgd", weights, v).flatten(1, 2)
        return out


def check_attention(machine: Machine, kernels: Kernels) -> Iterator[Row]:
    """Checks each shape of head, group, window and cap that the families need, with decodes and chunks in one batch."""
    heads = [(32, 8, 128), (28, 4, 128), (9, 3, 64), (32, 32, 80), (16, 16, 96), (16, 8, 256)]
    mixed = [(4096, 1), (17, 1), (1, 1), (300, 300), (2000, 77), (1500, 2)]
    if machine.is_dry:
        heads, mixed = [(4, 2, 64), (3, 1, 80)], [(40, 1), (1, 1), (33, 20)]
    for index, (num_heads, kv_heads, head_dim) in enumerate(heads):
        case = PagedCase(machine, mixed, num_heads, kv_heads, head_dim, seed=random.randrange(1 << 30))
        scale = head_dim**-0.5
        for window, softcap in ((None, None), (1000 if not machine.is_dry else 9, 30.0))[: 1 if index % 2 else 2]:
            out = kernels.paged_attention(case.q, case.pool[:, 1], case.batch, scale, window, softcap)
            error = relative_error(out, case.reference(1, scale, window, softcap))
            what = f"{num_heads}/{kv_heads} heads of {head_dim}" + (f", window {window}, cap" if window else "")
            yield Row("attention", what, error, TOLERANCE[machine.dtype])


def time_decode(machine: Machine, kernels: Kernels) -> Iterator[Row]:
    """Llama-3-8B's heads. The floor is the KV read once."""
    sizes = [(1, 4096), (16, 4096), (64, 512), (64, 4096)] if not machine.is_dry else [(2, 40)]
    for count, context in sizes:
        layers = 4 if count * context < 200_000 else 2
        case = PagedCase(machine, [(context, 1)] * count, 32, 8, 128, num_layers=layers)
        scale = 128**-0.5
        out = kernels.paged_attention(case.q, case.pool[:, 0], case.batch, scale, None)
        error = relative_error(out, case.reference(0, scale, None, None))

        def call(layer: int, case: PagedCase = case, scale: float = scale) -> torch.Tensor:
            return kernels.paged_attention(case.q, case.pool[:, layer], case.batch, scale, None)

        time_s = machine.time_s([lambda layer=layer, call=call: call(layer) for layer in range(layers)])  # type: ignore[misc]
        kv_bytes = count * context * 2 * 8 * 128 * case.pool.element_size()
        others = {}
        sdpa_s = _sdpa_time_s(machine, case, layers)
        if sdpa_s is not None:
            others["SDPA, contiguous"] = sdpa_s
        yield Row(
            "decode attention",
            f"B {count}, context {context}",
            error,
            TOLERANCE[machine.dtype],
            time_s,
            machine.floor_s(kv_bytes),
            others,
        )
        del case, call


def time_float8_kv(machine: Machine, kernels: Kernels) -> Iterator[Row]:
    """KV of eight bits with Llama-3-8B's heads: what is written, then decodes over what that stands for in float64."""
    if not machine.is_dry and torch.cuda.get_device_capability(machine.device)[0] < 9:
        return
    chosen, scale = with_float8_kv(kernels), 128**-0.5
    for count, context in [(16, 4096), (64, 4096)] if not machine.is_dry else [(2, 40)]:
        case = PagedCase(machine, [(context, 1)] * count, 32, 8, 128, num_layers=1)
        prompts = PagedCase(machine, [(context, context)] * count, 1, 8, 128, num_layers=1)  # on the same pages
        slab = BLOCK * 2 * 8 * (128 + 4) // machine.dtype.itemsize
        pool = torch.zeros((case.num_pages, 2, slab), dtype=machine.dtype, device=machine.device)
        layers = [float8_view(pool[:, layer], BLOCK, 8, 128) for layer in range(2)]
        angles = torch.stack((torch.ones(context, 64), torch.zeros(context, 64)), 1).to(machine.device)
        for kv in layers:
            chosen.write_kv(prompts.q, prompts.k, prompts.v, angles, kv, prompts.batch)
        numbers = numbers_of(layers[0])
        written = numbers[prompts.batch.row_pages, :, prompts.batch.row_slots]
        error = relative_error(written, torch.stack((prompts.k, prompts.v), 1).double())
        yield Row("KV write, float8", f"{count * context} rows", error, _OF_FLOAT8)
        case.pool = numbers.unsqueeze(1)
        out = chosen.paged_attention(case.q, layers[0], case.batch, scale, None)
        error = relative_error(out, case.reference(0, scale, None, None))
        calls = [lambda kv=kv, case=case: chosen.paged_attention(case.q, kv, case.batch, scale, None) for kv in layers]
        floor_s = machine.floor_s(count * context * 2 * 8 * (128 + 4))
        what = f"float8 KV, B {count}, context {context}"
        yield Row("decode attention", what, error, TOLERANCE[machine.dtype], machine.time_s(calls), floor_s)
        del case, prompts, calls


def time_chunks(machine: Machine, kernels: Kernels) -> Iterator[Row]:
    """A prompt chunk of Llama-3-8B's heads. The floor is the products of what is seen."""
    sizes = [(2048, 2048), (2048, 8192)] if not machine.is_dry else [(24, 40)]
    for rows, context in sizes:
        case = PagedCase(machine, [(context, rows)], 32, 8, 128)
        scale = 128**-0.5
        out = kernels.paged_attention(case.q, case.pool[:, 0], case.batch, scale, None)
        error = relative_error(out, case.reference(0, scale, None, None))

        def call(layer: int, case: PagedCase = case, scale: float = scale) -> torch.Tensor:
            return kernels.paged_attention(case.q, case.pool[:, layer], case.batch, scale, None)

        time_s = machine.time_s([lambda layer=layer, call=call: call(layer) for layer in range(2)])  # type: ignore[misc]
        seen = rows * (context - rows) + rows * (rows + 1) / 2
        others = {}
        if rows == context and not machine.is_dry:
            q, k, v = (x.transpose(0, 1).unsqueeze(0).contiguous() for x in (case.q, case.k, case.v))
            causal_s = machine.time_s(
                [lambda q=q, k=k, v=v: scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)] * 2  # type: ignore[misc]
            )
            if causal_s is not None:
                others["SDPA, contiguous"] = causal_s
        floor_s = machine.floor_s(context * 2 * 8 * 128 * case.pool.element_size(), 4 * seen * 32 * 128)
        what = f"{rows} rows, context {context}"
        yield Row("chunk attention", what, error, TOLERANCE[machine.dtype], time_s, floor_s, others)


def time_write_kv(machine: Machine, kernels: Kernels) -> Iterator[Row]:
    """The floor is q read and written, k and v read and written."""
    for rows, context in [(1, 64), (2048, 2048)] if not machine.is_dry else [(3, 20)]:
        count = 64 if rows == 1 else 1
        case = PagedCase(machine, [(context, rows)] * count, 32, 8, 128)
        angle = torch.outer(torch.arange(context, device=machine.device), torch.rand(64, device=machine.device))
        rotary = torch.stack((angle.cos(), angle.sin()), 1).contiguous()
        turned = kernels.write_kv(case.q, case.k, case.v, rotary, case.pool[:, 0], case.batch)
        half = rotary[case.batch.positions].double()

        def rotate(x: torch.Tensor, half: torch.Tensor = half) -> torch.Tensor:
            cos, sin = half[:, 0].unsqueeze(1), half[:, 1].unsqueeze(1)
            first, second = x.double().chunk(2, -1)
            return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)

        stored = case.pool[case.batch.row_pages, 0, :, case.batch.row_slots]
        written = torch.stack((rotate(case.k), case.v.double()), 1)
        error = max(relative_error(turned, rotate(case.q)), relative_error(stored, written))
        time_s = machine.time_s(
            [
                lambda layer=layer, case=case, rotary=rotary: kernels.write_kv(  # type: ignore[misc]
                    case.q, case.k, case.v, rotary, case.pool[:, layer], case.batch
                )
                for layer in range(2)
            ]
        )
        num_bytes = 2 * (case.q.numel() + case.k.numel() + case.v.numel()) * case.q.element_size()
        yield Row(
            "rope + KV write",
            f"{rows * count} rows",
            error,
            TOLERANCE[machine.dtype],
            time_s,
            machine.floor_s(num_bytes),
        )


def _sdpa_time_s(machine: Machine, case: PagedCase, layers: int) -> float | None:
    """torch's own attention on KV that lies contiguously, in place of pages."""
    if machine.is_dry:
        return None
    context, count = case.sequences[0][0], len(case.sequences)
    shape = (count, 8, context, 128)
    q = case.q.unsqueeze(2)
    held = [
        [torch.randn(shape, dtype=machine.dtype, device=machine.device) for _ in range(2)]
        for _ in range(min(layers, 2))
    ]
    calls = [lambda k=k, v=v: scaled_dot_product_attention(q, k, v, enable_gqa=True) for k, v in held]
    return machine.time_s(calls)


def _batch(
    sequences: Sequence[tuple[int, int]], owned: Sequence[Sequence[int]], device: torch.device
) -> AttentionBatch:
    listed = torch.tensor([page for pages in owned for page in pages], dtype=torch.int32)
    page_starts = torch.tensor([*accumulate((len(pages) for pages in owned[:-1]), initial=0)])
    starts = [0]
    for _, rows in sequences:
        starts.append(starts[-1] + rows)
    positions = torch.cat([torch.arange(context - rows, context) for context, rows in sequences])
    owner = torch.arange(len(sequences)).repeat_interleave(torch.tensor([rows for _, rows in sequences]))
    return AttentionBatch(
        tuple(starts),
        tuple(context for context, _ in sequences),
        listed.to(device),
        page_starts.to(device),
        max(map(len, owned)),
        positions.to(device),
        listed[page_starts[owner] + positions // BLOCK].long().to(device),
        (positions % BLOCK).to(device),
    )
