"""/v1/embeddings: by OpenAI's own client, and in front of an engine by the states of transformers + PEFT."""

from __future__ import annotations

import json
from base64 import b64decode
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest

from motet.router.text.model_tokenizer import OwnPooling, own_pooling
from motet.tests.rigs.engine_dispatcher import EngineDispatcher, client_of
from motet.tests.rigs.engine_rig import EngineRig, Stock
from motet.tests.rigs.openai_client import openai_client
from motet.tests.rigs.oracle import RECIPES, Oracle, write_adapters, write_model
from motet.tests.rigs.router_rig import BASE, RouterRig, posted, text_service
from motet.workers.wire.prompt_scores import pooled_positions

ADAPTER = RECIPES[0].name
PROMPTS = [[5, 80, 33, 120, 7, 99, 140, 2], [66, 12, 150, 41, 23]]


@pytest.fixture
def rig(tmp_path: Path) -> RouterRig:
    return RouterRig(tmp_path / "spool", text_service())


async def post(rig: RouterRig, **fields: Any) -> Any:
    return await posted(rig, "/v1/embeddings", **fields)


def unit(*numbers: float) -> Any:
    return pytest.approx(list(np.array(numbers) / np.linalg.norm(numbers)), abs=1e-6)


async def test_the_client_of_openai(rig: RouterRig) -> None:
    """Which asks for base64 unless its caller says otherwise."""
    async with openai_client(rig) as client:
        found = await client.embeddings.create(model=BASE, input=[[7, 8, 9], [3]], user="u")
        assert [one.embedding for one in found.data] == [unit(7, 3, *[1] * 6), unit(3, 1, *[1] * 6)]
        assert [(one.index, one.object) for one in found.data] == [(0, "embedding"), (1, "embedding")]
        assert (found.object, found.model) == ("list", BASE)
        assert (found.usage.prompt_tokens, found.usage.total_tokens) == (4, 4)
        plain = await client.embeddings.create(model=BASE, input=[[7, 8, 9], [3]], encoding_format="float")
        assert [one.embedding for one in plain.data] == [unit(7, 3, *[1] * 6), unit(3, 1, *[1] * 6)]
        short = await client.embeddings.create(model=BASE, input=[7, 8, 9], dimensions=2)
        assert short.data[0].embedding == unit(7, 3)
        with pytest.raises(openai.BadRequestError) as refused:
            await client.embeddings.create(model=BASE, input="a", dimensions=9)
        assert refused.value.param == "dimensions"


@pytest.mark.parametrize("texts", ["hello world", ["hello world", "the fox"]])
async def test_texts_are_tokenized_as_the_models_tokenizer_does(rig: RouterRig, texts: str | list[str]) -> None:
    answer = await post(rig, input=texts)
    assert answer.status_code == 200, answer.text
    listed = [texts] if isinstance(texts, str) else texts
    expected = [rig.text._backend.encode(text).ids for text in listed]
    assert [request.prompt_token_ids for request in rig.dispatcher.submitted] == expected
    assert answer.json()["usage"]["prompt_tokens"] == sum(map(len, expected))
    assert {request.sampling.max_tokens for request in rig.dispatcher.submitted} == {0}
    assert {request.sampling.pooling for request in rig.dispatcher.submitted} == {"last"}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "input"),
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": ""}, "input"),
        ({"input": ["a", ""]}, "input[1]"),
        ({"input": ["a", 1]}, "input[1]"),
        ({"input": [[1], [320]]}, "input[1][0]"),
        ({"input": [5] * 2000}, "input"),
        ({"input": "a " * 2000}, "input"),
        ({"input": ["a"] * 2049}, "input"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "dimensions": 9}, "dimensions"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ({"input": "a", "pooling": "max"}, "pooling"),
        ({"input": "a", "truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        ({"input": "a", "normalize": False}, "normalize"),
        ({"input": "a", "messages": []}, "messages"),
    ],
)
async def test_bad_requests_name_the_field(rig: RouterRig, fields: dict[str, Any], param: str) -> None:
    answer = await post(rig, **fields)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param, answer.text
    assert "prompt" not in answer.json()["error"]["message"].replace("truncate_prompt_tokens", "").replace(
        "prompts times", ""
    )
    assert not rig.dispatcher.submitted


async def test_very_many_inputs_are_computed_some_at_a_time(rig: RouterRig) -> None:
    """As OpenAI's clients send them; no more at once than a request may have sequences."""
    rig.config.now = replace(rig.config.now, max_sequences_per_request=5)
    inputs = [[1 + number % 300] * (1 + number % 7) for number in range(2048)]
    most, submit = 0, rig.dispatcher.submit

    def counting(*args: Any, **options: Any) -> Any:
        nonlocal most
        stream = submit(*args, **options)
        most = max(most, sum(not one.num_read for one in rig.dispatcher.streams))
        return stream

    rig.dispatcher.submit = counting  # type: ignore[method-assign]
    answer = (await post(rig, input=inputs, dimensions=2)).json()
    assert [one["index"] for one in answer["data"]] == [*range(2048)]
    assert [one["embedding"] for one in answer["data"]] == [unit(one[0], len(one)) for one in inputs]
    assert answer["usage"]["prompt_tokens"] == sum(map(len, inputs))
    assert most <= 5, most


async def test_more_numbers_than_an_answer_has_are_refused(rig: RouterRig) -> None:
    rig.dispatcher.hidden_size = 4096
    for fields, most in (({}, 512), ({"encoding_format": "base64"}, 1024), ({"dimensions": 2048}, 1024)):
        refused = await post(rig, input=["a"] * (most + 1), **fields)
        assert refused.status_code == 400 and f"at most {most} inputs" in refused.json()["error"]["message"]
    assert (await post(rig, input=["a"] * 1024, encoding_format="base64")).status_code == 200


async def test_an_input_may_fill_the_context(rig: RouterRig) -> None:
    for prompt in ([5] * rig.dispatcher.context, [[5] * rig.dispatcher.context]):
        assert (await post(rig, input=prompt)).status_code == 200
    rig.dispatcher.submitted.clear()
    assert (await post(rig, input=[*range(300)], truncate_prompt_tokens=3)).status_code == 200
    assert rig.dispatcher.submitted[0].prompt_token_ids == [297, 298, 299]
    longer = [7, *[5] * rig.dispatcher.context]
    assert (await post(rig, input=longer, truncate_prompt_tokens=-1)).status_code == 200
    assert rig.dispatcher.submitted[-1].prompt_token_ids == longer[1:]


async def test_a_gang_that_knows_no_embeddings_gives_no_wrong_answer(
    rig: RouterRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("motet.tests.rigs.router_rig.embedding_of", lambda *_: None)
    assert (await post(rig, input="a")).status_code == 500


def model_folder(tmp_path: Path, modules: Any, pooling: Any = None) -> Path:
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    if pooling is not None:
        (tmp_path / "1_Pooling").mkdir()
        (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return tmp_path


TRANSFORMER = {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}
POOLING = {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}
NORMALIZE = {"idx": 2, "name": "2", "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"}


@pytest.mark.parametrize(
    ("modules", "pooling", "expected"),
    [
        ([TRANSFORMER, POOLING, NORMALIZE], {"pooling_mode_mean_tokens": True}, OwnPooling("mean", True)),
        (
            [TRANSFORMER, POOLING],
            {"pooling_mode_cls_token": False, "pooling_mode_lasttoken": True, "include_prompt": True},
            OwnPooling("last", False),
        ),
        ([TRANSFORMER, POOLING, NORMALIZE], {"pooling_mode": "cls"}, OwnPooling("first", True)),
    ],
)
def test_a_models_own_pooling(tmp_path: Path, modules: Any, pooling: Any, expected: OwnPooling) -> None:
    assert own_pooling(tmp_path) == OwnPooling("last", True)
    assert own_pooling(model_folder(tmp_path, modules, pooling)) == expected


@pytest.mark.parametrize(
    ("modules", "pooling", "what"),
    [
        ([TRANSFORMER, POOLING], {"pooling_mode_max_tokens": True}, "max_tokens"),
        ([TRANSFORMER, POOLING], {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True}, "cls_token with"),
        ([TRANSFORMER, POOLING, {"type": "a.models.Dense", "path": "2_Dense"}], {"pooling_mode": "mean"}, "Dense"),
        ([TRANSFORMER, POOLING], None, "1_Pooling"),
        ([TRANSFORMER], None, "no pooling"),
        ({}, None, "array"),
    ],
)
async def test_another_pooling_is_refused_unless_the_request_names_one(
    rig: RouterRig, tmp_path: Path, modules: Any, pooling: Any, what: str
) -> None:
    rig.text.pooling = own_pooling(model_folder(tmp_path, modules, pooling))
    refused = await post(rig, input="a")
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "pooling"
    assert what in refused.json()["error"]["message"]
    assert (await post(rig, input="a", pooling="mean")).status_code == 200


@pytest.mark.parametrize(
    ("file", "fields", "what"),
    [
        ("sentence_bert_config.json", {"max_seq_length": 512, "do_lower_case": True}, "do_lower_case"),
        ("config_sentence_transformers.json", {"default_prompt_name": "query"}, "'query'"),
        ("config_sentence_transformers.json", {"default_prompt_name": None, "prompts": {"query": "q"}}, ""),
    ],
)
def test_texts_that_would_be_changed_are_no_silent_matter(tmp_path: Path, file: str, fields: Any, what: str) -> None:
    folder = model_folder(tmp_path, [TRANSFORMER, POOLING], {"pooling_mode_mean_tokens": True})
    (folder / file).write_text(json.dumps(fields))
    found = own_pooling(folder)
    assert (found.pooling is None) == bool(what) and what in found.problem


async def test_a_model_without_normalize_keeps_its_lengths(rig: RouterRig) -> None:
    rig.text.pooling = OwnPooling("mean", False)
    (one,) = (await post(rig, input=[7, 8, 9])).json()["data"]
    assert one["embedding"] == [7, 3, *[1] * 6]
    assert (await post(rig, input=[7, 8, 9], pooling="last")).json()["data"][0]["embedding"] == unit(7, 3, *[1] * 6)
    assert [request.sampling.pooling for request in rig.dispatcher.submitted] == ["mean", "last"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Oracle, Stock]:
    folder = tmp_path_factory.mktemp("embeddings")
    path = write_model("llama", folder / "model")
    adapters = {ADAPTER: write_adapters(path, folder / "adapters")[ADAPTER]}
    return Oracle(path, adapters), Stock.make(path, adapters, folder / "store")


@pytest.fixture
def engine(model: tuple[Oracle, Stock]) -> Iterator[EngineRig]:
    with model[1].engine(200, max_tokens_per_step=16) as rig:
        yield rig


@pytest.mark.parametrize("adapter", [None, ADAPTER])
@pytest.mark.parametrize("pooling", ["last", "mean"])
async def test_embeddings_are_those_of_transformers(
    model: tuple[Oracle, Stock], engine: EngineRig, adapter: str | None, pooling: Any
) -> None:
    oracle, stock = model
    requested = {"model": adapter or BASE, "input": PROMPTS, "pooling": pooling, "encoding_format": "base64"}
    async with client_of(EngineDispatcher(engine), stock, ADAPTER) as client:
        answer = (await client.post("/v1/embeddings", json=requested)).json()
    for prompt, one in zip(PROMPTS, answer["data"], strict=True):
        rows = pooled_positions(pooling, len(prompt))
        expected = oracle.states(prompt, adapter)[rows.start : rows.stop].mean(0).numpy()
        found = np.frombuffer(b64decode(one["embedding"]), "<f4")
        np.testing.assert_allclose(found, expected / np.linalg.norm(expected), atol=1e-4)


async def test_numbers_are_float32_and_may_be_requested_so(rig: RouterRig) -> None:
    assert (await post(rig, input=[7, 8, 9], embed_dtype="float32")).status_code == 200
    assert (await post(rig, input=[7, 8, 9], embed_dtype="float16")).status_code == 400
