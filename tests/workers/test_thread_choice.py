"""How many threads a worker computes with."""

from __future__ import annotations

import logging
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from motet.kernels.native.build import COMPILERS
from motet.tests.rigs.engine_rig import Stock
from motet.tests.rigs.oracle import write_adapters, write_model
from motet.workers.thread_choice import LEAST_GAIN, fewest_of_the_fast, numbers_to_measure
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
    assert counts[0] == 1 and counts[-1] == most
    assert all(a < b <= 2 * a for a, b in pairwise(counts))


@pytest.mark.slow
def test_a_worker_measures_and_then_serves(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its pool is as it was, and its answers are those of a worker that was told the number."""
    if not COMPILERS:
        pytest.skip("no C++ compiler is known")
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
    assert " with 1, " in line and " with 2 tokens/s" in line
