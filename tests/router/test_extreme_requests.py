"""No request gets a 500: each field with the values that are furthest out, through a real engine."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator
from pathlib import Path

import httpx
import msgspec
import numpy as np
import pytest

from motet.adapters.format.score_head import ScoreHead
from motet.router.anthropic.message_chat import CountTokensRequest, MessagesRequest
from motet.router.bodies.request_decoder import refused_fields
from motet.router.classification import ClassifyRequest, RerankRequest, ScoreRequest
from motet.router.embeddings import EmbeddingsRequest
from motet.router.openai.request_schema import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerationFields,
    TokenizeRequest,
)
from motet.router.responses.response_schema import ResponsesRequest
from motet.router.uploads.lora_adapters_api import LoadBody, UnloadBody
from motet.tests.rigs.engine_dispatcher import EngineDispatcher, client_of
from motet.tests.rigs.engine_rig import EngineRig, Stock
from motet.tests.rigs.oracle import write_model
from motet.tests.rigs.patience import PATIENCE_S
from motet.tests.rigs.router_rig import BASE, RouterRig, failing, text_service

NUMBERS = (
    *("0", "-0.0", "1", "-1", "0.001", "1e-38", "1e-45", "1e-300", "5e-324", "-5e-324", "2", "100", "1e308", "1e309"),
    *("NaN", "Infinity", "1" + "0" * 400, "0." + "0" * 400 + "1", "129", "2147483648", "9223372036854775807"),
    *("-9223372036854775809", "1.5", "1e2", "01", "+1"),
)
TEXTS = ('""', '"\\u0000"', '"\\ud800"', '"\\udfff\\ud800"', '"😀"', '"\u202e\u200d"', '"a', '"' + "x" * 2000 + '"')
OTHERS = ("null", "true", "false", "[]", "{}", "[[]]", "[null]", '{"":null}', "[" * 2000, "[" * 500 + "]" * 500)
KEYS = ('{"%s": %s}', '{"1": 1, "%s": %s}')
BIASES = [form % (key, value) for form in KEYS for key in ("1", "-1", "01", "1e3", "²", "") for value in NUMBERS[4:11]]


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Stock:
    folder = tmp_path_factory.mktemp("extreme")
    return Stock.make(write_model("llama", folder / "model"), {}, folder / "store")


@pytest.fixture(scope="module")
def engine(stock: Stock) -> Iterator[EngineRig]:
    with stock.engine(num_pages=200) as rig:
        yield rig


async def check(client: httpx.AsyncClient, route: str, body: bytes) -> int:
    """Sends it; fails for a 500, and for an error that has not OpenAI's shape."""
    async with asyncio.timeout(PATIENCE_S):
        response = await client.post(f"/v1/{route}", content=body)
    assert response.status_code < 500, (body[:300], response.text)
    if response.status_code != 200:
        error = response.json()["error"]
        assert error.keys() == {"message", "type", "param", "code"}
        assert error["message"] and (error["type"] == "invalid_request_error" or route == "messages")
    else:
        assert "internal" not in response.text
    return response.status_code


def body_of(fields: dict[str, str]) -> bytes:
    """The JSON of fields whose values are JSON already, or should not be."""
    joined = ",".join(f"{json.dumps(name)}:{value}" for name, value in fields.items())
    return f"{{{joined}}}".encode("utf-8", "surrogatepass")


ROUTES = (
    ("completions", CompletionRequest, {"prompt": "[5,6,7]", "max_tokens": "1"}),
    ("chat/completions", ChatRequest, {"messages": '[{"role":"user","content":"a"}]', "max_tokens": "1"}),
    ("responses", ResponsesRequest, {"input": '"a"', "max_output_tokens": "1"}),
    ("messages", MessagesRequest, {"messages": '[{"role":"user","content":"a"}]', "max_tokens": "1"}),
)


@pytest.mark.parametrize(("route", "kind", "needed"), ROUTES, ids=["completions", "chats", "responses", "messages"])
async def test_each_field_with_each_value(
    stock: Stock, engine: EngineRig, tmp_path: Path, route: str, kind: type[GenerationFields], needed: dict[str, str]
) -> None:
    start = {"model": json.dumps(BASE), **needed}
    num_served = 0
    scripted = RouterRig(tmp_path / "spool", text_service())  # the engine's model is too small for texts
    async with (
        scripted.client() if kind is not CompletionRequest else client_of(EngineDispatcher(engine), stock) as client
    ):
        for field in kind.__struct_fields__:
            is_refused = field in refused_fields(kind)
            values = OTHERS if is_refused else (*NUMBERS, *TEXTS, *OTHERS, *(BIASES if field == "logit_bias" else ()))
            if field == "use_beam_search" and kind is not CompletionRequest:  # an engine has beams
                values = tuple(value for value in values if value != "true")
            for value in values:
                num_served += await check(client, route, body_of({**start, field: value})) == 200
    assert num_served > 100  # not all of it is refused


ROUTES_OF_TEXT: tuple[
    tuple[str, type[msgspec.Struct], dict[str, str], set[str]], ...
] = (  # path, body, a good one, and more
    ("/v1/embeddings", EmbeddingsRequest, {"input": "[5,6,7]"}, set()),
    ("/classify", ClassifyRequest, {"model": '"x"', "input": "[5,6,7]"}, set()),
    ("/score", ScoreRequest, {"model": '"x"', "text_1": '"a"', "text_2": '["b","c"]'}, set()),
    ("/rerank", RerankRequest, {"model": '"x"', "query": '"a"', "documents": '["b","c"]'}, set()),
    ("/tokenize", TokenizeRequest, {"prompt": '"a"'}, {"truncate_prompt_tokens", "max_tokens", "tools", "messages"}),
    ("/detokenize", DetokenizeRequest, {"tokens": "[5,6]"}, set()),
    ("/v1/messages/count_tokens", CountTokensRequest, {"messages": '[{"role":"user","content":"a"}]'}, set()),
    ("/v1/load_lora_adapter", LoadBody, {"lora_name": '"a"', "lora_path": '"/a"'}, set()),
    ("/v1/unload_lora_adapter", UnloadBody, {"lora_name": '"a"'}, set()),
)
LISTS = (
    *('["a"]', '["a",1]', "[1,[1]]", "[[1],[]]", '[""]', "[-1]", "[1e2]", "[1.5]", "[319]", "[320]", "[4294967296]"),
    *("[true]", "[9223372036854775808]", "[" + "1," * 3000 + "1]", "[" + "[1]," * 3000 + "[1]]"),
)
PATHS = (
    *('"/"', '"."', '"//"', '"/a/../../etc"', '"/a/./b"', '"/a/\u0000"', '"~"', '"/dev/stdin"', '"/proc/self/fd/0"'),
    *('"/a/' + "../" * 1000 + 'etc"', '"' + "/a" * 2048 + '"', '"file:///a"', '"/a%2e%2e/b"', '"\\\\a\\b"'),
)


@pytest.mark.parametrize(("path", "kind", "needed", "more"), ROUTES_OF_TEXT, ids=[way[0] for way in ROUTES_OF_TEXT])
async def test_each_field_of_the_small_doors(
    tmp_path: Path, path: str, kind: type[msgspec.Struct], needed: dict[str, str], more: set[str]
) -> None:
    """Whatever comes: an answer, or an error of the client's that names a reason; never another's files."""
    rig = RouterRig(tmp_path / "spool", text_service(), adapter_folders=f"{tmp_path}/allowed/{{tenant}}")
    rig.registry.add("acme", "x", head=ScoreHead(np.ones((1, 8), np.float32)))
    own = (
        set(kind.__struct_fields__) - (set(ChatRequest.__struct_fields__) if kind is TokenizeRequest else set()) | more
    )
    num_served = 0
    async with rig.client() as client:
        for field in sorted(own):
            for value in (*NUMBERS, *TEXTS, *OTHERS, *LISTS, *PATHS):
                fields = {"model": json.dumps(BASE), **needed, field: value}
                if "lora_name" in needed:
                    del fields["model"]
                async with asyncio.timeout(PATIENCE_S):
                    response = await client.post(path, content=body_of(fields))
                assert response.status_code < 500, (field, value[:300], response.text)
                if response.status_code == 200:
                    num_served += 1
                else:
                    assert response.json()["error"]["message"], (field, value[:300])
    assert num_served or "lora_name" in needed
    assert not [*(tmp_path / "spool").iterdir()]


async def test_what_is_accepted_of_each_field_together(stock: Stock, engine: EngineRig) -> None:
    extremes = {
        "temperature": ("0", "5e-324", "1e-300", "1e-45", "1e-38", "1e-5", "2"),
        "top_p": ("5e-324", "1e-300", "1e-45", "1"),
        "top_k": ("-1", "0", "1", "2147483647"),
        "min_p": ("0", "5e-324", "1e-45", "1"),
        "repetition_penalty": ("5e-324", "1e-300", "1e-45", "1e-38", "0.001", "0.01", "100"),
        "presence_penalty": ("-2", "5e-324", "2"),
        "frequency_penalty": ("-2", "5e-324", "2"),
        "logit_bias": ('{"5":100}', '{"5":-100,"6":-100,"7":5e-324}'),
        "seed": ("-9223372036854775808", "9223372036854775807", "0"),
        "logprobs": ("0", "20", "true", "false"),
        "n": ("1", "5"),
        "stop": ('"a"', '["\\u0000","\U0001f600"]'),
        "ignore_eos": ("true", "false"),
        "use_beam_search": ("true", "false", "false"),
        "length_penalty": ("-10", "10", "1"),
        "timeout": ("5e-324", "1e-300", "86400"),
        "stream": ("true", "false"),
    }
    rng, statuses = random.Random(7), []
    async with client_of(EngineDispatcher(engine), stock) as client:
        for _ in range(60):
            chosen = rng.sample(sorted(extremes), rng.randrange(1, 9))
            fields = {name: rng.choice(extremes[name]) for name in chosen}
            body = body_of({"model": json.dumps(BASE), "prompt": "[5,6,7,8]", "max_tokens": "6", **fields})
            statuses.append(await check(client, "completions", body))
    assert statuses.count(200) > 20


@pytest.mark.parametrize(
    "body",
    [
        *(
            b"",
            b"{",
            b"[]",
            b"null",
            b'"x"',
            b"1",
            b"\xff\xfe",
            b"\xef\xbb\xbf{}",
            b"\x00",
            b"{}" * 10,
            b'{"model":"\xff"}',
        ),
        *(b'{"model":"\xed\xa0\x80"}', b"[" * 60_000, b'{"a":' * 20_000, b'{"messages":' * 30_000, b" " * 70_000),
        *(
            b'{"model":' * 30_000,
            b'{"model": ' + b"[" * 100_000,
            b'{"model":"m","messages":[{"tool_calls":' + b"[" * 90_000,
        ),
        *(b'{"chat_template_kwargs":' + b'{"a":' * 900 + b"1" + b"}" * 901, b'{"model":1}', b'{"model":""}'),
    ],
)
async def test_bodies_that_are_none(tmp_path: Path, body: bytes) -> None:
    rig = RouterRig(tmp_path / "spool", text_service())
    async with rig.client() as client:
        for route in ("completions", "chat/completions"):
            assert await check(client, route, body) in (400, 413)


async def test_faults_of_ours_have_the_shape_too(tmp_path: Path) -> None:
    rig = RouterRig(tmp_path / "spool", text_service())
    rig.dispatcher.script = failing("internal", "it broke")
    async with rig.client() as client:
        response = await client.post("/v1/completions", json={"model": BASE, "prompt": "a"})
    assert response.json()["error"].keys() == {"message", "type", "param", "code"}
