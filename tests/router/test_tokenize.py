"""/tokenize, /detokenize and /version."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import msgspec
import pytest

from motet import __version__
from motet.router.bodies.request_decoder import FIXED_BYTES, MAX_BYTES_ON_LOOP, packed, unpacked
from motet.router.openai.request_schema import DetokenizeRequest, TokenizeRequest
from motet.router.text.text import TextService
from motet.tests.rigs.router_rig import BASE, CONTEXT, EOS, RouterRig, text_service

MESSAGES = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "wörld"}]


@pytest.fixture(scope="module")
def text() -> TextService:
    return text_service()


@pytest.fixture
def rig(tmp_path: Path, text: TextService) -> RouterRig:
    rig = RouterRig(tmp_path / "spool", text)
    rig.dispatcher.answer = rig.ids("hello")
    return rig


async def post(rig: RouterRig, path: str, **fields: Any) -> Any:
    async with rig.client() as client:
        return await client.post(path, json=fields)


async def prompt_of(rig: RouterRig, path: str, **fields: Any) -> list[int]:
    """The tokens that a gang gets."""
    await post(rig, path, model=BASE, **fields)
    return rig.dispatcher.submitted[-1].prompt_token_ids


@pytest.mark.parametrize("fields", [{}, {"add_special_tokens": False}])
async def test_a_text_has_the_tokens_that_a_completion_of_it_has(rig: RouterRig, fields: dict[str, Any]) -> None:
    answer = (await post(rig, "/tokenize", prompt="héllo 你好", **fields)).json()
    token_ids = await prompt_of(rig, "/v1/completions", prompt="héllo 你好", **fields)
    assert answer == {"count": len(token_ids), "max_model_len": CONTEXT, "tokens": token_ids}


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"add_generation_prompt": False},
        {"continue_final_message": True},
        {"chat_template_kwargs": {"mood": "fine"}},
        {"add_special_tokens": True},
        {"temperature": 0.5, "max_tokens": 3},
    ],
)
async def test_a_chat_has_the_tokens_of_its_prompt(rig: RouterRig, fields: dict[str, Any]) -> None:
    answer = (await post(rig, "/tokenize", messages=MESSAGES, **fields)).json()
    assert answer["tokens"] == await prompt_of(rig, "/v1/chat/completions", messages=MESSAGES, **fields)


async def test_tokens_come_as_the_vocabulary_has_them(rig: RouterRig) -> None:
    answer = (await post(rig, "/tokenize", prompt="the fox 你", return_token_strs=True)).json()
    assert len(answer["token_strs"]) == answer["count"]
    assert [rig.text.token_id(token) for token in answer["token_strs"]] == answer["tokens"]


async def test_what_was_tokenized_is_a_text_again_with_its_special_tokens(rig: RouterRig) -> None:
    said = "hello 你好 wörld<|end|>"
    tokens = (await post(rig, "/tokenize", prompt=said, model=BASE)).json()["tokens"]
    assert (await post(rig, "/detokenize", tokens=tokens, model=BASE)).json() == {"prompt": said}
    shown = (await post(rig, "/detokenize", tokens=[EOS])).json()["prompt"]
    assert rig.text.token_id(shown) == EOS
    assert (await post(rig, "/detokenize", tokens=[])).json() == {"prompt": ""}


@pytest.mark.parametrize(
    ("path", "fields", "status", "param"),
    [
        ("/tokenize", {}, 400, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": MESSAGES}, 400, "prompt"),
        ("/tokenize", {"prompt": ["a"]}, 400, "prompt"),
        ("/tokenize", {"prompt": "a", "model": "unknown"}, 404, "model"),
        ("/tokenize", {"prompt": "a", "chat_template": "{{ x }}"}, 400, "chat_template"),
        ("/detokenize", {}, 400, "tokens"),
        ("/detokenize", {"tokens": [-1]}, 400, "tokens[0]"),
        ("/detokenize", {"tokens": [10**6]}, 400, "tokens[0]"),
        ("/detokenize", {"tokens": [3] * (CONTEXT + 1)}, 400, "tokens"),
        ("/detokenize", {"tokens": [3], "model": "unknown"}, 404, "model"),
    ],
)
async def test_what_cannot_be_is_refused_by_name(
    rig: RouterRig, path: str, fields: dict[str, Any], status: int, param: str
) -> None:
    response = await post(rig, path, **fields)
    assert response.status_code == status
    assert response.json()["error"]["param"] == param


async def test_an_adapter_may_be_named(rig: RouterRig) -> None:
    rig.registry.add("acme", "voice")
    assert (await post(rig, "/tokenize", prompt="a", model="voice")).status_code == 200


async def test_a_large_text_is_read_in_another_process_and_a_larger_one_is_refused(rig: RouterRig) -> None:
    ballast = " " * MAX_BYTES_ON_LOOP
    async with rig.client() as client:
        text_sent = await client.post("/tokenize", content=f'{{"prompt": {ballast} "the fox"}}')
        chat_sent = await client.post("/tokenize", content=f'{{"messages": {ballast} {json.dumps(MESSAGES)}}}')
        ids_sent = await client.post("/detokenize", content=f'{{"tokens": {ballast} {rig.ids("the fox")}}}')
    assert text_sent.json()["tokens"] == await rig.text.encode("the fox", add_special_tokens=True)
    assert chat_sent.json() == (await post(rig, "/tokenize", messages=MESSAGES)).json()
    assert ids_sent.json() == {"prompt": "the fox"}
    assert (await post(rig, "/detokenize", tokens=[3] * MAX_BYTES_ON_LOOP)).status_code == 400
    for path, fields in (
        ("/tokenize", {"prompt": "x" * 2 * FIXED_BYTES}),
        ("/detokenize", {"tokens": [3] * FIXED_BYTES}),
    ):
        assert (await post(rig, path, **fields)).status_code == 413


async def test_nothing_of_it_is_charged_or_generated(rig: RouterRig) -> None:
    await post(rig, "/tokenize", prompt="hello")
    assert not rig.dispatcher.submitted


@pytest.mark.parametrize("seed", range(20))
def test_a_packed_request_is_unpacked_as_it_was(seed: int) -> None:
    random_ = random.Random(seed)
    texts = ["".join(random_.choices("aé你\ud800", k=random_.choice((0, 3, 200_000)))) for _ in range(3)]
    chat = [{"role": "user", "content": one} for one in texts[1:]]
    requests: list[TokenizeRequest | DetokenizeRequest] = [
        TokenizeRequest(prompt=texts[0]),
        msgspec.convert({"messages": chat}, TokenizeRequest),
        DetokenizeRequest(tokens=random_.choices(range(1000), k=random_.choice((0, 1, 100_000)))),
    ]
    for request in requests:
        assert unpacked(packed(request), type(request)) == request


async def test_the_version(rig: RouterRig) -> None:
    async with rig.client() as client:
        assert (await client.get("/version")).json() == {"version": __version__}
