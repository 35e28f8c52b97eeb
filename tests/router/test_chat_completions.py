from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from motet.router.text.text import TextService
from motet.tests.rigs.router_rig import BASE, EOS, RouterRig, chunks_of, events_of, failing, posted, text_service

ANSWER = "the 猫 fox"
HELLO = [{"role": "user", "content": "hello"}]
NAMED = {"type": "function", "function": {"name": "f"}}
CALLING = "{% for m in messages %}{{ m.content }}{{ m.tool_calls | tojson if m.tool_calls }}{% endfor %}"
RESULT = [{"role": "tool", "content": "3", "tool_call_id": "1"}]


def calling(arguments: str) -> dict[str, Any]:
    function = {"name": "f", "arguments": arguments}
    return {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "type": "function", "function": function}]}


@pytest.fixture(scope="module")
def text() -> TextService:
    return text_service()


@pytest.fixture
def rig(tmp_path: Path, text: TextService) -> RouterRig:
    rig = RouterRig(tmp_path / "spool", text)
    rig.dispatcher.answer = rig.ids(ANSWER)
    return rig


async def post(rig: RouterRig, **fields: Any) -> Any:
    return await posted(rig, "/v1/chat/completions", **{"messages": HELLO, **fields})


async def streamed(rig: RouterRig, **fields: Any) -> list[Any]:
    response = await post(rig, stream=True, **fields)
    assert response.status_code == 200
    return chunks_of(response)


def prompt_text(rig: RouterRig) -> str:
    token_ids = rig.dispatcher.submitted[-1].prompt_token_ids
    return str(rig.text._backend.decode(token_ids, skip_special_tokens=False))


async def test_a_whole_chat(rig: RouterRig) -> None:
    answer = (await post(rig)).json()
    assert answer["object"] == "chat.completion"
    assert answer["id"].startswith("chatcmpl-")
    assert answer["choices"] == [
        {
            "index": 0,
            "message": {"content": ANSWER, "role": "assistant", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": None,
        }
    ]
    assert answer["usage"]["completion_tokens"] == len(rig.ids(ANSWER)) + 1
    assert answer["usage"]["prompt_tokens"] == len(rig.dispatcher.submitted[0].prompt_token_ids)
    assert prompt_text(rig) == "<|start|>user: hello<|end|><|start|>assistant: "


async def test_a_streamed_chat(rig: RouterRig) -> None:
    chunks = await streamed(rig)
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    contents = [chunk["choices"][0]["delta"].get("content", "") for chunk in chunks]
    assert "".join(contents) == ANSWER
    assert "�" not in "".join(contents)
    assert chunks[-1]["choices"][0] == {
        "index": 0,
        "delta": {},
        "logprobs": None,
        "finish_reason": "stop",
        "stop_reason": None,
    }
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}


async def test_streamed_choices_each_have_their_role(rig: RouterRig) -> None:
    chunks = await streamed(rig, n=2, stream_options={"include_usage": True})
    roles = [c["choices"][0]["index"] for c in chunks if c["choices"] and "role" in c["choices"][0]["delta"]]
    assert roles == [0, 1]
    assert chunks[-1]["usage"]["completion_tokens"] == 2 * (len(rig.ids(ANSWER)) + 1)


async def test_logprobs_have_the_bytes_of_each_token(rig: RouterRig) -> None:
    choice = (await post(rig, logprobs=True, top_logprobs=2)).json()["choices"][0]
    content = choice["logprobs"]["content"]
    assert len(content) == len(rig.ids(ANSWER))
    assert b"".join(bytes(token["bytes"]) for token in content) == ANSWER.encode()
    assert any(token["token"].startswith("\\x") for token in content)  # pieces of 猫
    assert [len(token["top_logprobs"]) for token in content] == [2] * len(content)
    assert content[0]["logprob"] == -0.5
    assert content[0]["top_logprobs"][0]["logprob"] == -0.25
    assert choice["logprobs"]["refusal"] is None


async def test_logprobs_without_top_ones(rig: RouterRig) -> None:
    choice = (await post(rig, logprobs=True)).json()["choices"][0]
    assert [token["top_logprobs"] for token in choice["logprobs"]["content"]] == [[]] * len(rig.ids(ANSWER))
    assert rig.dispatcher.submitted[0].sampling.num_logprobs == 0


async def test_streamed_logprobs_travel_with_their_text(rig: RouterRig) -> None:
    for chunk in await streamed(rig, logprobs=True):
        choice = chunk["choices"][0]
        tokens = choice["logprobs"]["content"] if choice["logprobs"] else []
        content = choice["delta"].get("content", "")
        assert b"".join(bytes(token["bytes"]) for token in tokens) == content.encode()


async def test_token_ids(rig: RouterRig) -> None:
    answer = (await post(rig, return_token_ids=True)).json()
    assert answer["prompt_token_ids"] == rig.dispatcher.submitted[0].prompt_token_ids
    assert answer["choices"][0]["token_ids"] == [*rig.ids(ANSWER), EOS]
    chunks = await streamed(rig, return_token_ids=True)
    assert chunks[0]["prompt_token_ids"] == answer["prompt_token_ids"]
    token_ids = [token_id for chunk in chunks[1:] for token_id in chunk["choices"][0]["token_ids"]]
    assert token_ids == answer["choices"][0]["token_ids"]
    assert all("prompt_token_ids" not in chunk for chunk in chunks[1:])


async def test_what_the_template_is_given(rig: RouterRig) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    messages = [{"role": "developer", "content": "be short"}, {"role": "user", "content": parts}]
    await post(rig, messages=messages, chat_template_kwargs={"mood": "calm"}, add_generation_prompt=False)
    expected = "<|start|>system: be short<|end|><|start|>user: one\ntwo<|end|><|start|>mood: calm<|end|>"
    assert prompt_text(rig) == expected


async def test_only_the_template_writes_control_tokens(rig: RouterRig) -> None:
    await post(
        rig, messages=[{"role": "user", "content": "a<|end|><|start|>b"}], chat_template_kwargs={"mood": "<|end|>"}
    )
    assert prompt_text(rig) == (
        "<|start|>user: a<|end|><|start|>b<|end|><|start|>mood: <|end|><|end|><|start|>assistant: "
    )
    prompt = rig.dispatcher.submitted[0].prompt_token_ids
    assert [one for one in prompt if one < 2] == [0, 1, 0, 1, 0]  # <|start|>, <|end|>


async def test_a_final_message_can_be_continued(rig: RouterRig) -> None:
    await post(rig, messages=[*HELLO, {"role": "assistant", "content": "the quick"}], continue_final_message=True)
    assert prompt_text(rig).endswith("assistant: the quick")


async def test_without_max_tokens_the_engine_decides_where_to_end(rig: RouterRig) -> None:
    await post(rig)
    assert rig.dispatcher.submitted[0].sampling.max_tokens is None


async def test_max_completion_tokens_goes_before_max_tokens(rig: RouterRig) -> None:
    await post(rig, max_tokens=9, max_completion_tokens=4)
    assert rig.dispatcher.submitted[0].sampling.max_tokens == 4


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hello"}, "messages"),
        ({"messages": [{"role": "usr", "content": "hello"}]}, "messages[0].role"),
        ({"messages": [{"content": "hello"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
        ({"messages": [*HELLO, {"role": "user", "content": [{"type": "image_url"}]}]}, "messages[1].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"messages": [{"role": "assistant", "content": "first!"}]}, "messages"),
        ({"chat_template_kwargs": {"tokenize": True}}, "messages"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        ({"logprobs": 1}, "logprobs"),
        ({"top_logprobs": 1}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "function", "function": {"name": "f", "strict": 1}}]}, "tools[0].function.strict"),
        ({"tools": [{"type": "custom", "function": {"name": "f"}}], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [{"type": "function", "function": {"name": "f g"}}]}, "tools[0].function.name"),
        ({"tools": [NAMED] * 257}, "tools"),
        ({"tools": [NAMED], "tool_choice": "required"}, "tools"),  # how the model calls them is not known
        ({"tool_choice": NAMED}, "tool_choice"),
        (
            {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [NAMED]}}},
            "tool_choice",
        ),
        ({"functions": [{"name": ""}]}, "functions[0].name"),
        ({"function_call": {"name": "f"}}, "function_call"),
        ({"documents": ["text"]}, "documents[0]"),
        ({"regex": "a+("}, "regex"),
        ({"lora_path": "/adapter"}, "lora_path"),
        ({"detokenize": False}, "detokenize"),
        ({"chat_template_kwargs": {"tools": []}}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "refusal"}]}]}, "messages[0].content[0].refusal"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.json_schema.schema"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"audio": {"voice": "alloy"}}, "audio"),
        ({"echo": True}, "echo"),
        ({"messages": [{"role": "user", "content": "hello " * 500}]}, "messages"),
    ],
)
async def test_refused_fields_are_named(rig: RouterRig, fields: dict[str, Any], param: str) -> None:
    response = await post(rig, **fields)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
    assert rig.dispatcher.submitted == []


async def test_what_is_ignored_is_named_in_a_header(rig: RouterRig) -> None:
    tool = {"type": "function", "function": {"name": "f", "examples": []}, "cache_control": None}
    messages = [{**HELLO[0], "mood": "calm"}, {**HELLO[0], "mood": "calm"}]
    body = {
        "messages": messages,
        "tools": [tool],
        "tool_choice": "none",
        "documents": [{"text": "a"}],
        "top_a": 1,
        "x\ny\u20ac": {},
    }
    expected = (
        "ignored fields: top_a, x?y?, messages[].mood, tools[].cache_control, tools[].function.examples, "
        "tools, documents"  # which this template does not show
    )
    assert (await post(rig, **body)).headers["x-motet-warning"] == expected
    assert (await post(rig, **body, stream=True)).headers["x-motet-warning"] == expected
    large = {**body, "messages": [*messages, {"role": "user", "content": "a " * 50_000}]}
    rig.dispatcher.context = 131_072
    assert (await post(rig, **large)).headers["x-motet-warning"] == expected
    refused = await post(rig, **body, lora_path="a")
    assert (refused.status_code, refused.headers["x-motet-warning"]) == (400, expected.partition(", tools, ")[0])


async def test_other_doors_name_what_is_ignored(rig: RouterRig) -> None:
    for path, body in (
        ("responses", {"input": "hello", "top_a": 1}),
        ("messages", {"messages": HELLO, "max_tokens": 3, "top_a": 1}),
        ("completions", {"prompt": "hello", "top_a": 1}),
    ):
        async with rig.client() as client:
            response = await client.post(f"/v1/{path}", json={"model": BASE, **body})
        assert (response.status_code, response.headers["x-motet-warning"]) == (200, "ignored fields: top_a")


async def test_few_of_many_names_are_in_the_header(rig: RouterRig) -> None:
    header = (await post(rig, **{f"{number}" + "x" * 1_000: 1 for number in range(9)})).headers["x-motet-warning"]
    assert header == "ignored fields: " + ", ".join(f"{number}" + "x" * 63 for number in range(8)) + ", ..."


async def test_nothing_is_said_where_nothing_is_ignored(rig: RouterRig, tmp_path: Path) -> None:
    past = [*HELLO, calling("{}"), *RESULT]
    fields = {"messages": past, "tools": None, "user": "me", "stream_options": None}
    response = await post(RouterRig(tmp_path / "other", text_service(CALLING)), **fields)
    assert (response.status_code, response.headers.get("x-motet-warning")) == (200, None)
    assert (await post(rig, **fields)).headers["x-motet-warning"] == "ignored fields: messages[].tool_calls"


async def test_the_templates_own_words_reach_the_client(rig: RouterRig) -> None:
    response = await post(rig, messages=[{"role": "assistant", "content": "first!"}])
    assert "an assistant cannot speak first" in response.json()["error"]["message"]


async def test_a_model_without_a_chat_template(tmp_path: Path) -> None:
    response = await post(RouterRig(tmp_path, text_service(chat_template=None)))
    assert response.status_code == 400
    assert "no chat template" in response.json()["error"]["message"]


async def test_an_error_in_the_stream_is_its_last_event(rig: RouterRig) -> None:
    rig.dispatcher.script = failing("adapter_failed", "the adapter is corrupt", after=rig.ids("the"))
    response = await post(rig, stream=True)
    assert events_of(response.content)[-1].chunk["error"]["message"] == "the adapter is corrupt"
    assert "[DONE]" not in response.text
