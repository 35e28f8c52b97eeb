"""An activated LoRA from its upload to its turn in a conversation, over HTTP."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from redis.asyncio import Redis

from motet.tests.rigs.grammar_tokenizer import write_tokenizer
from motet.tests.rigs.oracle import write_adapters, write_model
from motet.tests.rigs.served_folder import served_folder

pytestmark = pytest.mark.slow
INVOCATION = [3, 5]
FIELDS = {"max_tokens": 8, "temperature": 0, "ignore_eos": True, "return_token_ids": True}


async def test_the_bases_pages_serve_it_until_it_is_invoked(tmp_path: Path, redis_client: Redis) -> None:
    folder = write_model("llama", tmp_path / "model")
    write_tokenizer(folder)
    adapter = write_adapters(folder, tmp_path / "adapters")["rank8"]
    config_path = adapter / "adapter_config.json"
    config = json.loads(config_path.read_text())
    conversation = [10 + place % 50 for place in range(60)]
    turn = [*conversation, *INVOCATION, 20, 21]
    settings = {"dtype": "float32", "block_size": 8, "pool_bytes": 1 << 23}
    async with served_folder(folder, tmp_path / "data", redis_client, **settings) as served:
        await served.upload("plain", adapter)
        config_path.write_text(json.dumps({**config, "alora_invocation_tokens": INVOCATION}))
        await served.upload("activated", adapter)
        seen = (await served.http.get("/v1/adapters/activated")).json()
        assert seen["invocation_token_ids"] == INVOCATION
        assert seen["digest"] != (await served.http.get("/v1/adapters/plain")).json()["digest"]

        async def ask(model: str | None, prompt: list[int]) -> tuple[list[int], int]:
            answer = (await served.complete(model, prompt, **FIELDS)).json()
            return answer["choices"][0]["token_ids"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]

        of_base, _ = await ask(None, conversation)
        token_ids, num_cached = await ask("activated", turn)
        assert num_cached == 56
        assert token_ids != (await ask("plain", turn))[0] and token_ids != (await ask(None, turn))[0]
        assert await ask("activated", conversation) == (of_base, 59)  # it is not invoked, and the last page is copied
        assert await ask("activated", [*INVOCATION, *conversation]) == (
            (await ask("plain", [*INVOCATION, *conversation]))[0],
            0,
        )
