"""How decodes are split in Triton, interpreted on the CPU: by each sequence's own length."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate, pairwise

import pytest
import torch

from motet.kernels.attention import AttentionBatch
from motet.kernels.gpu.attention import TritonAttention
from motet.kernels.gpu.decode import DecodeTuning
from motet.kernels.gpu.decode_device import split_kernel
from motet.kernels.plain.attention import paged_attention

BLOCK = 16
TOLERANCE = 2e-4  # sums run in another order


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, atol=TOLERANCE, rtol=TOLERANCE)


def batch_of(sequences: list[tuple[int, int]], kv_heads: int, seed: int) -> tuple[torch.Tensor, AttentionBatch]:
    """A layer with KV for sequences of `(context, newest rows)`, and NaN beyond; and the batch of the newest rows."""
    counts = [-(-context // BLOCK) for context, _ in sequences]
    order = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(seed))
    kv = torch.randn(len(order), 2, BLOCK, kv_heads, 16, generator=torch.Generator().manual_seed(seed))
    ends = list(accumulate(counts))
    for (context, _), end in zip(sequences, ends, strict=True):
        if context % BLOCK:
            kv[order[end - 1], :, context % BLOCK :] = torch.nan
    positions = torch.cat([torch.arange(context - rows, context) for context, rows in sequences])
    batch = AttentionBatch(
        query_starts=(0, *accumulate(rows for _, rows in sequences)),
        context_lens=tuple(context for context, _ in sequences),
        pages=order.int(),
        page_starts=torch.tensor([0, *ends[:-1]]),
        most_pages=max(counts),
        positions=positions,
        row_pages=positions,  # of writes, as the next
        row_slots=positions,
    )
    return kv, batch


def test_a_decode_is_the_same_to_the_last_bit_in_any_batch() -> None:
    """Its splits depend on its own length alone."""
    contexts, attention = (700, 30, 257, 256), TritonAttention()
    kv, batch = batch_of([(context, 1) for context in contexts], 1, seed=4)
    q = torch.randn(len(contexts), 2, 16, generator=torch.Generator().manual_seed(5))
    together = attention.paged_attention(q, kv, batch, 0.25, None)
    close(together, paged_attention(q, kv, batch, 0.25, None))
    for row in range(len(contexts)):
        one = slice(row, row + 1)
        alone = replace(
            batch,
            query_starts=(0, 1),
            context_lens=batch.context_lens[one],
            page_starts=batch.page_starts[one],
            most_pages=-(-contexts[row] // 16),
            positions=batch.positions[one],
        )
        assert torch.equal(attention.paged_attention(q[one], kv, alone, 0.25, None), together[one])


@pytest.mark.parametrize("window", [None, 150])
def test_few_programs_go_through_many_splits(window: int | None) -> None:
    kv, batch = batch_of([(299, 1), (3, 1), (83, 3), (1, 1), (201, 1)], 2, seed=6)
    q = torch.randn(batch.query_starts[-1], 6, 16, generator=torch.Generator().manual_seed(7))
    attention = TritonAttention(decode_tuning=DecodeTuning(programs=4, split_keys=32, keys=16))
    actual = attention.paged_attention(q, kv, batch, 0.25, window)
    close(actual, paged_attention(q, kv, batch, 0.25, window))


def splits_of(lengths: list[int], room: int) -> tuple[list[int], list[tuple[int, int]], int]:
    """How many splits each has; decode and split of each item; keys of a split."""
    items = torch.full((room + 128,), -1, dtype=torch.int32)
    starts = torch.zeros(len(lengths) + 2, dtype=torch.int32)
    split_kernel[(len(lengths),)](
        torch.tensor(lengths) - 1, None, items, starts, len(lengths), 0, room,
        WINDOW=False, KEYS=256, BLOCK=64, AT_ONCE=4,
    )  # fmt: skip
    *begins, keys = starts.tolist()
    found = [divmod(item, 128) for item in items.tolist() if item >= 0]
    assert len(found) == begins[-1] <= room
    return [end - begin for begin, end in pairwise(begins)], found, keys


def test_splits_follow_each_sequences_length() -> None:
    """One of 128k tokens has as many as there can be, 1,000 tokens have four, and padding has one, for its zeros."""
    lengths = [1000, 131072, 0, 256, 257, 40000]
    counts, found, keys = splits_of(lengths, 4096)
    assert (counts, keys) == ([4, 128, 1, 1, 2, 125], 256)
    assert found == [(index, split) for index, count in enumerate(counts) for split in range(count)]


def test_splits_grow_where_there_is_no_room_for_all() -> None:
    lengths = [1000, 131072, 0, 256, 257, 4000]
    counts, _, keys = splits_of(lengths, 40)
    assert keys > 256 and sum(counts) <= 40
    assert counts == [max(-(-length // max(keys, 1024 if length > 65536 else 0)), 1) for length in lengths]
    assert splits_of(lengths, len(lengths))[0] == [1] * len(lengths)
