from __future__ import annotations

from collections.abc import Iterator
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from motet.cluster.client.client import MotetClient
from motet.cluster.commands.run_demo import (
    Inquiry,
    Reply,
    Voice,
    ask_all,
    print_answers,
    print_next_steps,
    print_speeds,
    speed_of,
)
from motet.tests.rigs.fake_motet import BASE, KEY, FakeMotet, running_fake

VOICE = Voice(BASE, "base", "acme")


@pytest.fixture(scope="module")
def fake() -> Iterator[FakeMotet]:
    with running_fake() as fake:
        yield fake


def reply(text: str, expected: str, first_token_s: float = 0.1, last_token_s: float = 1.0) -> Reply:
    return Reply(Inquiry(VOICE, "what?", expected), text, 10, first_token_s, last_token_s)


def test_replies_come_in_the_order_of_the_questions_and_are_checked(fake: FakeMotet) -> None:
    inquiries = [Inquiry(VOICE, f"question {i}", f"QUESTION {i if i != 3 else 'three'}") for i in range(12)]
    with MotetClient(fake.url, KEY) as client:
        replies = ask_all(inquiries, {"acme": client})
    assert [reply.inquiry for reply in replies] == inquiries
    assert [reply.is_right for reply in replies] == [i != 3 for i in range(12)]
    assert {reply.num_tokens for reply in replies} == {2}
    assert all(0 < reply.first_token_s <= reply.last_token_s for reply in replies)


def test_a_reply_that_failed_is_not_right_and_hides_nothing(fake: FakeMotet) -> None:
    with MotetClient(fake.url, KEY) as client:
        (failed,) = ask_all([Inquiry(Voice("absent", "base", "acme"), "what?", "")], {"acme": client})
    assert failed.error == "there is no model 'absent'"
    assert not failed.is_right


def test_speed_counts_all_tokens_until_the_last_reply() -> None:
    speed = speed_of([reply("a", "a", 0.1, 1.0), reply("b", "c", 0.3, 2.0), reply("d", "d", 0.2, 0.5)])
    assert (speed.median_first_token_s, speed.tokens_per_s) == (0.2, 15.0)
    assert (speed.num_right, speed.num_replies) == (2, 3)


def test_a_wrong_answer_is_shown_beside_the_right_one() -> None:
    console = Console(file=StringIO(), record=True, width=100)
    print_answers(console, [reply("[blue]", "red")])
    print_speeds(console, [reply("[blue]", "red")])
    shown = console.export_text()
    assert "[blue]" in shown
    assert "right: red" in shown
    assert "0 of 1" in shown


def test_the_lines_to_try_next_are_whole() -> None:
    console = Console(file=StringIO(), record=True, width=40)
    voice = Voice("pirate", "pirate", "acme")
    print_next_steps(console, "http://127.0.0.1:8000", {"acme": "k"}, voice, Path("examples/pirate"))
    shown = console.export_text().splitlines()
    assert '  curl http://127.0.0.1:8000/v1/adapters -H "Authorization: Bearer k" -F name=mine \\' in shown
    assert "  export MOTET_URL=http://127.0.0.1:8000 MOTET_API_KEY=k" in shown
    assert "  .venv/bin/motet chat --model pirate" in shown
