"""Log-probabilities of prompts are those of transformers + PEFT, however their prompts are computed."""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from motet.tests.rigs.engine_rig import EngineRig, SequenceOutput, Stock
from motet.tests.rigs.gang_rig import gang
from motet.tests.rigs.oracle import RECIPES, VOCAB_SIZE, Oracle, write_adapters, write_model
from motet.tests.rigs.stand_in_gpu.gpu_worker import gpu_of_twins
from motet.workers.decoding import prompt_scoring
from motet.workers.wire.messages import SamplingParams, SequenceRequest, SequenceUpdate, Submit
from motet.workers.wire.prompt_scores import PromptScores

pytestmark = pytest.mark.slow  # models of transformers, and engines
TOLERANCE = 1e-3  # in float32
NUM_TOP = 5
ADAPTERS = (None, RECIPES[0].name, RECIPES[1].name)
SCORED = SamplingParams(max_tokens=0, num_prompt_logprobs=NUM_TOP)


@dataclass(frozen=True)
class Bench:
    oracle: Oracle
    stock: Stock
    prompts: tuple[tuple[list[int], str | None], ...]

    def check(self, index: int, scores: PromptScores) -> None:
        """Raises AssertionError unless these are the prompt's."""
        prompt, adapter = self.prompts[index]
        rows = scores.rows()
        assert len(rows) == len(prompt) - 1
        expected = torch.log_softmax(self.oracle.logits(prompt, adapter).float(), dim=-1)[:-1]
        own = expected.gather(1, torch.tensor(prompt[1:]).unsqueeze(1))
        np.testing.assert_allclose(rows["logprob"], own.squeeze(1), atol=TOLERANCE)
        top = expected.topk(scores.num_top).values
        np.testing.assert_allclose(rows["top_logprobs"], top, atol=TOLERANCE)
        np.testing.assert_allclose(
            expected.gather(1, torch.tensor(rows["top_ids"].astype(np.int64))), top, atol=TOLERANCE
        )
        above = (expected > own + TOLERANCE).sum(-1).numpy()
        near = (expected > own - TOLERANCE).sum(-1).numpy()
        assert ((above < rows["rank"]) & (rows["rank"] <= near)).all()


@pytest.fixture(scope="module", params=["llama", "gemma2"])
def bench(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    folder = tmp_path_factory.mktemp(request.param)
    model = write_model(request.param, folder / "model")
    adapters = write_adapters(model, folder / "adapters")
    generator = random.Random(5)
    prompts = tuple((generator.choices(range(VOCAB_SIZE), k=generator.randint(20, 60)), name) for name in ADAPTERS)
    return Bench(Oracle(model, adapters), Stock.make(model, adapters, folder / "store"), prompts)


class Scoring:
    """An engine that scores prompts, and what has come of each."""

    def __init__(self, rig: EngineRig) -> None:
        self.rig, self.scores = rig, dict[int, PromptScores]()

    def submit(self, index: int, bench: Bench, sampling: SamplingParams = SCORED) -> None:
        prompt, adapter = bench.prompts[index]
        self.rig.submit(index, prompt, adapter, sampling)

    def finish(self) -> None:
        while self.rig.engine.has_work():
            for update in self.rig.step():
                self.take(update.sequence_id, update.prompt_scores)
                assert update.error is None

    def take(self, sequence_id: int, scores: PromptScores | None) -> None:
        if scores is not None:
            before = self.scores.get(sequence_id, PromptScores(scores.num_top, b""))
            self.scores[sequence_id] = PromptScores(scores.num_top, before.data + scores.data)


@pytest.mark.parametrize(("device", "max_tokens_per_step"), [("cpu", 7), ("cpu", 512), ("cuda", 32)])
def test_scores_do_not_depend_on_chunks_nor_slices(
    bench: Bench, device: str, max_tokens_per_step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside sequences that decode, on the CPU and where steps are launched ahead."""
    monkeypatch.setattr(prompt_scoring, "MOST_BYTES", 4 * VOCAB_SIZE * 5)  # five rows
    settings = {"max_tokens_per_step": max_tokens_per_step, "max_num_sequences": 6}
    if device == "cuda":
        with gpu_of_twins(), bench.stock.engine(400, device="cuda", **settings) as rig:
            _score_beside_decodes(bench, rig)
    else:
        with bench.stock.engine(400, **settings) as rig:
            _score_beside_decodes(bench, rig)


def _score_beside_decodes(bench: Bench, rig: EngineRig) -> None:
    scoring = Scoring(rig)
    rig.submit(90, [1, 2, 3], None, SamplingParams(max_tokens=20, ignore_eos=True))
    for index in range(len(bench.prompts)):
        scoring.submit(index, bench)
    scoring.finish()
    for index, output in enumerate([rig.outputs[index] for index in range(len(bench.prompts))]):
        bench.check(index, scoring.scores[index])
        assert (output.token_ids, output.finish_reason) == ([], "length")
    assert len(rig.outputs[90].token_ids) == 20
    rig.assert_idle()


def test_what_is_scored_is_computed_and_counted(bench: Bench) -> None:
    """A prompt whose pages are cached is computed again to be scored; then its pages serve others as before."""
    with bench.stock.engine(400, max_tokens_per_step=16) as rig:
        scoring = Scoring(rig)
        for repeat in range(2):
            scoring.scores.clear()
            for index, (prompt, _) in enumerate(bench.prompts):
                before = rig.engine.load().counters.num_computed_tokens
                scoring.submit(index, bench)
                updates = _steps(rig)
                for update in updates:
                    scoring.take(index, update.prompt_scores)
                usage = updates[-1].usage
                assert usage is not None and updates[-1].num_cached_tokens == 0
                assert rig.engine.load().counters.num_computed_tokens - before == len(prompt), f"round {repeat}"
                assert (usage.num_computed_prompt_tokens, usage.num_cached_prompt_tokens) == (len(prompt), 0)
                assert (usage.num_generated_tokens, usage.num_recomputed_tokens) == (0, 0)
                bench.check(index, scoring.scores[index])
        prompt, adapter = bench.prompts[0]
        rig.submit(50, prompt, adapter, SamplingParams(max_tokens=1, temperature=0.0))
        last = [update for update in _steps(rig) if update.sequence_id == 50][-1]
        assert last.num_cached_tokens is not None and last.num_cached_tokens >= len(prompt) // 8 * 8 - 8


def _steps(rig: EngineRig) -> list[SequenceUpdate]:
    updates: list[SequenceUpdate] = []
    while rig.engine.has_work():
        updates += rig.step()
    return updates


def test_preempted_prompts_go_on_where_their_scores_ended(bench: Bench) -> None:
    """In a pool with room for little more than one of them: no row is missing, and none comes twice."""
    longest = max(bench.stock.num_pages(len(prompt) + 30, adapter) for prompt, adapter in bench.prompts)
    with bench.stock.engine(longest + 4, max_tokens_per_step=8) as rig:
        scoring = Scoring(rig)
        sampling = SamplingParams(max_tokens=28, ignore_eos=True, num_prompt_logprobs=NUM_TOP, temperature=0.0)
        for index in range(len(bench.prompts)):
            scoring.submit(index, bench, sampling)
        scoring.finish()
        for index, (prompt, adapter) in enumerate(bench.prompts):
            bench.check(index, scoring.scores[index])
            assert len(rig.outputs[index].token_ids) == 28, (prompt, adapter)
        rig.assert_idle()


def test_another_gang_goes_on_with_the_scores(bench: Bench) -> None:
    """Of a prompt whose first scores came from another gang only the rest comes."""
    prompt, adapter = bench.prompts[1]
    with bench.stock.engine(400, max_tokens_per_step=8) as rig:
        scoring = Scoring(rig)
        scoring.submit(1, bench)
        scoring.finish()
        rig.outputs[2] = SequenceOutput()
        request = SequenceRequest(
            sequence_id=2,
            prompt_token_ids=prompt,
            sampling=SCORED,
            tenant="acme",
            adapter=None if adapter is None else bench.stock.refs[adapter],
            num_scored=11,
        )
        rig.engine.receive(Submit(request))
        scoring.finish()
    rest, whole = scoring.scores[2], scoring.scores[1]
    expected = whole.part(11, whole.num_rows).rows()["logprob"]
    np.testing.assert_allclose(rest.rows()["logprob"], expected, atol=TOLERANCE)


def test_a_prompt_may_fill_the_context(bench: Bench) -> None:
    with bench.stock.engine(400) as rig:
        context = rig.engine.info.max_model_len
        generator = random.Random(3)
        for index, length in enumerate((1, context, context + 1)):
            rig.submit(index, generator.choices(range(VOCAB_SIZE), k=length), None, SCORED)
        rig.finish()
        assert [rig.outputs[index].finish_reason for index in range(3)] == ["length", "length", None]
        assert rig.outputs[2].error is not None and "1 over the context" in rig.outputs[2].error.message


def test_a_gang_of_two_workers_scores_alike(bench: Bench) -> None:
    with gang(bench.stock.gang_config(400, 2, max_tokens_per_step=16)) as (engine, _):
        rig = EngineRig(engine, bench.stock.refs)
        scoring = Scoring(rig)
        for index in range(len(bench.prompts)):
            scoring.submit(index, bench)
        scoring.finish()
        for index in range(len(bench.prompts)):
            bench.check(index, scoring.scores[index])
