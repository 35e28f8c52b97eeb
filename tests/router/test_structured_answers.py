"""Structured output by the demo model and its adapters, through the router: it parses and fits, however it is sent."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from jsonschema import Draft202012Validator

from motet.router.text.answer_format import FORMATS
from motet.router.text.model_tokenizer import load_tokenizer
from motet.router.text.text import TextService
from motet.tests.rigs.engine_dispatcher import EngineDispatcher, client_of
from motet.tests.rigs.engine_rig import EngineRig, Stock
from motet.tests.rigs.router_rig import BASE, Event, events_of

DEMO = Path(__file__).resolve().parents[2] / "examples/demo"
ADAPTERS = {name: DEMO / "adapters" / name for name in ("pirate", "shout")}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "answer": {"type": "string", "maxLength": 12},
        "urgency": {"enum": ["low", "high", None]},
        "numbers": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 3},
        "inner": {"anyOf": [{"type": "boolean"}, {"const": {"a": ["b"]}}]},
    },
    "required": ["answer", "urgency", "numbers", "inner"],
    "additionalProperties": False,
}
NAMED = {"name": "ticket", "strict": True, "schema": SCHEMA}
FORMAT: dict[str, Any] = {"response_format": {"type": "json_schema", "json_schema": NAMED}}
QUESTION = "What is the capital of France?"
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": 400}
CHATS = "/v1/chat/completions"


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Stock:
    return Stock.make(DEMO / "base", ADAPTERS, tmp_path_factory.mktemp("structured") / "store", block_size=16)


@pytest.fixture(scope="module")
def text() -> TextService:
    return TextService.from_folder(DEMO / "base", response_template="hermes")


@pytest.fixture
def engine(stock: Stock) -> Iterator[EngineRig]:
    with stock.engine(num_pages=2000) as rig:
        yield rig


@pytest.fixture
async def client(stock: Stock, engine: EngineRig, text: TextService) -> httpx.AsyncClient:
    return client_of(EngineDispatcher(engine), stock, *ADAPTERS, text=text)


async def posted(client: httpx.AsyncClient, path: str = CHATS, *, event: str = "", **body: Any) -> httpx.Response:
    headers = {"Last-Event-ID": event} if event else {}
    answer = await client.post(path, json={"model": BASE, **body}, headers=headers)
    assert answer.status_code == 200, answer.text
    return answer


def fits(content: str) -> bool:
    return bool(Draft202012Validator(SCHEMA).is_valid(json.loads(content)))


def contents_of(events: list[Event]) -> dict[int, str]:
    contents: dict[int, str] = {}
    for event in events:
        for choice in event.chunk["choices"] if event.data != "[DONE]" else ():
            delta = choice["delta"].get("content") or ""
            contents[choice["index"]] = contents.get(choice["index"], "") + delta
    return contents


async def test_answers_fit_their_schema_with_every_adapter_and_in_streams(client: httpx.AsyncClient) -> None:
    for seed, model in enumerate((BASE, *ADAPTERS)):
        body: dict[str, Any] = {**CHAT, **FORMAT, "model": model, "seed": seed, "n": 2}
        choices = (await posted(client, **body)).json()["choices"]
        contents = [choice["message"]["content"] for choice in choices]
        assert [choice["finish_reason"] for choice in choices] == ["stop"] * 2
        assert all(map(fits, contents))
        assert len({*contents}) > 1
        streamed = events_of((await posted(client, **body, stream=True)).content)
        assert contents_of(streamed) == dict(enumerate(contents))


async def test_a_stream_that_is_resumed_anywhere_goes_on_in_its_schema(client: httpx.AsyncClient) -> None:
    body: dict[str, Any] = {**CHAT, **FORMAT, "seed": 4, "stream": True, "model": "pirate"}
    whole = events_of((await posted(client, **body)).content)
    expected = contents_of(whole)
    assert fits(expected[0])
    for cut in range(1, len(whole) - 1, 20):
        resumed = events_of((await posted(client, **body, event=whole[cut].id)).content)
        assert contents_of([*whole[: cut + 1], *resumed]) == expected


async def test_a_stop_string_ends_an_answer_within_its_schema(client: httpx.AsyncClient) -> None:
    body: dict[str, Any] = {**CHAT, **FORMAT, "seed": 5}
    whole = (await posted(client, **body)).json()["choices"][0]["message"]["content"]
    (choice,) = (await posted(client, **body, stop=['"numb', "no such text"])).json()["choices"]
    assert choice["finish_reason"] == "stop"
    assert choice["message"]["content"] == whole.partition('"numb')[0].rstrip() != whole


async def test_log_probabilities_are_of_the_tokens_that_were_allowed(client: httpx.AsyncClient) -> None:
    (choice,) = (await posted(client, **CHAT, **FORMAT, seed=6, logprobs=True, top_logprobs=2)).json()["choices"]
    shown = choice["logprobs"]["content"]
    assert bytes(byte for each in shown for byte in each["bytes"]).decode() == choice["message"]["content"]
    assert fits(choice["message"]["content"])
    assert all(each["logprob"] <= 0 and len(each["top_logprobs"]) == 2 for each in shown)
    assert any(each["token"] not in [one["token"] for one in each["top_logprobs"]] for each in shown)


async def test_responses_fit_their_schema_whole_and_streamed(client: httpx.AsyncClient) -> None:
    body: dict[str, Any] = {"input": QUESTION, "text": {"format": {"type": "json_schema", **NAMED}}, "temperature": 0}
    answer = (await posted(client, "/v1/responses", **body)).json()
    (message,) = answer["output"]
    content = message["content"][0]["text"]
    assert answer["status"] == "completed"
    assert fits(content)
    streamed = [
        event.chunk for event in events_of((await posted(client, "/v1/responses", **body, stream=True)).content)
    ]
    assert content == "".join(each["delta"] for each in streamed if each["type"] == "response.output_text.delta")


async def test_a_required_call_is_made_of_its_tool_and_fits(client: httpx.AsyncClient) -> None:
    function = {"name": "file", "parameters": SCHEMA}
    body: dict[str, Any] = {
        **CHAT,
        "model": "shout",
        "seed": 7,
        "tool_choice": "required",
        "parallel_tool_calls": False,
    }
    answer = await posted(client, **body, tools=[{"type": "function", "function": function}])
    (choice,) = answer.json()["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert choice["finish_reason"] == "tool_calls"
    assert call["function"]["name"] == "file"
    assert fits(call["function"]["arguments"])
    body = {"input": QUESTION, "tools": [{"type": "function", **function}], "tool_choice": "required"}
    response = await posted(client, "/v1/responses", **body, parallel_tool_calls=False, temperature=0)
    (item,) = response.json()["output"]
    assert (item["type"], item["name"]) == ("function_call", "file")
    assert fits(item["arguments"])


async def test_other_forms_and_completions(client: httpx.AsyncClient) -> None:
    gbnf = 'root ::= "(" root ")" | [a-c]{2,4}'
    forms: list[tuple[dict[str, Any], Callable[[str], Any]]] = [
        ({"regex": "[0-9]{2}-[a-f]+;"}, lambda found: re.fullmatch("[0-9]{2}-[a-f]+;", found)),
        ({"structured_outputs": {"choice": ["yes", "no", "yesterday"]}}, {"yes", "no", "yesterday"}.__contains__),
        (
            {"ebnf": gbnf},
            lambda found: re.fullmatch(r"\(*[a-c]{2,4}\)*", found) and found.count("(") == found.count(")"),
        ),
        (
            {"response_format": {"type": "json_object"}, "temperature": 0},
            lambda found: isinstance(json.loads(found), dict),
        ),
    ]
    for fields, is_one in forms:
        body: dict[str, Any] = {"prompt": ["hello", "good bye"], "max_tokens": 40, "seed": 3, **fields}
        for choice in (await posted(client, "/v1/completions", **body)).json()["choices"]:
            assert choice["finish_reason"] == "length" or is_one(choice["text"]), (fields, choice)


@pytest.fixture(scope="module")
def thinking(tmp_path_factory: pytest.TempPathFactory) -> TextService:
    """The demo's, as if it thought first, between two of its special tokens."""
    file = tmp_path_factory.mktemp("thinking") / "template.json"
    thoughts = {"open": "<|pad|>", "close": "<|endoftext|>"}
    file.write_text(json.dumps({**FORMATS["hermes"], "fields": {**FORMATS["hermes"]["fields"], "reasoning": thoughts}}))
    tokenizer = load_tokenizer(DEMO / "base")
    tokenizer.chat_template += "{% if add_generation_prompt %}<|pad|>{% endif %}"
    return TextService(tokenizer, response_template=str(file))


async def test_thoughts_end_with_their_budget_and_the_answer_fits(
    stock: Stock, engine: EngineRig, thinking: TextService
) -> None:
    """Seeded ones of several choices, streamed and resumed anywhere, too. In a form a character comes to its end."""
    client = client_of(EngineDispatcher(engine), stock, *ADAPTERS, text=thinking)
    for budget, fields in ((0, FORMAT), (9, FORMAT), (9, {"max_tokens": 30})):
        body: dict[str, Any] = {**CHAT, **fields, "thinking_token_budget": budget, "seed": 8, "model": "pirate"}
        answer = (await posted(client, **body, n=2)).json()
        for choice in answer["choices"]:
            assert "max_tokens" in fields or fits(choice["message"]["content"])
            assert budget or "reasoning" not in choice["message"]
        num_thought = answer["usage"]["completion_tokens_details"]["reasoning_tokens"]
        assert num_thought - 2 * (budget + 1) in (range(7) if fields is FORMAT else {0})
    body |= FORMAT | {"max_tokens": 400, "stream": True}
    whole = events_of((await posted(client, **body)).content)
    expected = contents_of(whole)
    assert fits(expected[0])
    for cut in range(1, len(whole) - 1, 9):
        resumed = events_of((await posted(client, **body, event=whole[cut].id)).content)
        assert contents_of([*whole[: cut + 1], *resumed]) == expected
