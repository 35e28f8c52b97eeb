"""Activated LoRA against transformers + PEFT: the base computes what stands before the invocation, in its own pages."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from motet.router.generation.beam_streams import NEW_SEARCH, BeamSearch, advanced
from motet.tests.rigs.engine_rig import EngineRig, SequenceOutput, Stock
from motet.tests.rigs.gang_rig import gang
from motet.tests.rigs.oracle import VOCAB_SIZE, Oracle, patterns_may_match_nothing, write_adapters, write_model
from motet.workers.plan import StepPlan
from motet.workers.wire.beams import BeamRules
from motet.workers.wire.messages import SamplingParams, SequenceRequest, Submit
from motet.workers.wire.prompt_scores import PromptScores

pytestmark = pytest.mark.slow
TOLERANCE = 1e-3  # of log-probabilities in float32
NUM_TOKENS, BLOCK = 12, 8
INVOCATIONS = {"rank8": [3, 5, 7], "patterns_rslora": [9]}
PLAIN = "rank3"
VARIANTS = ("llama", "gemma3", "qwen3_moe", "qwen3_5")  # all layers alike, windows, experts, recurrent states
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True, num_logprobs=0)


@dataclass(frozen=True)
class Bench:
    oracle: Oracle  # of the base and the plain adapter
    activated: PeftModel
    stock: Stock

    @torch.inference_mode()
    def logprobs(self, prompt: Sequence[int], answer: Sequence[int], adapter: str | None) -> torch.Tensor:
        """PEFT's log-probabilities after each token, where the prompt alone invokes, as in its `generate`."""
        token_ids, invocation = [*prompt, *answer], INVOCATIONS.get(adapter or "", [])
        places = [at for at in range(len(prompt)) if [*prompt[at : at + len(invocation)]] == invocation]
        if adapter is None or not invocation or not places:
            logits = self.oracle.logits(token_ids, None if invocation else adapter)
        else:
            self.activated.set_adapter(adapter)
            offsets = [len(token_ids) - places[-1]]
            inputs = torch.tensor([token_ids])
            logits = self.activated(input_ids=inputs, alora_offsets=offsets, use_cache=False).logits[0]
        return logits.log_softmax(-1)


@pytest.fixture(scope="module", params=VARIANTS)
def bench(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    folder, num_threads = tmp_path_factory.mktemp(request.param), torch.get_num_threads()
    torch.set_num_threads(1)
    model_path = write_model(request.param, folder / "model")
    adapters = write_adapters(model_path, folder / "adapters")
    base = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32, attn_implementation="eager")
    for name, invocation in INVOCATIONS.items():
        path = adapters[name] / "adapter_config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "alora_invocation_tokens": invocation}))
    first, *others = INVOCATIONS
    with patterns_may_match_nothing():
        activated = PeftModel.from_pretrained(base, adapters[first], adapter_name=first)
        for name in others:
            activated.load_adapter(adapters[name], adapter_name=name)
    oracle = Oracle(model_path, {PLAIN: adapters[PLAIN]})
    yield Bench(oracle, activated.eval(), Stock.make(model_path, adapters, folder / "store", BLOCK))
    torch.set_num_threads(num_threads)


def _tokens(rng: random.Random, count: int) -> list[int]:
    """Random ones, without those of invocations."""
    return [rng.randrange(10, VOCAB_SIZE - 2) for _ in range(count)]


def _check(
    bench: Bench,
    rig: EngineRig,
    sequence_id: int,
    prompt: Sequence[int],
    adapter: str | None,
    generated: Sequence[int] = (),
) -> list[int]:
    """The answer, which is PEFT's greedy one."""
    output = rig.outputs[sequence_id]
    assert output.error is None and len(generated) + len(output.token_ids) == NUM_TOKENS
    answer = [*generated, *output.token_ids]
    rows = bench.logprobs(prompt, answer, adapter)[len(prompt) - 1 + len(generated) : -1]
    for place, (row, token_id, found) in enumerate(zip(rows, output.token_ids, output.logprobs, strict=True)):
        assert abs(found.chosen - float(row[token_id])) < TOLERANCE, f"{adapter}, token {place}"
        assert int(row.argmax()) == token_id, f"{adapter}, token {place}"
    return answer


def _ask(bench: Bench, rig: EngineRig, requests: Sequence[tuple[Sequence[int], str | None]]) -> list[list[int]]:
    """Asks all at once, and compares the answers."""
    first = len(rig.outputs)
    for number, (prompt, adapter) in enumerate(requests, start=first):
        rig.submit(number, [*prompt], adapter, GREEDY)
    rig.finish()
    rig.assert_idle()
    return [_check(bench, rig, number, *request) for number, request in enumerate(requests, start=first)]


def test_a_turn_of_an_adapter_uses_the_pages_of_the_conversation(bench: Bench) -> None:
    """The base's conversation, a turn of one adapter and of another, then the base again."""
    rng = random.Random(0)
    prompt = _tokens(rng, 45)
    with bench.stock.engine(200) as rig:
        (answer,) = _ask(bench, rig, [(prompt, None)])
        conversation = [*prompt, *answer]
        for adapter, invocation in INVOCATIONS.items():
            before = rig.engine.load().counters.num_cached_tokens
            _ask(bench, rig, [([*conversation, *invocation, *_tokens(rng, 5)], adapter)])
            num_cached = rig.engine.load().counters.num_cached_tokens - before
            # All full pages; the answer's last token has no KV. Of recurrent states one is kept near the prompt's end.
            num_tokens = len(prompt) - BLOCK if bench.stock.num_state_pages else len(conversation) - 1
            assert num_cached >= num_tokens // BLOCK * BLOCK
            _ask(bench, rig, [([*conversation, *_tokens(rng, 3)], None)])


def test_mixed_in_one_batch_in_chunks(bench: Bench) -> None:
    rng = random.Random(1)
    common = _tokens(rng, 20)
    requests: list[tuple[list[int], str | None]] = []
    for adapter, invocation in INVOCATIONS.items():
        for num_before in (0, 1, 7, 8, 9, 16, 20):  # on the edges of pages, and beside them
            requests.append(([*common[:num_before], *invocation, *_tokens(rng, rng.randint(0, 12))], adapter))
        requests.append(
            ([*common, *invocation, *common, *invocation, *_tokens(rng, 2)], adapter)
        )  # the last one counts
        requests.append(([*common, *_tokens(rng, 9)], adapter))  # it is not invoked
        requests.append(([*common, *invocation, *_tokens(rng, 9)], None))
        requests.append(([*common, *invocation, *_tokens(rng, 9)], PLAIN))
    rng.shuffle(requests)
    with bench.stock.engine(400, max_tokens_per_step=17) as rig:
        _ask(bench, rig, requests)
        rng.shuffle(requests)
        _ask(bench, rig, requests)  # now from pages that are kept


def test_preempted_in_a_small_pool(bench: Bench) -> None:
    rng = random.Random(2)
    common = _tokens(rng, 20)
    names = [*INVOCATIONS] * 3
    requests = [([*common, *INVOCATIONS[name], *_tokens(rng, 6)], name) for name in names]
    num_pages = 3 + max(bench.stock.num_pages(len(prompt) + NUM_TOKENS, name) for prompt, name in requests)
    with bench.stock.engine(num_pages, max_tokens_per_step=32) as rig:
        _ask(bench, rig, requests)


def test_without_reuse_of_prefixes(bench: Bench) -> None:
    rng = random.Random(3)
    requests = [([*_tokens(rng, 13), *ids, *_tokens(rng, 6)], name) for name, ids in INVOCATIONS.items()]
    with bench.stock.engine(100, prefix_cache=False) as rig:
        _ask(bench, rig, [*requests, *requests])


def test_pages_of_others_change_no_answer(bench: Bench) -> None:
    """Prompts that begin alike and are invoked in different places, some in the middle of a page, in a small pool."""
    rng = random.Random(4)
    pieces = [_tokens(rng, count) for count in (9, 17)] + [*INVOCATIONS.values()]
    requests: list[tuple[list[int], str | None]] = []
    while len(requests) < 60:
        prompt = sum((rng.choice(pieces) for _ in range(rng.randint(2, 8))), list[int]())
        requests += [(prompt, rng.choice([None, PLAIN, *INVOCATIONS, *INVOCATIONS])) for _ in range(2)]
    num_pages = 60 + max(bench.stock.num_pages(len(prompt) + 2, name) for prompt, name in requests)
    sampling = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True, num_logprobs=0)
    answers = []
    for settings in ({"prefix_cache": False}, {"prefix_cache": True}):
        with bench.stock.engine(num_pages, max_tokens_per_step=24, **settings) as rig:
            for number, (prompt, adapter) in enumerate(requests):
                rig.submit(number, prompt, adapter, sampling)
            rig.finish()
            rig.assert_idle()
            answers.append([rig.outputs[number] for number in range(len(requests))])
    assert rig.engine.load().counters.num_cached_tokens > (100 if bench.stock.num_state_pages else 800)
    for (_, adapter), alone, shared in zip(requests, *answers, strict=True):
        assert shared.error is None
        assert abs(alone.logprobs[0].chosen - shared.logprobs[0].chosen) < TOLERANCE, adapter
        assert alone.token_ids[0] == shared.token_ids[0]


RULES = BeamRules(3, NUM_TOKENS, frozenset())


class Mixture:
    """Requests of all kinds that begin alike and are invoked in different places; answers are compared with PEFT's."""

    def __init__(self, bench: Bench, rig: EngineRig, rng: random.Random, *kinds: str) -> None:
        self.bench, self.rig, self.rng, self.kinds = bench, rig, rng, kinds
        self.pieces = [*(_tokens(rng, count) for count in (9, 17)), *INVOCATIONS.values()]
        self.requests: dict[int, SequenceRequest] = {}
        self.names: dict[int, str | None] = {}
        self.beams: dict[int, BeamSearch] = {}
        self.scores: dict[int, bytes] = {}
        self.answers: list[tuple[list[int], str | None, list[int]]] = []  # prompt, adapter, PEFT's answer
        scheduler = rig.engine._scheduler
        schedule = scheduler.schedule

        def preempt_and_schedule() -> StepPlan:
            if scheduler._running.by_id and rng.random() < 0.1:
                scheduler._preempt(rng.choice([*scheduler._running.by_id.values()]))
            return schedule()

        scheduler.schedule = preempt_and_schedule  # type: ignore[method-assign]

    def submit(self) -> None:
        rng, number = self.rng, len(self.rig.outputs)
        prompt = sum((rng.choice(self.pieces) for _ in range(rng.randint(1, 5))), list[int]())
        name = rng.choice([None, PLAIN, *INVOCATIONS, *INVOCATIONS])
        if self.answers and rng.random() < 0.5:  # a next turn
            before, _, answer = rng.choice(self.answers)
            prompt = [*before, *answer[: rng.randint(0, NUM_TOKENS)], *rng.choice(self.pieces), *_tokens(rng, 2)]
        prompt = prompt[-90:]
        kind = rng.choice(self.kinds)
        request = SequenceRequest(
            sequence_id=number,
            prompt_token_ids=prompt,
            sampling=GREEDY,
            tenant="acme",
            adapter=None if name is None else self.rig.refs[name],
            cache_salt=rng.choice(["", "", "salt"]),
        )
        if kind == "resumed" and self.answers:
            prompt, name, answer = rng.choice(self.answers)
            request = msgspec.structs.replace(
                request,
                prompt_token_ids=prompt,
                adapter=None if name is None else self.rig.refs[name],
                generated_token_ids=answer[: rng.randint(1, NUM_TOKENS - 1)],
            )
        elif kind == "scored":
            sampling = SamplingParams(max_tokens=0, num_prompt_logprobs=0)
            request = msgspec.structs.replace(request, sampling=sampling)
        elif kind == "beams":
            self.beams[number] = NEW_SEARCH
            sampling = SamplingParams(max_tokens=NUM_TOKENS)
            request = msgspec.structs.replace(request, sampling=sampling, beams=RULES)
        self.requests[number], self.names[number], self.rig.outputs[number] = request, name, SequenceOutput()
        self.rig.engine.receive(Submit(request))

    def step(self) -> None:
        for update in self.rig.step():
            number = update.sequence_id
            for one_round in update.beam_rounds or ():
                self.beams[number] = advanced(self.beams[number], one_round, RULES)[0]
            if update.prompt_scores is not None:
                self.scores[number] = self.scores.get(number, b"") + update.prompt_scores.data
            if self.rig.outputs[number].ended:
                self.check(number)

    def check(self, number: int) -> None:
        request, name = self.requests[number], self.names[number]
        prompt, sampling = request.prompt_token_ids, request.sampling
        assert self.rig.outputs[number].error is None
        if request.beams is not None:
            search = self.beams[number]
            assert not search.live and len(search.finished) == RULES.width
            for beam in search.finished:
                rows = self.bench.logprobs(prompt, beam.token_ids, name)[len(prompt) - 1 : -1]
                total = float(rows.gather(1, torch.tensor(beam.token_ids).unsqueeze(1)).sum())
                assert abs(total - beam.total) < RULES.max_tokens * TOLERANCE, name
        elif sampling.num_prompt_logprobs is not None:
            found = PromptScores(0, self.scores.get(number, b"")).rows()["logprob"]
            rows = self.bench.logprobs(prompt, (), name)[:-1]
            expected = rows.gather(1, torch.tensor(prompt[1:]).unsqueeze(1)).squeeze(1)
            torch.testing.assert_close(torch.tensor(found.copy()), expected, atol=TOLERANCE, rtol=0)
        else:
            answer = _check(self.bench, self.rig, number, prompt, name, request.generated_token_ids)
            self.answers.append((prompt, name, answer))

    def run(self, count: int) -> None:
        """Asks for so many, at random times, and once more for some that have ended."""
        while count or self.rig.engine.has_work():
            if count and self.rng.random() < 0.6:
                self.submit()
                count -= 1
            self.step()
        self.rig.assert_idle()


@pytest.mark.parametrize("seed", range(2))
def test_in_a_small_pool_with_tiers_behind_it(bench: Bench, seed: int, tmp_path: Path) -> None:
    """Pages and states come back from host memory and disk, and sequences are preempted wherever they are."""
    stock, num_tokens = bench.stock, 90 + NUM_TOKENS
    num_pages = 3 + max(stock.num_pages(num_tokens, name) for name in stock.refs) + stock.num_state_pages
    tiers = {"kv_host_bytes": 30 * stock.page_bytes, "kv_disk_bytes": 200 * stock.page_bytes, "kv_disk_path": tmp_path}
    with stock.engine(num_pages, max_tokens_per_step=24, **tiers) as rig:
        rig.prefer_copies()
        Mixture(bench, rig, random.Random(seed), "answer", "answer", "resumed", "scored").run(40)
        counters = rig.engine.load().counters
        assert min(counters.num_cached_tokens, counters.num_pages_in, counters.num_preemptions) > 0, counters


@pytest.mark.parametrize("degree", [2, pytest.param(4, marks=pytest.mark.each_kind)])
def test_gangs_with_beams(bench: Bench, degree: int) -> None:
    num_pages = 80 + 8 * bench.stock.num_state_pages
    config = bench.stock.gang_config(num_pages, degree, max_tokens_per_step=24)
    kinds = ("answer", "resumed", "scored", "beams", "beams")
    with gang(config) as (engine, _):
        Mixture(bench, EngineRig(engine, bench.stock.refs), random.Random(degree), *kinds).run(20)
