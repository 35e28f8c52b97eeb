"""Sequence classifiers and reward models, from their uploads to labels and scores over HTTP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from redis.asyncio import Redis

from motet.tests.rigs.classifiers import classifier_logits, write_classifier
from motet.tests.rigs.grammar_tokenizer import write_tokenizer
from motet.tests.rigs.oracle import write_model
from motet.tests.rigs.router_rig import KEYS
from motet.tests.rigs.served_folder import served_folder

pytestmark = pytest.mark.slow
TOLERANCE = 1e-4
PROMPTS = [[10 + place % 50 for place in range(30)], [66, 12, 15, 41, 23]]
OTHER_KEY = next(key for key, tenant in KEYS.items() if tenant != "acme")


async def test_classifiers_are_served(tmp_path: Path, redis_client: Redis) -> None:
    folder = write_model("qwen3", tmp_path / "model")
    write_tokenizer(folder)
    labels = {"mood": 3, "reward": 1}
    adapters = {name: write_classifier(folder, tmp_path / name, count) for name, count in labels.items()}
    others = write_classifier(folder, tmp_path / "others", 3, seed=8)
    settings = {"dtype": "float32", "block_size": 8, "pool_bytes": 1 << 23}
    async with served_folder(folder, tmp_path / "data", redis_client, **settings) as served:

        async def done(path: str, key: str | None = None, **fields: Any) -> Any:
            headers = {} if key is None else {"Authorization": f"Bearer {key}"}
            answer = await served.http.post(path, json=fields, headers=headers)
            assert answer.status_code == 200, answer.text
            return answer.json()

        for name, adapter in adapters.items():
            await served.upload(name, adapter)
            seen = (await served.http.get(f"/v1/adapters/{name}")).json()
            assert (seen["num_labels"], seen["targets"]) == (labels[name], ["q_proj", "down_proj"])
        files = {file: (others / file).read_bytes() for file in ("adapter_config.json", "adapter_model.safetensors")}
        theirs = {"Authorization": f"Bearer {OTHER_KEY}"}
        uploaded = await served.http.post("/v1/adapters", data={"name": "mood"}, files=files, headers=theirs)
        assert uploaded.status_code == 201, uploaded.text

        for name, key, adapter in (
            ("mood", None, adapters["mood"]),
            ("mood", OTHER_KEY, others),
            ("reward", None, adapters["reward"]),
        ):
            expected = classifier_logits(folder, adapter, labels[name], PROMPTS)
            raw = await done("/classify", key, model=name, input=PROMPTS, use_activation=False)
            for one, logits in zip(raw["data"], expected, strict=True):
                torch.testing.assert_close(torch.tensor(one["probs"]), logits, atol=TOLERANCE, rtol=TOLERANCE)
        request = {"model": "reward", "input": PROMPTS}
        assert (await served.http.post("/classify", json=request, headers=theirs)).status_code == 404

        query, documents = "abc", ["abcd a", "d", "cabb"]
        tokens = [(await done("/tokenize", model="reward", prompt=text))["tokens"] for text in (query, *documents)]
        pairs = [[*tokens[0], *document] for document in tokens[1:]]
        rewards = torch.cat(classifier_logits(folder, adapters["reward"], 1, pairs)).sigmoid()
        scored = await done("/v1/score", model="reward", text_1=query, text_2=documents)
        scores = torch.tensor([pair["score"] for pair in scored["data"]])
        torch.testing.assert_close(scores, rewards, atol=TOLERANCE, rtol=0)
        ranked = await done("/v2/rerank", model="reward", query=query, documents=documents)
        assert [one["index"] for one in ranked["results"]] == rewards.argsort(descending=True).tolist()

        refused = await served.http.post("/v1/completions", json={"model": "reward", "prompt": PROMPTS[0]})
        assert refused.status_code == 400 and "/v1/classify" in refused.text
        assert len((await done("/v1/embeddings", model="reward", input=PROMPTS))["data"]) == 2
