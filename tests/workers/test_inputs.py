"""A step's tensors cost what its rows and pages cost, whatever the longest of its contexts is."""

from __future__ import annotations

import msgspec
import torch

from motet.kernels.lora import PagedAdapter
from motet.workers.execution.device_rows import make_inputs
from motet.workers.plan import SequencePlan, StepPlan, packed

BLOCK = 16
CPU = torch.device("cpu")


def decodes(contexts: list[int]) -> StepPlan:
    """One decode of each context; sequence i has the pages from 1000 * i on."""
    return StepPlan(
        1,
        tuple(
            SequencePlan(i, (7,), context, packed(range(1000 * i, 1000 * i + context // BLOCK + 1)), None, None)
            for i, context in enumerate(contexts)
        ),
        (),
        (),
    )


def test_pages_lie_one_after_the_other() -> None:
    batch = make_inputs(decodes([40, 3, 16]), {}, BLOCK, CPU).attention
    assert batch.pages.tolist() == [0, 1, 2, 1000, 2000, 2001]
    assert batch.page_starts.tolist() == [0, 3, 4]
    assert batch.most_pages == 3
    assert batch.row_pages.tolist() == [2, 1000, 2001]
    assert batch.row_slots.tolist() == [8, 3, 0]
    assert batch.context_lens == (41, 4, 17)


def test_one_long_context_pads_no_other() -> None:
    def num_elements(plan: StepPlan) -> int:
        inputs = make_inputs(plan, {}, BLOCK, CPU)
        tensors = [*vars(inputs).values(), *vars(inputs.attention).values()]
        return sum(one.numel() for one in tensors if isinstance(one, torch.Tensor))

    none, one = decodes([500] * 64), decodes([131_000] + [500] * 63)
    assert num_elements(one) - num_elements(none) == 131_000 // BLOCK - 500 // BLOCK


def test_rows_of_an_adapter_are_one_segment_in_whichever_order_a_plan_has_them() -> None:
    plan, adapters = decodes([3, 5, 9, 11, 2]), {name: PagedAdapter((number,), ()) for number, name in enumerate("ab")}
    parts = [
        msgspec.structs.replace(part, adapter=adapter)
        for part, adapter in zip(plan.sequences, ("b", None, "a", "b", "a"), strict=True)
    ]
    inputs = make_inputs(msgspec.structs.replace(plan, sequences=tuple(parts)), adapters, BLOCK, CPU)
    assert inputs.attention.context_lens == (6, 10, 3, 4, 12), "base, a, a, b, b"
    assert [(one.start, one.end, one.adapter) for one in inputs.segments] == [
        (1, 3, adapters["a"]),
        (3, 5, adapters["b"]),
    ]
