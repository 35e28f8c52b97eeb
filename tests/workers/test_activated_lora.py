"""Activated LoRA against transformers + PEFT: the base computes what stands before the invocation, in its own pages."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from motet.tests.rigs.engine_rig import EngineRig, Stock
from motet.tests.rigs.oracle import VOCAB_SIZE, Oracle, patterns_may_match_nothing, write_adapters, write_model
from motet.workers.wire.messages import SamplingParams

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
    def answer(self, prompt: Sequence[int], adapter: str | None) -> tuple[list[int], list[float]]:
        """PEFT's greedy tokens, without a cache, and their log-probabilities."""
        token_ids, logprobs = [*prompt], list[float]()
        for _ in range(NUM_TOKENS):
            if adapter in INVOCATIONS:
                self.activated.set_adapter(adapter)
                logits = self.activated(input_ids=torch.tensor([token_ids]), use_cache=False).logits[0, -1]
            else:
                logits = self.oracle.logits(token_ids, adapter)[-1]
            token_ids.append(int(logits.argmax()))
            logprobs.append(float(logits.log_softmax(-1).max()))
        return token_ids[len(prompt) :], logprobs


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


def _check(bench: Bench, rig: EngineRig, sequence_id: int, prompt: Sequence[int], adapter: str | None) -> list[int]:
    token_ids, logprobs = bench.answer(prompt, adapter)
    output = rig.outputs[sequence_id]
    assert output.error is None
    for place, (token_id, logprob) in enumerate(zip(token_ids, logprobs, strict=True)):
        assert abs(output.logprobs[place].chosen - logprob) < TOLERANCE, f"{adapter}, token {place}"
        assert output.token_ids[place] == token_id, f"{adapter}, token {place}"
    return token_ids


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
