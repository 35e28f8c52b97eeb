"""Whose weights made each token, while versions of a name come and go and prefixes of old ones are warm."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest
from msgspec import structs
from redis.asyncio import Redis

from motet.tests.rigs.grammar_tokenizer import write_tokenizer
from motet.tests.rigs.oracle import VOCAB_SIZE
from motet.tests.rigs.served_folder import ServedFolder, served_folder
from motet.tests.rigs.version_markers import files_of, num_wrong, write_base
from motet.workers.wire.messages import SequenceRequest
from motet.workers.wire.page_keys import KeyChain

pytestmark = pytest.mark.slow
NUM_ASKERS, NUM_VERSIONS = 6, 60
PREFIXES = [[1 + place * step % 150 for place in range(length)] for step, length in ((1, 40), (3, 150), (7, 333))]
SETTINGS = {"dtype": "float32", "block_size": 8, "pool_bytes": 3 << 20, "kv_host_bytes": 4 << 20}


class Traffic:
    """Askers of one name and who uploads its versions. `num_tokens`, `num_wrong`: of all answers."""

    def __init__(self, served: ServedFolder, seed: int) -> None:
        self.num_tokens = self.num_wrong = self.num_answers = 0
        self._served, self._rng = served, random.Random(seed)
        self._acknowledged, self._is_over = 0, False

    async def run(self) -> None:
        await self._upload(1)
        askers = [asyncio.create_task(self._ask_on()) for _ in range(NUM_ASKERS)]
        for version in range(2, NUM_VERSIONS + 1):
            await asyncio.sleep(self._rng.uniform(0, 0.1))
            if version % 7 == 0:
                assert (await self._served.http.delete("/v1/adapters/policy")).status_code == 200
            await self._upload(version)
        self._is_over = True
        await asyncio.gather(*askers)

    async def _upload(self, version: int) -> None:
        answer = await self._served.http.post("/v1/adapters", data={"name": "policy"}, files=files_of(version))
        assert answer.status_code == 201 and answer.json()["version"] == version, answer.text
        self._acknowledged = version

    async def _ask_on(self) -> None:
        while not self._is_over:
            prefix = self._rng.choice(PREFIXES)
            prompt = [*prefix[: self._rng.randrange(1, len(prefix))], self._rng.randrange(1, 150)]
            temperature, max_tokens = self._rng.choice((0, 1)), self._rng.randrange(1, 60)
            body = {"model": "policy", "prompt": prompt, "max_tokens": max_tokens, "temperature": temperature}
            acknowledged = self._acknowledged
            answer = await self._served.http.post(
                "/v1/completions", json={**body, "ignore_eos": True, "return_token_ids": True}
            )
            if answer.status_code == 404:  # between a deletion and the next upload
                continue
            assert answer.status_code == 200, answer.text
            version = int(answer.headers["x-motet-version"].removeprefix("policy@"))
            assert version >= acknowledged
            token_ids = answer.json()["choices"][0]["token_ids"]
            assert len(token_ids) == max_tokens
            self.num_answers += 1
            self.num_tokens += max_tokens
            self.num_wrong += num_wrong(token_ids, version)


async def _traffic(folder: Path, redis: Redis, seed: int) -> Traffic:
    base = write_base(folder / "base", VOCAB_SIZE)
    write_tokenizer(base)
    async with served_folder(base, folder / "data", redis, **SETTINGS) as served:
        traffic = Traffic(served, seed)
        await traffic.run()
    return traffic


async def test_each_token_is_of_the_version_that_its_answer_names(
    tmp_path: Path, redis_client: Redis, pytestconfig: pytest.Config
) -> None:
    traffic = await _traffic(tmp_path, redis_client, pytestconfig.getoption("first_seed"))
    assert traffic.num_answers > NUM_VERSIONS and traffic.num_tokens > 1000
    assert traffic.num_wrong == 0


async def test_pages_of_an_old_version_would_show(
    tmp_path: Path, redis_client: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With keys of pages that do not say whose they are."""
    key_chain = KeyChain.of

    def of(request: SequenceRequest, block_size: int) -> KeyChain:
        return key_chain(structs.replace(request, adapter=None), block_size)

    monkeypatch.setattr(KeyChain, "of", staticmethod(of))
    assert (await _traffic(tmp_path, redis_client, 0)).num_wrong > 100
