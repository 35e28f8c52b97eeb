"""A step's tensors on a GPU are those of its plan, though most of them stay there from step to step."""

from __future__ import annotations

import random

import pytest
import torch
from msgspec.structs import replace

from motet.kernels.attention import AttentionBatch
from motet.kernels.joint_sampling import ChoicesUnderWay, RowChoice
from motet.workers.execution.begun_step import BegunStep
from motet.workers.execution.device_rows import DeviceInputs, DeviceRows, PageTables, StepInputs, make_inputs
from motet.workers.plan import SamplePlan, SequencePlan, StatePlan, StepPlan, packed
from motet.workers.wire.messages import SamplingParams

BLOCK, MOST_PAGES, MOST_SEQUENCES = 4, 9, 5
CPU = torch.device("cpu")
GREEDY = SamplingParams(temperature=0.0)


def part(
    sequence_id: int, num_tokens: int, start: int, pages: list[int], *, samples: bool = True, is_fed: bool = False
) -> SequencePlan:
    sample = SamplePlan(GREEDY, 0, 0) if samples else None
    tokens = (0,) if is_fed else tuple(range(start, start + num_tokens))
    return SequencePlan(sequence_id, tokens, start, packed(pages), None, sample, is_fed)


def plan(*parts: SequencePlan) -> StepPlan:
    return StepPlan(1, parts, (), ())


def rows() -> DeviceRows:
    return DeviceRows(PageTables(MOST_SEQUENCES, MOST_PAGES, CPU), BLOCK)


def pages_of(batch: AttentionBatch) -> list[list[int]]:
    """Of each sequence, those that its tokens so far lie in."""
    starts = batch.page_starts.tolist()
    return [
        batch.pages[start : start + -(-length // BLOCK)].tolist()
        for start, length in zip(starts, batch.context_lens, strict=True)
    ]


def assert_same(ours: DeviceInputs, theirs: StepInputs) -> None:
    for name in ("positions", "row_pages", "row_slots"):
        torch.testing.assert_close(getattr(ours.attention, name), getattr(theirs.attention, name), rtol=0, atol=0)
    for name in ("query_starts", "context_lens", "most_pages"):
        assert getattr(ours.attention, name) == getattr(theirs.attention, name)
    assert pages_of(ours.attention) == pages_of(theirs.attention)
    assert torch.equal(ours.token_ids, theirs.token_ids)
    assert (ours.segments, ours.sample_ids, ours.samples) == (theirs.segments, theirs.sample_ids, theirs.samples)
    every = torch.arange(len(theirs.token_ids))
    assert torch.equal(every if ours.sample_rows is None else ours.sample_rows, theirs.sample_rows)


def test_tables_hold_the_pages_of_random_plans() -> None:
    """Sequences grow, start again on other pages, leave, and are more in all than there are tables."""
    generator, kept = random.Random(1), rows()
    held: dict[int, list[int]] = {}
    for _ in range(400):
        for sequence_id in [each for each in held if generator.random() < 0.05]:
            del held[sequence_id]
        chosen = generator.sample(range(12), generator.randint(1, MOST_SEQUENCES))
        parts = []
        for sequence_id in chosen:
            pages = held.setdefault(sequence_id, [generator.randrange(100)])
            while len(pages) < MOST_PAGES and generator.random() < 0.3:
                pages.append(generator.randrange(100))
            num_tokens = generator.choice([1, 1, 1, generator.randint(1, len(pages) * BLOCK)])
            free = len(pages) * BLOCK - num_tokens  # the newest token is in the last page
            start = free - generator.randrange(min(BLOCK, free + 1))
            parts.append(part(sequence_id, num_tokens, start, pages, samples=generator.random() < 0.8))
        requested = plan(*parts)
        assert_same(kept.inputs(requested, {}, BegunStep()), make_inputs(requested, {}, BLOCK, CPU))
        kept.tables.check_integrity()


def test_only_new_pages_are_written() -> None:
    tables = PageTables(3, MOST_PAGES, CPU)
    starts, places, pages = tables.update([part(7, 1, 3, [5]), part(8, 1, 3, [9, 4])])
    assert (starts, places.tolist(), pages.tolist()) == ([0, 9], [0, 9, 10], [5, 9, 4])
    starts, places, pages = tables.update([part(8, 1, 8, [9, 4, 6]), part(7, 1, 3, [5])])
    assert (starts, places.tolist(), pages.tolist()) == ([9, 0], [11], [6])
    _, places, pages = tables.update([part(7, 1, 8, [2, 5, 3])])  # it was preempted, and runs on other pages
    assert (places.tolist(), pages.tolist()) == ([0, 1, 2], [2, 5, 3])


def test_a_sequence_with_more_pages_than_a_table_is_refused() -> None:
    with pytest.raises(AssertionError, match="more pages than a table"):
        PageTables(2, 3, CPU).update([part(1, 1, 13, [1, 2, 3, 4])])


def test_tokens_are_those_that_the_step_before_has_chosen() -> None:
    """Whatever its order; a sequence without a token gets any, since what follows is thrown away."""
    logits = torch.zeros(3, 50)
    logits[[0, 1], [41, 17]] = 1.0
    logits[2] = torch.nan
    before = BegunStep((6, 4, 9), ChoicesUnderWay(logits, [RowChoice(None, None, {}, None)] * 3))
    fed = plan(
        part(4, 1, 3, [5], is_fed=True),
        part(2, 3, 0, [7]),
        part(6, 1, 5, [1, 2], is_fed=True),
        part(9, 1, 5, [3, 4], is_fed=True),
    )
    kept = rows()
    inputs = kept.inputs(fed, {}, before)
    kept.feed(before)
    assert inputs.is_fed and not inputs.is_decode
    assert inputs.token_ids.tolist() == [17, 0, 1, 2, 41, 0]
    decodes = kept.inputs(plan(*[each for each in fed.sequences if each.sequence_id != 2]), {}, before)
    kept.fill(decodes.rows, 5)
    token_ids, batch = kept.fixed(5)
    assert token_ids.tolist() == [17, 41, 0, 0, 0]
    assert batch.positions.tolist() == [3, 5, 5, -1, -1], "padding writes nothing"
    assert batch.row_pages[:3].tolist() == [5, 2, 4]


def test_states_of_a_step() -> None:
    """As they are laid out without tables; recorded decodes have them where they never move, and padding behind."""
    kept = DeviceRows(PageTables(MOST_SEQUENCES, MOST_PAGES, CPU), BLOCK, num_state_pages=2)
    goes_on = StatePlan(packed([8, 9]), packed([8, 9]))
    prompt = StatePlan(b"", packed([3, 4]), (2, 5), packed([10, 11, 12, 13]))
    parts = [
        replace(part(1, 1, 3, [5]), state=goes_on),
        replace(part(2, 7, 0, [6, 7]), state=prompt),
        replace(part(3, 1, 0, [20]), state=StatePlan(b"", packed([1, 2]))),
    ]
    for chosen in (parts, [parts[0], parts[2]]):
        requested = plan(*chosen)
        ours, theirs = kept.inputs(requested, {}, BegunStep()), make_inputs(requested, {}, BLOCK, CPU, 2)
        assert ours.states is not None and theirs.states is not None
        for name, tensor in vars(theirs.states).items():
            assert torch.equal(getattr(ours.states, name), tensor)
    assert ours.states is not None
    assert ours.is_decode
    for size, expected in ((5, [8, 9, 1, 2] + [-1] * 6), (3, [8, 9, 1, 2, -1, -1])):
        kept.fill_states(ours.states, size)
        fixed = kept.fixed_states(size)
        assert fixed is not None
        assert fixed.target.flatten().tolist() == expected
        assert fixed.source[0].tolist() == [8, 9]
        assert fixed.is_fresh.tolist() == [False, *[True] * (size - 1)]
        assert fixed.segment_rows.tolist() == fixed.sequence_segments.tolist() == list(range(size + 1))
    assert rows().fixed_states(3) is None


def test_a_step_that_chose_nothing_feeds_no_sequence() -> None:
    with pytest.raises(KeyError):
        rows().inputs(plan(part(1, 1, 3, [5], is_fed=True)), {}, BegunStep())
