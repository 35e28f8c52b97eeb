from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from motet.kernels.sampling import EXAMPLE_PARAMS, ShapingParams
from motet.router.text.text import TextService
from motet.tests.rigs.router_rig import BASE, CONTEXT, RouterRig, chunks_of, text_service
from motet.tests.rigs.router_rig import completed as post
from motet.workers.wire.messages import AdapterRef, SequenceUpdate

ANSWER = "the quick brown fox"


@pytest.fixture(scope="module")
def text() -> TextService:
    return text_service()


@pytest.fixture
def rig(tmp_path: Path, text: TextService) -> RouterRig:
    rig = RouterRig(tmp_path / "spool", text)
    rig.dispatcher.answer = rig.ids(ANSWER)
    return rig


async def events(rig: RouterRig, **fields: Any) -> list[Any]:
    """All events of a stream; [DONE] must be the last and is left out."""
    response = await post(rig, stream=True, **fields)
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/event-stream")
    return chunks_of(response)


async def test_a_whole_completion(rig: RouterRig) -> None:
    response = await post(rig)
    assert response.status_code == 200
    answer = response.json()
    assert answer["id"].startswith("cmpl-")
    assert answer["object"] == "text_completion"
    assert answer["model"] == BASE
    choice = {"index": 0, "text": ANSWER, "logprobs": None, "finish_reason": "stop", "stop_reason": None}
    assert answer["choices"] == [choice]
    num_prompt, num_answer = len(rig.ids("hello")), len(rig.ids(ANSWER)) + 1  # the end-of-sequence token counts
    assert answer["usage"] == {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_answer,
        "total_tokens": num_prompt + num_answer,
    }


async def test_the_cache_salt_reaches_the_engine(rig: RouterRig) -> None:
    await post(rig, cache_salt="mine")
    await post(rig)
    assert [submitted.cache_salt for submitted in rig.dispatcher.submitted] == ["0:mine", "0:"]
    assert (await post(rig, cache_salt="x" * 1025)).status_code == 400


async def test_sampling_reaches_the_engine(rig: RouterRig) -> None:
    await post(
        rig,
        max_tokens=7,
        temperature=0.5,
        top_p=0.9,
        top_k=-1,
        min_p=0.1,
        seed=5,
        repetition_penalty=1.1,
        presence_penalty=-1,
        frequency_penalty=2,
        logit_bias={"3": -100, "17": 1.5},
        stop_token_ids=[9],
        ignore_eos=True,
        logprobs=2,
        unknown_field={"is": "ignored"},
        user="someone",
    )
    request = rig.dispatcher.submitted[0]
    sampling = request.sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p, sampling.top_k) == (7, 0.5, 0.9, 0)
    assert (sampling.min_p, sampling.seed, sampling.repetition_penalty) == (0.1, 5, 1.1)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (-1, 2)
    assert sampling.logit_bias == {3: -100.0, 17: 1.5}
    assert (sampling.stop_token_ids, sampling.ignore_eos, sampling.num_logprobs) == ((9,), True, 2)
    assert (request.tenant, request.adapter) == ("acme", None)


async def test_every_parameter_of_the_table_reaches_the_engine(rig: RouterRig) -> None:
    """Absent or null it has the default, which changes nothing."""
    examples = msgspec.structs.asdict(EXAMPLE_PARAMS) | {"temperature": 0.5}
    for fields in (examples, dict.fromkeys(examples), {}):
        assert (await post(rig, **fields)).status_code == 200
    sent = [{name: getattr(each.sampling, name) for name in examples} for each in rig.dispatcher.submitted]
    assert sent == [examples, *[msgspec.structs.asdict(ShapingParams())] * 2]


async def test_max_tokens_defaults_to_that_of_openai_within_the_context(rig: RouterRig) -> None:
    await post(rig, temperature=None, max_tokens=None)
    assert rig.dispatcher.submitted[0].sampling.max_tokens == 16
    assert rig.dispatcher.submitted[0].sampling.temperature == 1.0
    await post(rig, prompt=[1] * (CONTEXT - 3), max_tokens=None)
    assert rig.dispatcher.submitted[1].sampling.max_tokens == 3


async def test_an_adapter_is_sent_by_digest(rig: RouterRig) -> None:
    rig.registry.add("acme", "pirate", "abc")
    response = await post(rig, model="pirate")
    assert response.json()["model"] == "pirate"
    assert rig.dispatcher.submitted[0].adapter == AdapterRef("abc", {"q_proj": 8, "v_proj": 4})


async def test_n_sequences_have_seeds_in_a_row(rig: RouterRig) -> None:
    def script(request: Any) -> list[SequenceUpdate]:
        return [SequenceUpdate(1, rig.ids(f"fox {request.sampling.seed}"), None, "length")]

    rig.dispatcher.script = script
    answer = (await post(rig, prompt=["hello", "world"], n=2, best_of=2, seed=2**63 - 1)).json()
    low = -(2**63)
    assert [choice["text"] for choice in answer["choices"]] == [f"fox {2**63 - 1}", f"fox {low}"] * 2
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert answer["usage"]["prompt_tokens"] == len(rig.ids("hello")) + len(rig.ids("world"))
    assert answer["usage"]["completion_tokens"] == 2 * len(rig.ids(f"fox {2**63 - 1}") + rig.ids(f"fox {low}"))


@pytest.mark.parametrize("prompt", [[5, 6, 7], [[5, 6, 7], [8]], ["hello", "fox"], "hello"])
async def test_kinds_of_prompts(rig: RouterRig, prompt: Any) -> None:
    response = await post(rig, prompt=prompt)
    assert response.status_code == 200
    sent = [request.prompt_token_ids for request in rig.dispatcher.submitted]
    if isinstance(prompt, str):
        assert sent == [rig.ids(prompt)]
    elif isinstance(prompt[0], int):
        assert sent == [prompt]
    else:
        assert sent == [rig.ids(one) if isinstance(one, str) else one for one in prompt]


async def test_streamed_chunks_join_to_the_whole(rig: RouterRig) -> None:
    chunks = await events(rig)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == ANSWER
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + ["stop"]
    assert len({(chunk["id"], chunk["created"]) for chunk in chunks}) == 1
    assert all("usage" not in chunk for chunk in chunks)


async def test_streamed_usage(rig: RouterRig) -> None:
    *chunks, last = await events(rig, stream_options={"include_usage": True})
    assert all(chunk["usage"] is None for chunk in chunks)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == len(rig.ids(ANSWER)) + 1


async def test_continuous_usage(rig: RouterRig) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, _ = await events(rig, stream_options=options)
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == list(range(1, len(rig.ids(ANSWER)) + 2))


async def test_streams_of_several_choices(rig: RouterRig) -> None:
    chunks = await events(rig, n=3)
    texts = ["", "", ""]
    for chunk in chunks:
        texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert texts == [ANSWER] * 3


@pytest.mark.parametrize("stream", [False, True])
async def test_echo(rig: RouterRig, stream: bool) -> None:
    if stream:
        text = "".join(chunk["choices"][0]["text"] for chunk in await events(rig, echo=True))
    else:
        text = (await post(rig, echo=True)).json()["choices"][0]["text"]
    assert text == "hello" + ANSWER


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("stop", "expected"), [("brown", "the quick "), (["k br", "own"], "the quic"), (["t"], "")])
async def test_stop_strings_cut_the_text_and_cancel(
    rig: RouterRig, stream: bool, stop: str | list[str], expected: str
) -> None:
    rig.dispatcher.hangs = True
    if stream:
        chunks = await events(rig, stop=stop, stream_options={"include_usage": True})
        text = "".join(chunk["choices"][0]["text"] for chunk in chunks[:-1])
        reason, usage = chunks[-2]["choices"][0]["finish_reason"], chunks[-1]["usage"]
    else:
        answer = (await post(rig, stop=stop)).json()
        text, reason = answer["choices"][0]["text"], answer["choices"][0]["finish_reason"]
        usage = answer["usage"]
    assert (text, reason) == (expected, "stop")
    fake = rig.dispatcher.streams[0]
    assert fake.cancelled.is_set()
    assert usage["completion_tokens"] == fake.num_read  # up to the token that completed the match
    assert fake.num_read < len(rig.ids(ANSWER)) + 1


async def test_a_stop_string_that_does_not_come_holds_nothing_back_at_the_end(rig: RouterRig) -> None:
    chunks = await events(rig, stop=["fox jumps"])
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == ANSWER


async def test_logprobs(rig: RouterRig) -> None:
    choice = (await post(rig, logprobs=1)).json()["choices"][0]
    logprobs = choice["logprobs"]
    assert "".join(logprobs["tokens"]) == choice["text"]
    assert logprobs["token_logprobs"] == [-0.5] * len(rig.ids(ANSWER))
    assert [
        choice["text"][offset:].startswith(token)
        for offset, token in zip(logprobs["text_offset"], logprobs["tokens"], strict=True)
    ] == [True] * len(rig.ids(ANSWER))
    for token, top in zip(logprobs["tokens"], logprobs["top_logprobs"], strict=True):
        assert top[token] == -0.5
        assert len(top) == 2  # the most likely one, and the chosen one beside it


async def test_impossible_tokens_have_a_finite_logprob(rig: RouterRig) -> None:
    logprobs = (await post(rig, logprobs=3)).json()["choices"][0]["logprobs"]
    assert all(-9999.0 in top.values() for top in logprobs["top_logprobs"])


@pytest.mark.parametrize("echo", [False, True])
async def test_logprobs_may_be_a_boolean(rig: RouterRig, echo: bool) -> None:
    """SkyRL's Tinker server sends `true`, which vLLM reads as 1."""
    choices = [(await post(rig, logprobs=value, echo=echo)).json()["choices"] for value in (True, 1, False, None)]
    assert choices[0] == choices[1]
    assert choices[0][0]["logprobs"]["top_logprobs"]
    assert choices[2] == choices[3]
    assert choices[2][0]["logprobs"] is None
    numbers = [request.sampling.num_logprobs for request in rig.dispatcher.submitted]
    assert [(number, type(number)) for number in numbers[::2]] == [(1, int), (None, type(None))]


async def test_streamed_logprobs_join_to_the_whole(rig: RouterRig) -> None:
    whole = (await post(rig, logprobs=2, stop=["brown f"])).json()["choices"][0]
    tokens, offsets = [], []
    for chunk in await events(rig, logprobs=2, stop=["brown f"]):
        tokens += chunk["choices"][0]["logprobs"]["tokens"]
        offsets += chunk["choices"][0]["logprobs"]["text_offset"]
    assert whole["text"] == "the quick "
    assert (tokens, offsets) == (whole["logprobs"]["tokens"], whole["logprobs"]["text_offset"])
    assert "".join(tokens).startswith(whole["text"])


async def test_token_ids(rig: RouterRig) -> None:
    choice = (await post(rig, return_token_ids=True, logprobs=0)).json()["choices"][0]
    expected = [*rig.dispatcher.answer, 1]
    assert choice["token_ids"] == expected
    assert choice["prompt_token_ids"] == rig.ids("hello")
    assert len(choice["logprobs"]["token_logprobs"]) == len(expected)  # one for each id, the hidden ones too
    chunks = await events(rig, return_token_ids=True)
    assert chunks[0]["choices"][0]["prompt_token_ids"] == rig.ids("hello")
    assert [i for chunk in chunks for i in chunk["choices"][0]["token_ids"]] == expected
    assert all("prompt_token_ids" not in chunk["choices"][0] for chunk in chunks[1:])
