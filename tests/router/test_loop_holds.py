"""No request holds the router's event loop: what was sent once to hold it, and what is like it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from motet.adapters.format.score_head import ScoreHead
from motet.router.text.text import TextService
from motet.tests.rigs.loop_holds import measured_holds
from motet.tests.rigs.patience import PATIENCE_S
from motet.tests.rigs.router_rig import BASE, RouterRig, text_service

# Left alone, all hold it for 2 to 6 ms.
MOST_S = 0.012
ATTEMPTS = 5  # of which all must hold it: time that a host takes from this machine looks like a hold
CONTEXT = 131_072
WORDS = "hello world, the quick brown fox "
HEAD = f'{{"model":"{BASE}",'.encode()
HELLO = b'"messages":[{"role":"user","content":"hello"}]}'


def listed(element: bytes, number: int) -> bytes:
    return b"[" + b",".join([element] * number) + b"]"


def completion(**fields: Any) -> bytes:
    return json.dumps({"model": BASE, "prompt": "hello", **fields}).encode()


CHATS = {
    "a long chat": HEAD + b'"messages":[{"role":"user","content":"' + WORDS.encode() * 10_000 + b'"}]}',
    "a chat beyond the context": HEAD + b'"messages":[{"role":"user","content":"' + "你好".encode() * 600_000 + b'"}]}',
    "escapes": HEAD + b'"messages":[{"role":"user","content":"' + b"\\n" * 1_000_000 + b'"}]}',
    "lists of nothing": HEAD + b'"tools":' + listed(b"[]", 1_000_000) + b"," + HELLO,
    "lists that are not read": HEAD + b'"tool_choice":"none","tools":' + listed(b"[]", 1_000_000) + b"," + HELLO,
    "lists in a small body": HEAD + b'"tool_choice":"none","tools":' + listed(b"[]", 19_000) + b"," + HELLO,
    "unknown fields in a small body": HEAD + b",".join(b'"x%d":1' % i for i in range(6_000)) + b"," + HELLO,
    "unknown fields of messages in a small body": HEAD
    + b'"messages":'
    + listed(b'{"role":"user","content":"a","x":1}', 1_500)
    + b"}",
    "unknown fields of parts in a small body": HEAD
    + b'"messages":[{"role":"user","content":'
    + listed(b'{"type":"text","text":"","x":1}', 1_900)
    + b"}]}",
    "lists in arguments": HEAD
    + b'"messages":[{"role":"user","content":"a"},{"role":"assistant","tool_calls":['
    + listed(b'{"function":{"name":"f","arguments":"{\\"a\\":' + listed(b"[]", 19_000) + b'}"}}', 8)[1:]
    + b'},{"role":"tool","content":"a"}]}',
    "lists in tools": HEAD
    + b'"tools":[{"type":"function","function":{"name":"f","parameters":{"a":'
    + listed(b"[]", 40_000)
    + b"}}}],"
    + HELLO,
    "an unknown field": HEAD + b'"unknown":' + listed(b"{}", 1_000_000) + b"," + HELLO,
    "empty messages": HEAD + b'"messages":' + listed(b'{"role":"user","content":""}', 140_000) + b"}",
    "many messages": HEAD + b'"messages":' + listed(b'{"role":"user","content":"a"}', 8_000) + b"}",
    "many messages in a small body": HEAD + b'"messages":' + listed(b'{"role":"user","content":"a"}', 2_000) + b"}",
    "many parts": HEAD
    + b'"messages":[{"role":"user","content":'
    + listed(b'{"type":"text","text":""}', 99_999)
    + b"}]}",
    "arguments of the template": HEAD + b'"chat_template_kwargs":{"mood":' + listed(b"[]", 1_000_000) + b"}," + HELLO,
}
COMPLETIONS = {
    "token ids": HEAD + b'"prompt":' + listed(b"300", 131_000) + b"}",
    "token ids that are none": HEAD + b'"prompt":' + listed(b"300", 1_000_000) + b"}",
    "lists of token ids": HEAD + b'"prompt":' + listed(listed(b"300", 30_000), 64) + b"}",
    "texts": HEAD + b'"prompt":' + listed(b'"' + WORDS.encode() * 1_000 + b'"', 64) + b"}",
    "empty texts": HEAD + b'"prompt":' + listed(b'""', 1_000_000) + b"}",
    "n of a long prompt": HEAD + b'"n":128,"prompt":' + listed(b"300", 60_000) + b"}",
    "the prompt's ids n times": completion(prompt=WORDS * 3_000, n=128, return_token_ids=True),
    "the prompt's ids n times, streamed": completion(prompt=WORDS * 3_000, n=128, return_token_ids=True, stream=True),
    "biases": HEAD + b'"prompt":"a","logit_bias":{' + b",".join(b'"%d":1' % i for i in range(200_000)) + b"}}",
    "a long name": completion(model="x" * 1_000_000),
    "a long salt": completion(cache_salt="x" * 1_000_000),
    "log-probabilities": completion(n=64, logprobs=20, max_tokens=200),
    "log-probabilities, streamed": completion(n=64, logprobs=20, max_tokens=200, stream=True),
    "stop strings": completion(stop=["a" * 255 + chr(98 + i) for i in range(16)], n=64, max_tokens=200),
    "stop strings beyond the limit": completion(stop=["a" * 2999 + chr(98 + i) for i in range(16)], n=16),
    "a schema in a small body": HEAD + b'"prompt":"a","guided_json":{"enum":' + listed(b"[]", 19_000) + b"}}",
    "a grammar in a small body": completion(ebnf="root ::= " + "." * 60_000),
    "a schema": HEAD + b'"prompt":"a","guided_json":{"anyOf":' + listed(b"{}", 1_000_000) + b"}}",
    "long echo": completion(prompt=WORDS * 8_000, echo=True),
    "scores of a long prompt": completion(prompt=[300] * 49_000, echo=True, logprobs=20, max_tokens=0),
    "scores of many prompts": completion(prompt=[[300] * 4096] * 128, echo=True, logprobs=1, max_tokens=1),
    "vLLM's scores": completion(prompt=[[300] * 390] * 128, prompt_logprobs=20, max_tokens=0),
    "more scores than an answer has": completion(prompt=[[300] * 8192] * 128, prompt_logprobs=1),
}
RESPONSES = {
    "a long text": HEAD + b'"input":"' + WORDS.encode() * 10_000 + b'"}',
    "long instructions": HEAD + b'"input":"a","instructions":"' + WORDS.encode() * 10_000 + b'"}',
    "empty items": HEAD + b'"input":' + listed(b"{}", 1_000_000) + b"}",
    "many items": HEAD + b'"input":' + listed(b'{"role":"user","content":"a"}', 8_000) + b"}",
    "many items in a small body": HEAD + b'"input":' + listed(b'{"role":"user","content":"a"}', 800) + b"}",
    "many calls in a small body": HEAD
    + b'"input":'
    + listed(b'{"type":"function_call","call_id":"","name":"f","arguments":""}', 380)
    + b"}",
    "large tools, streamed": HEAD
    + b'"input":"a","stream":true,"tool_choice":"none","tools":[{"type":"function","name":"f","parameters":{"a":'
    + listed(b"[]", 40_000)
    + b"}}]}",
}
MESSAGES = {
    "many turns": HEAD + b'"max_tokens":9,"messages":' + listed(b'{"role":"user","content":"a"}', 8_000) + b"}",
    "many turns in a small body": HEAD
    + b'"max_tokens":9,"messages":'
    + listed(b'{"role":"user","content":"a"}', 800)
    + b"}",
    "many blocks": HEAD
    + b'"max_tokens":9,"messages":[{"role":"user","content":'
    + listed(b'{"type":"tool_result","tool_use_id":"a"}', 300_000)
    + b"}]}",
}
EMBEDDINGS = {
    "a long text": HEAD + b'"input":"' + WORDS.encode() * 8_000 + b'"}',
    "many vectors": HEAD + b'"input":' + listed(listed(b"300", 100), 128) + b"}",
    "many vectors in base64": HEAD + b'"encoding_format":"base64","input":' + listed(listed(b"300", 100), 128) + b"}",
    "token ids that are none": HEAD + b'"input":' + listed(b"300", 1_000_000) + b"}",
    "very many inputs": HEAD + b'"dimensions":9,"input":' + listed(b'"a"', 2048) + b"}",
    "very many long inputs": HEAD + b'"dimensions":9,"input":' + listed(listed(b"300", 1500), 2048) + b"}",
}
TEMPLATED = {name: CHATS[name].replace(HEAD, b'{"model":"templated",', 1) for name in ("a long chat", "escapes")}
HEAD_OF_CLASSIFIER = b'{"model":"wide",'
CLASSIFIED = {
    "many labels of many inputs": HEAD_OF_CLASSIFIER + b'"input":' + listed(listed(b"300", 10), 500) + b"}",
    "a long chat": HEAD_OF_CLASSIFIER + b'"messages":[{"role":"user","content":"' + WORDS.encode() * 10_000 + b'"}]}',
}
RERANKED = {
    "a long query of many documents": b'{"model":"one","query":"'
    + WORDS.encode() * 60
    + b'","documents":'
    + listed(b'"' + WORDS.encode() * 60 + b'"', 2047)
    + b"}",
    "very many small documents": b'{"model":"one","query":"a","documents":' + listed(b'{"text":"a"}', 2048) + b"}",
}
TOKENIZED = {
    "a long text": HEAD + b'"prompt":"' + WORDS.encode() * 120_000 + b'"}',
    "the end of a long text": HEAD + b'"truncate_prompt_tokens":9,"prompt":"' + WORDS.encode() * 120_000 + b'"}',
    "one long word": HEAD + b'"truncate_prompt_tokens":-1,"prompt":"' + b"a" * 4_000_000 + b'"}',
    "tokens' names": HEAD + b'"return_token_strs":true,"prompt":"' + WORDS.encode() * 8_000 + b'"}',
    "a long chat": HEAD + b'"messages":[{"role":"user","content":"' + WORDS.encode() * 10_000 + b'"}]}',
}
DETOKENIZED = {
    "many tokens": HEAD + b'"tokens":' + listed(b"300", 131_000) + b"}",
    "token ids that are none": HEAD + b'"tokens":' + listed(b"3000000", 131_000) + b"}",
    "no tokens": HEAD + b'"tokens":' + listed(b"[]", 1_000_000) + b"}",
}
CASES = [("/v1/chat/completions", name, body) for name, body in CHATS.items()]
CASES += [("/v1/chat/completions", f"{name} by its template", body) for name, body in TEMPLATED.items()]
CASES += [("/v1/embeddings", name, body) for name, body in EMBEDDINGS.items()]
CASES += [("/v1/classify", name, body) for name, body in CLASSIFIED.items()]
CASES += [("/v1/rerank", name, body) for name, body in RERANKED.items()]
CASES += [("/v1/completions", name, body) for name, body in COMPLETIONS.items()]
CASES += [("/v1/responses", name, body) for name, body in RESPONSES.items()]
CASES += [("/v1/messages", name, body) for name, body in MESSAGES.items()]
CASES += [("/v1/messages/count_tokens", name, body) for name, body in MESSAGES.items()]
CASES += [("/tokenize", name, body) for name, body in TOKENIZED.items()]
CASES += [("/detokenize", name, body) for name, body in DETOKENIZED.items()]


@pytest.fixture(scope="module")
def text() -> TextService:
    return text_service()


@pytest.fixture
def rig(tmp_path: Path, text: TextService) -> RouterRig:
    rig = RouterRig(tmp_path / "spool", text)
    rig.dispatcher.context, rig.dispatcher.hidden_size = CONTEXT, 4096
    rig.dispatcher.answer = rig.ids("a" * 190)
    rig.registry.add("acme", "templated", chat_template="{% for m in messages %}{{ m.content }}{% endfor %}")
    for name, num_labels in (("one", 1), ("wide", 1024)):
        rig.registry.add("acme", name, name[0] * 64, head=ScoreHead(np.full((num_labels, 4096), 1e-9, np.float32)))
    return rig


async def pieces(body: bytes) -> AsyncIterator[bytes]:
    """As a server hands a body on: whole, it is copied at once, which takes long where memory is slow to get."""
    for start in range(0, len(body), 1 << 16):
        yield body[start : start + (1 << 16)]
        await asyncio.sleep(0)


@pytest.mark.parametrize(("route", "body"), [case[::2] for case in CASES], ids=[case[1] for case in CASES])
async def test_no_request_holds_the_loop(rig: RouterRig, route: str, body: bytes) -> None:
    async with rig.client() as client:
        await client.post("/v1/completions", json={"model": BASE, "prompt": "a", "max_tokens": 1})
        for _ in range(ATTEMPTS):
            with measured_holds() as holds:
                async with asyncio.timeout(PATIENCE_S):
                    request = client.build_request("POST", route, content=pieces(body))
                    response = await client.send(request, stream=True)  # the client joins the answer's pieces later
            await response.aclose()
            assert response.status_code in (200, 400, 404, 413)
            if holds.within(MOST_S):
                return
    raise AssertionError(holds)
