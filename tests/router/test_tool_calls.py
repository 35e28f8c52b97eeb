"""Chats whose answers think and call tools, through the routes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic_core import from_json

from motet.router.openai import generation_response
from motet.router.text.text import TextService
from motet.tests.rigs.grammar_matcher import accepts
from motet.tests.rigs.openai_client import openai_client
from motet.tests.rigs.router_rig import BASE, RouterRig, chunks_of, events_of, text_service
from motet.workers.wire.messages import ThinkingBudget, TokenRules

TEMPLATE = (
    "{% for t in tools or [] %}{{ t.function.name }} {% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}{# <tool_call> <think> #}"
)
ASK = [{"role": "user", "content": "hello"}]
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in ("f", "g")]
THOUGHT, CONTENT = "the fox", "So, 猫:"
CALLS = [("f", '{"n": 3}'), ("g", "{}")]
CALLING = "".join(f'<tool_call>{{"name": "{name}", "arguments": {given}}}</tool_call>' for name, given in CALLS)
CALLING_F = '<tool_call>\n{"name": "f", "arguments": {"n": 3}}\n</tool_call>'
ANSWER = f"<think>{THOUGHT}</think>\n\n{CONTENT}\n{CALLING}"


@pytest.fixture(scope="module")
def text() -> TextService:
    return text_service(TEMPLATE)


@pytest.fixture
def rig(tmp_path: Path, text: TextService) -> RouterRig:
    rig = RouterRig(tmp_path / "spool", text)
    rig.dispatcher.context = 4096
    rig.dispatcher.answer = rig.ids(ANSWER)
    return rig


async def post(rig: RouterRig, **fields: Any) -> Any:
    headers = fields.pop("headers", {})
    async with rig.client() as client:
        body = {"model": BASE, "messages": ASK, **fields}
        return await client.post("/v1/chat/completions", json=body, headers=headers)


async def choice_of(rig: RouterRig, **fields: Any) -> Any:
    response = await post(rig, **fields)
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]


async def grammar_of(rig: RouterRig, **fields: Any) -> str:
    """The grammar that the engine gets for such a request."""
    response = await post(rig, **fields)
    assert response.status_code == 200, response.text
    return rig.dispatcher.submitted[-1].sampling.grammar


def bad_schema(choice: str) -> dict[str, Any]:
    schema = {"type": "object", "properties": {"n": {"type": "array", "uniqueItems": True}}}
    return {"type": "function", "function": {"name": "f", "parameters": schema, "strict": choice == "auto"}}


def joined(chunks: list[Any], index: int = 0) -> Any:
    """The choice that a stream's chunks make, as clients join them."""
    message: dict[str, Any] = {"role": None, "content": None, "refusal": None}
    reason = None
    for chunk in chunks:
        for choice in chunk["choices"]:
            if choice["index"] != index:
                continue
            delta = choice["delta"]
            message["role"] = delta.get("role", message["role"])
            for part in ("content", "reasoning", "reasoning_content"):
                if delta.get(part):
                    message[part] = (message.get(part) or "") + delta[part]
            for call in delta.get("tool_calls", []):
                calls = message.setdefault("tool_calls", [])
                if "id" in call:
                    assert call["index"] == len(calls)
                    calls.append({key: value for key, value in call.items() if key != "index"})
                else:
                    assert call.keys() == {"index", "function"} and call["function"].keys() == {"arguments"}
                    calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
            if "function_call" in delta:
                before = message.setdefault("function_call", {"arguments": ""})
                arguments = before["arguments"] + delta["function_call"]["arguments"]
                message["function_call"] = {**before, **delta["function_call"], "arguments": arguments}
            reason = choice["finish_reason"] or reason
    return message, reason


async def test_a_whole_answer_has_thoughts_content_and_calls(rig: RouterRig) -> None:
    response = (await post(rig, tools=TOOLS)).json()
    choice = response["choices"][0]
    message = choice["message"]
    assert choice["finish_reason"] == "tool_calls"
    assert message["content"] == CONTENT
    assert message["reasoning"] == message["reasoning_content"] == THOUGHT
    assert [(call["function"]["name"], call["function"]["arguments"]) for call in message["tool_calls"]] == CALLS
    ids = [call["id"] for call in message["tool_calls"]]
    assert len({*ids}) == 2 and all(call_id.startswith("call_") for call_id in ids)
    assert {call["type"] for call in message["tool_calls"]} == {"function"}
    details = response["usage"]["completion_tokens_details"]
    assert details == {"reasoning_tokens": 1 + len(rig.ids(f"{THOUGHT}</think>"))}, "from the mark's last token on"


async def test_the_deltas_of_a_stream_make_the_whole_message(rig: RouterRig) -> None:
    whole = await choice_of(rig, tools=TOOLS, seed=1)
    chunks = chunks_of(await post(rig, tools=TOOLS, seed=1, stream=True, stream_options={"include_usage": True}))
    message, reason = joined(chunks)
    assert reason == whole["finish_reason"]
    for one in (message, whole["message"]):
        for number, call in enumerate(one["tool_calls"]):
            assert call.pop("id").startswith("call_"), number
    assert message == whole["message"]
    assert chunks[-1]["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0


async def test_a_stream_that_is_resumed_anywhere_goes_on_as_it_was(rig: RouterRig) -> None:
    events = events_of((await post(rig, tools=TOOLS, stream=True)).content)
    expected = joined([event.chunk for event in events[:-1]])
    assert len(expected[0]["tool_calls"]) == 2
    for number, event in enumerate(events[:-1]):
        resumed = await post(rig, tools=TOOLS, stream=True, headers={"Last-Event-ID": event.id})
        assert resumed.status_code == 200
        again = [one.chunk for one in events_of(resumed.content)[:-1]]
        assert joined([*(one.chunk for one in events[: number + 1]), *again]) == expected


async def test_another_reading_resumes_no_stream(rig: RouterRig) -> None:
    events = events_of((await post(rig, tools=TOOLS, stream=True)).content)
    headers = {"Last-Event-ID": events[3].id}
    refused = await post(rig, tools=TOOLS, stream=True, headers=headers, include_reasoning=False)
    assert refused.status_code == 400


@pytest.mark.parametrize("num_tokens", range(1, 120, 7))
async def test_a_cut_answer_ends_with_length_however_it_is_requested(rig: RouterRig, num_tokens: int) -> None:
    """The last call has what came of its arguments."""
    whole = await choice_of(rig, tools=TOOLS, max_tokens=num_tokens)
    assert whole["finish_reason"] == "length"
    calls = [(one["function"]["name"], one["function"]["arguments"]) for one in whole["message"].get("tool_calls", [])]
    for call, expected in zip(calls, CALLS, strict=False):
        assert call == expected or (call is calls[-1] and call[0] == expected[0] and expected[1].startswith(call[1]))
    message, reason = joined(chunks_of(await post(rig, tools=TOOLS, max_tokens=num_tokens, stream=True)))
    assert reason == "length"
    assert (message["content"] or "") == (whole["message"]["content"] or "")
    streamed = [one["function"] for one in message.get("tool_calls", [])]
    assert streamed == [{"name": name, "arguments": arguments} for name, arguments in calls]
    tools: list[Any] = [{"type": "function", "name": name, "parameters": SCHEMA} for name in ("f", "g")]
    async with rig.client() as client:
        requested: dict[str, Any] = {"model": BASE, "input": "hello", "tools": tools, "max_output_tokens": num_tokens}
        response = (await client.post("/v1/responses", json=requested)).json()
        requested = {"model": BASE, "messages": ASK, "max_tokens": num_tokens}
        tools = [{"name": one["name"], "input_schema": SCHEMA} for one in tools]
        answer = (await client.post("/v1/messages", json={**requested, "tools": tools})).json()
    assert response["status"] == "incomplete"
    assert [(one["name"], one["arguments"]) for one in response["output"] if one["type"] == "function_call"] == calls
    assert answer["stop_reason"] == "max_tokens"
    used = [(one["name"], one["input"]) for one in answer["content"] if one["type"] == "tool_use"]
    assert used == [(name, from_json(arguments or "{}", allow_partial=True)) for name, arguments in calls]


async def test_without_tools_or_with_none_chosen_a_call_is_text(rig: RouterRig) -> None:
    for fields in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        choice = await choice_of(rig, **fields)
        assert choice["finish_reason"] == "stop"
        assert choice["message"]["content"] == f"{CONTENT}\n{CALLING}"
        assert choice["message"]["reasoning"] == THOUGHT


async def test_thoughts_are_left_out_on_request(rig: RouterRig) -> None:
    message = (await choice_of(rig, tools=TOOLS, include_reasoning=False))["message"]
    assert "reasoning" not in message and message["content"] == CONTENT
    chunks = chunks_of(await post(rig, tools=TOOLS, include_reasoning=False, stream=True))
    assert THOUGHT not in json.dumps(chunks)
    assert all(choice["delta"] or choice["finish_reason"] for chunk in chunks for choice in chunk["choices"])


async def test_no_more_than_one_call_on_request(rig: RouterRig) -> None:
    message = (await choice_of(rig, tools=TOOLS, parallel_tool_calls=False))["message"]
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["f"]


async def test_content_is_null_beside_calls(rig: RouterRig) -> None:
    rig.dispatcher.answer = rig.ids(CALLING)
    assert (await choice_of(rig, tools=TOOLS))["message"]["content"] is None


async def test_functions_of_old_are_answered_as_such(rig: RouterRig) -> None:
    functions = [tool["function"] for tool in TOOLS]
    choice = await choice_of(rig, functions=functions)
    assert choice["finish_reason"] == "function_call"
    assert choice["message"]["function_call"] == {"name": "f", "arguments": '{"n": 3}'}
    assert "tool_calls" not in choice["message"]
    message, reason = joined(chunks_of(await post(rig, functions=functions, stream=True)))
    assert reason == "function_call" and message["function_call"] == choice["message"]["function_call"]


async def test_only_allowed_tools_are_called(rig: RouterRig) -> None:
    allowed = {"mode": "auto", "tools": [{"type": "function", "function": {"name": "g"}}]}
    choice = await choice_of(rig, tools=TOOLS, tool_choice={"type": "allowed_tools", "allowed_tools": allowed})
    assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["g"]
    assert '"name": "f"' in choice["message"]["content"]


async def test_log_probabilities_are_of_all_tokens(rig: RouterRig) -> None:
    whole = await choice_of(rig, tools=TOOLS, logprobs=True)
    assert b"".join(bytes(token["bytes"]) for token in whole["logprobs"]["content"]).decode() == ANSWER
    chunks = chunks_of(await post(rig, tools=TOOLS, logprobs=True, stream=True))
    logprobs = [choice["logprobs"] or {"content": []} for chunk in chunks for choice in chunk["choices"]]
    assert [token for one in logprobs for token in one["content"]] == whole["logprobs"]["content"]


async def test_every_choice_has_calls_of_its_own(rig: RouterRig) -> None:
    response = (await post(rig, tools=TOOLS, n=3)).json()
    ids = [call["id"] for choice in response["choices"] for call in choice["message"]["tool_calls"]]
    assert len({*ids}) == 6


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "h"}}}, "tool_choice"),
        ({"functions": [TOOLS[0]["function"]], "function_call": {"name": "h"}}, "function_call"),
        ({"tools": TOOLS, "tool_choice": "required", "use_beam_search": True}, "tool_choice"),
        ({"tools": [bad_schema("required")], "tool_choice": "required"}, "tools"),
        ({"tools": [bad_schema("auto")]}, "tools"),
        (
            {
                "tools": TOOLS,
                "tool_choice": {
                    "type": "allowed_tools",
                    "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": "other"}}]},
                },
            },
            "tool_choice",
        ),
    ],
)
async def test_a_wrong_choice_is_named(rig: RouterRig, fields: dict[str, Any], param: str) -> None:
    response = await post(rig, **fields)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


FORCED: list[dict[str, Any]] = [
    {"tool_choice": "required"},
    {"tool_choice": {"type": "function", "function": {"name": "f"}}},
    {"functions": [TOOLS[0]["function"]], "tools": None, "function_call": {"name": "f"}},
]


@pytest.mark.parametrize("fields", FORCED)
async def test_a_forced_call_has_a_grammar(rig: RouterRig, fields: dict[str, Any]) -> None:
    grammar = await grammar_of(rig, **{"tools": TOOLS, **fields})
    assert accepts(grammar, CALLING_F)
    assert accepts(grammar, f"<think>hm</think>\n\n{CALLING_F}")
    assert not accepts(grammar, "text")
    assert not accepts(grammar, CALLING_F.replace("3", "true"))
    assert accepts(grammar, f"{CALLING_F}\n{CALLING_F}") == (fields == FORCED[0])


async def test_free_text_needs_no_grammar(rig: RouterRig) -> None:
    assert await grammar_of(rig, tools=TOOLS) == ""
    assert await grammar_of(rig, tools=TOOLS, tool_choice="none") == ""


async def test_calls_of_strict_tools_fit_their_schema_wherever_they_stand(rig: RouterRig) -> None:
    strict = {"type": "function", "function": {"name": "f", "parameters": SCHEMA, "strict": True}}
    grammar = await grammar_of(rig, tools=[strict, TOOLS[1]])
    for text in ("", "text", f"So: {CALLING_F}", f"{CALLING_F}\n{CALLING_F} and so on"):
        assert accepts(grammar, text)
    wrong = CALLING_F.replace("3", "true")
    assert not accepts(grammar, f"So: {wrong}")
    assert accepts(grammar, wrong.replace('"f"', '"g"')), "which is not strict"


async def test_an_answer_of_a_form_may_be_a_call_where_there_are_tools(rig: RouterRig) -> None:
    grammar = await grammar_of(rig, tools=TOOLS, response_format={"type": "json_object"})
    assert accepts(grammar, '{"a": 1}') and accepts(grammar, CALLING_F) and not accepts(grammar, "text")
    grammar = await grammar_of(rig, tools=TOOLS, tool_choice="none", response_format={"type": "json_object"})
    assert accepts(grammar, "<think>hm</think>{}") and not accepts(grammar, CALLING_F)


async def test_a_form_begins_behind_a_thought_that_the_prompt_began(rig: RouterRig) -> None:
    begun = [*ASK, {"role": "assistant", "content": "<think>well"}]
    fields = {"messages": begun, "continue_final_message": True, "response_format": {"type": "json_object"}}
    grammar = await grammar_of(rig, **fields)
    assert accepts(grammar, "{</think>\n{}") and not accepts(grammar, "{}")


async def test_answers_of_gpt_oss_are_held_to_their_channels(tmp_path: Path) -> None:
    template = TEMPLATE + "{# <|channel|>analysis<|message|> #}"
    rig = RouterRig(tmp_path / "spool", TextService(text_service(template)._templated))
    rig.dispatcher.context = 4096
    rig.dispatcher.answer = rig.ids("<|channel|>final<|message|>hi")
    thought: list[Any] = ["<|channel|>analysis<|message|>hm", *rig.ids("<|end|>"), *rig.ids("<|start|>"), "assistant"]
    call = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"n": 3}'
    final = "<|channel|>final<|message|>"
    form = {"response_format": {"type": "json_object"}}
    grammar = await grammar_of(rig, tools=TOOLS, tool_choice="required")
    assert accepts(grammar, call) and accepts(grammar, *thought, call)
    assert not any(accepts(grammar, text) for text in (f"{final}hi", call * 2, call.replace("3", "true")))
    assert not accepts(grammar, *thought)
    grammar = await grammar_of(rig, tools=TOOLS, **form)
    assert accepts(grammar, call) and accepts(grammar, *thought, f"{final}{{}}") and not accepts(grammar, f"{final}hi")
    grammar = await grammar_of(rig, **form)
    assert accepts(grammar, *thought, f"{final}{{}}") and not accepts(grammar, "{}") and not accepts(grammar, call)
    strict = {"type": "function", "function": {"name": "f", "parameters": SCHEMA, "strict": True}}
    grammar = await grammar_of(rig, tools=[strict])
    assert accepts(grammar, call) and accepts(grammar, *thought, f"{final}hi")
    assert not accepts(grammar, call.replace("3", "true"))


async def test_tools_are_refused_where_the_form_of_calls_is_not_known(tmp_path: Path) -> None:
    plain = RouterRig(tmp_path / "spool", text_service())
    response = await post(plain, tools=TOOLS)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "tools"
    plain.dispatcher.answer = plain.ids("hi")
    assert (await choice_of(plain, tools=TOOLS, tool_choice="none"))["message"]["content"] == "hi"


async def test_a_stream_whose_tokens_show_nothing_yet_is_kept_alive(
    rig: RouterRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generation_response, "HEADERS_AFTER_S", 0.001)
    monkeypatch.setattr(generation_response, "HEARTBEAT_S", 0.001)
    rig.dispatcher.answer = rig.ids('<tool_call>{"name": "f", "arguments": {}' + " " * 3000)
    body = (await post(rig, tools=TOOLS, stream=True)).content
    assert body.count(b": waiting\n") >= 2


async def test_the_client_of_openai_reads_it(rig: RouterRig) -> None:
    request: Any = {"model": BASE, "messages": ASK, "tools": TOOLS}
    async with openai_client(rig) as client:
        messages: list[Any] = [(await client.chat.completions.create(**request)).choices[0].message]
        async with client.chat.completions.stream(**request) as stream:
            async for _ in stream:
                pass
            messages.append((await stream.get_final_completion()).choices[0].message)
    for message in messages:
        assert [(one.function.name, one.function.arguments) for one in message.tool_calls] == CALLS
        assert (message.content, message.reasoning_content) == (CONTENT, THOUGHT)


@pytest.fixture
def thinking(tmp_path: Path) -> RouterRig:
    """Of a model whose marks of thoughts are tokens."""
    tokenizer = text_service(TEMPLATE)._templated
    tokenizer.add_tokens(["<think>", "</think>"])
    rig = RouterRig(tmp_path / "thinking", TextService(tokenizer))
    rig.dispatcher.context = 4096
    rig.dispatcher.answer = rig.ids(ANSWER)
    return rig


async def test_a_budget_of_thinking_tokens_reaches_the_engine(thinking: RouterRig) -> None:
    begin, end = thinking.ids("<think>"), thinking.ids("</think>")
    assert len(begin) == len(end) == 1

    async def budget_of(**fields: Any) -> ThinkingBudget | None:
        assert (await post(thinking, **fields)).status_code == 200
        rules = thinking.dispatcher.submitted[-1].sampling.rules
        return None if rules is None else rules.thinking

    budget = ThinkingBudget(5, (*begin,), (*end,))
    assert await budget_of(thinking_token_budget=5) == budget
    assert await budget_of(thinking_token_budget=5, tools=TOOLS, tool_choice="required", n=2) == budget
    assert await budget_of(thinking_token_budget=5, tool_choice="none", min_tokens=2) == budget
    assert await budget_of(thinking_token_budget=-1) is await budget_of() is None
    begun = {"messages": [*ASK, {"role": "assistant", "content": "<think>well"}], "continue_final_message": True}
    assert await budget_of(thinking_token_budget=0, **begun) == ThinkingBudget(0, (*begin,), (*end,), has_begun=True)
    async with thinking.client() as client:
        message = {"model": BASE, "messages": ASK, "max_tokens": 9, "thinking": {"type": "enabled", "budget_tokens": 5}}
        assert (await client.post("/v1/messages", json=message)).status_code == 200
        assert thinking.dispatcher.submitted[-1].sampling.rules == TokenRules(thinking=budget)
        response = {"model": BASE, "input": "hello", "thinking_token_budget": 5}
        assert (await client.post("/v1/responses", json=response)).status_code == 200
        assert thinking.dispatcher.submitted[-1].sampling.rules == TokenRules(thinking=budget)


async def test_a_budget_is_left_out_where_tokens_do_not_show_thoughts(rig: RouterRig, thinking: RouterRig) -> None:
    answer = await post(rig, thinking_token_budget=5)  # of marks that may be written in other tokens
    assert answer.headers["x-motet-warning"] == "ignored fields: thinking_token_budget"
    assert await refused_budget(thinking, use_beam_search=True) == "thinking_token_budget"
    async with thinking.client() as client:
        body = {"model": BASE, "prompt": "hello", "thinking_token_budget": 5}
        answer = await client.post("/v1/completions", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "thinking_token_budget")


async def refused_budget(rig: RouterRig, **fields: Any) -> str:
    answer = await post(rig, thinking_token_budget=5, **fields)
    assert answer.status_code == 400, answer.text
    return str(answer.json()["error"]["param"])


async def test_an_adapter_may_write_in_a_form_of_its_own(rig: RouterRig) -> None:
    """The base's chat template is of Hermes."""
    rig.registry.add("acme", "tuned", response_template="mistral-args")
    rig.registry.add("acme", "plain")
    rig.dispatcher.answer = rig.ids('[TOOL_CALLS]f[ARGS]{"n": 3}')
    choice = await choice_of(rig, model="tuned", tools=TOOLS)
    (call,) = choice["message"]["tool_calls"]
    assert (call["function"], len(call["id"])) == ({"name": "f", "arguments": '{"n": 3}'}, 9)
    assert "tool_calls" not in (await choice_of(rig, model="plain", tools=TOOLS))["message"]
    grammar = await grammar_of(rig, model="tuned", tools=TOOLS, tool_choice="required")
    assert accepts(grammar, '[TOOL_CALLS]f[ARGS]{"n": 3}') and not accepts(grammar, CALLING_F)
    rig.dispatcher.answer = rig.ids(ANSWER)
    assert len((await choice_of(rig, model="plain", tools=TOOLS))["message"]["tool_calls"]) == 2
