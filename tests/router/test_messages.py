"""/v1/messages and what counts its tokens, in Anthropic's shape."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import pytest

from motet.router.text.text import TextService
from motet.tests.rigs.router_rig import BASE, CONTEXT, KEYS, RouterRig, failing, posted, text_service
from motet.tests.router.test_responses import CALLS_AS_CHAT, SCHEMA, TOOLS_TEMPLATE
from motet.tests.router.test_tool_calls import ANSWER as THINKING_ANSWER
from motet.tests.router.test_tool_calls import CALLS, CONTENT, THOUGHT
from motet.tests.router.test_tool_calls import TEMPLATE as THINKING_TEMPLATE

ANSWER: Final = "the 猫 fox"
HELLO: Final = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def text() -> TextService:
    return text_service()


@pytest.fixture
def rig(tmp_path: Path, text: TextService) -> RouterRig:
    rig = RouterRig(tmp_path / "spool", text)
    rig.dispatcher.answer = rig.ids(ANSWER)
    return rig


async def post(rig: RouterRig, path: str = "/v1/messages", **fields: Any) -> Any:
    limit = {"max_tokens": 100} if path == "/v1/messages" else {}
    return await posted(rig, path, **{"messages": HELLO, **limit, **fields})


async def streamed(rig: RouterRig, **fields: Any) -> list[Any]:
    response = await post(rig, stream=True, **fields)
    assert response.status_code == 200, response.text
    events = []
    for block in response.text.split("\n\n")[:-1]:
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def gathered(events: list[Any]) -> Any:
    """The message that the events of a stream make, as Anthropic's clients put it together."""
    message: Any = events[0]["message"]
    inputs: dict[int, str] = {}
    for event in events[1:]:
        match event["type"]:
            case "content_block_start":
                assert event["index"] == len(message["content"])
                message["content"].append(event["content_block"])
            case "content_block_delta":
                kind = event["delta"].pop("type")
                ((field, added),) = event["delta"].items()
                if kind == "input_json_delta":
                    inputs[event["index"]] = inputs.get(event["index"], "") + added
                else:
                    message["content"][event["index"]][field] += added
            case "content_block_stop":
                if event["index"] in inputs:
                    message["content"][event["index"]]["input"] = json.loads(inputs[event["index"]])
            case "message_delta":
                message |= event["delta"]
                message["usage"] |= event["usage"]
    return message


def prompt_text(rig: RouterRig) -> str:
    token_ids = rig.dispatcher.submitted[-1].prompt_token_ids
    return str(rig.text._backend.decode(token_ids, skip_special_tokens=False))


async def test_a_whole_message(rig: RouterRig) -> None:
    message = (await post(rig, system="be short")).json()
    assert message.pop("id").startswith("msg_")
    num_prompt_tokens = len(rig.dispatcher.submitted[0].prompt_token_ids)
    assert message == {
        "type": "message",
        "role": "assistant",
        "model": BASE,
        "content": [{"type": "text", "text": ANSWER}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": num_prompt_tokens,
            "output_tokens": len(rig.ids(ANSWER)) + 1,
            "cache_read_input_tokens": 0,
            "cache_creation_input_tokens": 0,
        },
    }
    assert prompt_text(rig) == "<|start|>system: be short<|end|><|start|>user: hello<|end|><|start|>assistant: "


async def test_the_events_in_their_order(rig: RouterRig) -> None:
    events = await streamed(rig)
    kinds = [event["type"] for event in events]
    num_deltas = kinds.count("content_block_delta")
    assert num_deltas > 1
    assert kinds == [
        *("message_start", "ping", "content_block_start"),
        *["content_block_delta"] * num_deltas,
        *("content_block_stop", "message_delta", "message_stop"),
    ]
    assert events[0]["message"]["usage"]["input_tokens"] > 0
    assert (events[0]["message"]["content"], events[0]["message"]["stop_reason"]) == ([], None)


@pytest.mark.parametrize("max_tokens", [100, 5, 3, 1])
async def test_a_stream_makes_the_whole_message(rig: RouterRig, max_tokens: int) -> None:
    whole, streaming = (
        (await post(rig, max_tokens=max_tokens)).json(),
        gathered(await streamed(rig, max_tokens=max_tokens)),
    )
    assert {**streaming, "id": ""} == {**whole, "id": ""}
    assert whole["stop_reason"] == ("end_turn" if max_tokens == 100 else "max_tokens")


async def test_a_stop_sequence_is_named(rig: RouterRig) -> None:
    requested: dict[str, Any] = {"stop_sequences": ["dog", " f"]}
    whole = (await post(rig, **requested)).json()
    assert (whole["stop_reason"], whole["stop_sequence"]) == ("stop_sequence", " f")
    assert whole["content"] == [{"type": "text", "text": ANSWER.partition(" f")[0]}]
    assert {**gathered(await streamed(rig, **requested)), "id": ""} == {**whole, "id": ""}


CONVERSATION: Final = [
    {"role": "user", "content": [{"type": "text", "text": "hello", "cache_control": {"type": "ephemeral"}}]},
    {"role": "assistant", "content": [{"type": "text", "text": "the fox"}]},
    {"role": "user", "content": [{"type": "text", "text": "and"}, {"type": "text", "text": "now"}]},
]
AS_CHAT: Final = [
    {"role": "system", "content": "be short"},
    {"role": "user", "content": "hello"},
    {"role": "assistant", "content": "the fox"},
    {"role": "user", "content": [{"type": "text", "text": "and"}, {"type": "text", "text": "now"}]},
]
SAMPLING: Final[dict[str, Any]] = {"temperature": 0.5, "top_p": 0.9, "top_k": 4, "seed": 7}


async def test_the_same_tokens_as_of_a_chat(rig: RouterRig) -> None:
    system = [{"type": "text", "text": "be short"}]
    await post(rig, messages=CONVERSATION, system=system, max_tokens=9, stop_sequences=["dog"], **SAMPLING)
    await post(rig, "/v1/chat/completions", messages=AS_CHAT, max_tokens=9, stop=["dog"], **SAMPLING)
    message, chat = rig.dispatcher.submitted
    assert message.prompt_token_ids == chat.prompt_token_ids
    assert message.sampling == chat.sampling
    counted = (await post(rig, "/v1/messages/count_tokens", messages=CONVERSATION, system=system)).json()
    assert counted == {"input_tokens": len(chat.prompt_token_ids)}
    assert len(rig.dispatcher.submitted) == 2


PAST_CALLS: Final = [
    {"role": "user", "content": "the weather?"},
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "two calls", "signature": "x"},
            {"type": "text", "text": "wait"},
            {"type": "tool_use", "id": "1", "name": "weather", "input": {"city": "Lima"}},
            {"type": "tool_use", "id": "2", "name": "weather", "input": {"city": "Rome"}},
        ],
    },
    {
        "role": "user",
        "content": [
            {"type": "tool_result", "tool_use_id": "1", "content": "warm"},
            {"type": "tool_result", "tool_use_id": "2", "content": [{"type": "text", "text": "cold"}]},
            {"type": "text", "text": "and now"},
        ],
    },
]


async def test_calls_and_thoughts_are_those_of_a_chat(tmp_path: Path) -> None:
    rig = RouterRig(tmp_path / "spool", text_service(TOOLS_TEMPLATE))
    rig.dispatcher.context = 4096
    tool = {"name": "weather", "description": "of a city", "input_schema": SCHEMA}
    assert (await post(rig, messages=PAST_CALLS, tools=[tool], tool_choice={"type": "none"})).status_code == 200
    function = {"name": "weather", "description": "of a city", "parameters": SCHEMA}
    chat: dict[str, Any] = {"tool_choice": "none", "tools": [{"type": "function", "function": function}]}
    messages = [*CALLS_AS_CHAT[:-1], {"role": "user", "content": "and now"}]
    answer = await post(rig, "/v1/chat/completions", messages=messages, **chat)
    assert answer.status_code == 200
    assert len({tuple(request.prompt_token_ids) for request in rig.dispatcher.submitted}) == 1
    assert "two calls wait 1 weather" in prompt_text(rig)


async def test_unknown_fields_within_a_message_are_named(rig: RouterRig) -> None:
    cached = {"cache_control": {"type": "ephemeral"}}
    call = {"type": "tool_use", "id": "1", "name": "f", "input": {"any": "thing"}, "caller": {"type": "direct"}}
    result = {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "5", "mood": 1}]}
    fields: dict[str, Any] = {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "hello", "colour": "red", **cached}]},
            {"role": "assistant", "content": [{"type": "text", "text": "a", "citations": None}, call]},
            {"role": "user", "content": [{**result, "is_error": True}], "name": "me"},
        ],
        "tools": [{"name": "f", "input_schema": SCHEMA, "defer_loading": True, **cached}],
        "tool_choice": {"type": "none"},
        "metadata": {"user_id": "1", "team": "2"},
        "system": [{"type": "text", "text": "be short", "tone": "dry", **cached}],
    }
    names = (
        "messages[].content[].colour, messages[].content[].caller, messages[].name, messages[].content[].is_error, "
        "messages[].content[].content[].mood, system[].tone, tools[].defer_loading, metadata.team"
    )
    rig.dispatcher.context = 60_000
    for more in ({}, {"stream": True}, {"system": "a " * 20_000}):
        shown = names if more != {"system": "a " * 20_000} else names.replace("system[].tone, ", "")
        answer = await post(rig, **{**fields, **more})
        assert answer.status_code == 200, answer.text
        ignored = answer.headers["x-motet-warning"].removeprefix("ignored fields: ")
        assert ignored.startswith(shown), ignored
    messages = [{"role": "user", "content": [{"type": "text", "text": "a", **cached}]}]
    answer = await post(rig, messages=messages, cache_control=cached["cache_control"])
    assert (answer.status_code, answer.headers.get("x-motet-warning")) == (200, None)


async def test_a_large_body_means_the_same(rig: RouterRig) -> None:
    """It is decoded, and made a chat, in another process."""
    rig.dispatcher.context = 60_000
    long = [{"role": "user", "content": "the quick fox " * 6000}]
    await post(rig, messages=long)
    await post(rig, "/v1/chat/completions", messages=long)
    message, chat = rig.dispatcher.submitted
    assert message.prompt_token_ids == chat.prompt_token_ids
    counted = (await post(rig, "/v1/messages/count_tokens", messages=long)).json()
    assert counted == {"input_tokens": len(chat.prompt_token_ids)}


BAD: Final[list[tuple[dict[str, Any], str]]] = [
    ({"max_tokens": None}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 2 * CONTEXT}, "max_tokens"),
    ({"stop": "dog"}, "stop"),
    ({"n": 2}, "n"),
    ({"user": "someone"}, "user"),
    ({"stop_sequences": ["x" * 1000] * 5}, "stop_sequences"),
    ({"lora_path": "a"}, "lora_path"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "assistant", "content": "hi"}]}, "messages"),  # as the template says
    ({"messages": [{"role": "tool", "content": "hi"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0].type"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
    ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "messages[0].content[0].tool_use_id"),
    ({"messages": [*HELLO, {"role": "assistant", "content": [{"type": "tool_use"}]}]}, "messages[1].content[0].name"),
    ({"system": [{"type": "image"}]}, "system[0].type"),
    ({"tools": [{"name": "f", "type": "bash_20250124"}], "tool_choice": {"type": "any"}}, "tool_choice"),
    ({"tools": [{"name": "f", "type": "bash_20250124"}], "tool_choice": {"type": "tool", "name": "f"}}, "tool_choice"),
    ({"tools": [{"input_schema": {}}]}, "tools[0].name"),
    ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
    ({"tools": [{"name": "not a name", "input_schema": {}}]}, "tools[0].name"),
    ({"output_config": {"effort": "least"}}, "output_config.effort"),
    ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
]


@pytest.mark.parametrize(("fields", "param"), BAD, ids=lambda value: value if isinstance(value, str) else "")
async def test_a_bad_field_is_named(rig: RouterRig, fields: dict[str, Any], param: str) -> None:
    answer = await post(rig, **fields)
    body = answer.json()
    assert (answer.status_code, body["error"]["param"]) == (400, param), body
    assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")
    assert not rig.dispatcher.submitted


@pytest.fixture
def thinker(tmp_path: Path) -> RouterRig:
    """Its answers think, speak, and call."""
    rig = RouterRig(tmp_path / "thinker", text_service(THINKING_TEMPLATE))
    rig.dispatcher.context = 4096
    rig.dispatcher.answer = rig.ids(THINKING_ANSWER)
    return rig


TOOLS: Final = [{"name": name, "input_schema": {"type": "object"}} for name in ("f", "g")]


async def test_thoughts_and_calls_are_blocks(thinker: RouterRig) -> None:
    message = (await post(thinker, tools=TOOLS, max_tokens=500)).json()
    blocks = message["content"]
    assert [block["type"] for block in blocks] == ["thinking", "text", "tool_use", "tool_use"]
    assert (blocks[0]["thinking"], blocks[1]["text"]) == (THOUGHT, CONTENT)
    assert [(block["name"], json.dumps(block["input"])) for block in blocks[2:]] == CALLS
    assert message["stop_reason"] == "tool_use"
    results = [{"type": "tool_result", "tool_use_id": block["id"], "content": "5"} for block in blocks[2:]]
    turns = [*HELLO, {"role": "assistant", "content": blocks}, {"role": "user", "content": results}]
    assert (await post(thinker, messages=turns, tools=TOOLS)).status_code == 200


@pytest.mark.parametrize("max_tokens", [*range(1, 90, 8), 500])
async def test_an_answer_cut_anywhere_is_the_same_in_a_stream(thinker: RouterRig, max_tokens: int) -> None:
    requested: dict[str, Any] = {"tools": TOOLS, "max_tokens": max_tokens}
    messages = (await post(thinker, **requested)).json(), gathered(await streamed(thinker, **requested))
    for message in messages:
        for part in (message, *message["content"]):
            part.pop("id", None)
    assert messages[0] == messages[1]


@pytest.mark.parametrize("arguments", ['{"a": "\\ud800"}', '{"\\udc00": 1}', '"{\\"a\\": \\"\\\\ud800\\"}"'])
async def test_half_of_a_surrogate_pair_in_a_call_is_no_error(thinker: RouterRig, arguments: str) -> None:
    thinker.dispatcher.answer = thinker.ids(f'<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>')
    requested: dict[str, Any] = {"max_tokens": 200, "tools": [{"name": "f", "input_schema": {}}]}
    (block,) = (await post(thinker, **requested)).json()["content"]
    assert "\ufffd" in str(block["input"])
    assert gathered(await streamed(thinker, **requested))["content"][0]["input"] == block["input"]


async def test_errors_have_anthropics_types(rig: RouterRig) -> None:
    unknown = await post(rig, model="unknown")
    assert (unknown.status_code, unknown.json()["error"]["type"]) == (404, "not_found_error")
    rig.dispatcher.script = failing("store_unavailable", "the adapter cannot be read")
    failed = await post(rig)
    assert (failed.status_code, failed.json()["error"]["type"]) == (503, "overloaded_error")
    assert failed.json()["error"]["message"] == "the adapter cannot be read"


async def test_a_failure_ends_a_stream_that_has_begun(rig: RouterRig) -> None:
    rig.dispatcher.script = failing("gang_lost", "its gang is gone", after=rig.ids("the fox"))
    last = (await streamed(rig))[-1]
    assert last["type"] == "error"
    assert (last["error"]["type"], last["error"]["message"]) == ("overloaded_error", "its gang is gone")


async def test_the_key_in_the_header_of_anthropics_clients(rig: RouterRig) -> None:
    body = {"model": BASE, "messages": HELLO, "max_tokens": 5}
    key, other = KEYS
    async with rig.client() as client:
        del client.headers["Authorization"]
        assert (await client.post("/v1/messages", json=body)).json()["error"]["type"] == "authentication_error"
        assert (await client.post("/v1/messages", json=body, headers={"x-api-key": key})).status_code == 200
        assert (await client.post("/v1/messages", json=body, headers={"x-api-key": "unknown"})).status_code == 401
        both = {"x-api-key": key, "Authorization": f"Bearer {other}"}
        assert (await client.post("/v1/messages", json=body, headers=both)).status_code == 200
    assert [request.tenant for request in rig.dispatcher.submitted] == [KEYS[key], KEYS[other]]
