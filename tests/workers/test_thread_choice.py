"""How many threads a worker computes with."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from functools import partial
from itertools import count, pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from motet.kernels.native import attention as native_attention
from motet.kernels.native import onednn_linear
from motet.kernels.native import step as native_step
from motet.kernels.native.build import COMPILERS
from motet.kernels.native.linear import NativeLinear
from motet.tests.rigs.engine_rig import Stock
from motet.tests.rigs.oracle import write_adapters, write_model
from motet.workers import worker_builder
from motet.workers.step_measurements import (
    CLEARLY_SLOWER,
    LEAST_GAIN,
    NUM_ROUNDS,
    SpeedMeter,
    Speeds,
    choose_threads,
    fewest_of_the_fast,
    measure_threads,
    numbers_to_measure,
)
from motet.workers.wire.messages import SamplingParams


@given(speeds=st.dictionaries(st.integers(1, 64), st.floats(0.1, 1e6), min_size=1))
def test_the_choice(speeds: dict[int, float]) -> None:
    """It is one of those measured; fewer threads are slower by the least gain, and no more threads are faster by it."""
    chosen = fewest_of_the_fast(speeds)
    assert chosen == min(speeds) or speeds[chosen] >= LEAST_GAIN * speeds[min(speeds)]
    assert all(speeds[count] < LEAST_GAIN * speeds[chosen] for count in speeds if count > chosen)


def test_examples() -> None:
    assert fewest_of_the_fast({1: 100.0, 2: 105.0}) == 1
    assert fewest_of_the_fast({1: 100.0, 2: 180.0}) == 2
    assert fewest_of_the_fast({1: 100.0, 2: 60.0, 4: 160.0}) == 4


@given(most=st.integers(1, 1024))
def test_what_is_measured(most: int) -> None:
    counts = numbers_to_measure(most)
    assert counts[0] == most and counts[-1] == 1
    assert all(b < a <= 2 * b for a, b in pairwise(counts))


def test_the_kind_of_step_that_needs_most_threads_decides() -> None:
    assert choose_threads({4: {"decodes": 100.0, "prompts": 400.0}, 1: {"decodes": 99.0, "prompts": 390.0}}) == 1
    assert choose_threads({4: {"decodes": 100.0, "prompts": 400.0}, 1: {"decodes": 99.0, "prompts": 200.0}}) == 4
    assert choose_threads({4: {"decodes": 100.0}, 1: {"decodes": 50.0}}) == 4


@dataclass
class Machine:
    """Its speed with each number of threads, which it has but for one measurement: it is slower then."""

    speeds: dict[int, float]
    disturbed: int = -1  # the number of the measurement
    measured: list[int] = field(default_factory=list)
    reported: list[tuple[int, int]] = field(default_factory=list)

    def measure(self, count: int) -> Speeds | None:
        self.measured.append(count)
        if self.speeds[count] == 0:
            return None
        share = 0.7 if len(self.measured) - 1 == self.disturbed else 1.0
        return {"decodes": self.speeds[count] * share, "prompts": 10.0 * self.speeds[count] * share}

    def run(self) -> dict[int, Speeds]:
        return measure_threads(max(self.speeds), self.measure, lambda what, done, total: self._report(done, total))

    def _report(self, done: int, total: int) -> None:
        self.reported.append((done, total))


@given(speeds=st.lists(st.floats(1.0, 1e3), min_size=5, max_size=5), disturbed=st.integers(-1, 9))
def test_measuring(speeds: list[float], disturbed: int) -> None:
    """One disturbance changes no speed; what is not measured has more threads above it that are clearly faster."""
    machine = Machine(dict(zip((12, 8, 4, 2, 1), speeds, strict=True)), disturbed)
    found = machine.run()
    if len(found) > 1:
        assert all(of["decodes"] == machine.speeds[count] for count, of in found.items())
    assert list(found) == list(machine.speeds)[: len(found)]
    if len(found) < 5 and disturbed < 0:
        assert machine.speeds[list(found)[-1]] * CLEARLY_SLOWER < max(of["decodes"] for of in found.values())
    rounds = [machine.measured[at : at + len(found)] for at in range(0, len(machine.measured), len(found))]
    assert rounds == [list(found)] * len(rounds) and len(rounds) == (NUM_ROUNDS if len(found) > 1 else 1)
    done = [number for number, _ in machine.reported]
    assert done == sorted(done) and machine.reported[0][0] == 0 and len(set(machine.reported[-1])) == 1


def test_one_thread_of_many_is_not_measured_where_it_would_take_long() -> None:
    machine = Machine({64: 640.0, 32: 320.0, 16: 160.0, 8: 80.0, 4: 40.0, 2: 20.0, 1: 10.0})
    assert choose_threads(machine.run()) == 64
    assert set(machine.measured) == {64, 32}


def test_nothing_more_is_measured_where_one_step_takes_long() -> None:
    machine = Machine({4: 0.0, 2: 0.0, 1: 0.0})
    assert machine.run() == {} and machine.measured == [4]
    machine = Machine({4: 100.0, 2: 0.0, 1: 0.0})
    assert choose_threads(machine.run()) == 4 and machine.measured == [4, 2]


@pytest.mark.slow
def test_a_worker_measures_and_then_serves(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its pool is as it was, and its answers are those of a worker with this number in its settings."""
    if not COMPILERS:
        pytest.skip("no C++ compiler is known")
    readings = count()  # each step takes as long: on a busy machine one of two threads may be too long to measure
    monkeypatch.setattr(worker_builder, "SpeedMeter", partial(SpeedMeter, clock=lambda: 0.01 * next(readings)))
    model_path = write_model("llama", tmp_path / "model")
    stock = Stock.make(model_path, write_adapters(model_path, tmp_path / "adapters"), tmp_path / "store")
    answers = []
    for settings in ({"num_threads": 1}, {"num_threads": 2, "measures_threads": True}):
        with caplog.at_level(logging.INFO), stock.engine(num_pages=50, **settings) as rig:
            assert not rig.engine.executor.runner.pool.any()  # type: ignore[attr-defined]
            for index in range(3):
                rig.submit(
                    index, [5, 7, 9 + index], None, SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
                )
            rig.finish()
            answers.append([rig.outputs[index].token_ids for index in range(3)])
    assert answers[0] == answers[1]
    (line,) = [record.getMessage() for record in caplog.records if record.getMessage().startswith("threads: ")]
    assert "decodes " in line and "prompts " in line and " with 2, " in line and " with 1" in line


@pytest.mark.slow
def test_what_was_chosen_is_what_the_gang_reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not COMPILERS:
        pytest.skip("no C++ compiler is known")
    monkeypatch.setattr(worker_builder, "choose_threads", lambda speeds: 1)
    model_path = write_model("gemma3", tmp_path / "model")
    stock = Stock.make(model_path, {}, tmp_path / "store")
    with stock.engine(num_pages=50, num_threads=2, measures_threads=True) as rig:
        assert rig.engine.info.num_threads == 1


@pytest.mark.slow
@pytest.mark.parametrize("plain", ["linears", "heads"])
def test_where_torch_computes_some_its_threads_are_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, plain: str
) -> None:
    """Linears are oneDNN's, or attention has heads that are not native: nothing is measured."""
    if not COMPILERS:
        pytest.skip("no C++ compiler is known")
    if plain == "linears":
        if not onednn_linear.can_pack(torch.bfloat16):
            pytest.skip("oneDNN has no packed linears for this CPU")
        monkeypatch.setattr(
            NativeLinear, "is_best", property(lambda _: False, lambda _self, _value: None), raising=False
        )
    else:
        for module in (native_attention, native_step):
            monkeypatch.setattr(module, "MOST_DIMS", 1)
    model_path = write_model("llama", tmp_path / "model")
    stock = Stock.make(model_path, {}, tmp_path / "store", dtype="bfloat16")
    with caplog.at_level(logging.INFO), stock.engine(num_pages=50, num_threads=2, measures_threads=True) as rig:
        thread = rig.engine.executor._thread  # type: ignore[attr-defined]
        assert thread.submit(torch.get_num_threads).result() == 2
        assert rig.engine.info.num_threads == 2
    assert not [record for record in caplog.records if record.getMessage().startswith("threads: ")]
