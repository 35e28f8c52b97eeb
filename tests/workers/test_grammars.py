"""Answers that follow a grammar: the same tokens as by brute force, whatever happens to their sequences on the way.

More than ten seconds of CPU: engines on the CPU, on stand-in GPUs and of two workers are compared.
"""

from __future__ import annotations

import json
import random
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLMatcher

from motet.tests.rigs.engine_rig import EngineRig, SequenceOutput, Stock
from motet.tests.rigs.full_pool import fill_to_the_last_page
from motet.tests.rigs.gang_rig import gang
from motet.tests.rigs.grammar_tokenizer import EOS, TOKENS, text_of, write_tokenizer
from motet.tests.rigs.oracle import RECIPES, VOCAB_SIZE, write_adapters, write_model
from motet.tests.rigs.patience import PATIENCE_S, eventually
from motet.tests.rigs.stand_in_gpu.gpu_worker import gpu_of_twins
from motet.workers.decoding.constraints import CompiledGrammars, Constraint, Constraints, Vocabulary
from motet.workers.wire.messages import SamplingParams, TokenRules

pytestmark = pytest.mark.slow
ADAPTER = RECIPES[0].name
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "n": {"type": "integer", "maximum": 999, "minimum": 0}},
    "required": ["name", "n"],
    "additionalProperties": False,
}
COMPACT = {"x-guidance": {"whitespace_flexible": False}}
GRAMMARS = (
    "start: %json " + json.dumps(SCHEMA | COMPACT),
    "start: /[a-f]{3,12}/",
    'start: "yes" | "no" | "tea" ("," "nine")*',
)
FITS: tuple[Callable[[str], Any], ...] = (
    json.loads,
    re.compile("[a-f]{3,12}").fullmatch,
    re.compile("yes|no|tea(,nine)*").fullmatch,
)
MANY = 24  # tokens, enough for all of them but the last, which may go on
BAD_WORDS = ((TOKENS.index("b"),), (TOKENS.index("a"), TOKENS.index("c")))
RULES = TokenRules(bad_words=BAD_WORDS, min_tokens=5, late_token_ids=(EOS,))
WAYS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0, "num_logprobs": 1},
    {"temperature": 1.0, "seed": 4, "repetition_penalty": 1.2, "frequency_penalty": 0.3},
    {"temperature": 0.9, "seed": 3, "top_p": 0.95, "logit_bias": {TOKENS.index("a"): 4.0}, "num_logprobs": 2},
    {"temperature": 1.3, "seed": 5, "top_k": 5, "ignore_eos": True, "rules": RULES},
)


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Stock:
    return made("llama", tmp_path_factory.mktemp("grammars"))


def made(variant: str, folder: Path) -> Stock:
    model = write_model(variant, folder / "model")
    write_tokenizer(model)
    adapters = write_adapters(model, folder / "adapters")
    return Stock.make(model, {ADAPTER: adapters[ADAPTER]}, folder / "store")


@contextmanager
def engine(stock: Stock, device: str = "cpu", num_pages: int = 120, **settings: Any) -> Iterator[EngineRig]:
    on_gpu = gpu_of_twins() if device == "cuda" else nullcontext()
    with on_gpu, stock.engine(num_pages, device=device, **settings) as rig:
        yield rig


def prompt_of(index: int) -> list[int]:
    return random.Random(index).choices(range(VOCAB_SIZE), k=11)


def sampling_of(index: int, **more: Any) -> SamplingParams:
    """Every fourth is free."""
    grammar = "" if index % 4 == 3 else GRAMMARS[index % 4]
    requested: dict[str, Any] = {"max_tokens": MANY, "grammar": grammar} | WAYS[index // 4 % 4] | more
    return SamplingParams(**requested)


def submit(rig: EngineRig, num: int, given: Mapping[int, list[int]] | None = None, **more: Any) -> None:
    for index in range(num):
        adapter = ADAPTER if index % 2 else None
        rig.submit(index, prompt_of(index), adapter, sampling_of(index, **more), (given or {}).get(index, ()))


def answers(rig: EngineRig, num: int = 16, **more: Any) -> dict[int, SequenceOutput]:
    submit(rig, num, **more)
    rig.finish()
    rig.assert_idle()
    return rig.outputs


def assert_same(there: Mapping[int, SequenceOutput], here: Mapping[int, SequenceOutput]) -> None:
    for index, output in there.items():
        other = here[index]
        assert (output.token_ids, output.finish_reason, output.error) == (other.token_ids, other.finish_reason, None), (
            index
        )
        assert [each.chosen for each in output.logprobs] == pytest.approx(
            [each.chosen for each in other.logprobs], abs=1e-3
        )


@pytest.fixture(scope="module")
def expected(stock: Stock) -> dict[int, SequenceOutput]:
    with engine(stock) as rig:
        return answers(rig)


def test_answers_follow_their_grammars_to_the_end(expected: dict[int, SequenceOutput]) -> None:
    for index, output in expected.items():
        if index % 4 != 3 and output.finish_reason == "stop":
            assert output.token_ids[-1] == EOS
            assert FITS[index % 4](text_of(output.token_ids)) is not None, text_of(output.token_ids)
    assert sum(output.finish_reason == "stop" for index, output in expected.items() if index % 4 != 3) > 6


def allowed_by_brute_force(vocabulary: Vocabulary, grammar: str, token_ids: list[int]) -> set[int]:
    """Token by token, without masks. Where only one text can follow, the tokenizer's own first token of it."""
    matcher = LLMatcher(vocabulary.tokens, grammar)
    assert matcher.consume_tokens(token_ids)
    if forced := matcher.compute_ff_tokens():
        return {forced[0]}
    allowed = {token for token in range(VOCAB_SIZE) if matcher.validate_tokens([token])}
    return allowed | ({EOS} if matcher.is_accepting() else set())


def test_the_most_likely_token_that_may_come_is_chosen_and_its_logprob_is_that_without_a_grammar(stock: Stock) -> None:
    """By an engine without grammars, with the log-probabilities of all tokens after each prefix of the answer."""
    vocabulary = Vocabulary(stock.model_path, VOCAB_SIZE, [EOS])
    with engine(stock) as rig:
        for index, grammar in enumerate(GRAMMARS):
            rig.submit(
                index,
                prompt_of(index),
                ADAPTER,
                SamplingParams(max_tokens=MANY, temperature=0.0, grammar=grammar, num_logprobs=0),
            )
        rig.finish()
        for index, grammar in enumerate(GRAMMARS):
            token_ids = rig.outputs[index].token_ids
            all_of_them = SamplingParams(max_tokens=1, temperature=0.0, num_logprobs=VOCAB_SIZE)
            for length in range(len(token_ids)):
                rig.submit(100 * (index + 1) + length, prompt_of(index) + token_ids[:length], ADAPTER, all_of_them)
            rig.finish()
            for length, token in enumerate(token_ids):
                (raw,) = rig.outputs[100 * (index + 1) + length].logprobs
                of_token = dict(zip(raw.top_ids, raw.top_logprobs, strict=True))
                allowed = allowed_by_brute_force(vocabulary, grammar, token_ids[:length])
                assert token == max(allowed, key=lambda each: of_token[each])
                assert rig.outputs[index].logprobs[length].chosen == pytest.approx(of_token[token], abs=1e-3)


def test_a_gpu_that_is_fed_tokens_gives_the_same(stock: Stock, expected: dict[int, SequenceOutput]) -> None:
    with engine(stock, "cuda") as rig:
        assert_same(answers(rig, 12), expected)


def test_a_late_mask_preempts_a_sequence_whose_state_has_gone_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hybrid, take, generator = made("qwen3_5", tmp_path), Constraints.take, random.Random(7)

    def late_by_chance(of: Constraints, wanted: Sequence[tuple[int, int]], is_over: Callable[[], bool]) -> Any:
        return take(of, [each for each in wanted if generator.random() < 0.8], is_over)

    with engine(hybrid, num_pages=400) as rig:
        on_time = answers(rig, 8)
    monkeypatch.setattr(Constraints, "take", late_by_chance)
    with engine(hybrid, num_pages=400) as rig:
        assert_same(answers(rig, 8), on_time)
        counters = rig.engine.load().counters
        assert counters.num_preemptions == counters.num_late_masks > 5


def test_a_sequence_whose_state_has_gone_on_waits_for_its_late_mask(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once, however long that takes, and others go on meanwhile."""
    hybrid, make_mask, held, num_made = made("qwen3_5", tmp_path), Constraint.make_mask, threading.Event(), 0

    def slow(of: Constraint, vocabulary: Vocabulary) -> None:
        nonlocal num_made
        num_made += 1
        if num_made == 3:
            held.wait(PATIENCE_S)
        make_mask(of, vocabulary)

    with engine(hybrid, num_pages=400) as rig:
        rig.submit(0, prompt_of(0), None, sampling_of(1))
        rig.finish()
        on_time = rig.outputs
    monkeypatch.setattr(Constraint, "make_mask", slow)
    with engine(hybrid, num_pages=400) as rig:
        rig.submit(0, prompt_of(0), None, sampling_of(1))
        rig.submit(1, prompt_of(1), None, SamplingParams(max_tokens=80, temperature=0.0, ignore_eos=True))
        while not rig.outputs[1].ended:
            rig.step()
        assert len(rig.outputs[0].token_ids) == 2
        counters = rig.engine.load().counters
        assert counters.num_preemptions == counters.num_late_masks == 1
        held.set()
        rig.finish()
        rig.assert_idle()
        assert_same(on_time, rig.outputs)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_late_mask_makes_only_its_own_sequence_wait(
    stock: Stock, expected: dict[int, SequenceOutput], monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    take, generator, late = Constraints.take, random.Random(7), dict[int, int]()

    def late_by_chance(of: Constraints, wanted: Sequence[tuple[int, int]], is_over: Callable[[], bool]) -> Any:
        assert all(late.get(each, index) == index for each, index in wanted), "a mask after a token that is not chosen"
        in_time = [each for each in wanted if generator.random() < 0.6]
        late.update({*wanted} - {*in_time})
        for each, _ in in_time:
            late.pop(each, None)
        return take(of, in_time, is_over)

    monkeypatch.setattr(Constraints, "take", late_by_chance)
    with engine(stock, device) as rig:
        assert_same(answers(rig, 8), expected)
        assert rig.engine.load().counters.num_late_masks > 30


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_sequences_that_are_preempted_go_on_in_their_grammars(
    stock: Stock, expected: dict[int, SequenceOutput], device: str
) -> None:
    with engine(stock, device, num_pages=stock.num_pages(11 + MANY, ADAPTER) + 9) as rig:
        fill_to_the_last_page(rig.engine._scheduler)
        assert_same(answers(rig, 10), expected)
        assert rig.engine.load().counters.num_preemptions > 0


def test_sequences_go_on_in_another_gang_wherever_they_were_cut(
    stock: Stock, expected: dict[int, SequenceOutput]
) -> None:
    generator = random.Random(3)
    with engine(stock) as rig:
        for _ in range(4):
            given = {
                i: output.token_ids[: generator.randrange(len(output.token_ids))] for i, output in expected.items()
            }
            submit(rig, 16, given)
            rig.finish()
            for index, output in rig.outputs.items():
                assert given[index] + output.token_ids == expected[index].token_ids
                assert output.finish_reason == expected[index].finish_reason


def test_a_gang_of_two_workers_gives_the_same(stock: Stock, expected: dict[int, SequenceOutput]) -> None:
    with gang(stock.gang_config(120, 2)) as (built, _):
        rig = EngineRig(built, stock.refs)
        assert_same(answers(rig), expected)


def test_an_answer_that_must_end_does_so_though_it_ignores_the_end(stock: Stock) -> None:
    with engine(stock) as rig:
        for index, grammar in enumerate(('start: "no"', 'start: "n" ("o")*')):
            rig.submit(index, prompt_of(0), None, SamplingParams(max_tokens=9, grammar=grammar, ignore_eos=True))
        rig.finish()
        assert (text_of(rig.outputs[0].token_ids), rig.outputs[0].finish_reason) == ("no", "stop")
        assert (text_of(rig.outputs[1].token_ids), rig.outputs[1].finish_reason) == ("noooooooo", "length")


def test_rules_hold_within_a_grammar_which_may_end_where_it_must(stock: Stock) -> None:
    a, b = TOKENS.index("a"), TOKENS.index("b")
    cases = {
        "start: /[ab]{2,4}/": (TokenRules(bad_words=((b,),), min_tokens=3, late_token_ids=(EOS,)), {"aaa", "aaaa"}),
        'start: "a"': (TokenRules(min_tokens=9, late_token_ids=(EOS,)), {"a"}),
        "start: /[a-z]{3}/": (TokenRules(allowed_token_ids=(b, EOS)), {"bbb"}),
        "start: /[ab]{3}/": (TokenRules(bad_words=((a, a), (b, b)), allowed_token_ids=(a, b, EOS)), {"aba", "bab"}),
        "start: /[b-z]+/": (TokenRules(allowed_token_ids=(a, EOS)), set[str]()),
    }
    with engine(stock) as rig:
        for index, (grammar, (rules, _)) in enumerate(cases.items()):
            requested = SamplingParams(max_tokens=12, temperature=1.0, seed=index, grammar=grammar, rules=rules)
            rig.submit(index, prompt_of(index), ADAPTER, requested)
        rig.finish()
        rig.assert_idle()
        for index, (_, texts) in enumerate(cases.values()):
            output = rig.outputs[index]
            if texts:
                assert (text_of(output.token_ids) in texts, output.finish_reason) == (True, "stop")
            else:
                assert output.error is not None
                assert (output.error.kind, "bad_words leave no token" in output.error.message) == (
                    "invalid_request",
                    True,
                )


BAD = (
    ("start: %json {", "parse"),
    ("start: missing", "missing"),
    ("start: /(/", "regex"),
    ('start: "é"', "no token"),
    ("start: " + "(" * 1000 + '"a"' + ")" * 1000, "nested"),
)


@pytest.mark.parametrize(("grammar", "reason"), BAD, ids=lambda each: each[:24])
def test_a_grammar_that_cannot_be_used_ends_its_own_sequence_and_says_why(
    stock: Stock, grammar: str, reason: str, expected: dict[int, SequenceOutput]
) -> None:
    with engine(stock) as rig:
        submit(rig, 4)
        rig.submit(99, prompt_of(1), None, SamplingParams(max_tokens=9, grammar=grammar))
        rig.finish()
        rig.assert_idle()
        error = rig.outputs.pop(99).error
        assert error is not None
        assert error.kind == "invalid_request"
        assert reason in error.message
        assert len(error.message) < 400
        assert_same(rig.outputs, {index: expected[index] for index in range(4)})


def test_a_model_without_a_tokenizer_says_so(tmp_path: Path) -> None:
    model = write_model("llama", tmp_path / "model")
    with Stock.make(model, {}, tmp_path / "store").engine(20) as rig:
        rig.submit(0, prompt_of(0), None, SamplingParams(max_tokens=9, grammar=GRAMMARS[0]))
        rig.finish()
        error = rig.outputs[0].error
        assert error is not None
        assert "tokenizer.json" in error.message


class Panic(BaseException):
    """As a library in Rust raises it."""


@pytest.mark.parametrize("error", [OSError("the disk is away"), Panic("out of range")], ids=["error", "panic"])
@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("constraints.Vocabulary.__init__", "vocabulary could not be read"),
        ("constraints.CompiledGrammars.matcher", "grammar could not be followed"),
        ("constraints.Constraint._mask_after", "grammar could not be followed"),
    ],
)
def test_an_error_that_was_not_foreseen_ends_the_sequences_that_wait_and_the_next_ones_are_served(
    stock: Stock, monkeypatch: pytest.MonkeyPatch, where: str, message: str, error: BaseException
) -> None:
    def fail(*_: Any) -> None:
        raise error

    with engine(stock) as rig:
        with monkeypatch.context() as patch:
            patch.setattr(f"motet.workers.decoding.{where}", fail)
            submit(rig, 4)
            rig.finish()
        for index in range(3):
            failed = rig.outputs[index].error
            assert failed is not None and failed.kind == "internal" and message in failed.message
        assert rig.outputs[3].error is None, "it has no grammar"
        rig.submit(9, prompt_of(0), None, sampling_of(0))
        rig.finish()
        assert rig.outputs[9].error is None and FITS[0](text_of(rig.outputs[9].token_ids))
        rig.assert_idle()


def test_others_run_while_a_grammar_is_compiled(stock: Stock, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is cancelled meanwhile is forgotten."""
    may_compile, compile_now = threading.Event(), CompiledGrammars.matcher

    def held(*given: Any) -> LLMatcher:
        assert may_compile.wait(PATIENCE_S)
        return compile_now(*given)

    monkeypatch.setattr(CompiledGrammars, "matcher", held)
    with engine(stock) as rig:
        submit(rig, 4)
        while rig.outputs[3].finish_reason is None:
            rig.step()
        assert not any(rig.outputs[index].token_ids for index in range(3))
        assert rig.engine.load().gauges.num_waiting == 3
        assert rig.engine._scheduler.cancel(1) is not None
        may_compile.set()
        while not (rig.outputs[0].ended and rig.outputs[2].ended):
            rig.step()
        rig.assert_idle()


def test_the_loop_is_woken_when_a_grammar_is_compiled(stock: Stock) -> None:
    woken = threading.Event()
    with engine(stock) as rig:
        rig.engine.wake_on_copy_end(woken.set)
        submit(rig, 1)
        eventually(woken.is_set)
        rig.finish()
