"""/v1/responses, by the types of OpenAI's own package and by its client."""

from __future__ import annotations

import time
from datetime import date
from pathlib import Path
from typing import Any, Final, cast

import msgspec
import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from motet.adapters.registry.ledger.ledger import entry_of, field_of
from motet.router.bodies.request_decoder import MAX_OBJECTS
from motet.router.grammars.response_format import ResponseFormat
from motet.router.responses.response_chat import response_chat
from motet.router.responses.response_schema import InputItem, ResponseChat, ResponsesRequest
from motet.router.tenancy.metering import Metering
from motet.router.text.text import TextService
from motet.tests.rigs.openai_client import openai_client as sdk
from motet.tests.rigs.router_rig import (
    BASE,
    CONTEXT,
    RouterRig,
    events_of,
    failing,
    posted,
    text_service,
)
from motet.tests.router.test_charged_usage import MemorySpool
from motet.tests.router.test_tool_calls import ANSWER as THINKING_ANSWER
from motet.tests.router.test_tool_calls import CALLS, CONTENT, THOUGHT, TOOLS
from motet.tests.router.test_tool_calls import TEMPLATE as THINKING_TEMPLATE

ANSWER: Final = "the 猫 fox"
EVENT: Final[TypeAdapter[Any]] = TypeAdapter(ResponseStreamEvent)


@pytest.fixture(scope="module")
def text() -> TextService:
    return text_service()


@pytest.fixture
def rig(tmp_path: Path, text: TextService) -> RouterRig:
    rig = RouterRig(tmp_path / "spool", text)
    rig.dispatcher.answer = rig.ids(ANSWER)
    return rig


async def post(rig: RouterRig, path: str = "/v1/responses", **fields: Any) -> Any:
    return await posted(rig, path, **fields)


async def streamed(rig: RouterRig, **fields: Any) -> list[Any]:
    """The events, each as OpenAI's package reads it, strictly."""
    response = await post(rig, stream=True, **fields)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    names = [line.removeprefix("event: ") for line in response.text.split("\n") if line.startswith("event: ")]
    events = [EVENT.validate_json(event.data, strict=True) for event in events_of(response.content)]
    assert [event.type for event in events] == names
    assert [event.sequence_number for event in events] == [*range(len(events))]
    return events


def prompt_text(rig: RouterRig) -> str:
    token_ids = rig.dispatcher.submitted[-1].prompt_token_ids
    return str(rig.text._backend.decode(token_ids, skip_special_tokens=False))


def shown(response: Any) -> dict[str, Any]:
    """What two answers to one request have in common."""
    fields: dict[str, Any] = response.model_dump(exclude={"id", "created_at", "completed_at"})
    for item in fields["output"]:
        del item["id"]
    return fields


async def test_a_whole_response(rig: RouterRig) -> None:
    answer = await post(rig, input="hello", instructions="be short", metadata={"a": "b"})
    response = Response.model_validate_json(answer.content, strict=True)
    assert response.output_text == ANSWER
    assert (response.status, response.object, response.model) == ("completed", "response", BASE)
    assert (response.instructions, response.metadata) == ("be short", {"a": "b"})
    assert answer.json()["store"] is False
    assert response.usage is not None
    assert response.usage.output_tokens == len(rig.ids(ANSWER)) + 1
    assert response.usage.input_tokens == len(rig.dispatcher.submitted[0].prompt_token_ids)
    assert prompt_text(rig) == "<|start|>system: be short<|end|><|start|>user: hello<|end|><|start|>assistant: "


async def test_the_events_in_their_order(rig: RouterRig) -> None:
    events = await streamed(rig, input="hello")
    kinds = [event.type.removeprefix("response.") for event in events]
    num_deltas = kinds.count("output_text.delta")
    assert num_deltas > 1
    assert kinds == [
        *("created", "in_progress", "output_item.added", "content_part.added"),
        *["output_text.delta"] * num_deltas,
        *("output_text.done", "content_part.done", "output_item.done", "completed"),
    ]
    assert events[0].response.output == []
    assert events[0].response.status == events[1].response.status == events[2].item.status == "in_progress"
    deltas = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert deltas == events[-4].text == events[-3].part.text == events[-2].item.content[0].text == ANSWER
    assert {event.item_id for event in events if hasattr(event, "item_id")} == {events[-2].item.id}
    assert events[-1].response.output == [events[-2].item]


@pytest.mark.parametrize("max_tokens", [None, 1, 3, 5])
@pytest.mark.parametrize("fields", [{}, {"include": ["message.output_text.logprobs"], "top_logprobs": 2}])
async def test_the_last_event_has_the_whole_answer(rig: RouterRig, max_tokens: int | None, fields: Any) -> None:
    requested: dict[str, Any] = {"input": "hello", "max_output_tokens": max_tokens, **fields}
    last = (await streamed(rig, **requested))[-1]
    whole = Response.model_validate_json((await post(rig, **requested)).content, strict=True)
    assert shown(last.response) == shown(whole)
    assert last.type == ("response.completed" if max_tokens is None else "response.incomplete")
    if max_tokens is not None:
        assert whole.status == "incomplete"
        assert whole.incomplete_details is not None
        assert whole.incomplete_details.reason == "max_output_tokens"
    if fields:
        logprobs: Any = whole.output[0].content[0].logprobs  # type: ignore[union-attr, index]
        assert b"".join(bytes(token.bytes) for token in logprobs).decode(errors="ignore") == whole.output_text.rstrip(
            "�"
        )
        assert {len(token.top_logprobs) for token in logprobs} == {2}


async def test_an_answer_without_text_has_an_empty_one(rig: RouterRig) -> None:
    rig.dispatcher.answer = []
    assert [item["content"][0]["text"] for item in (await post(rig, input="hello")).json()["output"]] == [""]
    assert shown((await streamed(rig, input="hello"))[-1].response)["output"][0]["content"][0]["text"] == ""


CONVERSATION: Final = [
    {"role": "developer", "content": "be short"},
    {"role": "user", "content": [{"type": "input_text", "text": "hello"}]},
    {
        "type": "message",
        "role": "assistant",
        "id": "msg_1",
        "status": "completed",
        "content": [{"type": "output_text", "text": "the fox", "annotations": []}],
    },
    {"role": "user", "content": [{"type": "input_text", "text": "and"}, {"type": "input_text", "text": "now"}]},
]
AS_CHAT: Final = [
    {"role": "developer", "content": "be short"},
    {"role": "user", "content": "hello"},
    {"role": "assistant", "content": "the fox"},
    {"role": "user", "content": [{"type": "text", "text": "and"}, {"type": "text", "text": "now"}]},
]
SAMPLING: Final[dict[str, Any]] = {
    "temperature": 0.5,
    "top_p": 0.9,
    "seed": 7,
    "top_k": 4,
    "stop": "dog",
    "service_tier": "flex",
}


async def test_the_sampling_that_is_shown_is_that_of_the_draws(rig: RouterRig) -> None:
    rig.dispatcher.sampling_defaults = {"temperature": 0.6, "top_p": 0.8}
    left_open = (await post(rig, input="hello")).json()
    given = (await post(rig, input="hello", temperature=1, top_p=1)).json()
    assert (left_open["temperature"], left_open["top_p"]) == (0.6, 0.8)
    assert (given["temperature"], given["top_p"]) == (1, 1)


async def test_the_same_tokens_as_of_a_chat(rig: RouterRig) -> None:
    await post(rig, input=CONVERSATION, max_output_tokens=9, **SAMPLING)
    await post(rig, "/v1/chat/completions", messages=AS_CHAT, max_completion_tokens=9, **SAMPLING)
    response, chat = rig.dispatcher.submitted
    assert response.prompt_token_ids == chat.prompt_token_ids
    assert response.sampling == chat.sampling
    assert response.is_background and chat.is_background


TOOLS_TEMPLATE: Final = (
    "{% for t in tools or [] %}<|start|>tool {{ t.function | tojson }}<|end|>{% endfor %}"
    "{% for m in messages %}<|start|>{{ m.role }} {{ m.tool_call_id }}: {{ m.reasoning_content }} {{ m.content }}"
    "{% for c in m.tool_calls or [] %} {{ c.id }} {{ c.function.name }} {{ c.function.arguments | tojson }}{% endfor %}"
    "<|end|>{% endfor %}{{ reasoning_effort }}{% if add_generation_prompt %}<|start|>assistant: {% endif %}"
)
SCHEMA: Final = {"type": "object", "properties": {"city": {"type": "string"}}}
PAST_CALLS: Final = [
    {"role": "user", "content": "the weather?"},
    {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "two calls"}]},
    {"role": "assistant", "content": "wait"},
    {"type": "function_call", "id": "fc_1", "call_id": "1", "name": "weather", "arguments": '{"city": "Lima"}'},
    {"type": "function_call", "call_id": "2", "name": "weather", "arguments": '{"city": "Rome"}'},
    {"type": "function_call_output", "call_id": "1", "output": "warm"},
    {"type": "function_call_output", "call_id": "2", "output": [{"type": "input_text", "text": "cold"}]},
    {"type": "function_call", "call_id": "3", "name": "weather", "arguments": "{}"},
]
CALLS_AS_CHAT: Final = [
    {"role": "user", "content": "the weather?"},
    {
        "role": "assistant",
        "content": "wait",
        "reasoning_content": "two calls",
        "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Lima"}'}},
            {"id": "2", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}},
        ],
    },
    {"role": "tool", "tool_call_id": "1", "content": "warm"},
    {"role": "tool", "tool_call_id": "2", "content": "cold"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "3", "type": "function", "function": {"name": "weather", "arguments": "{}"}}],
    },
]


async def test_calls_and_thoughts_are_those_of_a_chat(tmp_path: Path) -> None:
    rig = RouterRig(tmp_path / "spool", text_service(TOOLS_TEMPLATE))
    rig.dispatcher.context = 4096
    function = {"name": "weather", "description": "of a city", "parameters": SCHEMA}
    requested: dict[str, Any] = {"tool_choice": "none", "reasoning": {"effort": "low"}}
    assert (await post(rig, input=PAST_CALLS, tools=[{"type": "function", **function}], **requested)).status_code == 200
    chat: dict[str, Any] = {
        "tool_choice": "none",
        "reasoning_effort": "low",
        "tools": [{"type": "function", "function": function}],
    }
    assert (await post(rig, "/v1/chat/completions", messages=CALLS_AS_CHAT, **chat)).status_code == 200
    assert len({tuple(request.prompt_token_ids) for request in rig.dispatcher.submitted}) == 1
    assert "two calls wait 1 weather" in prompt_text(rig)
    assert '"description": "of a city"' in prompt_text(rig)


async def test_a_large_body_means_the_same(rig: RouterRig) -> None:
    """It is decoded, and made a chat, in another process."""
    rig.dispatcher.context = 60_000
    long = "the quick fox " * 6000
    await post(rig, input=[{"role": "user", "content": long}], instructions="be short")
    messages = [{"role": "system", "content": "be short"}, {"role": "user", "content": long}]
    await post(rig, "/v1/chat/completions", messages=messages)
    response, chat = rig.dispatcher.submitted
    assert response.prompt_token_ids == chat.prompt_token_ids


async def test_a_body_of_many_tiny_items(rig: RouterRig) -> None:
    """They would take far more memory than their bytes."""
    rig.dispatcher.context = 1 << 20
    body = b'{"model": "a", "input": [' + b"{}," * (MAX_OBJECTS + 1) + b"{}]}"
    async with rig.client() as client:
        answer = await client.post("/v1/responses", content=body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "request_too_large")


BAD: Final[list[tuple[dict[str, Any], str]]] = [
    ({"store": True}, "store"),
    ({"background": True}, "background"),
    ({"previous_response_id": "resp_1"}, "previous_response_id"),
    ({"conversation": "conv_1"}, "conversation"),
    ({"prompt": {"id": "pmpt_1"}}, "prompt"),
    ({"n": 2}, "n"),
    ({"max_tokens": 5}, "max_tokens"),
    ({"prompt_logprobs": 1}, "prompt_logprobs"),
    ({"return_token_ids": True}, "return_token_ids"),
    ({"use_beam_search": True}, "use_beam_search"),
    ({"lora_path": "a"}, "lora_path"),
    ({"top_logprobs": 21}, "top_logprobs"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"max_output_tokens": 2 * CONTEXT}, "max_output_tokens"),
    ({"stop_token_ids": [99_999]}, "stop_token_ids[0]"),
    ({"metadata": {str(number): "" for number in range(17)}}, "metadata"),
    ({"reasoning": {"summary": "long"}}, "reasoning.summary"),
    ({"reasoning": {"effort": "most"}}, "reasoning.effort"),
    ({"tools": [{"type": "function", "name": "not a name"}]}, "tools[0].name"),
    ({"text": {"verbosity": "least"}}, "text.verbosity"),
    ({"input": []}, "input"),
    ({"input": "a " * 20 * CONTEXT}, "input"),
    ({"input": [{"role": "assistant", "content": "hi"}]}, "input"),  # as the template says
    ({"input": [{"content": "hi"}]}, "input[0].role"),
    ({"input": [{"role": "user"}]}, "input[0].content"),
    ({"input": [{"role": "absent", "content": "hi"}]}, "input[0].role"),
    ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].type"),
    ({"input": [{"type": "web_search_call"}]}, "input"),  # it is left out
    ({"input": [{"type": "function_call_output", "call_id": "1", "output": {"a": 1}}]}, "input[0].output"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
    ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text"),
    ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input[0].call_id"),
    ({"input": [{"type": "function_call_output", "call_id": "1"}]}, "input[0].output"),
    ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
    ({"tools": [{"type": "custom"}]}, "tools[0].name"),
    ({"tools": [{"type": "custom", "name": "a", "format": {"type": "grammar"}}]}, "tools[0].format.syntax"),
    ({"tool_choice": {"type": "custom", "name": "absent"}}, "tool_choice"),
    ({"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "mcp"}]}}, "tool_choice.tools"),
    ({"tools": [{"type": "function"}]}, "tools[0].name"),
    ({"tool_choice": {"type": "file_search"}}, "tool_choice.type"),
    ({"tool_choice": {"type": "function"}}, "tool_choice.name"),
    ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
    ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
]


@pytest.mark.parametrize(("fields", "param"), BAD, ids=lambda value: value if isinstance(value, str) else "")
async def test_a_bad_field_is_named(rig: RouterRig, fields: dict[str, Any], param: str) -> None:
    answer = await post(rig, **{"input": "hello", **fields})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param), error
    assert "messages" not in error["message"].replace("these messages", "")
    assert not rig.dispatcher.submitted


def test_which_fields_a_chat_gets() -> None:
    requested = {
        "tools": FLAT,
        "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]},
        "text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA, "strict": True}},
        "parallel_tool_calls": False,
    }

    def chat_of(**fields: Any) -> ResponseChat:
        return response_chat(msgspec.convert({"model": "a", "input": "a", **requested, **fields}, ResponsesRequest))

    chat = chat_of()
    assert msgspec.to_builtins(chat.tool_choice) == {
        "type": "allowed_tools",
        "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": "f"}}]},
    }
    schema = {"name": "x", "schema": SCHEMA, "strict": True}
    assert chat.response_format == msgspec.convert({"type": "json_schema", "json_schema": schema}, ResponseFormat)
    assert (chat.parallel_tool_calls, len(chat.tools or ())) == (False, 2)
    named = chat_of(tool_choice={"type": "function", "name": "f"}, text={"format": {"type": "json_object"}})
    assert msgspec.to_builtins(named.tool_choice) == {"type": "function", "function": {"name": "f"}}
    assert named.response_format == ResponseFormat(type="json_object")
    assert chat_of(tool_choice="required").tool_choice == "required"


async def test_what_means_nothing_here_is_taken(rig: RouterRig) -> None:
    neutral: dict[str, Any] = {
        "store": False,
        "background": False,
        "truncation": "disabled",
        "include": ["reasoning.encrypted_content"],
        "stream_options": {"include_obfuscation": False},
        "prompt_cache_key": "k",
        "safety_identifier": "s",
        "parallel_tool_calls": True,
        "max_tool_calls": 3,
        "text": {"format": {"type": "text"}},
        "reasoning": {"summary": "auto"},
        "tools": [],
        "tool_choice": "auto",
        "user": "u",
    }
    response = Response.model_validate_json((await post(rig, input="hello", **neutral)).content, strict=True)
    assert response.output_text == ANSWER
    assert (response.prompt_cache_key, response.safety_identifier, response.user) == ("k", "s", "u")


FLAT: Final[Any] = [{"type": "function", **cast("Any", tool)["function"]} for tool in TOOLS]


@pytest.fixture
def thinker(tmp_path: Path) -> RouterRig:
    """Its answers think, speak, and call."""
    rig = RouterRig(tmp_path / "thinker", text_service(THINKING_TEMPLATE))
    rig.dispatcher.context = 4096
    rig.dispatcher.answer = rig.ids(THINKING_ANSWER)
    return rig


async def test_thoughts_and_calls_are_items(thinker: RouterRig) -> None:
    answer = await post(thinker, input="hello", tools=FLAT)
    response = Response.model_validate_json(answer.content, strict=True)
    thought, message, *calls = response.output
    assert thought.type == "reasoning" and thought.content is not None
    assert thought.content[0].text == THOUGHT
    assert message.type == "message" and response.output_text == CONTENT
    assert [(call.name, call.arguments) for call in calls if call.type == "function_call"] == CALLS
    assert [tool.name for tool in response.tools if tool.type == "function"] == ["f", "g"]
    chat = await post(thinker, "/v1/chat/completions", messages=[{"role": "user", "content": "hello"}], tools=TOOLS)
    assert response.usage is not None
    details = chat.json()["usage"]["completion_tokens_details"]
    assert response.usage.output_tokens_details.reasoning_tokens == details["reasoning_tokens"] > 0
    sent = [{"role": "user", "content": "hello"}, *answer.json()["output"]]
    outputs = [{"type": "function_call_output", "call_id": one["call_id"], "output": "5"} for one in sent[-2:]]
    assert (await post(thinker, input=[*sent, *outputs], tools=FLAT)).status_code == 200


async def test_the_events_of_thoughts_and_calls(thinker: RouterRig) -> None:
    events = await streamed(thinker, input="hello", tools=FLAT)
    kinds = [event.type.removeprefix("response.") for event in events]
    shown = [kind for kind, before in zip(kinds, ["", *kinds], strict=False) if kind != before]
    assert shown == [
        *("created", "in_progress"),
        *("output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.done"),
        *("content_part.done", "output_item.done"),
        *("output_item.added", "content_part.added", "output_text.delta", "output_text.done"),
        *("content_part.done", "output_item.done"),
        *("output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done") * 2,
        "completed",
    ]
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert done == events[-1].response.output
    for index, item in enumerate(done):
        deltas = "".join(event.delta for event in events if hasattr(event, "delta") and event.output_index == index)
        assert deltas == (item.arguments if item.type == "function_call" else item.content[0].text)


@pytest.mark.parametrize("max_tokens", [*range(1, 90, 8), None])
async def test_an_answer_cut_anywhere_is_the_same_in_a_stream(thinker: RouterRig, max_tokens: int | None) -> None:
    requested: dict[str, Any] = {"input": "hello", "tools": FLAT, "max_output_tokens": max_tokens, "top_logprobs": 1}
    last = (await streamed(thinker, **requested))[-1]
    whole = Response.model_validate_json((await post(thinker, **requested)).content, strict=True)
    shown_last, shown_whole = shown(last.response), shown(whole)
    for item in (*shown_last["output"], *shown_whole["output"]):
        item.pop("call_id", None)
    assert shown_last == shown_whole


async def test_the_client_of_openai_calls_tools(thinker: RouterRig) -> None:
    async with sdk(thinker) as client, client.responses.stream(model=BASE, input="hello", tools=FLAT) as stream:
        async for _ in stream:
            pass
        final = await stream.get_final_response()
    assert [(item.name, item.arguments) for item in final.output if item.type == "function_call"] == CALLS


@pytest.mark.parametrize("route", ["/v1/responses", "/v1/messages"])
@pytest.mark.parametrize("stream", [False, True])
async def test_it_is_charged_as_a_chat_is(tmp_path: Path, text: TextService, route: str, stream: bool) -> None:
    spool = MemorySpool()
    rig = RouterRig(tmp_path / "spool", text, accountants=[Metering(spool)])  # type: ignore[arg-type]
    rig.dispatcher.answer = rig.ids(ANSWER)
    hello = [{"role": "user", "content": "hello"}]
    own: dict[str, Any] = {"input": hello} if route == "/v1/responses" else {"messages": hello, "max_tokens": 99}
    answer = await post(rig, route, stream=stream, **own)
    await post(rig, "/v1/chat/completions", messages=hello, stream=stream)
    entry, of_chat = spool.entries
    assert entry.id in answer.text
    other = {"id": "", "began_at": 0}
    assert msgspec.structs.replace(entry, **other) == msgspec.structs.replace(of_chat, **other)
    day = date(2026, 11, 22)
    record = entry_of("acme", day, field_of(entry.id), "2 1 61 1 0 9", "key\tsql\t3\tab12")
    assert record.id == entry.id


@pytest.mark.parametrize("route", ["/v1/responses", "/v1/messages"])
async def test_unknown_fields_are_named_in_a_header(rig: RouterRig, route: str) -> None:
    own = {"input": "hi"} if route == "/v1/responses" else {"messages": [{"role": "user", "content": "hi"}]}
    answer = await post(rig, route, **{"max_tokens": 9} if route == "/v1/messages" else {}, **own, colour="red")
    assert (answer.status_code, answer.headers["x-motet-warning"]) == (200, "ignored fields: colour")


async def test_unknown_fields_within_a_response_are_named(rig: RouterRig) -> None:
    tool = {"type": "function", "name": "f", "parameters": {}, "defer_loading": True}
    own = {"reasoning": {"context": "auto"}, "text": {"format": None, "tone": "dry"}, "truncation": None}
    answer = await post(rig, "/v1/responses", input="hi", tools=[tool], tool_choice="none", **own)
    expected = "ignored fields: tools[].defer_loading, text.tone, reasoning.context, tools"  # no template shows them
    assert (answer.status_code, answer.headers["x-motet-warning"]) == (200, expected)
    known: dict[str, Any] = {"reasoning": None, "text": {}, "tools": None}
    answer = await post(rig, "/v1/responses", input="hi", **known)
    assert (answer.status_code, answer.headers.get("x-motet-warning")) == (200, None)


async def test_its_streams_cannot_be_resumed(rig: RouterRig) -> None:
    async with rig.client() as client:
        answer = await client.post(
            "/v1/responses", json={"model": BASE, "input": "hello", "stream": True}, headers={"Last-Event-ID": "x:1"}
        )
    assert answer.json()["error"]["param"] == "Last-Event-ID"


async def test_a_failure_before_the_first_token_has_its_status(rig: RouterRig) -> None:
    rig.dispatcher.script = failing("store_unavailable", "the adapter cannot be read")
    answer = await post(rig, input="hello", stream=True)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "store_unavailable")


async def test_a_failure_ends_a_stream_that_has_begun(rig: RouterRig) -> None:
    rig.dispatcher.script = failing("gang_lost", "its gang is gone", after=rig.ids("the fox"))
    *_, error, failed = await streamed(rig, input="hello")
    assert (error.type, error.code, error.message) == ("error", "gang_lost", "its gang is gone")
    assert failed.type == "response.failed"
    assert (failed.response.status, failed.response.error.code) == ("failed", "server_error")


def test_many_thoughts_of_one_turn_cost_no_more_than_many_messages() -> None:
    """Joined one by one they would cost thirty times as much."""

    def cost_s(item: InputItem) -> float:
        request, costs = ResponsesRequest(model="a", input=[InputItem(role="user", content="a"), *[item] * 4000]), []
        for _ in range(3):
            began_at = time.process_time()
            response_chat(request)
            costs.append(time.process_time() - began_at)
        return min(costs)

    long = "thought " * 250
    (_, message) = response_chat(
        ResponsesRequest(
            model="a",
            input=[InputItem(role="user", content="a"), *[InputItem("reasoning", content=long)] * 3],
        )
    ).messages
    assert message.reasoning_content == 3 * long
    assert cost_s(InputItem("reasoning", content=long)) < 8 * cost_s(InputItem(role="user", content=long))


async def test_the_client_of_openai(rig: RouterRig) -> None:
    async with sdk(rig) as client:
        response = await client.responses.create(model=BASE, input="hello")
        assert response.output_text == ANSWER
        async with client.responses.stream(model=BASE, input="hello") as stream:
            seen = [event async for event in stream]
            final = await stream.get_final_response()
        assert final.output_text == ANSWER
        assert seen[-1].type == "response.completed"
        following: Any = [{"role": "user", "content": "hello"}, *final.output, {"role": "user", "content": "and now"}]
        await client.responses.create(model=BASE, input=following)
        expected = f"user: hello<|end|><|start|>assistant: {ANSWER}<|end|><|start|>user: and now<|end|>"
        assert expected in prompt_text(rig)
        with pytest.raises(openai.BadRequestError) as refused:
            await client.responses.create(model=BASE, input="hello", store=True)
        assert refused.value.param == "store"
