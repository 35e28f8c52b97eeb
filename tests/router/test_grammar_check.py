"""Which of tenants' grammars may wait for idle processors, and that these leave a process to others."""

from __future__ import annotations

import asyncio

import pytest

from motet.router.grammars.check_process import GrammarQuestion, Verdict
from motet.router.grammars.grammar_check import GrammarCheck
from motet.router.grammars.response_format import WantedGrammar


def grammar(number: int) -> WantedGrammar:
    return WantedGrammar("response_format", "regex", f"a{{{number}}}")


class Trials:
    """In place of the processes: each trial takes a second of CPU, and ends when the test lets it."""

    def __init__(self, check: GrammarCheck, monkeypatch: pytest.MonkeyPatch) -> None:
        self.questions: list[GrammarQuestion] = []
        self.may_end = asyncio.Event()
        monkeypatch.setattr(check, "_run", self.run)

    async def run(self, question: GrammarQuestion, data: bytes) -> tuple[Verdict, float]:
        self.questions.append(question)
        await self.may_end.wait()
        return Verdict("start: /a/"), 0.15


async def test_a_tenants_first_costly_grammar_gets_a_share_of_the_processors_and_its_next_ones_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    check = GrammarCheck({})
    trials = Trials(check, monkeypatch)
    trials.may_end.set()
    for tenant in ("a", "a", "b"):
        await check.lark(tenant, grammar(len(trials.questions) + 1), 300)
    assert [question.may_wait for question in trials.questions] == [False, True, False]


async def test_of_grammars_that_come_at_once_those_behind_the_first_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    check = GrammarCheck({})
    trials = Trials(check, monkeypatch)
    costly = [asyncio.create_task(check.lark("a", grammar(number), 300)) for number in range(1, 4)]
    for _ in range(20):
        await asyncio.sleep(0)
    trials.may_end.set()
    await asyncio.gather(*costly)
    assert [question.may_wait for question in trials.questions] == [False, True, True]


async def test_grammars_that_may_wait_leave_a_process_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    check = GrammarCheck({})
    trials = Trials(check, monkeypatch)
    trials.may_end.set()
    for tenant in ("a", "b"):
        await check.lark(tenant, grammar(1), 300)
    trials.may_end.clear()
    costly = [asyncio.create_task(check.lark(tenant, grammar(2), 300)) for tenant in ("a", "b")]
    for _ in range(20):
        await asyncio.sleep(0)
    assert [question.may_wait for question in trials.questions[2:]] == [True]
    quick = asyncio.create_task(check.lark("c", grammar(3), 300))
    for _ in range(20):
        await asyncio.sleep(0)
    assert [question.may_wait for question in trials.questions[2:]] == [True, False]
    trials.may_end.set()
    await asyncio.gather(quick, *costly)
