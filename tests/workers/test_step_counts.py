"""What a decode step asks of a GPU, by count: the same with any number of sequences and adapters, but for its bytes."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("triton", reason="Triton is for Linux on x86-64")

from motet.tests.rigs.stand_in_gpu.step_counts import MEASURED, Counts, Load, count
from motet.workers.execution.graphs import RecordedAdapters

FEW = Load(2, context=20, num_steps=24, max_tokens=120, pool_bytes=8 << 20)
MANY = replace(FEW, num_sequences=6)


@pytest.fixture(scope="module")
def few() -> Counts:
    return count(1, 0, load=FEW)


def test_a_step_is_one_copy_to_the_device_and_one_back(few: Counts) -> None:
    """Four numbers for each row, 12 bytes for a new page, and a token of each."""
    for load, counts in ((FEW, few), (MANY, count(1, 0, load=MANY))):
        num = load.num_sequences
        assert (counts.copies_to_device, counts.copies_to_host, counts.waits) == (MEASURED, MEASURED, MEASURED)
        assert counts.bytes_to_device == MEASURED * num * 4 * 8 + num * 12
        assert counts.bytes_to_host == MEASURED * num * 8
        assert (counts.launches, counts.within_the_graph) == (few.launches, few.within_the_graph)
        assert counts.idle_waits == 0, "the device has the next step already"
    assert few.launches < 10 * MEASURED


HYBRID = {  # Qwen3.5
    "architectures": ["Qwen3_5ForCausalLM"],
    "head_dim": 16,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}


def test_states_are_in_the_same_copy() -> None:
    """Pages before and after the step, whether it is the first, and where each sequence's one row is."""
    for load in (FEW, MANY):
        counts, num = count(2, 0, HYBRID, load), load.num_sequences
        assert (counts.copies_to_device, counts.copies_to_host, counts.waits) == (MEASURED, MEASURED, MEASURED)
        of_states = num * (2 * 4 + 1) + 2 * 4 * (num + 1)  # a state takes one page here
        assert counts.bytes_to_device == MEASURED * (num * 4 * 8 + of_states) + num * 12
        assert counts.bytes_to_host == MEASURED * num * 8
        assert counts.idle_waits == 0, "the device has the next step already"
    assert counts.launches < 20 * MEASURED


def test_adapters_are_within_the_graph(few: Counts, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables that are copied in each step, put back, are found."""
    there = count(1, 2, load=FEW)
    assert there.within_the_graph > few.within_the_graph
    # They may come one after the other, and new pages then go there in as many steps.
    num_more = there.launches - few.launches
    assert 0 <= num_more < FEW.num_sequences
    assert replace(there, within_the_graph=few.within_the_graph, launches=few.launches) == few
    monkeypatch.setattr(RecordedAdapters, "hold", lambda adapters, part, step: adapters._tables.refill(part, step))
    assert count(1, 2, load=FEW).launches >= there.launches + MEASURED
