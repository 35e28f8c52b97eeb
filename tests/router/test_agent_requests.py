"""Requests of coding agents: what only another server can do is left out of them, and named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final, Literal

import pytest

from motet.router.grammars.call_grammar import CALL_TEXTS, WantedCalls
from motet.router.grammars.check_process import GrammarTrial
from motet.router.grammars.lark_text import lark_text
from motet.router.grammars.response_format import WantedGrammar
from motet.tests.clients.agent_requests import ASK, FOUND, PLACE, REQUESTS, RULES, AgentRequest, num_answered
from motet.tests.rigs.router_rig import BASE, HEADERS, RouterRig, events_of, posted, text_service
from motet.tests.router.test_responses import EVENT
from motet.tests.router.test_tool_calls import TEMPLATE

# As of models that read one message of the system, at the begin, and users and assistants in turn.
STRICT: Final = (
    "{% for t in tools or [] %}{{ t.function.name + t.function.description + t.function.parameters | tojson }}"
    "{% endfor %}{% set ns = namespace(user=true) %}{% for m in messages %}"
    "{% if m.role == 'system' %}{% if not loop.first %}{{ raise_exception('late') }}{% endif %}"
    "{% elif m.role == 'tool' or m.tool_calls %}"
    "{% elif (m.role == 'user') != ns.user %}{{ raise_exception('not in turn') }}"
    "{% else %}{% set ns.user = not ns.user %}{% endif %}"
    "{% if m.role == 'user' and m.tool_calls is not defined %}{% set ns.user = false %}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>"
    "{{ {'name': c.function.name, 'arguments': c.function.arguments} | tojson }}</tool_call>{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}{# <think> #}"
)
# Some leave it out without a word, others know no such role at all.
SILENT: Final = TEMPLATE.replace(
    "{% for m in messages %}", "{% for m in messages if m.role != 'system' or loop.first %}"
)
WITHOUT: Final = TEMPLATE.replace(
    "{% for m in messages %}",
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}",
)
TEMPLATES: Final = {"any": TEMPLATE, "strict": STRICT, "silent": SILENT, "without": WITHOUT}


@pytest.fixture(scope="module", params=TEMPLATES)
def rig(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> RouterRig:
    rig = RouterRig(tmp_path_factory.mktemp("spool"), text_service(TEMPLATES[request.param]))
    rig.dispatcher.context = 4096
    rig.dispatcher.answer = rig.ids("the fox")
    return rig


def prompt_text(rig: RouterRig) -> str:
    token_ids = rig.dispatcher.submitted[-1].prompt_token_ids
    return str(rig.text._backend.decode(token_ids, skip_special_tokens=False))


async def test_all_of_them_are_answered(rig: RouterRig) -> None:
    async with rig.client() as client:
        assert await num_answered(client, BASE, HEADERS) == len(REQUESTS)


@pytest.mark.parametrize("request_", REQUESTS, ids=lambda one: f"{one.client}, {one.turn}")
async def test_the_model_reads_all_texts(rig: RouterRig, request_: AgentRequest) -> None:
    answer = await posted(rig, request_.path, **request_.body)
    assert answer.status_code == 200, answer.text
    shown = prompt_text(rig)
    sent = json.dumps(request_.body)
    assert [text for text in (ASK, FOUND, PLACE, RULES) if text in sent and text not in shown] == []


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> RouterRig:
    rig = RouterRig(tmp_path_factory.mktemp("plain"), text_service(TEMPLATE))
    rig.dispatcher.context = 4096
    rig.dispatcher.answer = rig.ids("the fox")
    return rig


async def warning(rig: RouterRig, path: str, **fields: Any) -> str:
    answer = await posted(rig, path, **fields)
    assert answer.status_code == 200, answer.text
    return str(answer.headers.get("x-motet-warning", "")).removeprefix("ignored fields: ")


HELLO: Final = [{"role": "user", "content": "hello"}]
LEFT_OUT: Final[list[tuple[str, dict[str, Any], str]]] = [
    ("responses", {"truncation": "auto"}, "truncation"),
    ("responses", {"include": ["everything"]}, "include[0]"),
    ("responses", {"context_management": [{"type": "compaction"}]}, "context_management"),
    ("responses", {"reasoning": {"effort": "low"}}, "reasoning.effort"),  # the template does not know it
    ("responses", {"text": {"verbosity": "low"}}, "text.verbosity"),
    ("responses", {"tools": [{"type": "web_search"}]}, "tools[0]"),
    ("responses", {"input": [{"type": "web_search_call"}, *HELLO]}, "input[0]"),
    ("responses", {"input": [{"type": "reasoning", "encrypted_content": "x"}, *HELLO]}, "input[0]"),
    ("chat/completions", {"messages": HELLO, "reasoning_effort": "low"}, "reasoning_effort"),
    ("chat/completions", {"messages": HELLO, "verbosity": "low"}, "verbosity"),
    ("chat/completions", {"messages": HELLO, "web_search_options": {}}, "web_search_options"),
    ("chat/completions", {"messages": HELLO, "tools": [{"type": "custom", "custom": {"name": "a"}}]}, "tools[0]"),
    (
        "chat/completions",
        {"messages": [*HELLO, {"role": "assistant", "audio": {"id": "a"}}, *HELLO]},
        "messages[1].audio",
    ),
    (
        "chat/completions",
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}, {"role": "assistant"}, *HELLO]},
        "messages[0].content[0]",
    ),
    ("messages", {"messages": HELLO, "output_config": {"effort": "low"}}, "output_config.effort"),
    (
        "messages",
        {"messages": HELLO, "thinking": {"type": "enabled", "budget_tokens": 9}},
        "thinking.budget_tokens",  # its marks may be written in several ways
    ),
    ("messages", {"messages": HELLO, "mcp_servers": [{"name": "a"}]}, "mcp_servers"),
    ("messages", {"messages": HELLO, "tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0]"),
    ("messages", {"messages": HELLO, "container": "a", "stream_options": {}}, "container"),
]


@pytest.mark.parametrize(("path", "fields", "name"), LEFT_OUT)
async def test_what_is_left_out_is_named(plain: RouterRig, path: str, fields: dict[str, Any], name: str) -> None:
    others: dict[str, dict[str, Any]] = {"messages": {"max_tokens": 9}, "responses": {"input": "hello"}}
    found = await warning(plain, f"/v1/{path}", **{**others.get(path, {}), **fields})
    assert name in found.split(", "), found


async def test_operators_may_refuse_what_would_be_left_out(tmp_path: Path) -> None:
    rig = RouterRig(tmp_path / "strict", text_service(TEMPLATE), strict_requests=True)
    answer = await posted(rig, "/v1/responses", input="hello", tools=[{"type": "web_search"}])
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tools[0]")
    answer = await posted(rig, "/v1/chat/completions", messages=HELLO, mood="calm")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "mood")
    assert not rig.dispatcher.submitted


async def test_a_line_stands_where_a_later_item_refers_to_one_that_is_left_out(plain: RouterRig) -> None:
    call = {"type": "local_shell_call", "call_id": "1"}
    output = {"type": "local_shell_call_output", "call_id": "1", "output": "x"}
    cases: list[tuple[list[Any], bool]] = [([call, output], True), ([call], False)]
    for items, is_shown in cases:
        await posted(plain, "/v1/responses", input=[*HELLO, *items, *HELLO])
        assert ("[local_shell_call left out]" in prompt_text(plain)) is is_shown


async def test_a_picture_in_what_is_asked_is_refused_and_one_in_the_history_is_not(plain: RouterRig) -> None:
    picture = {"role": "user", "content": [{"type": "input_image", "image_url": "data:,"}]}
    answer = await posted(plain, "/v1/responses", input=[picture])
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "input[0].content[0].type")
    assert await warning(plain, "/v1/responses", input=[picture, {"role": "assistant", "content": "a"}, *HELLO])
    assert "[input_image left out]" in prompt_text(plain)


async def test_notes_of_the_system_stay_where_the_template_shows_them(plain: RouterRig) -> None:
    messages = [*HELLO, {"role": "system", "content": "Note."}]
    await posted(plain, "/v1/messages", messages=messages, max_tokens=9)
    assert prompt_text(plain).endswith("<|im_start|>system\nNote.<|im_end|>\n<|im_start|>assistant\n")


@pytest.fixture
def caller(tmp_path: Path) -> RouterRig:
    rig = RouterRig(tmp_path / "caller", text_service(TEMPLATE))
    rig.dispatcher.context = 4096
    return rig


GRAMMAR: Final = 'start: "a" LF /[^\\n]+/\n%import common.LF'
PATCH_TOOL: Final = {
    "type": "custom",
    "name": "p",
    "format": {"type": "grammar", "syntax": "lark", "definition": GRAMMAR},
}


async def test_a_custom_tool_is_called_with_a_text(caller: RouterRig) -> None:
    arguments = json.dumps({"input": 'a\n"b"'})
    caller.dispatcher.answer = caller.ids(f'<tool_call>\n{{"name": "p", "arguments": {arguments}}}\n</tool_call>')
    fields: dict[str, Any] = {"input": "hello", "tools": [PATCH_TOOL], "max_output_tokens": 200}
    answer = await posted(caller, "/v1/responses", **fields)
    assert answer.status_code == 200, answer.text
    (item,) = answer.json()["output"]
    assert (item["type"], item["name"], item["input"]) == ("custom_tool_call", "p", 'a\n"b"')
    assert answer.json()["tools"] == [{**PATCH_TOOL, "description": None}]
    assert caller.dispatcher.submitted[-1].sampling.grammar
    streamed = events_of((await posted(caller, "/v1/responses", stream=True, **fields)).content)
    events = [EVENT.validate_json(event.data, strict=True).model_dump() for event in streamed]
    inputs = [event for event in events if event["type"].startswith("response.custom_tool_call_input")]
    assert [event.get("delta", event.get("input")) for event in inputs] == ['a\n"b"'] * 2
    output = {"type": "custom_tool_call_output", "call_id": item["call_id"], "output": "done"}
    again = await posted(caller, "/v1/responses", **{**fields, "input": [*HELLO, item, output]})
    assert again.status_code == 200, again.text


@pytest.mark.parametrize("family", ["hermes", "qwen-xml", "glm", "gemma", "lfm", "mistral", "deepseek-3.1"])
def test_a_custom_tools_input_has_its_grammar(family: str) -> None:
    inputs: list[tuple[Literal["lark", "regex"], str]] = [("lark", GRAMMAR), ("regex", "a\\n[^\\n]+")]
    for form in inputs:
        calls = WantedCalls(CALL_TEXTS[family], [("p", {})], must_call=True, is_one=True, inputs={"p": form})
        lark = lark_text(WantedGrammar("tools", "any", None, calls=calls), {})
        assert GrammarTrial().problem(lark, 300) == ""


BARE: Final = {"type": "function", "function": {"name": "look"}}
LENIENT: Final[list[dict[str, Any]]] = [
    {"tools": [BARE]},
    {"tools": [BARE], "tool_choice": "required"},
    {"top_logprobs": 0, "logprobs": False},
    {"top_logprobs": 0},
    {"verbosity": "high"},
]


@pytest.mark.parametrize("fields", LENIENT)
async def test_what_clients_send_without_need_is_taken(rig: RouterRig, fields: dict[str, Any]) -> None:
    answer = await posted(rig, "/v1/chat/completions", messages=HELLO, max_tokens=9, **fields)
    assert answer.status_code == 200, answer.text


async def test_top_p_of_zero_is_the_likeliest_token_alone(plain: RouterRig) -> None:
    for path, prompt in (("chat/completions", {"messages": HELLO}), ("completions", {"prompt": "hello"})):
        assert (await posted(plain, f"/v1/{path}", **prompt, top_p=0)).status_code == 200
        sampling = plain.dispatcher.submitted[-1].sampling
        assert (sampling.top_k, sampling.top_p) == (1, 1.0)


async def test_messages_that_are_joined_keep_all_their_thoughts(tmp_path: Path) -> None:
    template = STRICT.replace("{{ m.content }}", "{{ m.reasoning_content or '' }} {{ m.content }}")
    rig = RouterRig(tmp_path, text_service(template))
    rig.dispatcher.context = 4096
    turn = [{"role": "user", "content": "hello"}]
    said = [{"role": "assistant", "content": f"says {i}", "reasoning_content": f"thinks {i}"} for i in range(3)]
    answer = await posted(rig, "/v1/chat/completions", messages=[*turn, *said, *turn], max_tokens=1)
    assert answer.status_code == 200, answer.text
    shown = prompt_text(rig)
    assert all(f"{what} {i}" in shown for what in ("says", "thinks") for i in range(3))
