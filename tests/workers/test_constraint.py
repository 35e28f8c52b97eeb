"""What a sequence may say next follows from its grammar and its tokens, whatever happened on the way."""

from __future__ import annotations

import random
import threading
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from motet.tests.rigs.grammar_tokenizer import EOS, write_tokenizer
from motet.tests.rigs.oracle import VOCAB_SIZE
from motet.tests.rigs.patience import PATIENCE_S, eventually
from motet.workers.decoding.constraints import CompiledGrammars, Constraint, GrammarError, Vocabulary
from motet.workers.decoding.fair_threads import FairThreads, _Worker

GRAMMAR = 'start: ("[" (NUMBER ("," NUMBER)*)? "]")+\nNUMBER: /-?[0-9]{1,5}/'


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Vocabulary:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    return Vocabulary(folder, VOCAB_SIZE, [EOS])


def made(vocabulary: Vocabulary, token_ids: list[int]) -> Constraint:
    """Of a sequence that has these tokens, and had no others."""
    constraint = Constraint("t", token_ids, False)
    constraint.begin(CompiledGrammars().matcher("t", GRAMMAR, vocabulary))
    constraint.make_mask(vocabulary)
    return constraint


def tokens_of(mask: bytes) -> list[int]:
    return np.flatnonzero(np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")).tolist()


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 1 << 30))
def test_after_any_cuts_and_other_tokens_it_is_as_from_scratch(vocabulary: Vocabulary, seed: int) -> None:
    generator = random.Random(seed)
    token_ids: list[int] = []
    constraint = made(vocabulary, [])
    for _ in range(12):
        if token_ids and generator.random() < 0.3:  # it is computed again, and may get another token there
            del token_ids[generator.randrange(len(token_ids)) :]
            if token_ids:
                constraint.advance(len(token_ids), token_ids[-1])
                if generator.random() < 0.5:
                    constraint.make_mask(vocabulary)
        mask = made(vocabulary, token_ids).mask(len(token_ids))
        assert mask is not None
        token = generator.choice([each for each in tokens_of(mask) if each != EOS])
        token_ids.append(token)
        constraint.advance(len(token_ids), token)
        if generator.random() < 0.8:
            constraint.make_mask(vocabulary)
            there = made(vocabulary, token_ids)
            assert constraint.mask(len(token_ids)) == there.mask(len(token_ids)) is not None
            assert constraint.problem == ""


def test_a_mask_is_only_that_of_its_own_token(vocabulary: Vocabulary) -> None:
    constraint = made(vocabulary, [])
    assert constraint.mask(0) is not None
    assert constraint.mask(1) is None
    assert not constraint.advance(0, 5), "nothing has changed"
    assert constraint.is_ready


def test_tokens_that_are_no_beginning_of_an_answer_are_a_problem(vocabulary: Vocabulary) -> None:
    assert made(vocabulary, [3]).problem


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_tenants_grammars_are_its_own_and_who_keeps_most_loses_some(vocabulary: Vocabulary) -> None:
    grammars = CompiledGrammars(most_bytes=5 * 66_000)
    for index in range(20):
        grammars.matcher("large", f'start: "{index}"', vocabulary)
        grammars.matcher("small", GRAMMAR, vocabulary)
        grammars.check_integrity()
    assert len(grammars._by_tenant["small"]) == 1
    assert len(grammars._by_tenant["large"]) == 3
    for _ in range(2):  # what is no grammar is not compiled again either
        with pytest.raises(GrammarError):
            grammars.matcher("small", "start: /(/", vocabulary)
    grammars.check_integrity()


def run_next(threads: FairThreads, yields: bool) -> None:
    worker = _Worker(yields)
    job = threads._next(worker)
    assert job is not None
    job()
    threads._end_job(worker)


def test_the_tenant_that_has_used_least_goes_first_and_costly_ones_are_distinguished() -> None:
    clock, order = Clock(), list[str]()
    threads = FairThreads("test", 0.5, clock=clock)
    threads._start = lambda worker: None  # type: ignore[method-assign]  # the test runs the jobs itself

    def submit(name: str, seconds: float) -> None:
        def job() -> None:
            order.append(name)
            clock.now += seconds

        threads.submit(name, job)

    for name, seconds in (("slow", 0.4), ("slow", 3.0), ("slow", 3.0), ("quick", 0.1), ("quick", 0.1)):
        submit(name, seconds)
    for yields in (False, False, False, False, True):
        run_next(threads, yields)
    assert order == ["slow", "quick", "quick", "slow", "slow"]


def test_a_job_that_does_not_end_is_left_alone() -> None:
    may_end, others_ran = threading.Event(), threading.Event()
    threads = FairThreads("test", 0.001)
    threads.submit("slow", lambda: assert_set(may_end))
    eventually(lambda: threads._prompt is not None and threads._prompt.tenant is not None)
    threads._prompt.began_at -= 1.0  # type: ignore[union-attr]
    threads.submit("slow", lambda: None)
    threads.submit("quick", others_ran.set)
    assert_set(others_ran)
    may_end.set()
    threads.close()


def test_a_job_that_waits_is_not_costly() -> None:
    """As jobs do on a machine that is busy."""
    threads, has_run = FairThreads("test", 0.01), threading.Event()
    for job in (*[lambda: time.sleep(0.03)] * 4, has_run.set):
        threads.submit("t", job)
    assert_set(has_run)
    assert not threads._is_costly(threads._tenants["t"])
    threads.close()


def assert_set(event: threading.Event) -> None:
    assert event.wait(PATIENCE_S)


def test_jobs_of_a_tenant_that_turns_out_to_be_costly_are_done_without_another_job() -> None:
    """They are the other thread's then, which had looked for jobs while the tenant was not costly, and waits."""
    now, go, is_done = [0.0], threading.Event(), threading.Event()

    def costly() -> None:
        go.wait(PATIENCE_S)
        now[0] += 1.0

    threads = FairThreads("test", 0.5, clock=lambda: now[0])
    threads.submit("t", costly)
    threads.submit("t", is_done.set)
    time.sleep(0.1)  # both threads have looked
    go.set()
    assert is_done.wait(PATIENCE_S)
    threads.close()
