"""Beam search in the engine against transformers + PEFT, family by family: the same beams and scores, however it is
computed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch

from motet.router.generation.beam_search import NEW_SEARCH, BeamSearch, advanced
from motet.tests.rigs.engine_rig import EngineRig, Stock
from motet.tests.rigs.gang_rig import gang
from motet.tests.rigs.oracle import RECIPES, VARIANTS, VOCAB_SIZE, Oracle, write_adapters, write_model
from motet.workers.wire.beams import BeamRules
from motet.workers.wire.messages import SamplingParams, SequenceRequest, Submit

pytestmark = pytest.mark.slow
TOLERANCE = 1e-3  # of scores in float32
WIDTH, MAX_TOKENS = 4, 12
RULES = BeamRules(WIDTH, MAX_TOKENS, frozenset(range(2, VOCAB_SIZE, 9)))
ADAPTERS: tuple[str | None, ...] = (None, RECIPES[2].name, RECIPES[0].name)


@dataclass(frozen=True)
class Requested:
    prompt: list[int]
    adapter: str | None
    found: list[tuple[list[int], float]]  # by transformers


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
        requested.append(Requested(prompt, adapter, found))
    yield Bench(Stock.make(model_path, adapters, folder / "store"), tuple(requested))
    torch.set_num_threads(num_threads)


def found_by(rig: EngineRig, bench: Bench, num_others: int) -> None:
    """Asks for all searches and some other sequences at once, and compares what comes."""
    searches = dict[int, BeamSearch]()
    for number, requested in enumerate(bench.searches):
        adapter = None if requested.adapter is None else rig.refs[requested.adapter]
        sampling = SamplingParams(max_tokens=MAX_TOKENS)
        searches[number] = NEW_SEARCH
        request = SequenceRequest(
            sequence_id=number,
            prompt_token_ids=requested.prompt,
            sampling=sampling,
            tenant="acme",
            adapter=adapter,
            beams=RULES,
        )
        rig.engine.receive(Submit(request))
    others = [*range(len(searches), len(searches) + num_others)]
    for number in others:
        rig.submit(number, [number] * 9, None, SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True))
    while rig.engine.has_work():
        for update in rig.engine.step():
            assert update.error is None
            for one in update.beam_rounds or ():
                searches[update.sequence_id] = advanced(searches[update.sequence_id], one, RULES)[0]
        rig.engine.check_integrity()
    rig.assert_idle()
    for number, requested in enumerate(bench.searches):
        assert not searches[number].live
        finished = searches[number].finished
        assert [[*beam.token_ids] for beam in finished] == [token_ids for token_ids, _ in requested.found]
        scores = [score for _, score in requested.found]
        assert [beam.score(RULES) for beam in finished] == pytest.approx(scores, abs=TOLERANCE)


def test_beams_are_those_of_transformers(bench: Bench) -> None:
    with bench.stock.engine(num_pages=400) as rig:
        found_by(rig, bench, num_others=0)


def test_beams_that_are_preempted_are_the_same(bench: Bench) -> None:
    def most_pages(adapter: str | None, num_prompt: int) -> int:
        of_adapter = bench.stock.num_pages(1, adapter)
        return of_adapter + WIDTH * bench.stock.num_pages(num_prompt + MAX_TOKENS, None)

    num_pages = 2 + max(most_pages(one.adapter, len(one.prompt)) for one in bench.searches)
    with bench.stock.engine(num_pages, max_tokens_per_step=16) as rig:
        found_by(rig, bench, num_others=6)


@pytest.mark.parametrize(("bench", "degree"), [("llama", 2), ("gemma3", 4)], indirect=["bench"])
def test_a_gang_of_workers_finds_the_same(bench: Bench, degree: int) -> None:
    """Four workers hold the one KV head of the latter."""
    with gang(bench.stock.gang_config(num_pages=400, degree=degree)) as (engine, _):
        found_by(EngineRig(engine, bench.stock.refs), bench, num_others=2)
