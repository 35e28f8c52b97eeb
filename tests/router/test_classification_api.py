"""/classify, /score and /rerank: as vLLM's, and in front of an engine by the logits of transformers + PEFT."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import AddedToken
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from motet.adapters.adapter import AdapterVersion
from motet.adapters.errors import AdapterCorrupt, StoreUnavailable
from motet.adapters.format.score_head import ScoreHead
from motet.router import classification
from motet.router.bodies.request_decoder import BODY_KINDS, RequestDecoder, packed, unpacked
from motet.router.classification import ScoreHeads
from motet.router.text.model_tokenizer import own_pad_id
from motet.router.text.text import TextService
from motet.tests.rigs.classifiers import classifier_logits, write_classifier
from motet.tests.rigs.engine_dispatcher import EngineDispatcher, client_of
from motet.tests.rigs.engine_rig import EngineRig, Stock
from motet.tests.rigs.oracle import write_model
from motet.tests.rigs.router_rig import BASE, KEYS, RouterRig, byte_level_tokenizer, text_service

PROMPTS = [[5, 80, 33, 120, 7, 99, 140, 2], [66, 12, 150, 41, 23]]
ROUTES = {
    "classify": ("/classify", "/v1/classify"),
    "score": ("/score", "/v1/score"),
    "rerank": ("/rerank", "/v1/rerank", "/v2/rerank"),
}
CHAT = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "the fox"}]
# Of states that begin with the first token and the prompt's length: see `embedding_of`.
FIRST = ScoreHead(np.eye(1, 8, dtype=np.float32) / 64)
LENGTH = ScoreHead(np.eye(1, 8, 1, dtype=np.float32))
BOTH = ScoreHead(np.eye(3, 8, dtype=np.float32) / 64, np.array([0, 0, 1], np.float32))


@pytest.fixture
def rig(tmp_path: Path) -> RouterRig:
    rig = RouterRig(tmp_path / "spool", text_service())
    for name, head in {"first": FIRST, "length": LENGTH, "both": BOTH}.items():
        rig.registry.add("acme", name, digest=name[0] * 64, head=head)
    rig.registry.add("acme", "plain")
    return rig


async def post_as(key: str, rig: RouterRig, path: str, **fields: Any) -> Any:
    async with rig.client() as client:
        return await client.post(path, json=fields, headers={"Authorization": f"Bearer {key}"})


async def post(rig: RouterRig, path: str, **fields: Any) -> Any:
    return await post_as("key-of-acme", rig, path, **fields)


def softmax(numbers: list[float]) -> Any:
    powers = np.exp(np.array(numbers))
    return pytest.approx(list(powers / powers.sum()), abs=1e-6)


def sigmoid(number: float) -> Any:
    return pytest.approx(1 / (1 + np.exp(-number)), abs=1e-6)


@pytest.mark.parametrize("path", ROUTES["classify"])
async def test_classes_of_texts(rig: RouterRig, path: str) -> None:
    answer = (await post(rig, path, model="both", input=[[200, 8, 9], [3], [3] * 130])).json()
    assert answer["id"].startswith("classify-") and answer["created"] > 1.7e9
    assert (answer["object"], answer["model"]) == ("list", "both")
    assert answer["usage"] == {"prompt_tokens": 134, "total_tokens": 134}
    expected = [[200, 3, 65], [3, 1, 65], [3, 130, 65]]
    assert answer["data"] == [
        {"index": index, "label": label, "probs": softmax([part / 64 for part in parts]), "num_classes": 3}
        for index, (parts, label) in enumerate(zip(expected, ["LABEL_0", "LABEL_2", "LABEL_1"], strict=True))
    ]
    assert {request.sampling.pooling for request in rig.dispatcher.submitted} == {"last"}
    assert {request.sampling.max_tokens for request in rig.dispatcher.submitted} == {0}
    for field in ("use_activation", "activation", "softmax"):
        raw = (await post(rig, path, model="both", input=[200, 8, 9], **{field: False})).json()
        assert raw["data"][0]["probs"] == [part / 64 for part in expected[0]]
    one = (await post(rig, path, model="first", input="hello")).json()["data"][0]
    assert one["probs"] == [sigmoid(rig.ids("hello")[0] / 64)] and one["label"] == "LABEL_0"


async def test_a_chat_is_classified_as_the_template_renders_it(rig: RouterRig) -> None:
    """Without the beginning of an answer, as reward models are trained."""
    ended = "<|start|>user: hello<|end|><|start|>assistant: the fox<|end|>"
    for more, text in (({}, ended), ({"add_generation_prompt": True}, f"{ended}<|start|>assistant: ")):
        answer = await post(rig, "/v1/classify", model="length", messages=CHAT, use_activation=False, **more)
        assert answer.json()["data"][0]["probs"] == [len(rig.ids(text))]
        assert rig.dispatcher.submitted[-1].prompt_token_ids == rig.ids(text)


async def test_a_chat_is_rendered_by_the_adapters_own_template(rig: RouterRig) -> None:
    template = "{% for m in messages %}{{ m.content }};{% endfor %}"
    rig.registry.add("acme", "own", "e" * 64, chat_template=template, head=LENGTH)
    assert (await post(rig, "/v1/classify", model="own", messages=CHAT)).status_code == 200
    assert rig.dispatcher.submitted[-1].prompt_token_ids == rig.ids("hello;the fox;")


@pytest.mark.parametrize("path", ROUTES["score"])
async def test_scores_of_pairs(rig: RouterRig, path: str) -> None:
    texts = ["hello", "the fox", "jumps over"]
    names = {"text_1": "text_2", "queries": "documents"}
    for first, second in names.items():
        answer = (await post(rig, path, model="length", **{first: "the", second: texts}, use_activation=False)).json()
        assert answer["id"].startswith("score-") and answer["object"] == "list"
        assert answer["data"] == [
            {"index": index, "object": "score", "score": len(rig.ids("the")) + len(rig.ids(text))}
            for index, text in enumerate(texts)
        ]
        pairs = (await post(rig, path, model="length", **{first: texts, second: texts}, use_activation=False)).json()
        assert [pair["score"] for pair in pairs["data"]] == [2 * len(rig.ids(text)) for text in texts]
    one = (await post(rig, path, model="first", text_1="the", text_2="fox")).json()
    assert one["data"] == [{"index": 0, "object": "score", "score": sigmoid(rig.ids("the")[0] / 64)}]


@pytest.mark.parametrize("path", ROUTES["rerank"])
async def test_documents_in_order(rig: RouterRig, path: str) -> None:
    documents: list[Any] = ["fox", "the quick brown fox jumps", {"text": "hello jumps"}, "fox"]
    query: dict[str, Any] = {"model": "length", "query": "the", "use_activation": False}
    answer = (await post(rig, path, documents=documents, **query)).json()
    assert answer["id"].startswith("rerank-") and answer["model"] == "length"
    texts = [each if isinstance(each, str) else each["text"] for each in documents]
    scores = [len(rig.ids("the")) + len(rig.ids(text)) for text in texts]
    order = sorted(range(4), key=lambda index: -scores[index])
    assert [result["index"] for result in answer["results"]] == order != [*range(4)]
    for result in answer["results"]:
        assert result["relevance_score"] == scores[result["index"]]
        assert result["document"] == {"text": texts[result["index"]]}
    assert answer["usage"]["total_tokens"] == sum(scores)
    best = (await post(rig, path, documents=documents, top_n=2, return_documents=False, **query)).json()
    assert best["results"] == [{"index": index, "relevance_score": scores[index]} for index in order[:2]]


async def test_numbers_whose_probabilities_are_equal_have_an_order_too(rig: RouterRig) -> None:
    """Rewards of 20 and more have the sigmoid 1.0 in float32."""
    answer = await post(rig, "/v1/rerank", model="length", query="the", documents=["fox " * 20, "fox " * 40], top_n=1)
    (best,) = answer.json()["results"]
    assert (best["index"], best["relevance_score"]) == (1, 1.0)
    steep = ScoreHead(np.array([[1], [1 + 2**-23]], np.float32) * np.eye(1, 8, dtype=np.float32) / 64)
    rig.registry.add("acme", "steep", "5" * 64, head=steep)
    (label,) = (await post(rig, "/v1/classify", model="steep", input=[[1]])).json()["data"]
    assert (label["label"], label["probs"]) == ("LABEL_1", [0.5, 0.5])


def with_marks(pair: str) -> tuple[TextService, PreTrainedTokenizerFast]:
    tokenizer = byte_level_tokenizer()
    tokenizer.add_special_tokens([AddedToken("<|sep|>", special=True)])
    marks = [(name, tokenizer.token_to_id(name)) for name in ("<|start|>", "<|end|>", "<|sep|>")]
    tokenizer.post_processor = TemplateProcessing(single="<|start|> $A", pair=pair, special_tokens=marks)
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    return TextService(wrapped), wrapped


@pytest.mark.parametrize("pair", ["$A $B", "<|start|> $A <|start|> $B", "<|start|> $A <|sep|> <|sep|> $B <|end|>"])
@pytest.mark.parametrize("special", [True, False])
async def test_pairs_are_joined_as_the_tokenizer_does(tmp_path: Path, pair: str, special: bool) -> None:
    text, tokenizer = with_marks(pair)
    rig = RouterRig(tmp_path / "spool", text)
    rig.registry.add("acme", "x", head=FIRST)
    queries, documents = ["héllo 你好", "the", " a"], ["quick fox", "", "<|end|> a"]
    fields: dict[str, Any] = {"model": "x", "queries": queries, "documents": documents, "add_special_tokens": special}
    assert (await post(rig, "/score", **fields)).status_code == 200
    expected = tokenizer(queries, documents, add_special_tokens=special)["input_ids"]
    assert [request.prompt_token_ids for request in rig.dispatcher.submitted] == expected


async def test_padding_at_the_end_is_passed_over(rig: RouterRig, tmp_path: Path) -> None:
    """As a classifier of transformers does, by the token that the model's config names."""
    model = write_model("llama", tmp_path / "padded", pad_token_id=9)
    assert own_pad_id(model) == 9
    rig.text._pad_id = 9
    prompts = [[5, 9, 7, 9, 9], [5, 9, 7], [9, 9]]
    folder = write_classifier(model, tmp_path / "classifier", 2)
    ended, whole = [5, 9, 7], classifier_logits(model, folder, 2, prompts)
    assert (await post(rig, "/classify", model="both", input=prompts)).status_code == 200
    assert [request.prompt_token_ids for request in rig.dispatcher.submitted] == [ended, ended, [9]]
    for logits, cut in zip(whole, classifier_logits(model, folder, 2, [ended, ended, [9]]), strict=True):
        torch.testing.assert_close(logits, cut, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/classify", {}, "input"),
        ("/classify", {"input": "a", "messages": CHAT}, "input"),
        ("/classify", {"input": []}, "input"),
        ("/classify", {"input": ["a", ""]}, "input[1]"),
        ("/classify", {"input": ["a", 1]}, "input[1]"),
        ("/classify", {"input": [[1], [320]]}, "input[1][0]"),
        ("/classify", {"input": [5] * 2000}, "input"),
        ("/classify", {"input": ["a"] * 2049}, "input"),
        ("/classify", {"input": "a", "tools": []}, "tools"),
        ("/classify", {"messages": []}, "messages"),
        ("/classify", {"messages": CHAT, "chat_template": "{{ x }}"}, "chat_template"),
        ("/classify", {"messages": [{"role": "user", "content": "a " * 2000}]}, "messages"),
        ("/classify", {"messages": [{"role": "user", "content": "aq" * 110}] * 3}, "messages"),
        ("/score", {"text_1": "a"}, "text_2"),
        ("/score", {"text_2": "a"}, "text_1"),
        ("/score", {"text_1": "a", "queries": "a", "text_2": "b"}, "text_1"),
        ("/score", {"text_1": ["a", "b"], "text_2": ["a"]}, "text_1"),
        ("/score", {"text_1": [], "text_2": ["a"]}, "text_1"),
        ("/score", {"text_1": "a", "text_2": []}, "text_2"),
        ("/score", {"text_1": "a", "text_2": ["a"] * 2049}, "documents"),
        ("/score", {"text_1": "", "text_2": ["a", ""]}, "documents[1]"),
        ("/score", {"text_1": "a", "text_2": "b", "truncate_prompt_tokens": 3}, "truncate_prompt_tokens"),
        ("/score", {"text_1": "a" * (1 << 14), "text_2": ["b"] * 1024}, "text_2"),
        ("/rerank", {"query": "a"}, "documents"),
        ("/rerank", {"query": "a", "documents": []}, "documents"),
        ("/rerank", {"query": "a", "documents": [{"txt": "b"}]}, "documents[0].text"),
        ("/rerank", {"query": "a", "documents": ["b"], "top_n": -1}, "top_n"),
        ("/rerank", {"query": "a", "documents": ["b"], "max_tokens_per_doc": 4}, "max_tokens_per_doc"),
        ("/rerank", {"query": "a", "documents": ["b"], "rank_fields": ["x"]}, "rank_fields"),
        ("/rerank", {"query": "a q" * 60, "documents": ["b c" * 60]}, "documents"),
    ],
)
async def test_bad_requests_name_the_field(rig: RouterRig, path: str, fields: dict[str, Any], param: str) -> None:
    answer = await post(rig, path, model="first", **fields)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param, answer.text
    assert not rig.dispatcher.submitted


@pytest.mark.parametrize("path", [path for paths in ROUTES.values() for path in paths])
async def test_models_without_a_head(rig: RouterRig, path: str) -> None:
    fields: dict[str, Any] = {"input": "a"} if "classify" in path else {"text_1": "a", "text_2": "b"}
    fields = {"query": "a", "documents": ["b"]} if "rerank" in path else fields
    for model in (BASE, "plain"):
        refused = await post(rig, path, model=model, **fields)
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "model"
        assert "SEQ_CLS" in refused.json()["error"]["message"]
    if "classify" not in path:
        refused = await post(rig, path, model="both", **fields)
        assert refused.status_code == 400 and "/v1/classify" in refused.json()["error"]["message"]
    assert (await post(rig, path, model="unknown", **fields)).status_code == 404
    assert not rig.dispatcher.submitted


async def test_classifiers_generate_no_text(rig: RouterRig) -> None:
    """They were trained without the head of the vocabulary. Their states are embeddings as any others'."""
    chat: dict[str, Any] = {"messages": CHAT[:1]}
    requests: dict[str, dict[str, Any]] = {
        "/v1/completions": {"prompt": "a"},
        "/v1/chat/completions": chat,
        "/v1/responses": {"input": "a"},
        "/v1/messages": chat | {"max_tokens": 4},
    }
    for path, fields in requests.items():
        refused = await post(rig, path, model="first", **fields)
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "model", refused.text
        assert "/v1/rerank" in refused.json()["error"]["message"]
        assert (await post(rig, path, model="plain", **fields)).status_code == 200
    assert (await post(rig, "/v1/embeddings", model="first", input="a")).status_code == 200
    assert (await post(rig, "/tokenize", model="first", prompt="a")).status_code == 200


async def test_a_tenant_never_has_anothers_head(rig: RouterRig) -> None:
    """Also not of an adapter of the same digest: each tenant's is read by itself."""
    fields: dict[str, Any] = {"model": "first", "input": [64], "use_activation": False}
    assert (await post(rig, "/classify", **fields)).json()["data"][0]["probs"] == [1]
    other = next(key for key, tenant in KEYS.items() if tenant == "zenith")
    assert (await post_as(other, rig, "/classify", **fields)).status_code == 404
    rig.registry.add("zenith", "first", digest="f" * 64, head=BOTH)  # no real digest: it has another head
    assert len((await post_as(other, rig, "/classify", **fields)).json()["data"][0]["probs"]) == 3
    rig.registry.heads["f" * 64] = RuntimeError("read again")
    assert (await post(rig, "/classify", **fields)).json()["data"][0]["probs"] == [1]


async def test_a_head_that_cannot_be_read(rig: RouterRig) -> None:
    for error, status, code in (
        (AdapterCorrupt("the head is damaged: upload it again"), 500, "adapter_failed"),
        (StoreUnavailable("the store is away"), 503, "store_unavailable"),
    ):
        rig.registry.heads["b" * 64] = error
        answer = await post(rig, "/classify", model="both", input="a")
        assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
        assert str(error) in answer.json()["error"]["message"]
    assert not rig.dispatcher.submitted, "before anything is computed"
    rig.registry.heads["b" * 64] = BOTH
    assert (await post(rig, "/classify", model="both", input="a")).status_code == 200
    num_read = rig.registry.num_read_heads
    assert (await post(rig, "/classify", model="both", input="a")).status_code == 200
    assert rig.registry.num_read_heads == num_read


async def test_numbers_that_overflow(rig: RouterRig) -> None:
    rig.registry.add("acme", "huge", head=ScoreHead(np.full((2, 8), 3e38, np.float32)))
    answer = await post(rig, "/classify", model="huge", input="a")
    assert (answer.status_code, answer.json()["error"]["code"]) == (422, "adapter_overflow")


async def test_heads_in_memory_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """By their bytes, the last used ones stay, and what is used is right whatever goes."""
    monkeypatch.setattr(classification, "MAX_KEPT_BYTES", 100)
    reads: list[str] = []

    async def read(version: AdapterVersion) -> ScoreHead:
        reads.append(version.digest)
        await asyncio.sleep(0)
        return ScoreHead(np.ones((1, 8), np.float32))

    heads = ScoreHeads(read)

    def version(digest: str) -> AdapterVersion:
        return AdapterVersion("acme", "x", 1, digest, {}, 1, 1.0, num_labels=1)

    for digest in "abcab":  # 32 bytes each
        await heads.check("acme", version(digest))
    assert reads == [*"abc"]
    await heads.check("zenith", version("a"))
    assert reads == [*"abca"], "a tenant reads its own"
    for digest in "bca":  # a was used least
        await heads.check("acme", version(digest))
    assert reads == [*"abcaa"]
    await asyncio.gather(*(heads.check(tenant, version(digest)) for tenant in "uvw" for digest in "abcd"))
    assert heads._num_bytes == sum(head.num_bytes for head in heads._heads.values()) <= 100


async def test_more_numbers_than_an_answer_has_are_refused(rig: RouterRig) -> None:
    rig.registry.add("acme", "wide", head=ScoreHead(np.zeros((4096, 8), np.float32)))
    refused = await post(rig, "/classify", model="wide", input=["a"] * 513)
    assert refused.status_code == 400 and "at most 512" in refused.json()["error"]["message"]
    assert (await post(rig, "/classify", model="wide", input=["a"] * 512)).status_code == 200


@pytest.mark.parametrize("decoded", [{"input": ["a", "b"]}, {"input": "a"}, {"input": [5, 6]}, {"messages": CHAT}])
def test_requests_travel_between_processes(decoded: dict[str, Any]) -> None:
    kind = next(kind for kind in BODY_KINDS if kind.__name__ == "ClassifyPrompts")
    request = RequestDecoder(kind).decode(json.dumps({"model": "x", **decoded}).encode())
    assert unpacked(packed(request), kind) == request


async def test_large_bodies(rig: RouterRig) -> None:
    """Which another process decodes."""
    documents = [f"fox {number}" for number in range(2000)]
    answer = (await post(rig, "/rerank", model="length", query="the " * 8, documents=documents, timeout=None)).json()
    assert len(answer["results"]) == 2000
    padded: dict[str, Any] = {"user": None, "messages": CHAT, "chat_template_kwargs": {"unused": "x" * (70 << 10)}}
    answer = await post(rig, "/classify", model="first", **padded)
    assert answer.status_code == 200, answer.text


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Path], Stock]:
    folder = tmp_path_factory.mktemp("classifiers")
    path = write_model("gemma2", folder / "model")
    adapters = {str(count): write_classifier(path, folder / str(count), count, seed=count) for count in (1, 4)}
    return path, adapters, Stock.make(path, adapters, folder / "store")


@pytest.fixture
def engine(model: tuple[Path, dict[str, Path], Stock]) -> Iterator[EngineRig]:
    with model[2].engine(200, max_tokens_per_step=16) as rig:
        yield rig


@pytest.mark.parametrize("num_labels", [1, 4])
async def test_logits_are_those_of_transformers(
    model: tuple[Path, dict[str, Path], Stock], engine: EngineRig, num_labels: int
) -> None:
    path, adapters, stock = model
    name = str(num_labels)
    expected = classifier_logits(path, adapters[name], num_labels, PROMPTS)
    async with client_of(EngineDispatcher(engine), stock, *adapters) as client:
        request = {"model": name, "input": PROMPTS}
        answer = (await client.post("/classify", json=request)).json()
        raw = (await client.post("/classify", json=request | {"use_activation": False})).json()
    for logits, one, own in zip(expected, answer["data"], raw["data"], strict=True):
        torch.testing.assert_close(torch.tensor(own["probs"]), logits, atol=1e-4, rtol=1e-4)
        probabilities = logits.sigmoid() if num_labels == 1 else logits.softmax(-1)
        torch.testing.assert_close(torch.tensor(one["probs"]), probabilities, atol=1e-5, rtol=0)
        assert one["label"] == f"LABEL_{logits.argmax()}" and one["num_classes"] == num_labels
