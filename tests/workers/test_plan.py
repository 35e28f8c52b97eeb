"""Steps of virtual time: their fit, traces, the engine over them; and sizes that no setting gives."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from motet.adapters.store.store import AdapterStore
from motet.benchmarks.rigs.published_bases import published_base
from motet.tests.rigs.engine_rig import Stock
from motet.tests.rigs.oracle import RECIPES, write_adapters, write_model
from motet.tests.rigs.part_configs import engine_config
from motet.tests.rigs.trace_files import write_trace
from motet.workers.costs.devices import DEVICES
from motet.workers.costs.measured_steps import RecordingExecutor, costs_of, load_each, random_adapters, wait_a_little
from motet.workers.costs.operations import StepBatch, step_operations
from motet.workers.costs.replay import Replayed, TracedRequest, VirtualExecutor, read_trace, replay
from motet.workers.costs.step_costs import StepCosts, StepShape, fit_line, fit_steps, non_negative_least_squares
from motet.workers.costs.step_defaults import (
    CPU_MEMORY_SHARE,
    GPU_SEQUENCES,
    GPU_TOKENS,
    WEIGHTS_SHARE,
    cpu_pool_bytes,
    step_limits,
)
from motet.workers.engine_builder import build_virtual_engine
from motet.workers.wire.messages import AdapterRef

ADAPTERS = tuple(recipe.name for recipe in RECIPES[:2])
ZERO = tuple(0.0 for _ in StepShape().features)
shapes = st.builds(StepShape, *[st.integers(0, 3000)] * 10)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Stock:
    folder = tmp_path_factory.mktemp("llama")
    model = write_model("llama", folder / "model")
    adapters = write_adapters(model, folder / "adapters")
    return Stock.make(model, {name: adapters[name] for name in ADAPTERS}, folder / "store")


def costs(step_s: float = 0.01, row_s: float = 0.001, **given: Any) -> StepCosts:
    """A step takes `step_s` and `row_s` for each row."""
    rows = [row_s if 1 <= place <= 14 else 0.0 for place in range(len(ZERO))]
    sizes = {"model": "model", "machine": "m", "device": "cpu", "num_threads": 1, "dtype": "bfloat16"}
    times = {"store_load_s": 0.5, "store_page_s": 0.0, "copy_page_s": 0.0, "residual": 0.0, "num_steps": 100}
    return StepCosts(**{**sizes, **times, "coefficients": (step_s, *rows[1:]), **given})


def run(folder: Path, requests: list[TracedRequest], step_costs: StepCosts, **settings: Any) -> Replayed:
    config = engine_config(folder, folder / "store", pool_bytes=1 << 22, block_size=8, **settings)
    executor = VirtualExecutor(step_costs)
    engine = build_virtual_engine(config, executor, executor.clock)
    refs = {"a": AdapterRef("a", {"q_proj": 4}), "b": AdapterRef("b", {"q_proj": 8})}
    found = replay(engine, requests, refs, executor.clock, executor.wait)
    engine.check_integrity()
    assert found.seconds <= executor.now_s
    return found


@given(shapes, st.integers(0, 9))
def test_no_larger_step_is_expected_to_be_faster(shape: StepShape, which: int) -> None:
    name = list(vars(shape))[which]
    larger = replace(shape, **{name: vars(shape)[name] + 17})
    assert all(a <= b for a, b in zip(shape.features, larger.features, strict=True))


@given(st.integers(0, 2**31), st.integers(1, 6), st.integers(8, 30))
def test_least_squares_without_negative_parts(seed: int, num_columns: int, num_rows: int) -> None:
    """No direction that is allowed makes the error smaller (Karush, Kuhn and Tucker)."""
    chance = np.random.default_rng(seed)
    matrix, target = chance.standard_normal((num_rows, num_columns)), chance.standard_normal(num_rows)
    found = non_negative_least_squares(matrix, target)
    gradient = matrix.T @ (target - matrix @ found)
    assert found.min() >= 0 and gradient.max() <= 1e-6
    assert np.abs(gradient[found > 1e-9]).max(initial=0.0) <= 1e-6


def test_a_fit_finds_the_costs_that_made_the_steps() -> None:
    chance, known = np.random.default_rng(0), costs(0.02, 0.003)
    steps = []
    for _ in range(300):
        shape = StepShape(
            *(int(chance.integers(0, most)) for most in (600, 40, 40, 9000, 9000, 20, 900, 900, 900, 9000))
        )
        steps.append((shape, known.shape_s(shape) * (10.0 if chance.random() < 0.05 else 1.0)))  # a stall now and then
    fit = fit_steps(steps)
    assert fit.residual < 0.01
    found = replace_coefficients(known, fit.coefficients)
    assert all(abs(found.shape_s(shape) / known.shape_s(shape) - 1) < 0.05 for shape, _ in steps)
    assert fit_line([(1, 3.0), (2, 5.0), (4, 9.0)]) == pytest.approx((1.0, 2.0))
    with pytest.raises(ValueError, match="a fit needs 16"):
        fit_steps(steps[:3])


def replace_coefficients(known: StepCosts, coefficients: tuple[float, ...]) -> StepCosts:
    return costs(coefficients=coefficients, model=known.model)


def test_costs_and_traces_are_kept_in_files(tmp_path: Path) -> None:
    costs(0.25).write(tmp_path / "costs.json")
    assert StepCosts.read(tmp_path / "costs.json") == costs(0.25)
    (tmp_path / "costs.json").write_text('{"model": "m"}')
    with pytest.raises(ValueError, match="holds no measured costs"):
        StepCosts.read(tmp_path / "costs.json")
    late, early = TracedRequest(2.0, 5, 6, "a", "t"), TracedRequest(0.5, 7, 8)
    write_trace(tmp_path / "trace.jsonl", [late, early])
    assert read_trace(tmp_path / "trace.jsonl") == (early, late)
    for line, problem in (
        ('{"arrival_s": 0, "prompt_tokens": 0, "output_tokens": 1}', "each must be from 1 to"),
        ('{"arrival_s": -1, "prompt_tokens": 1, "output_tokens": 1}', "must be 0 or more"),
        ('{"arrival_s": 0, "prompt_tokens": 1, "output_tokens": 1, "user": "u"}', "unknown field"),
        ("", "has no requests"),
    ):
        (tmp_path / "trace.jsonl").write_text(f"{line}\n")
        with pytest.raises(ValueError, match=problem):
            read_trace(tmp_path / "trace.jsonl")


def test_a_replay_takes_the_time_of_its_steps(llama: Stock) -> None:
    """By hand: a prompt of 10 and two further tokens are steps of 10, 1 and 1 rows."""
    found = run(llama.model_path, [TracedRequest(3.0, 10, 3)], costs())
    assert found.first_token_s == pytest.approx([0.02])
    assert found.token_interval_s == pytest.approx([0.011])
    assert found.seconds == pytest.approx(3.042) and found.num_output_tokens == 3


def test_an_adapter_is_waited_for_once_and_arrivals_meanwhile_are_served(llama: Stock) -> None:
    requests = [TracedRequest(0.0, 4, 2, "a"), TracedRequest(0.1, 4, 2), TracedRequest(0.9, 4, 2, "a")]
    found = run(llama.model_path, requests, costs(), prefix_cache=False)
    base, first, again = sorted(found.first_token_s)[0], max(found.first_token_s), sorted(found.first_token_s)[1]
    assert (base, again) == pytest.approx((0.014, 0.014)) and 0.5 <= first < 0.53
    assert not found.refused and found.num_output_tokens == 6


def test_requests_that_never_fit_are_counted_not_lost(llama: Stock) -> None:
    found = run(llama.model_path, [TracedRequest(0.0, 10**5, 3), TracedRequest(0.0, 5, 3)], costs())
    assert sum(found.refused.values()) == 1 and found.num_output_tokens == 3
    config = engine_config(llama.model_path, llama.store_path, pool_bytes=None)
    with pytest.raises(ValueError, match="pool_bytes"):
        build_virtual_engine(config, VirtualExecutor(costs()), lambda: 0.0)


requests_of_traces = st.lists(
    st.builds(
        TracedRequest,
        st.floats(0, 2),
        st.integers(1, 60),
        st.integers(1, 12),
        st.sampled_from([None, "a", "b"]),
        st.sampled_from(["t", "u"]),
    ),
    min_size=1,
    max_size=12,
)


@given(requests_of_traces)
def test_every_request_is_answered_and_faster_steps_end_sooner(requests: list[TracedRequest]) -> None:
    folder = FOLDERS[0]
    found = run(folder, requests, costs())
    assert found.num_output_tokens == sum(request.output_tokens for request in requests)
    assert len(found.first_token_s) == len(requests) and min(found.first_token_s) > 0
    assert found.seconds >= max(request.arrival_s for request in requests)


FOLDERS: list[Path] = []


@pytest.fixture(autouse=True)
def _keep_folder(llama: Stock) -> None:
    FOLDERS[:] = [llama.model_path]


def test_steps_of_an_engine_are_recorded_and_its_loads(llama: Stock, tmp_path: Path) -> None:
    with llama.engine(400) as rig:
        engine = rig.engine
        engine.executor = recording = RecordingExecutor(engine.executor)
        names = {name: llama.refs[name] for name in llama.refs}
        free = load_each(engine, recording, list(names.values()), 0)
        assert [pages for pages, _ in recording.loads] == [
            llama.layout.num_pages(ref.module_ranks) for ref in names.values()
        ]
        recording.steps.clear()
        recording.pause()
        requests = [TracedRequest(0.0, 20, 12, name) for name in [None, *names]]
        ran = replay(engine, requests, names, recording.clock, wait_a_little, free)
        assert ran.num_output_tokens == 12 * len(requests)
        shapes = [shape for shape, _ in recording.steps]
        assert sum(shape.num_rows for shape in shapes) == len(requests) * (20 + 11)
        assert sum(shape.num_logits for shape in shapes) == 12 * len(requests)
        assert max(shape.num_adapters for shape in shapes) == len(names)
        assert all(seconds > 0 for _, seconds in recording.steps)
        found = costs_of(recording if len(shapes) >= 16 else _doubled(recording), engine.info, llama.model_path)
        assert found.shape_s(shapes[-1]) > 0 and found.copy_page_s > 0
        assert engine.info.reasons["pool-bytes"] == "as the settings say"


def _doubled(recording: RecordingExecutor) -> RecordingExecutor:
    recording.steps += recording.steps
    return recording


def test_random_adapters_are_stored_as_uploads_are(llama: Stock, tmp_path: Path) -> None:
    store = AdapterStore(tmp_path / "store")
    refs = random_adapters(store, llama.layout, 2)
    assert sorted(store.digests()) == sorted(ref.digest for ref in refs)
    assert [max(ref.module_ranks.values()) for ref in refs] == [8, 16]


def test_sizes_that_no_setting_gives_are_those_of_the_cost_model() -> None:
    """On every NVIDIA GPU of the catalogue. An H100 gives 256 sequences a token in 50 ms, at half of its limits."""
    for name, device in DEVICES.items():
        if not name.startswith("MI"):
            assert device.flops_per_s / device.bytes_per_s / GPU_TOKENS < WEIGHTS_SHARE, name
    model, h100 = published_base("Llama-3-8B"), DEVICES["H100 SXM"]

    def step_s(number: int) -> float:
        return sum(each.seconds(h100) for each in step_operations(model, StepBatch((1024,) * number))) / 0.5

    assert step_s(GPU_SEQUENCES) < 0.05 < step_s(2 * GPU_SEQUENCES)
    on_gpu, on_cpu = step_limits(True, None, None), step_limits(False, None, None)
    assert (on_gpu.max_tokens_per_step, on_gpu.max_num_sequences) == (2048, 256)
    assert (on_cpu.max_tokens_per_step, on_cpu.max_num_sequences) == (512, 128)
    assert step_limits(True, 64, None).max_num_sequences == 64
    given = step_limits(True, 300, 900)
    assert (given.max_tokens_per_step, given.max_num_sequences) == (300, 900)
    assert set(given.reasons.values()) == {"as the settings say"}
    assert set(on_gpu.reasons) == {"max-tokens-per-step", "max-num-sequences"}


@given(st.integers(1 << 28, 1 << 42), st.integers(1, 64))
def test_pools_leave_most_of_a_machine(memory_bytes: int, num_workers: int) -> None:
    assert num_workers * cpu_pool_bytes(memory_bytes, num_workers) <= CPU_MEMORY_SHARE * memory_bytes
