"""How requests fail: in OpenAI's shape, with the right status and the name of the field."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from motet.router.text.text import TextService
from motet.tests.rigs.router_rig import BASE, CONTEXT, HEADERS, RouterRig, events_of, failing, text_service
from motet.tests.rigs.router_rig import completed as post
from motet.workers.wire.messages import SequenceError, SequenceUpdate

ANSWER = "the quick brown fox"


@pytest.fixture(scope="module")
def text() -> TextService:
    return text_service()


@pytest.fixture
def rig(tmp_path: Path, text: TextService) -> RouterRig:
    rig = RouterRig(tmp_path / "spool", text)
    rig.dispatcher.answer = rig.ids(ANSWER)
    return rig


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": "warm"}, "temperature"),
        ({"temperature": 2.5}, "temperature"),
        ({"top_p": -0.1}, "top_p"),
        ({"n": 0}, "n"),
        ({"n": True}, "n"),
        ({"n": 100, "prompt": ["a", "b"]}, "prompt"),
        ({"n": 2, "best_of": 1}, "best_of"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 0, "use_beam_search": True}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stop": ["a", ""]}, "stop[1]"),
        ({"stop_token_ids": [1, 320]}, "stop_token_ids[1]"),
        ({"logit_bias": {"1": 101}}, "logit_bias"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias"),
        ({"logit_bias": {"320": 1}}, "logit_bias"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": 1, "echo": True, "stream": True}, "echo"),
        ({"logprobs": 1, "echo": True, "use_beam_search": True}, "echo"),
        ({"seed": 2**63}, "seed"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"suffix": "end"}, "suffix"),
        ({"response_format": {"type": "yaml"}}, "response_format.type"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt_logprobs": 0, "stream": True}, "prompt_logprobs"),
        ({"spaces_between_special_tokens": False}, "spaces_between_special_tokens"),
        ({"min_tokens": False}, "min_tokens"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [[1], []]}, "prompt[1]"),
        ({"prompt": [1, 320]}, "prompt[1]"),
        ({"prompt": [[1], [2, -1]]}, "prompt[1][1]"),
        ({"prompt": [1, "a"]}, "prompt[1]"),
        ({"prompt": {"text": "a"}}, "prompt"),
        ({"model": 7}, "model"),
    ],
)
async def test_refused_fields_are_named(rig: RouterRig, fields: dict[str, Any], param: str) -> None:
    response = await post(rig, **fields)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"
    assert param.split("[")[0].split(".")[0] in error["message"]
    assert rig.dispatcher.submitted == []


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "text"}},
        {"suffix": None},
        {"tool_choice": "none"},
        {"tools": []},
        {"skip_special_tokens": True},
        {"logit_bias": None, "stop": None, "stream_options": None, "n": None},
    ],
)
async def test_fields_that_ask_for_nothing_else_are_accepted(rig: RouterRig, fields: dict[str, Any]) -> None:
    assert (await post(rig, **fields)).status_code == 200


async def test_a_missing_field_and_a_broken_body(rig: RouterRig) -> None:
    async with rig.client() as client:
        missing = await client.post("/v1/completions", json={"model": BASE})
        broken = await client.post("/v1/completions", content=b'{"model": ')
        bad_bytes = await client.post("/v1/completions", content=b'{"model": "\xff"}')
        listed = await client.post("/v1/completions", json=[])
    assert missing.status_code == 400
    assert missing.json()["error"]["param"] == "prompt"
    assert missing.json()["error"]["code"] == "missing_required_parameter"
    for response in (broken, bad_bytes):
        assert response.status_code == 400
        assert response.json()["error"]["code"] == "invalid_json"
    assert listed.status_code == 400


async def test_a_body_over_the_limit(tmp_path: Path, text: TextService) -> None:
    rig = RouterRig(tmp_path, text, max_body_bytes=1000)
    response = await post(rig, prompt="a" * 1000)
    assert response.status_code == 413
    assert "1000 bytes" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "excess"),
    [(CONTEXT + 19, None, 19), (CONTEXT, None, 1), (CONTEXT - 10, 30, 20), (CONTEXT + 1, 1, 1)],
)
async def test_too_long_says_by_how_much(rig: RouterRig, num_prompt: int, max_tokens: int | None, excess: int) -> None:
    response = await post(rig, prompt=[5] * num_prompt, max_tokens=max_tokens)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert f" {excess} " in error["message"]


async def test_all_of_the_context_may_be_used(rig: RouterRig) -> None:
    assert (await post(rig, prompt=[5] * (CONTEXT - 10), max_tokens=10)).status_code == 200


async def test_unknown_and_foreign_models_look_the_same(rig: RouterRig) -> None:
    rig.registry.add("zenith", "secret")
    foreign = await post(rig, model="secret")
    unknown = await post(rig, model="absent")
    for response in (foreign, unknown):
        assert response.status_code == 404
        assert response.json()["error"]["code"] == "model_not_found"
    assert foreign.text.replace("secret", "absent") == unknown.text


@pytest.mark.parametrize("authorization", ["", "Bearer", "Bearer nope", "Basic key-of-acme"])
async def test_keys(rig: RouterRig, authorization: str) -> None:
    async with rig.client() as client:
        for path in ("/v1/completions", "/v1/chat/completions", "/v1/adapters"):
            response = await client.post(path, headers={"Authorization": authorization}, json={})
            assert response.status_code == 401
            assert response.json()["error"]["code"] == "invalid_api_key"
    assert HEADERS["Authorization"] not in response.text


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("kind", "status", "code"),
    [
        ("invalid_request", 400, "invalid_request"),
        ("adapter_failed", 500, "adapter_failed"),
        ("adapter_overflow", 422, "adapter_overflow"),
        ("overloaded", 429, "overloaded"),
        ("timeout", 408, "timeout"),
        ("gang_lost", 503, "gang_lost"),
        ("store_unavailable", 503, "store_unavailable"),
        ("internal", 500, "internal_error"),
    ],
)
async def test_errors_before_the_first_token(rig: RouterRig, stream: bool, kind: str, status: int, code: str) -> None:
    rig.dispatcher.script = failing(kind, "because of that")
    response = await post(rig, stream=stream)
    assert response.status_code == status
    assert response.json()["error"]["code"] == code
    assert "because of that" in response.json()["error"]["message"]
    assert ("retry-after" in response.headers) == (status in (429, 503))


@pytest.mark.parametrize(("expected_s", "reported"), [(None, "1"), (0.0, "1"), (7.1, "8"), (1e9, "3600")])
async def test_a_refusal_says_when_to_try_again(rig: RouterRig, expected_s: float | None, reported: str) -> None:
    error = SequenceError("overloaded", "too many wait", expected_s, "wait")
    rig.dispatcher.script = lambda request: [SequenceUpdate(1, error=error)]
    response = await post(rig, stream=True)
    assert response.status_code == 429
    assert response.headers["retry-after"] == reported
    assert response.json()["error"] == {
        "message": "too many wait",
        "type": "rate_limit_error",
        "param": None,
        "code": "overloaded",
    }
    async with rig.client() as client:
        lines = (await client.get("/metrics")).text.splitlines()
    assert 'motet_refused_requests_total{reason="wait"} 1.0' in lines
    assert 'motet_refused_requests_total{reason="full"} 0.0' in lines


async def test_a_timeout_travels_with_each_sequence(rig: RouterRig) -> None:
    assert (await post(rig, timeout=60, n=2)).status_code == 200
    first, second = rig.dispatcher.limits
    assert first is not None
    assert second is not None
    assert first.timeout_s is not None
    assert 0 < first.timeout_s < 60
    assert first.num_new_tokens == 1  # it may end at any token
    await post(rig, timeout=60, max_tokens=9, ignore_eos=True)
    await post(rig, timeout=60, max_tokens=9, ignore_eos=True, stop="x")
    await post(rig)
    known, unknown, unlimited = rig.dispatcher.limits[2:]
    assert [known and known.num_new_tokens, unknown and unknown.num_new_tokens] == [9, 1]
    assert unlimited is None


async def test_a_timeout_in_the_stream_is_reported_and_counted(rig: RouterRig) -> None:
    rig.dispatcher.script = failing("timeout", "its timeout passed", after=rig.ids("the quick"))
    response = await post(rig, stream=True, timeout=60)
    assert events_of(response.content)[-1].chunk["error"]["code"] == "timeout"
    async with rig.client() as client:
        assert "motet_timed_out_requests_total 1.0" in (await client.get("/metrics")).text.splitlines()


@pytest.mark.parametrize("bad", [0, -1, "soon", 1e9])
async def test_a_bad_timeout_is_refused(rig: RouterRig, bad: object) -> None:
    response = await post(rig, timeout=bad)
    assert response.status_code == 400
    assert "timeout" in response.json()["error"]["message"]


async def test_an_error_in_the_stream_is_its_last_event(rig: RouterRig) -> None:
    rig.dispatcher.script = failing("gang_lost", "the gang died", after=rig.ids("the quick"))
    response = await post(rig, stream=True)
    assert response.status_code == 200
    *chunks, error = [event.chunk for event in events_of(response.content)]
    assert error["error"]["code"] == "gang_lost"
    assert "[DONE]" not in response.text
    texts = [chunk["choices"][0]["text"] for chunk in chunks]
    assert "".join(texts) == "the quick"


async def test_an_update_may_bring_tokens_and_an_error(rig: RouterRig) -> None:
    def script(request: Any) -> list[SequenceUpdate]:
        error = failing("gang_lost", "the gang died")(request)[0].error
        return [SequenceUpdate(1, rig.ids("the")), SequenceUpdate(1, rig.ids(" fox"), error=error)]

    rig.dispatcher.script = script
    response = await post(rig, stream=True)
    assert '"text":" fox"' in response.text
    assert "the gang died" in response.text


async def test_one_failed_choice_fails_the_request_and_cancels_the_others(rig: RouterRig) -> None:
    def script(request: Any) -> Sequence[SequenceUpdate]:
        return [SequenceUpdate(1, [5])] if request.sampling.seed == 0 else failing("internal", "broke")(request)

    rig.dispatcher.script = script
    rig.dispatcher.hangs = True
    response = await post(rig, n=2, seed=0)
    assert response.status_code == 500
    assert rig.dispatcher.streams[0].cancelled.is_set()


@pytest.mark.parametrize("n", [1, 2])
async def test_a_stream_that_just_ends_is_an_error(rig: RouterRig, n: int) -> None:
    rig.dispatcher.script = lambda request: [SequenceUpdate(1, [5])]
    response = await post(rig, n=n)
    assert response.status_code == 500
    assert response.json()["error"]["code"] == "internal_error"


async def test_a_fault_of_ours_is_reported_without_its_cause(rig: RouterRig) -> None:
    def script(request: Any) -> list[SequenceUpdate]:
        return [SequenceUpdate(1, [5]), SequenceUpdate(1, ["no token id"])]  # type: ignore[list-item]

    rig.dispatcher.script = script
    whole, streamed = await post(rig), await post(rig, stream=True)
    assert whole.status_code == 500
    for response in (whole, streamed):
        assert "internal_error" in response.text
        assert "not a token id" not in response.text


async def test_no_gang_has_ever_connected(rig: RouterRig) -> None:
    rig.dispatcher.is_connected = False
    response = await post(rig)
    assert response.status_code == 503
    assert response.headers["retry-after"] == "1"


async def test_requests_wait_for_the_successor_of_a_gang(rig: RouterRig) -> None:
    assert (await post(rig)).status_code == 200
    rig.dispatcher.is_connected = False
    assert (await post(rig)).status_code == 200  # the dispatcher lets it wait


async def test_too_many_biases_are_refused_with_how_many_are_accepted(rig: RouterRig) -> None:
    accepted = await post(rig, logit_bias={str(i): 1 for i in range(320)})
    refused = await post(rig, logit_bias={str(i): 1 for i in range(1025)})
    assert accepted.status_code == 200
    assert refused.status_code == 400
    assert "1024" in refused.json()["error"]["message"]


@pytest.mark.parametrize("field", ["tools", "unknown"])
async def test_json_that_is_nested_too_deeply(rig: RouterRig, field: str) -> None:
    deep = "[" * 100_000 + "]" * 100_000
    body = f'{{"model": "{BASE}", "prompt": "hello", "{field}": {deep}}}'
    async with rig.client() as client:
        response = await client.post("/v1/completions", content=body)
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "invalid_json"


async def test_too_many_prompts_are_refused_before_they_are_encoded(
    rig: RouterRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def encode_all(*args: Any, **options: Any) -> Any:
        raise AssertionError("a prompt was encoded")

    monkeypatch.setattr(rig.text, "encode_all", encode_all)
    for fields in ({"prompt": ["hello"] * 129}, {"prompt": ["hello"] * 65, "n": 2}, {"prompt": [[1]] * 129}):
        response = await post(rig, **fields)
        assert response.status_code == 400
        assert "at most 128" in response.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_a_text_that_cannot_fit_is_refused_before_it_is_encoded(
    rig: RouterRig, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    async def encode_all(*args: Any, **options: Any) -> Any:
        raise AssertionError("a prompt was encoded")

    monkeypatch.setattr(rig.text, "encode_all", encode_all)
    prompt = "the quick " * 10_000
    response = await post(rig, path, prompt=prompt, messages=[{"role": "user", "content": prompt}])
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (400, "context_length_exceeded")
    at_least = int(error["message"].split("at least ")[1].split()[0])
    assert CONTEXT < at_least <= len(rig.ids(prompt)) + 20


async def test_token_ids_that_cannot_fit_are_not_looked_at(rig: RouterRig) -> None:
    for prompt in ([999_999] * (CONTEXT + 1), [[1], [999_999] * (CONTEXT + 1)]):
        response = await post(rig, prompt=prompt)
        assert response.json()["error"]["code"] == "context_length_exceeded"
