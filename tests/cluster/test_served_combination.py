"""An adapter made of two, over HTTP, from the call to its tokens: those of PEFT's `add_weighted_adapter`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from peft import PeftModel
from redis.asyncio import Redis
from transformers import AutoModelForCausalLM

from motet.tests.rigs.grammar_tokenizer import write_tokenizer
from motet.tests.rigs.oracle import write_adapters, write_model
from motet.tests.rigs.served_folder import ServedFolder, served_folder

pytestmark = pytest.mark.slow
TOLERANCE = 4e-4  # of log-probabilities in float32
PARTS, WEIGHTS = ("rank8", "rank3"), (0.6, -0.3)
PROMPT = [10 + place % 50 for place in range(30)]
NUM_TOKENS = 8


async def _combine(served: ServedFolder, **body: Any) -> httpx.Response:
    parts = [{"adapter": name, "weight": weight} for name, weight in zip(PARTS, WEIGHTS, strict=True)]
    return await served.http.post("/v1/adapter_combinations", json={"name": "mix", "adapters": parts, **body})


async def test_it_answers_as_pefts_combination(tmp_path: Path, redis_client: Redis) -> None:
    folder = write_model("llama", tmp_path / "model")
    write_tokenizer(folder)
    adapters = write_adapters(folder, tmp_path / "adapters")
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model = PeftModel.from_pretrained(base, adapters[PARTS[0]], adapter_name=PARTS[0])
    model.load_adapter(adapters[PARTS[1]], adapter_name=PARTS[1])
    model.add_weighted_adapter([*PARTS], [*WEIGHTS], "mix", combination_type="cat")
    model.set_adapter("mix")
    settings = {"dtype": "float32", "block_size": 8, "pool_bytes": 1 << 23}
    async with served_folder(folder, tmp_path / "data", redis_client, **settings) as served:
        for name in PARTS:
            await served.upload(name, adapters[name])
        made = await _combine(served)
        assert made.status_code == 201, made.text
        ranks = [json.loads((adapters[name] / "adapter_config.json").read_text())["r"] for name in PARTS]
        assert (made.json()["version"], made.json()["rank"]) == (1, sum(ranks))
        again = await _combine(served)
        assert (again.status_code, again.json()["digest"]) == (200, made.json()["digest"])
        for name in PARTS:  # it needs them no longer
            assert (await served.http.delete(f"/v1/adapters/{name}")).status_code == 200
        fields = {"max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True, "logprobs": 0}
        answer = (await served.complete("mix", PROMPT, return_token_ids=True, **fields)).json()["choices"][0]
        token_ids = [*PROMPT]
        for token_id, logprob in zip(answer["token_ids"], answer["logprobs"]["token_logprobs"], strict=True):
            with torch.inference_mode():
                logprobs = model(input_ids=torch.tensor([token_ids])).logits[0, -1].log_softmax(-1)
            assert token_id == int(logprobs.argmax())
            assert abs(logprob - float(logprobs.max())) < TOLERANCE
            token_ids.append(token_id)

        refused = await _combine(served)
        assert (refused.status_code, refused.json()["error"]["code"]) == (404, "adapter_not_found")


async def test_what_is_not_there_or_cannot_be_is_said(tmp_path: Path, redis_client: Redis) -> None:
    folder = write_model("llama", tmp_path / "model")
    write_tokenizer(folder)
    adapters = write_adapters(folder, tmp_path / "adapters")
    async with served_folder(folder, tmp_path / "data", redis_client, dtype="float32", pool_bytes=1 << 23) as served:
        for name in PARTS:
            await served.upload(name, adapters[name])

        async def error(adapters: list[dict[str, Any]], **body: Any) -> tuple[int, str]:
            answer = await _combine(served, adapters=adapters, **body)
            return answer.status_code, answer.json()["error"]["message"]

        assert await error([{"adapter": "rank8@7"}]) == (
            404,
            "rank8@7 does not exist: there is no such version or alias",
        )
        status, message = await error([{"adapter": "rank8", "weight": 0}])
        assert status == 400 and "a finite number other than 0" in message
        status, message = await error([{"adapter": "rank8"}, {"adapter": "rank3"}], combination_type="linear")
        assert status == 400 and "linear needs adapters of one rank" in message
        status, message = await error([{"adapter": "rank8"}], combination_type="ties")
        assert status == 400 and "ties needs a density" in message
        status, _ = await error([{"adapter": "rank8"}], combination_type="average")
        assert status == 400
        assert (await error([{"adapter": "rank8"}] * 9))[0] == 400
        others = {"name": "mine", "adapters": [{"adapter": "rank8"}]}
        answer = await served.http.post(
            "/v1/adapter_combinations", json=others, headers={"Authorization": "Bearer key-of-zenith"}
        )
        assert answer.status_code == 404
        listed = (await served.http.get("/v1/adapters")).json()["data"]
        assert sorted(adapter["name"] for adapter in listed) == sorted(PARTS)
