"""Nano-batches: which steps are split, in which order they are computed, and that they change no result."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from pathlib import Path
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from motet.benchmarks.rigs.thread_gang import ThreadGroup, run_threads
from motet.kernels.attention import AttentionBatch, DerivedFromBatches
from motet.kernels.lora import ABSENT, LoraSegment, PagedAdapter
from motet.tests.rigs.oracle import VOCAB_SIZE, write_model
from motet.tests.rigs.part_configs import engine_config
from motet.workers import worker_builder
from motet.workers.costs.step_costs import LEAST_GAIN, LEAST_ROWS, StepTimes, first_rows, first_rows_of
from motet.workers.execution import runner as execution
from motet.workers.execution.device_rows import StepInputs, make_inputs
from motet.workers.execution.runner import split_rows
from motet.workers.models.config import ModelConfig
from motet.workers.models.passes import Pass, alone, in_turn
from motet.workers.parallel import Alone
from motet.workers.plan import Residence, SamplePlan, SequencePlan, StepPlan, packed
from motet.workers.step_measurements import measured_steps, note_of
from motet.workers.wire.messages import SamplingParams
from motet.workers.worker_builder import build_executor

BLOCK_SIZE = 8
CPU = torch.device("cpu")
SECONDS = st.floats(1e-6, 1.0)
MOST_ROWS = 512


@st.composite
def step_times(draw: st.DrawFn) -> StepTimes:
    sizes = draw(st.lists(st.integers(1, MOST_ROWS), min_size=1, max_size=5, unique=True))
    return StepTimes(*({size: draw(SECONDS) for size in sizes} for _ in range(2)))


@given(step_times(), st.integers(1, 2 * MOST_ROWS), st.floats(1.0, 100.0))
def test_a_step_that_takes_longer_whole_is_not_split_less(times: StepTimes, num_rows: int, slower: float) -> None:
    """As with a slower network that nano-batches hide; and one that takes longer split is not split more."""
    times_whole, times_split = (
        {size: slower * each for size, each in way.items()} for way in (times.whole, times.split)
    )
    assert StepTimes(times_whole, times.split).gain(num_rows) >= times.gain(num_rows) * (1 - 1e-9)
    assert StepTimes(times.whole, times_split).gain(num_rows) <= times.gain(num_rows) * (1 + 1e-9)


@given(step_times(), st.integers(1, 2 * MOST_ROWS))
def test_a_gain_lies_between_those_measured_beside_it(times: StepTimes, num_rows: int) -> None:
    gains = {size: times.whole[size] / times.split[size] for size in times.whole}
    if num_rows in gains:
        assert times.gain(num_rows) == pytest.approx(gains[num_rows])
    below, above = ([size for size in gains if (size < num_rows) == is_below] for is_below in (True, False))
    beside = [gains[max(below)], gains[min(above)]] if below and above else [gains[min(gains)]]
    if num_rows <= max(gains):
        assert min(beside) * (1 - 1e-9) <= times.gain(num_rows) <= max(beside) * (1 + 1e-9)


@given(step_times(), st.integers(1, MOST_ROWS), st.integers(1, MOST_ROWS))
def test_nothing_is_split_that_would_gain_little(times: StepTimes, least: int, most: int) -> None:
    chosen = first_rows_of(times, max(least, LEAST_ROWS), most)
    for num_rows in range(max(least, LEAST_ROWS), most + 1):
        gains = times.gain(num_rows) >= LEAST_GAIN
        assert chosen.get(num_rows) == (first_rows(num_rows) if gains else None)


@given(st.integers(2, 5000))
def test_both_parts_have_rows_and_the_larger_a_tile_more_at_most(num_rows: int) -> None:
    first = first_rows(num_rows)
    assert 0 < first < num_rows
    assert abs(num_rows - 2 * first) <= 32


class Recorded(Alone):
    """Notes when each sum is begun and waited for."""

    def __init__(self) -> None:
        self.events: list[tuple[str, int, int]] = []

    def begin_all_reduce(self, x: torch.Tensor) -> RecordedSum:  # type: ignore[override]
        index, number = x.tolist()
        self.events.append(("begun", index, number))
        return RecordedSum(self, index, number)


class RecordedSum:
    def __init__(self, group: Recorded, index: int, number: int) -> None:
        self._group, self._place = group, (index, number)

    def wait(self) -> torch.Tensor:
        self._group.events.append(("ended", *self._place))
        return torch.tensor([*self._place, 1])


@given(st.lists(st.integers(0, 6), max_size=4))
def test_passes_in_turn_break_no_dependency(numbers: list[int]) -> None:
    """Each computes after its own last sum, and after those before it; meanwhile others are under way."""
    group = Recorded()

    def forward(index: int, num_sums: int) -> Pass[int]:
        for number in range(num_sums):
            group.events.append(("computed", index, number))
            total = yield torch.tensor([index, number])
            assert total.tolist() == [index, number, 1]
        return index

    found = in_turn([forward(index, num_sums) for index, num_sums in enumerate(numbers)], group)
    assert sorted(found) == list(range(len(numbers)))
    place = {event: order for order, event in enumerate(group.events)}
    assert len(place) == len(group.events) == 3 * sum(numbers), "each part is computed, begun and ended once"
    for index, num_sums in enumerate(numbers):
        for number in range(num_sums):
            part = (index, number)
            assert place["computed", *part] < place["begun", *part] < place["ended", *part]
            if number:
                assert place["ended", index, number - 1] < place["computed", *part]
            if index and number < numbers[index - 1]:
                assert place["computed", index - 1, number] < place["computed", *part]
                assert place["computed", *part] < place["ended", index - 1, number], "nothing hides the sum"


def test_backends_derive_once_from_two_batches_in_turn() -> None:
    plan = StepPlan(1, (SequencePlan(0, (1, 2), 0, packed([0]), None, None),), (), ())
    first, second, third = (make_inputs(plan, {}, BLOCK_SIZE, CPU).attention for _ in range(3))
    kept, derived = DerivedFromBatches[str](), list[str]()

    def of(batch: AttentionBatch, name: str) -> str:
        def derive() -> str:
            derived.append(name)
            return name

        return kept.of(batch, derive)

    for _ in range(3):
        assert (of(first, "first"), of(second, "second")) == ("first", "second")
    assert derived == ["first", "second"]
    assert (of(third, "third"), of(second, "again"), of(first, "anew")) == ("third", "second", "anew")


def test_a_pass_alone_gets_each_sum_and_returns_its_result() -> None:
    def forward() -> Pass[str]:
        assert (yield torch.tensor([1])) == 1
        assert (yield torch.tensor([2])) == 2
        return "result"

    assert alone(forward(), Alone()) == "result"


@st.composite
def inputs(draw: st.DrawFn) -> StepInputs:
    """Sequences of any numbers of rows, some with adapters."""
    adapters = {name: PagedAdapter((index,), (ABSENT,)) for index, name in enumerate("abc")}
    sequences, first_page = list[SequencePlan](), 0
    for number in range(draw(st.integers(1, 6))):
        start, num_tokens = draw(st.integers(0, 30)), draw(st.integers(1, 20))
        num_pages = -(-(start + num_tokens) // BLOCK_SIZE)
        adapter = draw(st.sampled_from([None, *adapters]))
        tokens = tuple(range(100 * number, 100 * number + num_tokens))
        pages = packed(range(first_page, first_page + num_pages))
        sequences.append(SequencePlan(number, tokens, start, pages, adapter, None))
        first_page += num_pages
    return make_inputs(StepPlan(1, tuple(sequences), (), ()), adapters, BLOCK_SIZE, CPU)


def rows_of(segments: tuple[LoraSegment, ...], start: int = 0) -> dict[int, tuple[int, ...]]:
    return {start + row: one.adapter.pages for one in segments for row in range(one.start, one.end)}


@given(inputs(), st.data())
def test_split_rows_are_the_same_rows(whole: StepInputs, data: st.DataObject) -> None:
    if whole.num_rows < 2:
        return
    row = data.draw(st.integers(1, whole.num_rows - 1))
    parts = split_rows(whole.token_ids, whole.attention, whole.segments, row)
    assert torch.equal(torch.cat([part.token_ids for part in parts]), whole.token_ids)
    for name in ("positions", "row_pages", "row_slots"):
        both = [getattr(part.attention, name) for part in parts]
        assert torch.equal(torch.cat(both), getattr(whole.attention, name))
    assert rows_of(parts[0].segments) | rows_of(parts[1].segments, row) == rows_of(whole.segments)
    for part in parts:
        batch = part.attention
        assert batch.query_starts[0] == 0 and batch.query_starts[-1] == len(part.token_ids)
        assert list(batch.query_starts) == sorted(set(batch.query_starts)), "each sequence has rows"
        assert len(batch.context_lens) == len(batch.page_starts) == len(batch.query_starts) - 1
        for sequence, stop in enumerate(batch.query_starts[1:]):
            position = int(batch.positions[stop - 1])
            assert batch.context_lens[sequence] == position + 1
            page = batch.pages[batch.page_starts[sequence] + position // BLOCK_SIZE]
            assert page == batch.row_pages[stop - 1]


@pytest.fixture(scope="module", params=["llama", "gemma3", "qwen2_moe"])
def model_path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(request.param, tmp_path_factory.mktemp(request.param))


def mixed_step(modules: Iterable[str]) -> StepPlan:
    """Decodes and chunks of prompts at any positions, on the base and on adapters of two ranks."""
    generator, sequences, first_page = random.Random(0), list[SequencePlan](), 0
    sample = SamplePlan(SamplingParams(temperature=0.0), 0, 0)
    for number, num_tokens in enumerate([1, 17, 1, 1, 30, 9, 1, 1, 5]):
        start = generator.randint(0, 25)
        num_pages = -(-(start + num_tokens) // BLOCK_SIZE)
        tokens = tuple(generator.randrange(VOCAB_SIZE) for _ in range(num_tokens))
        pages = packed(range(first_page, first_page + num_pages))
        sequences.append(SequencePlan(number, tokens, start, pages, (None, "a", "b")[number % 3], sample))
        first_page += num_pages
    module_ranks = {name: dict.fromkeys(modules, rank) for name, rank in (("a", 4), ("b", 16))}
    residences = (Residence(name, ranks, tuple(range(100, 220))) for name, ranks in module_ranks.items())
    return StepPlan(1, tuple(sequences), tuple(residences), ())


@pytest.mark.parametrize("degree", [1, 2, 4])
def test_a_split_step_has_the_same_logits(model_path: Path, degree: int) -> None:
    """Bit by bit where no experts are, as long as workers add up in one order: rows do not depend on one another."""

    def work(group: ThreadGroup | Alone) -> list[torch.Tensor]:
        config = engine_config(
            model_path, model_path, dtype="float32", pool_bytes=8 << 20, block_size=BLOCK_SIZE, tensor_parallel=degree
        )
        executor = build_executor(config, group, None)
        runner = executor.runner
        runner._step = None  # of a worker alone, which computes a whole step in one call
        plan = mixed_step(["q_proj", "k_proj", "v_proj", "o_proj"])
        generator, found = torch.Generator().manual_seed(0), list[torch.Tensor]()
        content = torch.randn(runner.pool.shape, generator=generator) * 0.2
        num_rows = sum(len(sequence.token_ids) for sequence in plan.sequences)
        for first in (None, 1, 5, first_rows(num_rows), num_rows - 1):
            runner.pool.copy_(content)
            runner.nano_batches = {} if first is None else {num_rows: first}
            found.append(runner.logits(plan))
            found.append(runner.pool.clone())  # with the KV that the step has written
        executor.close()
        return found

    has_experts = ModelConfig.from_folder(model_path).experts is not None
    for found in [work(Alone())] if degree == 1 else run_threads(degree, work):
        assert len(found[0]) == 9 and found[0].isfinite().all()
        for index, split in enumerate(found[2:]):
            # Experts are grouped with other rows of theirs, which rounds otherwise.
            torch.testing.assert_close(split, found[index % 2], atol=1e-4 if has_experts else 0.0, rtol=0)


def test_workers_of_a_gang_choose_alike_by_what_the_slowest_takes(tmp_path: Path) -> None:
    """By clocks of different speeds, which are twice as fast in steps that are split."""
    given = {"dtype": "float32", "pool_bytes": 8 << 20, "tensor_parallel": 2, "nano_batches": "off"}
    config = engine_config(write_model("llama", tmp_path), tmp_path, **given)

    def work(group: ThreadGroup) -> StepTimes:
        executor = build_executor(config, group, None)
        runner, reads = executor.runner, [0.0]

        def clock() -> float:
            reads[0] += 0.1 * (1 + group.rank) * (2 if runner.nano_batches else 1)
            return reads[0]

        found = measured_steps(group, runner, 100, 64, 256, clock)
        assert not runner.pool[0].any() and not runner.nano_batches, "what was computed to measure is left"
        executor.close()
        return found

    with mock.patch.object(execution, "in_turn", wraps=in_turn) as split:
        first, second = run_threads(2, work)
    assert first == second
    assert first.whole == pytest.approx({32: 0.2, 64: 0.2}), "no larger step is measured after some seconds"
    assert first.split == pytest.approx({32: 0.4, 64: 0.4}), "both are of the slower clock"
    assert split.call_count == 2 * 2 * len(first.split)
    assert note_of(first, {}) == "; no nano-batches: 64 rows took 200 ms, in two 400 ms"
    assert note_of(first, {96: 48, 64: 32}).startswith("; nano-batches from 64 rows on: ")


@pytest.mark.parametrize("nano_batches", ["auto", "off"])
def test_an_operator_turns_them_off(nano_batches: str, tmp_path: Path) -> None:
    """Nothing is measured then."""
    given = {"dtype": "float32", "pool_bytes": 8 << 20, "tensor_parallel": 2, "nano_batches": nano_batches}
    config = engine_config(write_model("llama", tmp_path), tmp_path, **given)

    def work(group: ThreadGroup) -> tuple[Mapping[int, int], str]:
        executor = build_executor(config, group, None)
        executor.close()
        return executor.runner.nano_batches, executor.kernels_name

    with mock.patch.object(worker_builder, "measured_steps", return_value=StepTimes({32: 2.0}, {32: 1.0})) as measure:
        for chosen, kernels in run_threads(2, work):
            assert ("; nano-batches from 256" in kernels) == bool(chosen) == (nano_batches == "auto")
    assert measure.call_count == (2 if nano_batches == "auto" else 0)
