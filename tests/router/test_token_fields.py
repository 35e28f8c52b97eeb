"""vLLM's fields that say which tokens come, and what of a text is shown."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from motet.router.generation.choice import Choice, EndRules
from motet.router.text.stop_strings import StopStrings
from motet.router.text.text import TextService
from motet.tests.rigs.router_rig import BASE, CONTEXT, EOS, RouterRig, chunks_of, text_service
from motet.workers.wire.messages import SequenceUpdate, TokenRules

ANSWER = "the quick brown fox"


@pytest.fixture(scope="module")
def text() -> TextService:
    return text_service()


@pytest.fixture
def rig(tmp_path: Path, text: TextService) -> RouterRig:
    rig = RouterRig(tmp_path / "spool", text)
    rig.dispatcher.answer = rig.ids(ANSWER)
    rig.dispatcher.eos_token_ids = (EOS,)
    return rig


async def post(rig: RouterRig, path: str = "/v1/completions", **fields: Any) -> Any:
    prompt: dict[str, Any] = {"prompt": "hello"}
    if "chat" in path:
        prompt = {"messages": [{"role": "user", "content": "hello"}]}
    async with rig.client() as client:
        return await client.post(path, json={"model": BASE, **prompt, **fields})


async def choice_of(rig: RouterRig, path: str = "/v1/completions", **fields: Any) -> Any:
    response = await post(rig, path, **fields)
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]


async def rules_of(rig: RouterRig, **fields: Any) -> TokenRules | None:
    await choice_of(rig, **fields)
    return rig.dispatcher.submitted[-1].sampling.rules


async def test_rules_reach_the_engine(rig: RouterRig) -> None:
    assert await rules_of(rig) is None
    assert await rules_of(rig, min_tokens=0, bad_words=[]) is None
    assert await rules_of(rig, allowed_token_ids=[7, 3, 7]) == TokenRules(allowed_token_ids=(7, 3))
    requested = await rules_of(rig, min_tokens=2, stop_token_ids=[9])
    assert requested == TokenRules(min_tokens=2, late_token_ids=(EOS, 9))
    requested = await rules_of(rig, min_tokens=2, stop_token_ids=[9], ignore_eos=True)
    assert requested == TokenRules(min_tokens=2, late_token_ids=(9,))


async def test_rules_stand_beside_a_form_whose_end_may_come(rig: RouterRig) -> None:
    requested = await rules_of(rig, allowed_token_ids=[7, 3], regex="a+")
    assert requested == TokenRules(allowed_token_ids=(7, 3, EOS))
    assert await rules_of(rig, min_tokens=2, regex="a+") == TokenRules(min_tokens=2, late_token_ids=(EOS,))


async def test_bad_words_are_tokenized_with_and_without_a_space(rig: RouterRig) -> None:
    rules = await rules_of(rig, bad_words=[" fox", "jumps"])
    assert rules is not None
    expected = {(*rig.ids(one),) for word in ("fox", "jumps") for one in (word, f" {word}")}
    lengths = {len(rig.ids(word)) for word in ("fox", "jumps")}
    assert set(rules.bad_words) <= expected
    assert {(*rig.ids("fox"),), (*rig.ids("jumps"),)} <= set(rules.bad_words)
    assert {len(word) for word in rules.bad_words} == lengths


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [10**6]}, "allowed_token_ids[0]"),
        ({"allowed_token_ids": [*range(100)] * 11}, "allowed_token_ids"),
        ({"allowed_token_ids": [EOS], "min_tokens": 1}, "min_tokens"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
        ({"bad_words": [" "]}, "bad_words[0]"),
        ({"bad_words": ["你" * 64]}, "bad_words[0]"),
        ({"bad_words": ["x"] * 129}, "bad_words"),
        ({"use_beam_search": True, "n": 2, "bad_words": ["x"]}, "bad_words"),
        ({"use_beam_search": True, "n": 2, "allowed_token_ids": [4]}, "allowed_token_ids"),
        ({"use_beam_search": True, "n": 2, "min_tokens": 1}, "min_tokens"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": 0}, "prompt"),
        ({"prompt_cache_key": "x" * 1025}, "prompt_cache_key"),
    ],
)
async def test_what_cannot_be_is_refused_by_name(rig: RouterRig, fields: dict[str, Any], param: str) -> None:
    response = await post(rig, **fields)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


async def test_words_that_leave_no_allowed_token_are_refused(rig: RouterRig) -> None:
    (fox,) = {rig.ids("x")[-1]}
    response = await post(rig, allowed_token_ids=[fox], bad_words=["x"])
    assert (response.status_code, response.json()["error"]["param"]) == (400, "bad_words")


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_what_has_stopped_an_answer_is_reported(rig: RouterRig, path: str) -> None:
    last = rig.ids(ANSWER)[-1]
    assert (await choice_of(rig, path))["stop_reason"] is None
    assert (await choice_of(rig, path, max_tokens=2))["stop_reason"] is None
    assert (await choice_of(rig, path, stop=["quick", "brown"]))["stop_reason"] == "quick"
    assert (await choice_of(rig, path, stop_token_ids=[last]))["stop_reason"] == last
    assert (await choice_of(rig, path, stop_token_ids=[EOS]))["stop_reason"] is None
    chunks = chunks_of(await post(rig, path, stream=True, stop="brown"))
    reasons = [choice.get("stop_reason", "goes on") for chunk in chunks for choice in chunk["choices"]]
    assert reasons == ["goes on"] * (len(reasons) - 1) + ["brown"]


async def test_what_has_stopped_an_answer_may_be_shown(rig: RouterRig) -> None:
    shown: dict[str, Any] = {"include_stop_str_in_output": True}
    assert (await choice_of(rig, stop="quick"))["text"] == "the "
    assert (await choice_of(rig, stop="quick", **shown))["text"] == "the quick"
    last = rig.ids(ANSWER)[-1]
    without = (await choice_of(rig, stop_token_ids=[last]))["text"]
    assert (await choice_of(rig, stop_token_ids=[last], **shown))["text"] == ANSWER != without
    assert (await choice_of(rig, **shown))["text"] == ANSWER
    both = await choice_of(rig, skip_special_tokens=False, **shown)
    assert both["text"] == ANSWER + rig.text.token_str(EOS)


async def test_special_tokens_may_be_shown(rig: RouterRig) -> None:
    end = rig.text.token_id("<|start|>")
    assert end is not None
    rig.dispatcher.answer = [*rig.ids("the"), end, *rig.ids(" fox")]
    assert (await choice_of(rig))["text"] == "the fox"
    assert (await choice_of(rig, skip_special_tokens=False))["text"] == "the<|start|> fox"
    stopped = await choice_of(rig, skip_special_tokens=False, stop="<|start|>")
    assert (stopped["text"], stopped["stop_reason"]) == ("the", "<|start|>")
    echoed = await choice_of(rig, prompt="a<|start|>", echo=True, skip_special_tokens=False)
    assert echoed["text"] == "a<|start|>the<|start|> fox"


@pytest.mark.parametrize("min_tokens", range(8))
def test_no_stop_string_ends_a_text_with_its_first_tokens(text: TextService, min_tokens: int) -> None:
    token_ids = text._encode_all(["abababab"], add_special_tokens=False)[0]
    choice = Choice(text.detokenizer([]), StopStrings(("b",)), ends=EndRules(min_tokens=min_tokens))
    shown = ""
    for token_id in token_ids:
        shown += choice.fold(SequenceUpdate(1, [token_id])).text
        if choice.finish_reason is not None:
            break
    before = text._backend.decode(token_ids[:min_tokens])
    after = text._backend.decode(token_ids[min_tokens:])
    assert choice.num_tokens > min_tokens
    assert shown == before + after[: after.index("b")]


@pytest.mark.parametrize("kept", [1, 3, -1])
async def test_the_last_tokens_of_a_prompt_are_read(rig: RouterRig, kept: int) -> None:
    said = "the quick brown fox " * CONTEXT
    await choice_of(rig, prompt=said, truncate_prompt_tokens=kept, max_tokens=5)
    expected = rig.ids(said)[-(kept if kept > 0 else CONTEXT - 5) :]
    assert rig.dispatcher.submitted[-1].prompt_token_ids == expected
    await choice_of(rig, prompt=rig.ids(said), truncate_prompt_tokens=kept, max_tokens=5)
    assert rig.dispatcher.submitted[-1].prompt_token_ids == expected
    messages = [{"role": "user", "content": said}]
    await choice_of(rig, "/v1/chat/completions", messages=messages, truncate_prompt_tokens=kept, max_tokens=5)
    prompt = rig.dispatcher.submitted[-1].prompt_token_ids
    assert len(prompt) == len(expected)
    async with rig.client() as client:
        body = {"prompt": said, "truncate_prompt_tokens": kept, "max_tokens": 5}
        assert (await client.post("/tokenize", json=body)).json()["tokens"] == expected


async def test_a_cache_key_makes_no_difference(rig: RouterRig) -> None:
    await choice_of(rig)
    await choice_of(rig, prompt_cache_key="mine")
    first, second = rig.dispatcher.submitted
    assert (first.prompt_token_ids, first.sampling, first.cache_salt) == (
        second.prompt_token_ids,
        second.sampling,
        second.cache_salt,
    )


async def test_log_probabilities_may_name_tokens_by_their_ids(rig: RouterRig) -> None:
    ids = [f"token_id:{token_id}" for token_id in rig.ids(ANSWER)]
    logprobs = (await choice_of(rig, logprobs=1, return_tokens_as_token_ids=True))["logprobs"]
    assert logprobs["tokens"] == ids
    assert all(name.startswith("token_id:") for top in logprobs["top_logprobs"] for name in top)
    fields: dict[str, Any] = {"logprobs": True, "top_logprobs": 1, "return_tokens_as_token_ids": True}
    logprobs = (await choice_of(rig, "/v1/chat/completions", **fields))["logprobs"]
    assert [token["token"] for token in logprobs["content"]] == ids


async def test_what_a_request_leaves_open_is_as_the_model_says(rig: RouterRig) -> None:
    rig.dispatcher.sampling_defaults = {"temperature": 0.6, "top_k": 20, "min_p": 0.1, "max_tokens": 7}

    async def sampling_of(path: str, **fields: Any) -> tuple[float, int, float, float, int | None]:
        await choice_of(rig, path, **fields)
        sampling = rig.dispatcher.submitted[-1].sampling
        return sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p, sampling.max_tokens

    chat = "/v1/chat/completions"
    assert await sampling_of(chat) == (0.6, 20, 1.0, 0.1, 7)
    assert await sampling_of(chat, temperature=0, top_k=-1, min_p=0, max_tokens=9) == (0.0, 0, 1.0, 0.0, 9)
    assert await sampling_of(chat, top_p=0) == (0.6, 1, 1.0, 0.1, 7)
    assert await sampling_of("/v1/completions") == (0.6, 20, 1.0, 0.1, 16)
    rig.dispatcher.sampling_defaults = {"top_k": -1, "max_tokens": 10**9}
    assert await sampling_of(chat) == (1.0, 0, 1.0, 0.0, CONTEXT - len(rig.dispatcher.submitted[-1].prompt_token_ids))


async def test_beams_take_nothing_of_the_models_sampling(rig: RouterRig) -> None:
    rig.dispatcher.sampling_defaults = {"temperature": 0.6, "repetition_penalty": 1.1}
    await post(rig, use_beam_search=True, n=2, max_tokens=2)
    sampling = rig.dispatcher.submitted[-1].sampling
    assert (sampling.temperature, sampling.repetition_penalty) == (0.0, 1.0)
