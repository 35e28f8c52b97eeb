"""`echo` with `logprobs`, `prompt_logprobs` and `max_tokens: 0`: as OpenAI's and vLLM's clients read them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from motet.router.openai.sampling_params import MAX_SCORE_VALUES
from motet.tests.rigs.engine_dispatcher import EngineDispatcher, client_of
from motet.tests.rigs.engine_rig import EngineRig, Stock
from motet.tests.rigs.oracle import RECIPES, Oracle, write_adapters, write_model
from motet.tests.rigs.router_rig import BASE, RouterRig, text_service

ADAPTER = RECIPES[0].name
PROMPTS = [[5, 80, 33, 120, 7, 99, 140, 2], [66, 12, 150, 41, 23]]
TOLERANCE = 1e-3


@pytest.fixture
def rig(tmp_path: Path) -> RouterRig:
    return RouterRig(tmp_path / "spool", text_service())


async def post(rig: RouterRig, route: str = "completions", **fields: Any) -> Any:
    async with rig.client() as client:
        response = await client.post(f"/v1/{route}", json={"model": BASE, **fields})
        assert response.status_code == 200, response.text
        return response.json()


@pytest.mark.parametrize("text", ["hello wörld 你好, the quick", "a", "<|start|>hello<|end|> 世"])
async def test_an_echo_has_the_prompts_tokens_then_the_answers(rig: RouterRig, text: str) -> None:
    """Offsets say where in the whole text each token begins; the token that ends the answer has its entry, too."""
    rig.dispatcher.answer = rig.ids(" fox")
    answer = await post(rig, prompt=text, echo=True, logprobs=2, max_tokens=20)
    (choice,) = answer["choices"]
    found, prompt = choice["logprobs"], rig.ids(text)
    num_new = len(rig.ids(" fox")) + 1
    assert {len(values) for values in found.values()} == {len(prompt) + num_new}
    assert found["token_logprobs"] == [None, *(-float(n) for n in range(1, len(prompt))), *[-0.5] * num_new]
    assert found["top_logprobs"][0] is None
    for token, own, top in zip(
        found["tokens"][1:], found["token_logprobs"][1:], found["top_logprobs"][1:], strict=True
    ):
        assert top[token] == own and max(top.values()) == own + (0.5 if own <= -1 else 0.25)
    offsets, whole = found["text_offset"], choice["text"]
    assert offsets == sorted(offsets) and offsets[-1] <= len(whole)
    for token, (start, end) in zip(found["tokens"], pairwise(offsets), strict=False):
        assert whole[start:end] == token or "\\x" in token or token.startswith("<|")
    assert answer["usage"]["completion_tokens"] == num_new


async def test_without_new_tokens_the_prompt_is_the_answer(rig: RouterRig) -> None:
    answer = await post(rig, prompt=["hello world", "the fox"], echo=True, logprobs=0, max_tokens=0)
    assert [choice["text"] for choice in answer["choices"]] == ["hello world", "the fox"]
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["length"] * 2
    assert [len(choice["logprobs"]["tokens"]) for choice in answer["choices"]] == [
        len(rig.ids("hello world")),
        len(rig.ids("the fox")),
    ]
    assert answer["usage"]["completion_tokens"] == 0
    assert all(request.sampling.max_tokens == 0 for request in rig.dispatcher.submitted)


async def test_vllms_field_in_completions_and_chats(rig: RouterRig) -> None:
    rig.dispatcher.answer = rig.ids("fox")
    prompt = rig.ids("hello")
    (choice,) = (await post(rig, prompt=prompt, prompt_logprobs=3))["choices"]
    first, *rows = choice["prompt_logprobs"]
    assert first is None and len(rows) == len(prompt) - 1
    for number, (token, row) in enumerate(zip(prompt[1:], rows, strict=True), start=1):
        assert [*row] == [str(token), str((token + 1) % 320), str((token + 2) % 320)]
        assert [entry["logprob"] for entry in row.values()] == [-float(number), 0.5 - number, -9999.0]
        assert [entry["rank"] for entry in row.values()] == [2, 1, 3]
    assert choice["logprobs"] is None
    chat = await post(rig, "chat/completions", messages=[{"role": "user", "content": "hi"}], prompt_logprobs=0, n=2)
    assert [len(row) for row in chat["prompt_logprobs"][1:]] == [1] * (chat["usage"]["prompt_tokens"] - 1)
    assert "prompt_logprobs" not in chat["choices"][0] and len(chat["choices"]) == 2


async def test_each_field_has_as_many_likely_tokens_as_requested(rig: RouterRig) -> None:
    (choice,) = (await post(rig, prompt="hello world", prompt_logprobs=0, echo=True, logprobs=3, max_tokens=0))[
        "choices"
    ]
    assert {len(row) for row in choice["prompt_logprobs"][1:]} == {1}
    assert {len(top) for top in choice["logprobs"]["top_logprobs"][1:]} == {3}
    plain = await post(rig, prompt="hello world", echo=True, max_tokens=0)
    assert plain["choices"][0]["logprobs"] is None and "prompt_logprobs" not in plain["choices"][0]


async def test_several_choices_of_a_prompt_score_it_once(rig: RouterRig) -> None:
    answer = await post(rig, prompt=["hello world", "fox"], n=3, echo=True, logprobs=1, best_of=3)
    requested = [request.sampling.num_prompt_logprobs for request in rig.dispatcher.submitted]
    assert requested == [1, None, None] * 2
    own = [choice["logprobs"]["token_logprobs"] for choice in answer["choices"]]
    assert own[0] == own[1] == own[2] and own[3] == own[5] and own[0][1] == -1


@pytest.mark.parametrize(
    ("route", "fields"),
    [("responses", {"input": "hi"}), ("messages", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4})],
)
async def test_answers_that_show_none_refuse_them(rig: RouterRig, route: str, fields: dict[str, Any]) -> None:
    async with rig.client() as client:
        response = await client.post(f"/v1/{route}", json={"model": BASE, **fields, "prompt_logprobs": 0})
    assert response.status_code == 400 and "prompt_logprobs" in response.json()["error"]["message"]
    assert not rig.dispatcher.submitted


async def test_an_answer_has_a_bounded_number_of_them(rig: RouterRig) -> None:
    rig.dispatcher.context = 1 << 20
    async with rig.client() as client:
        num_tokens = MAX_SCORE_VALUES // 2 // 2
        body = {"model": BASE, "echo": True, "logprobs": 1, "max_tokens": 0, "n": 2}
        response = await client.post("/v1/completions", json={**body, "prompt": [7] * (num_tokens + 1)})
        assert response.status_code == 400 and response.json()["error"]["param"] == "logprobs"
        assert str(MAX_SCORE_VALUES) in response.json()["error"]["message"]
    assert not rig.dispatcher.submitted


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Oracle, Stock]:
    folder = tmp_path_factory.mktemp("prompt_logprobs")
    path = write_model("llama", folder / "model")
    adapters = {ADAPTER: write_adapters(path, folder / "adapters")[ADAPTER]}
    return Oracle(path, adapters), Stock.make(path, adapters, folder / "store")


@pytest.fixture
def engine(model: tuple[Oracle, Stock]) -> Iterator[EngineRig]:
    with model[1].engine(200, max_tokens_per_step=16) as rig:
        yield rig


@pytest.mark.parametrize("adapter", [None, ADAPTER])
async def test_log_likelihoods_as_lm_eval_reads_them(
    model: tuple[Oracle, Stock], engine: EngineRig, adapter: str | None
) -> None:
    """It sends token ids, takes sums behind the context up to the entry before the last, and looks for the greedy."""
    oracle, stock = model
    requested = {"prompt": PROMPTS, "echo": True, "logprobs": 1, "max_tokens": 1, "temperature": 0, "seed": 1234}
    async with client_of(EngineDispatcher(engine), stock, ADAPTER) as client:
        response = await client.post("/v1/completions", json={"model": adapter or BASE, **requested})
    for prompt, choice in zip(PROMPTS, response.json()["choices"], strict=True):
        found = choice["logprobs"]
        expected = torch.log_softmax(oracle.logits(prompt, adapter).float(), dim=-1)
        for context in range(1, len(prompt)):
            own, tops = found["token_logprobs"][context:-1], found["top_logprobs"][context:-1]
            rows = expected[context - 1 : len(prompt) - 1]
            chosen = rows.gather(1, torch.tensor(prompt[context:]).unsqueeze(1)).squeeze(1)
            assert sum(own) == pytest.approx(float(chosen.sum()), abs=TOLERANCE)
            is_greedy = [value == max(top.values()) for value, top in zip(own, tops, strict=True)]
            assert is_greedy == (rows.argmax(-1) == torch.tensor(prompt[context:])).tolist()
