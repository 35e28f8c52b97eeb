"""The baselines of the papers' benchmarks: what they reserve fits, and the figures in docs/history/papers.md hold."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from motet.adapters.adapter import MODULES
from motet.benchmarks.papers import adapter_sharding, conversations, knees, orca, paged, slora
from motet.benchmarks.papers.policies import Continuous, Dynamic, Reserved, first_fit, known, largest, power_of_two
from motet.benchmarks.papers.virtual_load import BLOCK_SIZE, Job, run

jobs = st.lists(st.builds(Job, st.integers(1, 60), st.integers(1, 60)), min_size=1, max_size=30)


@given(jobs, st.sampled_from([largest(128), power_of_two(128), known]), st.booleans(), st.randoms())
def test_reservations_fit_and_do_not_overlap(
    jobs: list[Job], size_of: Callable[[Job], int], is_contiguous: bool, chance: Random
) -> None:
    policy, waiting, running = Reserved(200, size_of, is_contiguous), list(jobs), list[Job]()
    while waiting or running:
        number = policy.admit(waiting, len(running), 0.0, True)
        running += waiting[:number]
        del waiting[:number]
        assert set(policy._slots) == set(running) and running, "what fits alone starts when nothing runs"
        slots = sorted(policy._slots.values())
        assert sum(size for _, size in slots) <= 200 and all(size >= 0 for _, size in slots)
        if is_contiguous:
            assert all(start + size <= then for (start, size), (then, _) in itertools.pairwise(slots))
            assert slots[-1][0] + slots[-1][1] <= 200
        policy.end(running.pop(chance.randrange(len(running))))


@given(st.integers(1, 1000), st.integers(1, 1000))
def test_orca_s_rooms_are_in_order(prompt: int, answer: int) -> None:
    job = Job(prompt, answer)
    assert known(job) <= power_of_two(2048)(job) <= largest(2048)(job)
    assert power_of_two(4096)(job) - prompt < 2 * answer


def test_static_batches_end_with_their_longest_answer() -> None:
    jobs = [Job(4, answer) for answer in (2, 8, 3, 5, 4)]
    outcome = run(jobs, Dynamic(2, None))
    assert outcome.num_steps == 8 + 5 + 4
    assert outcome.num_answer_tokens == sum(job.answer for job in jobs)


def test_a_dynamic_batch_begins_when_its_window_has_passed() -> None:
    policy = Dynamic(4, 1.0)
    waiting = [Job(1, 1, 0.5), Job(1, 1, 1.0)]
    assert policy.admit(waiting, 0, 1.4, False) == 0
    assert policy.admit(waiting, 1, 1.5, False) == 0
    assert policy.admit(waiting, 0, 1.5, False) == 2
    assert policy.admit(waiting * 3, 0, 1.0, False) == 4
    assert policy.admit(waiting, 0, 1.0, True) == 2
    assert Dynamic(4, None).admit(waiting, 0, 100.0, False) == 0
    assert policy.num_rows(1) == 2


def test_continuous_gains_as_answers_differ() -> None:
    gains = []
    for spread in (0.0, 0.5, 1.0):
        jobs = orca.jobs_of(spread, number=128)
        gains.append(orca.continuous(jobs).tokens_per_s / run(jobs, Dynamic(orca.BATCH, None)).tokens_per_s)
    assert 0.99 <= gains[0] <= 1.02 and gains[1] > 1.4 and gains[2] > gains[1]


def test_pages_run_more_than_reservations() -> None:
    jobs = paged.jobs_of("ShareGPT", 120)
    ours = paged.paged(jobs)
    theirs = run(jobs, Reserved(paged.POOL_TOKENS, power_of_two(paged.CONTEXT)))
    assert ours.num_running > 1.7 * theirs.num_running
    assert ours.filled(paged.POOL_TOKENS) > 1.5 * theirs.filled(paged.POOL_TOKENS)


def test_samples_share_their_prompt_s_pages() -> None:
    shared, alone = (run([Job(64, 8, num_samples=number) for _ in range(4)], Continuous()) for number in (4, 1))
    assert alone.num_answer_tokens == 4 * 8 and shared.num_answer_tokens == 4 * 4 * 8


def test_beams_share_more_the_longer_they_grow() -> None:
    """All that beams share of a page less than whole is copied, so a beam alone saves nothing."""
    assert paged.beams(1, 4) == 0
    assert 0 < paged.beams(2, 4) < paged.beams(4, 4) < 1


def test_swapping_gains_with_larger_pages_and_recomputing_does_not() -> None:
    times = [paged.swapped_and_recomputed(size) for size in (1, 16, 256)]
    whole, by_layer, recomputed = zip(*times, strict=True)
    assert list(whole) == sorted(whole, reverse=True) and list(by_layer) == sorted(by_layer, reverse=True)
    assert len(set(recomputed)) == 1


def test_merged_bases_serve_one_adapter_at_a_time_and_pause_between_them() -> None:
    jobs = [Job(4, 4, adapter=str(number % 2)) for number in range(6)]
    policy, waiting = slora.Merged(), list(jobs)
    assert policy.admit(waiting, 0, 0.0, True) == 3
    assert {job.adapter for job in waiting[:3]} == {"0"} and set(waiting) == set(jobs)
    assert policy.pause_s() > 2 * slora.WEIGHTS_BYTES / slora.DEVICE.bytes_per_s and policy.pause_s() == 0.0
    del waiting[:3]
    assert policy.admit(waiting, 1, 0.0, True) == 0
    assert policy.admit(waiting, 0, 0.0, True) == 3


def test_a_pool_of_its_own_holds_the_adapters_that_run() -> None:
    ours = slora.pages_of(slora.rank_of("3"))
    policy = slora.OwnPool(ours + 1)
    three, other = Job(4, 4, adapter="3"), Job(4, 4, adapter="7")
    assert policy.admit([three, three, other], 0, 0.0, True) == 2
    policy.end(three)
    assert policy.admit([other], 1, 0.0, True) == 0
    policy.end(three)
    assert policy.admit([other], 0, 0.0, True) == 1


def test_one_pool_serves_at_least_as_fast_as_each_other_way() -> None:
    found = slora.measure(50, 60)
    assert all(found["one pool"] >= 0.99 * rate for name, rate in found.items() if name != "base alone")
    assert found["one pool"] > 2 * found["merged"]


@given(st.lists(st.integers(1, 9), min_size=1, max_size=12), st.randoms(), st.integers(1, 9))
def test_the_first_fit_is_the_first_gap(sizes: list[int], chance: Random, wanted: int) -> None:
    slots, start = list[tuple[int, int]](), 0
    for size in sizes:
        start += chance.randrange(6)
        slots.append((start, size))
        start += size
    chance.shuffle(slots)
    taken = {place for begin, size in slots for place in range(begin, begin + size)}
    assert first_fit(slots, wanted) == next(
        place for place in range(start + 1) if taken.isdisjoint(range(place, place + wanted))
    )


def test_one_piece_holds_what_runs_and_nothing_twice() -> None:
    adapter, kv = slora.bytes_of(slora.rank_of("3")), 8 * slora.PAGE_BYTES // BLOCK_SIZE
    policy = slora.OnePiece(adapter + 2 * kv)
    first, second, third = (Job(4, 4, adapter="3") for _ in range(3))
    assert policy.admit([first, second, third], 0, 0.0, True) == 2
    assert policy.free == [0.0] and policy.adapters == [adapter / (adapter + 2 * kv)]
    policy.end(first)
    assert policy.admit([Job(5, 4, adapter="3")], 1, 0.0, True) == 0
    assert policy.admit([third], 1, 0.0, True) == 1
    policy.end(second)
    policy.end(third)
    assert policy.admit([Job(8, 8, adapter="7")], 0, 0.0, True) == 1  # nothing is left of what has ended


def test_one_pool_loses_least_of_the_memory() -> None:
    found = slora.fragmentation(slora.FRAGMENTED_ADAPTERS)
    assert all(one.lost + one.free > -1e-9 and one.tokens > 0 and one.adapters > 0 for one in found.values())
    assert found["one pool"].tokens > max(found["own pool"].tokens, found["one piece"].tokens)


@pytest.mark.parametrize("load", knees.LOADS)
def test_beyond_the_knee_requests_wait(load: str) -> None:
    """Where more come than it serves, as many rows are computed as full steps have, by the model."""
    few, many = (
        knees.served(load, rate * knees.full_tokens_per_s(load) / knees.tokens_of(load), 20.0) for rate in (0.5, 2.0)
    )
    assert few.rows_per_s < 0.7 * many.rows_per_s
    assert many.rows_per_s == pytest.approx(knees.full_tokens_per_s(load), rel=0.06)
    assert few.token_s < many.token_s


def test_rounds_compute_less_where_their_kv_is_kept(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    talks = [[(10, 5), (3, 2)]]
    assert conversations.needed_without_reuse(talks) == 14 + 19
    monkeypatch.setattr("sys.argv", ["conversations", "--conversations", "12"])
    conversations.main()
    less = json.loads(capsys.readouterr().out.splitlines()[-1])["computed_less"]
    assert less["nothing"] <= 1.001 < less["in the pool"] <= less["and host memory"] * 1.02
    assert less["and host memory"] > 2


@pytest.mark.parametrize("degree", [2, 4])
@pytest.mark.parametrize("way", adapter_sharding.WAYS)
def test_an_adapter_that_is_cut_adds_what_a_whole_one_adds(way: str, degree: int) -> None:
    shapes = {module: (16, 8) if module[0] in "kv" else (16, 16) for module in MODULES}
    adapter = adapter_sharding.random_adapter(shapes, 8, torch.float64)
    if way == "block-diagonal":
        adapter = adapter_sharding.with_blocks(adapter, degree)
    chance = torch.Generator().manual_seed(3)
    inputs = {
        each: torch.randn(5, 16, generator=chance, dtype=torch.float64)
        for each in ("q_proj", "o_proj", "gate_proj", "down_proj")
    }
    found = adapter_sharding.exchange(way, adapter, inputs.__getitem__, degree)
    for modules in adapter_sharding.TOGETHER:
        for module in modules:
            (a, b), parts = adapter[module], [one.outputs[module] for one in found]
            whole = sum(parts) if module in adapter_sharding.ROW_PARALLEL else torch.cat(parts, 1)
            torch.testing.assert_close(
                whole, inputs[modules[0]] @ a.T @ b.T, atol=1e-5, rtol=1e-5
            )  # sums are in float32
    assert {one.num_collectives for one in found} == {4 if way == "S-LoRA" else 0}
    held = found[0].share_held
    assert held > 1 / degree if way == "motet" else held <= 1 / degree
