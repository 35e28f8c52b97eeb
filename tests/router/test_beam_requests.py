"""Requests for beams, and for the best of several draws, at a router with a scripted engine."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from motet.router.text.text import TextService
from motet.tests.rigs.beam_gang import beam_updates
from motet.tests.rigs.patience import PATIENCE_S
from motet.tests.rigs.router_rig import BASE, EOS, RouterRig, text_service
from motet.tests.rigs.router_rig import completed as post
from motet.workers.wire.messages import SamplingParams, SequenceError, SequenceRequest, SequenceUpdate, TokenLogprobs

ANSWER = "the quick brown fox"
BEAMS: dict[str, Any] = {"use_beam_search": True, "n": 2, "max_tokens": 3}


@pytest.fixture(scope="module")
def text() -> TextService:
    return text_service()


class Rig(RouterRig):
    """A router whose engine answers every prompt with ANSWER; a second token is always half as likely."""

    def __init__(self, spool_path: Path, text: TextService) -> None:
        super().__init__(spool_path, text)
        self.dispatcher.script = self.script
        self.other = self.ids("z")[0]
        self.said = [*self.ids(ANSWER), EOS]

    def script(self, request: SequenceRequest) -> list[SequenceUpdate]:
        return beam_updates(request, self.model)

    def model(self, token_ids: Sequence[int]) -> tuple[list[int], list[float]]:
        best = self.said[min(len(token_ids), len(self.said) - 1)]
        rest = [token for token in range(320) if token not in (best, self.other)]
        return [best, self.other, *rest], [math.log(0.6), math.log(0.3), *[math.log(0.1 / 318)] * len(rest)]


@pytest.fixture
def rig(tmp_path: Path, text: TextService) -> Rig:
    return Rig(tmp_path / "spool", text)


async def test_beams_of_a_completion(rig: Rig) -> None:
    answer = (await post(rig, **BEAMS, logprobs=1, return_token_ids=True, temperature=0.3, top_p=0.1)).json()
    first, second = answer["choices"]
    assert first["token_ids"] == rig.said[:3]
    assert second["token_ids"] in ([rig.other, *rig.said[1:3]], [*rig.said[:2], rig.other])
    assert [first["index"], second["index"]] == [0, 1]
    assert [first["finish_reason"], second["finish_reason"]] == ["length"] * 2
    assert first["logprobs"]["token_logprobs"] == pytest.approx([math.log(0.6)] * 3)
    assert all(len(top) == 1 for top in first["logprobs"]["top_logprobs"])
    num_prompt = len(rig.ids("hello"))
    assert answer["usage"] == {"prompt_tokens": num_prompt, "completion_tokens": 6, "total_tokens": num_prompt + 6}
    (submitted,) = rig.dispatcher.submitted
    assert submitted.beams is not None and (submitted.beams.width, submitted.beams.max_tokens) == (2, 3)
    assert submitted.sampling == SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True)
    assert rig.dispatcher.limits == [None]
    assert submitted.prompt_token_ids == rig.ids("hello")


async def test_a_search_for_each_prompt(rig: Rig) -> None:
    choices = (await post(rig, prompt=["hello", "hello"], **BEAMS)).json()["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2, 3]
    assert [choice["text"] for choice in choices[:2]] == [choice["text"] for choice in choices[2:]]


async def test_beams_of_a_chat(rig: Rig) -> None:
    async with rig.client() as client:
        messages = [{"role": "user", "content": "hi"}]
        body = {"model": BASE, "messages": messages, **BEAMS, "logprobs": True, "top_logprobs": 2}
        answer = (await client.post("/v1/chat/completions", json=body)).json()
    assert len(answer["choices"]) == 2
    for choice in answer["choices"]:
        content = choice["logprobs"]["content"]
        assert choice["message"]["content"] == "".join(one["token"] for one in content)
        assert all(len(one["top_logprobs"]) == 2 for one in content)


@pytest.mark.parametrize("stop", [["brown"], ["k br"], ["brown", "the quick brown"]])
async def test_a_stop_string_ends_a_beam(rig: Rig, stop: list[str]) -> None:
    fields: dict[str, Any] = {"use_beam_search": True, "n": 1, "max_tokens": 40, "stop": stop, "return_token_ids": True}
    choice = (await post(rig, **fields)).json()["choices"][0]
    assert choice["text"] == min((ANSWER[: ANSWER.index(string)] for string in stop), key=len)
    assert choice["finish_reason"] == "stop"
    longest = rig.ids("the quick brown")
    assert len(choice["token_ids"]) <= len(longest)
    assert len(rig.dispatcher.submitted) == 1


async def test_beams_that_a_stop_string_has_not_ended_go_on(rig: Rig) -> None:
    fields: dict[str, Any] = {**BEAMS, "max_tokens": 24, "length_penalty": 0, "stop": ["the"], "return_token_ids": True}
    choices = (await post(rig, **fields)).json()["choices"]
    assert {choice["finish_reason"] for choice in choices} <= {"stop", "length"}
    first, *later = rig.dispatcher.submitted
    assert first.beams_so_far is None and later
    num_tokens = 0
    for after in later:
        so_far = after.beams_so_far
        assert so_far is not None and len(so_far.beams[0]) > num_tokens
        num_tokens = len(so_far.beams[0])
    assert all(limit is not None and limit.has_begun for limit in rig.dispatcher.limits[1:])  # not refused half-way
    assert all(stream.cancelled.is_set() for stream in rig.dispatcher.streams)


async def test_an_end_token_ends_a_beam(rig: Rig) -> None:
    fields: dict[str, Any] = {
        "use_beam_search": True,
        "n": 1,
        "max_tokens": 40,
        "stop_token_ids": [EOS],
        "return_token_ids": True,
    }
    answer = (await post(rig, **fields)).json()
    choice = answer["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["token_ids"]) == (ANSWER, "stop", rig.said)
    assert answer["usage"]["completion_tokens"] == len(rig.said)


async def test_a_beam_that_is_refused_fails_the_request(rig: Rig) -> None:
    error = SequenceError("adapter_failed", "its file is gone")
    rig.dispatcher.script = lambda request: [*rig.script(request)[:1], SequenceUpdate(1, error=error)]
    response = await post(rig, **BEAMS)
    assert response.status_code >= 400
    assert "its file is gone" in response.json()["error"]["message"]


async def test_too_few_continuations_for_so_many_beams(rig: Rig) -> None:
    rig.dispatcher.script = lambda request: beam_updates(request, lambda _: ([5, 6], [0.0, -math.inf]))
    response = await post(rig, **BEAMS)
    assert response.status_code == 400
    assert "2 beams" in response.json()["error"]["message"]


async def test_a_client_that_goes_away_cancels_all_beams(rig: Rig) -> None:
    rig.dispatcher.hangs = True
    rig.dispatcher.script = lambda request: rig.script(request)[:1]
    asking = asyncio.create_task(post(rig, prompt=["hello", "hello"], **BEAMS))
    async with asyncio.timeout(PATIENCE_S):
        while len(rig.dispatcher.submitted) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        for stream in rig.dispatcher.streams:
            await stream.cancelled.wait()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({**BEAMS, "stream": True}, "stream"),
        ({**BEAMS, "best_of": 3}, "best_of"),
        ({**BEAMS, "presence_penalty": 0.5}, "presence_penalty"),
        ({**BEAMS, "repetition_penalty": 1.5}, "repetition_penalty"),
        ({**BEAMS, "logit_bias": {"5": 1}}, "logit_bias"),
        ({**BEAMS, "early_stopping": True}, "early_stopping"),
        ({**BEAMS, "length_penalty": 11}, "length_penalty"),
        ({**BEAMS, "n": 100, "prompt": ["a", "b"]}, "prompt"),
        ({"use_beam_search": 1}, "use_beam_search"),
        ({"length_penalty": 2}, "length_penalty"),
        ({"best_of": 0}, "best_of"),
        ({"n": 3, "best_of": 2}, "best_of"),
        ({"best_of": 129}, "best_of"),
        ({"best_of": 65, "prompt": ["a", "b"]}, "best_of"),
        ({"best_of": 2, "stream": True}, "best_of"),
    ],
)
async def test_what_does_not_go_together_is_refused(rig: Rig, fields: dict[str, Any], param: str) -> None:
    response = await post(rig, **fields)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
    assert rig.dispatcher.submitted == []


async def test_a_chat_has_no_best_of(rig: Rig) -> None:
    async with rig.client() as client:
        body = {"model": BASE, "messages": [{"role": "user", "content": "hi"}], "best_of": 2}
        response = await client.post("/v1/chat/completions", json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "best_of")


async def test_the_best_of_several_has_the_highest_mean(rig: Rig) -> None:
    totals = {1: [-1.0, -1.0], 2: [-0.5], 3: [-0.4, -0.4, -0.4], 4: [-2.0]}  # by seed

    def script(request: SequenceRequest) -> list[SequenceUpdate]:
        assert request.sampling.num_logprobs == 0
        seed = request.sampling.seed
        assert seed is not None
        logprobs = [TokenLogprobs(value, [], []) for value in totals[seed]]
        return [SequenceUpdate(1, rig.ids("fox") * len(logprobs), logprobs * len(rig.ids("fox")), "length")]

    rig.dispatcher.script = script
    answer = (await post(rig, n=2, best_of=4, seed=1)).json()
    assert [choice["text"] for choice in answer["choices"]] == ["fox" * 3, "fox"]
    assert [choice["logprobs"] for choice in answer["choices"]] == [None, None]
    assert answer["usage"]["completion_tokens"] == 7 * len(rig.ids("fox"))


async def test_what_comes_after_a_stop_string_does_not_count_among_the_best(rig: Rig) -> None:
    token = rig.ids("z")[0]

    def script(request: SequenceRequest) -> list[SequenceUpdate]:
        end = rig.ids("!")[0]
        values = [-1.0, -1.0, -50.0] if request.sampling.seed == 1 else [-2.0, -2.0, -0.1]
        return [SequenceUpdate(1, [token, end, token], [TokenLogprobs(value, [], []) for value in values], "length")]

    rig.dispatcher.script = script
    fields: dict[str, Any] = {"n": 1, "best_of": 2, "seed": 1, "stop": "!", "logprobs": 0}
    choice = (await post(rig, **fields)).json()["choices"][0]
    assert choice["logprobs"]["token_logprobs"] == [-1.0]
