"""The engine continues a sequence that another gang began, with the tokens that that gang would have given."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec
import pytest
import torch

from motet.tests.rigs.engine_rig import EngineRig, SequenceOutput, Stock
from motet.tests.rigs.full_pool import fill_to_the_last_page
from motet.tests.rigs.oracle import VOCAB_SIZE, write_adapters, write_model
from motet.workers.wire.messages import SamplingParams, ThinkingBudget, TokenRules

TOLERANCE = 1e-3  # of log-probabilities in float32
ADAPTERS = ("rank8", "rank16_rslora")
NUM_TOKENS = 40
CUTS = (1, 7, 8, 9, 22, 39)  # tokens that the other gang generated; a page holds 8
PENALTIES = SamplingParams(
    max_tokens=NUM_TOKENS,
    num_logprobs=3,
    ignore_eos=True,
    repetition_penalty=1.3,
    presence_penalty=0.5,
    frequency_penalty=0.4,
    logit_bias={3: 2.0, 5: -4.0},
)
ALLOWED = (*range(5),)
RULES = TokenRules(
    allowed_token_ids=ALLOWED,
    bad_words=(*((a, b, a) for a in ALLOWED for b in ALLOWED), *((a, a) for a in ALLOWED)),
    min_tokens=15,
    late_token_ids=(1,),
    thinking=ThinkingBudget(6, (0,), (7, 6)),
)


@dataclass(frozen=True)
class Requested:
    prompt: list[int]
    adapter: str | None
    sampling: SamplingParams


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stock]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("resumed")
    model_path = write_model("llama", folder / "model")
    adapters = write_adapters(model_path, folder / "adapters")
    yield Stock.make(model_path, {name: adapters[name] for name in ADAPTERS}, folder / "store")
    torch.set_num_threads(num_threads)


def questions() -> list[Requested]:
    generator = random.Random(5)
    samplings = [
        msgspec.structs.replace(PENALTIES, temperature=0.0),
        msgspec.structs.replace(PENALTIES, temperature=0.9, top_p=0.9, seed=11),
        SamplingParams(max_tokens=NUM_TOKENS, temperature=1.2, min_p=0.02, seed=12, ignore_eos=True, num_logprobs=0),
        SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True, num_logprobs=0, rules=RULES),
    ]
    return [
        Requested([generator.randrange(VOCAB_SIZE) for _ in range(generator.randint(1, 30))], adapter, sampling)
        for adapter in (None, *ADAPTERS)
        for sampling in samplings
    ]


def undisturbed(stock: Stock, requested: list[Requested]) -> list[SequenceOutput]:
    with stock.engine(num_pages=400) as rig:
        for sequence_id, question in enumerate(requested):
            rig.submit(sequence_id, question.prompt, question.adapter, question.sampling)
        rig.finish()
        return [rig.outputs[sequence_id] for sequence_id in range(len(requested))]


def resumed(rig: EngineRig, requested: list[Requested], whole: list[SequenceOutput]) -> None:
    """Asks for the rest of the answer after every possible cut, all at once, and compares."""
    expected: dict[int, tuple[SequenceOutput, int]] = {}
    for question, output in zip(requested, whole, strict=True):
        for cut in CUTS:
            if cut < len(output.token_ids):
                sequence_id = len(expected)
                expected[sequence_id] = output, cut
                before = output.token_ids[:cut]
                rig.submit(sequence_id, question.prompt, question.adapter, question.sampling, before)
    rig.finish()
    rig.assert_idle()
    for sequence_id, (output, cut) in expected.items():
        received = rig.outputs[sequence_id]
        assert received.token_ids == output.token_ids[cut:]
        assert (received.finish_reason, received.error) == (output.finish_reason, None)
        for said, would_be in zip(received.logprobs, output.logprobs[cut:], strict=True):
            assert said.top_ids == would_be.top_ids
            values, expected_values = [said.chosen, *said.top_logprobs], [would_be.chosen, *would_be.top_logprobs]
            torch.testing.assert_close(torch.tensor(values), torch.tensor(expected_values), atol=TOLERANCE, rtol=0)


def test_greedy_and_seeded_text_goes_on_as_it_would_have(stock: Stock) -> None:
    """Also in a pool so small that sequences are preempted, and with prompts in chunks."""
    requested = questions()
    whole = undisturbed(stock, requested)
    assert all(len(output.token_ids) == NUM_TOKENS and output.finish_reason == "length" for output in whole)
    ruled = [
        output.token_ids
        for question, output in zip(requested, whole, strict=True)
        if question.sampling.rules is not None
    ]
    assert all(6 in tokens and tokens[tokens.index(6) - 1] == 7 for tokens in ruled), "a thought was ended"
    num_pages = 24 + max(stock.num_pages(30 + NUM_TOKENS, adapter) for adapter in stock.refs)
    with stock.engine(num_pages, max_tokens_per_step=50, max_num_sequences=8) as rig:
        fill_to_the_last_page(rig.engine._scheduler)
        resumed(rig, requested, whole)
        assert rig.engine.load().counters.num_preemptions > 0
        assert rig.engine.load().counters.num_generated_tokens == sum(
            NUM_TOKENS - cut for _ in requested for cut in CUTS
        )


def test_it_stops_where_it_would_have(stock: Stock) -> None:
    requested = questions()
    stops = [output.token_ids[25] for output in undisturbed(stock, requested)]
    requested = [
        Requested(q.prompt, q.adapter, msgspec.structs.replace(q.sampling, stop_token_ids=(stop,), max_tokens=None))
        for q, stop in zip(requested, stops, strict=True)
    ]
    whole = undisturbed(stock, requested)
    assert all(output.finish_reason == "stop" and output.token_ids[-1] in stops for output in whole)
    with stock.engine(num_pages=400) as rig:
        resumed(rig, requested, whole)
