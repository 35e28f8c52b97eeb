"""Beams and samples of one prompt (`n`), which fork in the engine, against transformers + PEFT, family by family: the
same tokens and scores, however they are computed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch

from motet.router.generation.beam_streams import NEW_SEARCH, BeamSearch, advanced
from motet.tests.rigs.engine_rig import EngineRig, SequenceOutput, Stock
from motet.tests.rigs.gang_rig import ANYWHERE, gang, run_worker_in_nano_batches
from motet.tests.rigs.oracle import RECIPES, VARIANTS, VOCAB_SIZE, Oracle, write_adapters, write_model
from motet.workers.execution.executor import LocalExecutor
from motet.workers.wire.beams import BeamRules
from motet.workers.wire.messages import SamplingParams, SequenceRequest, Submit

pytestmark = pytest.mark.slow
TOLERANCE = 1e-3  # of scores in float32
WIDTH, MAX_TOKENS = 4, 12
RULES = BeamRules(WIDTH, MAX_TOKENS, frozenset(range(2, VOCAB_SIZE, 9)))
GREEDY = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0, ignore_eos=True)
ADAPTERS: tuple[str | None, ...] = (None, RECIPES[2].name, RECIPES[0].name)


@dataclass(frozen=True)
class Requested:
    prompt: list[int]
    adapter: str | None
    found: list[tuple[list[int], float]]  # beams and their scores, by transformers
    greedy: list[int]  # its answer without beams


@dataclass(frozen=True)
class Bench:
    stock: Stock
    searches: tuple[Requested, ...]


@pytest.fixture(scope="module", params=VARIANTS)
def bench(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    folder, generator = tmp_path_factory.mktemp(request.param), random.Random(request.param)
    model_path = write_model(request.param, folder / "model")
    adapters = write_adapters(model_path, folder / "adapters")
    oracle, requested = Oracle(model_path, adapters), list[Requested]()
    for number, adapter in enumerate(ADAPTERS):
        prompt = [generator.randrange(VOCAB_SIZE) for _ in range(5 + 12 * number)]
        found = oracle.beams(prompt, adapter, WIDTH, MAX_TOKENS, sorted(RULES.end_token_ids))
        (answer,) = oracle.answers([prompt], [adapter], MAX_TOKENS)
        assert answer.margin > TOLERANCE, "a close call, which rounding may decide"
        requested.append(Requested(prompt, adapter, found, answer.token_ids))
    yield Bench(Stock.make(model_path, adapters, folder / "store"), tuple(requested))
    torch.set_num_threads(num_threads)


def found_by(rig: EngineRig, bench: Bench, num_samples: int) -> None:
    """Asks for all searches, and samples of the same prompts, at once, and compares what comes."""
    searches = dict[int, BeamSearch]()
    for number, requested in enumerate(bench.searches):
        searches[number], rig.outputs[number] = NEW_SEARCH, SequenceOutput()
        request = SequenceRequest(
            sequence_id=number,
            prompt_token_ids=requested.prompt,
            sampling=SamplingParams(max_tokens=MAX_TOKENS),
            tenant="acme",
            adapter=None if requested.adapter is None else rig.refs[requested.adapter],
            beams=RULES,
        )
        rig.engine.receive(Submit(request))
    samples = {len(searches) + place: one for place, one in enumerate(num_samples * bench.searches)}
    for number, one in samples.items():
        rig.submit(number, one.prompt, one.adapter, GREEDY)
    while rig.engine.has_work():
        for update in rig.step():
            assert update.error is None
            for one_round in update.beam_rounds or ():
                searches[update.sequence_id] = advanced(searches[update.sequence_id], one_round, RULES)[0]
    rig.assert_idle()
    for number, one in samples.items():
        assert rig.outputs[number].token_ids == one.greedy
    for number, requested in enumerate(bench.searches):
        assert not searches[number].live
        finished = searches[number].finished
        assert [[*beam.token_ids] for beam in finished] == [token_ids for token_ids, _ in requested.found]
        scores = [score for _, score in requested.found]
        assert [beam.score(RULES) for beam in finished] == pytest.approx(scores, abs=TOLERANCE)


def test_beams_are_those_of_transformers(bench: Bench) -> None:
    with bench.stock.engine(num_pages=400) as rig:
        found_by(rig, bench, num_samples=0)


@pytest.mark.each_kind
def test_nano_batches_of_one_worker_find_the_same(bench: Bench) -> None:
    with bench.stock.engine(num_pages=400, max_tokens_per_step=len(ANYWHERE)) as rig:
        assert isinstance(rig.engine.executor, LocalExecutor)
        rig.engine.executor.runner.nano_batches = ANYWHERE
        found_by(rig, bench, num_samples=2)


@pytest.mark.each_kind
def test_beams_that_are_preempted_are_the_same(bench: Bench) -> None:
    def most_pages(adapter: str | None, num_prompt: int) -> int:
        of_adapter = bench.stock.num_pages(1, adapter)
        return of_adapter + WIDTH * bench.stock.num_pages(num_prompt + MAX_TOKENS, None)

    num_pages = 2 + max(most_pages(one.adapter, len(one.prompt)) for one in bench.searches)
    with bench.stock.engine(num_pages, max_tokens_per_step=16) as rig:
        found_by(rig, bench, num_samples=2)


@pytest.mark.parametrize("degree", [2, 4])
@pytest.mark.parametrize("bench", ["llama", "gemma3", "qwen2_moe"], indirect=True)
def test_a_gang_of_workers_finds_the_same_in_nano_batches(bench: Bench, degree: int) -> None:
    """Of several families: four workers hold the one KV head of Gemma 3."""
    config = bench.stock.gang_config(num_pages=400, degree=degree, max_tokens_per_step=len(ANYWHERE))
    with gang(config, run_worker_in_nano_batches) as (engine, processes):
        found_by(EngineRig(engine, bench.stock.refs), bench, num_samples=2)
    assert [process.exitcode for process in processes] == [0] * degree
