"""A client that resumes a stream after any event gets exactly what follows, from a router that never saw the stream."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from motet.adapters.format.own_tokenizer import OwnText, OwnToken
from motet.adapters.registry.versions.rollout import Rollout, with_others
from motet.router.text.text import TextService
from motet.tests.rigs.router_rig import (
    BASE,
    EOS,
    Event,
    FakeView,
    RouterRig,
    counts_of,
    events_of,
    logprobs_of,
    sealed,
    text_service,
)
from motet.workers.wire.messages import SequenceRequest, SequenceUpdate

ANSWER = "the quick 你猫 brown fox jumps 🎉 over"
CHAT = "/v1/chat/completions"
COMPLETION = "/v1/completions"
HELLO = {"messages": [{"role": "user", "content": "hello"}]}
USAGE = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "completion": (COMPLETION, {"prompt": "hello", "max_tokens": 40}),
    "cut short": (COMPLETION, {"prompt": "hello", "max_tokens": 7, **USAGE}),
    "logprobs and ids": (COMPLETION, {"prompt": "hello", "max_tokens": 40, "logprobs": 2, "return_token_ids": True}),
    "stop": (COMPLETION, {"prompt": "hello", "max_tokens": 40, "stop": ["jumps 🎉", "fox!"], "logprobs": 1, **USAGE}),
    "several": (COMPLETION, {"prompt": ["hello", "fox"], "n": 2, "echo": True, "max_tokens": 30, **USAGE}),
    "several with ids": (COMPLETION, {"prompt": ["hello", "fox"], "return_token_ids": True, "max_tokens": 30}),
    "chat": (CHAT, {**HELLO, "logprobs": True, "top_logprobs": 1, **USAGE}),
    "chats": (CHAT, {**HELLO, "n": 3, "stop": ["over"], "return_token_ids": True}),
}


@pytest.fixture(scope="module")
def text() -> TextService:
    return text_service()


@pytest.fixture
def rig(tmp_path: Path, text: TextService) -> RouterRig:
    rig = RouterRig(tmp_path / "spool", text)
    rig.dispatcher.script = merged_script(rig, random.Random(1))
    return rig


def merged_script(rig: RouterRig, rng: random.Random) -> Any:
    """Each submission's updates are the same tokens, merged by chance as a slow reader gets them."""

    def script(requested: SequenceRequest) -> Sequence[SequenceUpdate]:
        # Choices of a request are distinguished by their key's end: each starts at another word.
        start = int(requested.key.rpartition("/")[2]) if requested.key else 0
        token_ids = [*rig.ids(" ".join(ANSWER.split()[start:])), EOS][: requested.sampling.max_tokens]
        updates = []
        while token_ids:
            count = rng.randint(1, 4)
            part, token_ids = token_ids[:count], token_ids[count:]
            num_top = requested.sampling.num_logprobs
            logprobs = None if num_top is None else [logprobs_of(token_id, num_top) for token_id in part]
            reason: Any = None if token_ids else "stop" if part[-1] == EOS else "length"
            updates.append(SequenceUpdate(1, part, logprobs, reason))
        return updates

    return script


async def post(rig: RouterRig, path: str, body: dict[str, Any], last_event_id: str | None = None) -> httpx.Response:
    headers = {} if last_event_id is None else {"Last-Event-ID": last_event_id}
    async with rig.client() as client:
        return await client.post(path, json={"model": BASE, "stream": True, **body}, headers=headers)


def received(events: Iterable[Event]) -> dict[str, Any]:
    """The answer that a client puts together from events: the fields of each choice, joined."""
    joined: dict[Any, Any] = defaultdict(str)
    lists: dict[Any, list[Any]] = defaultdict(list)
    for event in events:
        if event.data == "[DONE]":
            lists["done"].append(True)
            continue
        chunk = event.chunk
        lists["heads"] = [(chunk["id"], chunk["created"], chunk["model"])]
        if not chunk["choices"]:
            lists["usage"].append(chunk["usage"])
        for choice in chunk["choices"]:
            index, delta = choice["index"], choice.get("delta", {})
            joined[index] += choice.get("text", "") + delta.get("content", "")
            for name, value in (
                ("roles", [delta["role"]] if "role" in delta else []),
                ("ids", choice.get("token_ids", [])),
                ("prompts", [choice["prompt_token_ids"]] if "prompt_token_ids" in choice else []),
                ("reasons", [choice["finish_reason"]] if choice["finish_reason"] else []),
            ):
                lists[name, index] += value
            for name, values in (choice["logprobs"] or {}).items():
                lists[name, index] += values or []
    return dict(joined) | {key: value for key, value in lists.items() if value}


@pytest.mark.parametrize("name", SHAPES)
async def test_from_every_event_on(rig: RouterRig, name: str) -> None:
    path, body = SHAPES[name]
    whole = events_of((await post(rig, path, body)).content)
    expected = received(whole)
    ids = [event.id for event in whole if event.data != "[DONE]"]
    assert all(ids)
    assert len(set(ids)) == len(ids), "two events that a client cannot distinguish"
    for number, event in enumerate(whole[:-1]):
        resumed = await post(rig, path, body, event.id)
        assert resumed.status_code == 200, resumed.text
        assert received([*whole[: number + 1], *events_of(resumed.content)]) == expected, event.id
    seeds = {(requested.key, requested.sampling.seed) for requested in rig.dispatcher.submitted}
    assert len(seeds) == len(expected.keys() & set(range(4)))
    assert rig.dispatcher.resumed.count(False) == len(seeds)


@pytest.mark.parametrize("name", SHAPES)
async def test_cut_off_again_and_again(rig: RouterRig, name: str) -> None:
    """The stream is cut at any byte; the client drops the part of an incomplete event."""
    rng = random.Random(name)
    path, body = SHAPES[name]
    for _ in range(10):
        events: list[Event] = []
        is_done = False
        while not is_done:
            content = (await post(rig, path, body, events[-1].id if events else None)).content
            if rng.random() < 0.7:
                content = content[: rng.randrange(len(content))]
            events += events_of(content)
            is_done = bool(events) and events[-1].data == "[DONE]"
        whole = received(events_of((await post(rig, path, body)).content))
        assert {**received(events), "heads": 0} == {**whole, "heads": 0}
        assert len({event.chunk["id"] for event in events[:-1]}) == 1


async def test_usage_and_continuous_usage_count_what_the_client_had(rig: RouterRig) -> None:
    path, body = SHAPES["several"]
    whole = events_of((await post(rig, path, body)).content)
    middle = whole[len(whole) // 2]
    usage = [event.chunk["usage"]["completion_tokens"] for event in whole[:-1]]
    resumed = events_of((await post(rig, path, body, middle.id)).content)
    again = [event.chunk["usage"]["completion_tokens"] for event in resumed[:-1]]
    assert again[0] > middle.chunk["usage"]["completion_tokens"]
    assert again == sorted(again)
    assert again[-1] == usage[-1]


async def test_what_was_had_is_not_counted_twice(rig: RouterRig) -> None:
    path, body = SHAPES["completion"]
    whole = events_of((await post(rig, path, body)).content)
    await post(rig, path, body, whole[3].id)
    async with rig.client() as client:
        metrics = (await client.get("/metrics")).text
    num_tokens = len(rig.ids(ANSWER)) + 1
    num_had = int(counts_of(whole[3].id))
    assert f"motet_completion_tokens_total {2 * num_tokens - num_had}.0" in metrics
    assert "motet_resumed_streams_total 1.0" in metrics


async def test_what_no_stream_can_have_reported(rig: RouterRig) -> None:
    path, body = SHAPES["cut short"]
    whole = events_of((await post(rig, path, body)).content)
    answer = whole[0].id.partition(":")[0]
    for reported, reason in (
        ("nonsense", "not the id of an event"),
        (answer, "not the id of an event"),
        (f"{answer}:", "not the id of an event"),
        (f"{answer}:-1", "not the id of an event"),
        (f"{answer}:1.", "not the id of an event"),
        (f"{answer}:1/", "not the id of an event"),
        (f"{answer}:\u0663", "not the id of an event"),
        (f"{answer}:1", "not the id of an event"),  # without a seal, as of a motet that sent none
        (sealed(answer[:-1], "1"), "not the id of an event"),
        (sealed(f"x{answer}", "1"), "another request"),
        (sealed(answer, f"{'1.' * 5000}1"), "not the id of an event"),
        (sealed(answer, "1/1"), "which is for positions before the first token"),
        (sealed(answer, "1.1"), "it has 2 choices, and the request has 1"),
        (sealed(answer, "8"), "8 tokens of choice 0, which has at most 7"),
        (sealed(answer, "3/end"), "the answer has not ended"),
    ):
        refused = await post(rig, path, body, reported.encode())  # type: ignore[arg-type]
        assert refused.status_code == 400, reported
        error = refused.json()["error"]
        assert reason in error["message"]
        assert (error["param"], error["code"]) == ("Last-Event-ID", "invalid_value")


async def test_more_than_the_sequence_came_to(rig: RouterRig) -> None:
    for body in ({"max_tokens": 60}, {"max_tokens": 60, "stop": "fox"}):
        whole = events_of((await post(rig, COMPLETION, {"prompt": "hello", **body})).content)
        count = counts_of(whole[-2].id)
        more = sealed(whole[-2].id, str(int(count) + 1))
        refused = await post(rig, COMPLETION, {"prompt": "hello", **body}, more)
        assert refused.status_code == 400
        assert f"choice 0 ends after {count} tokens" in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    "other",
    [{"prompt": "hallo"}, {"max_tokens": 6}, {"seed": 1}, {"stop": "x"}, {"n": 2}, {"model": "pirate"}],
    ids=str,
)
async def test_an_id_of_another_request(rig: RouterRig, other: dict[str, Any]) -> None:
    rig.registry.add("acme", "pirate", "abc")
    path, body = SHAPES["cut short"]
    whole = events_of((await post(rig, path, body)).content)
    refused = await post(rig, path, {**body, **other}, whole[1].id)
    assert refused.status_code == 400
    assert "another request" in refused.json()["error"]["message"]


async def test_a_name_that_has_moved_on(rig: RouterRig) -> None:
    """The rest of another version's text would not fit the text that the client has."""
    rig.registry.add("acme", "pirate", "abc")
    body = {"model": "pirate", "prompt": "hello"}
    whole = events_of((await post(rig, COMPLETION, body)).content)
    assert (await post(rig, COMPLETION, body, whole[1].id)).status_code == 200
    rig.registry.add("acme", "pirate", "def")
    assert (await post(rig, COMPLETION, body, whole[1].id)).status_code == 400


@pytest.mark.parametrize(
    "templates",
    [
        {},
        {"chat_template": "{{ messages[0].content }}"},
        {"response_template": "glm"},
        {"own_text": OwnText(tokens=(OwnToken(73, "h"),))},
    ],
)
async def test_a_stream_goes_on_by_the_templates_of_the_version_that_it_began_with(
    rig: RouterRig, templates: dict[str, Any]
) -> None:
    begun = rig.registry.add("acme", "pirate", "abc")
    body = {"model": "pirate", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 5}
    whole = events_of((await post(rig, CHAT, body)).content)
    (prompt,) = {(*one.prompt_token_ids,) for one in rig.dispatcher.submitted}
    promoted = rig.registry.add("acme", "pirate", "def", **templates)
    rollout = with_others(Rollout(), (), begun).json()
    rig.registry.adapters["acme", "pirate"] = replace(promoted, rollout=rollout)
    rest = await post(rig, CHAT, body, whole[1].id)
    assert rest.status_code == 200, rest.text
    request = rig.dispatcher.submitted[-1]
    assert (*request.prompt_token_ids,) == prompt and request.adapter is not None and request.adapter.digest == "abc"
    anew = await post(rig, CHAT, body)
    assert anew.status_code == 200 and rig.dispatcher.submitted[-1].adapter.digest == "def"  # type: ignore[union-attr]
    assert ((*rig.dispatcher.submitted[-1].prompt_token_ids,) == prompt) == (templates.keys() <= {"response_template"})


async def test_an_answer_in_one_piece_cannot_be_resumed(rig: RouterRig) -> None:
    path, body = SHAPES["completion"]
    whole = events_of((await post(rig, path, body)).content)
    refused = await post(rig, path, {**body, "stream": False}, whole[1].id)
    assert refused.status_code == 400
    assert "stream: true" in refused.json()["error"]["message"]
    await post(rig, path, {**body, "stream": False})
    assert rig.dispatcher.submitted[-1].key == ""
    assert (await post(rig, path, body, "")).status_code == 200  # an empty header is none


async def test_ids_are_not_to_be_guessed(rig: RouterRig) -> None:
    path, body = SHAPES["completion"]
    ids = [events_of((await post(rig, path, body)).content)[0].chunk["id"] for _ in range(3)]
    tails = {one[-21:] for one in ids}  # 126 of the 128 random bits
    assert len(tails) == 3


async def test_what_is_not_sealed_is_refused(rig: RouterRig) -> None:
    """A client that could change an id could have any number of sequences served before all others."""
    path, body = SHAPES["several"]
    whole = events_of((await post(rig, path, body)).content)
    genuine = whole[-3].id
    answer, counts, seal = genuine.split(":")
    forged = [
        f"{answer[:-1]}{'A' if answer[-1] != 'A' else 'B'}:{counts}:{seal}",  # another nonce
        f"{answer}:{counts.replace('.', '.1', 1)}:{seal}",
        f"{answer}:{counts}:{'a' * len(seal)}",
        f"{answer}:{counts}/end:{seal}",
        sealed(answer, counts, tenant="zenith"),
    ]
    num_submitted = len(rig.dispatcher.submitted)
    for reported in forged:
        refused = await post(rig, path, body, reported)
        assert refused.status_code == 400, reported
        assert "not sent to this tenant" in refused.json()["error"]["message"]
    assert len(rig.dispatcher.submitted) == num_submitted
    assert (await post(rig, path, body, genuine)).status_code == 200


async def test_ids_from_before_redis_lost_its_data(rig: RouterRig) -> None:
    path, body = SHAPES["completion"]
    whole = events_of((await post(rig, path, body)).content)
    rig.registry.stream_keys = (b"another", *FakeView.stream_keys)
    assert (await post(rig, path, body, whole[1].id)).status_code == 200
    rig.registry.stream_keys = (b"another",)
    assert (await post(rig, path, body, whole[1].id)).status_code == 400


async def test_only_what_has_delivered_tokens_is_not_new(rig: RouterRig) -> None:
    path, body = SHAPES["several"]
    whole = events_of((await post(rig, path, body)).content)
    await post(rig, path, body, sealed(whole[0].id, "0.2.0.1"))
    limits = rig.dispatcher.limits[-4:]
    assert [limit is not None and limit.has_begun for limit in limits] == [False, True, False, True]
    assert rig.dispatcher.resumed[-4:] == [True] * 4  # a gang may hold any of them
    await post(rig, path, {**body, "timeout": 9}, sealed(whole[0].id, "0.0.0.0"))
    assert all(limit is not None and not limit.has_begun for limit in rig.dispatcher.limits[-4:])
