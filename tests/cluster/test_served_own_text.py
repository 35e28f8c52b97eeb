"""An adapter's own chat template and tokens from its upload to its answers, over HTTP."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from redis.asyncio import Redis
from transformers import AutoModelForCausalLM

from motet.adapters.format.own_tokenizer import template_digest
from motet.adapters.store.store import AdapterStore
from motet.cluster.client.client import MotetClient
from motet.tests.rigs.grammar_tokenizer import write_tokenizer
from motet.tests.rigs.oracle import write_adapters, write_model
from motet.tests.rigs.router_rig import KEYS
from motet.tests.rigs.served_folder import served_folder

pytestmark = pytest.mark.slow
OWN = "{% for message in messages %}{{ message.content }} {{ message.role }}{% endfor %}"
OF_BASE = "{% for message in messages %}{{ message.role }} says: {{ message.content }}{% endfor %}"
CHAT = {"messages": [{"role": "user", "content": "abc"}], "max_tokens": 4, "temperature": 0}


async def test_a_versions_chats_are_rendered_by_its_template(tmp_path: Path, redis_client: Redis) -> None:
    folder = write_model("llama", tmp_path / "model")
    write_tokenizer(folder)
    (folder / "chat_template.jinja").write_text(OF_BASE)
    adapter = write_adapters(folder, tmp_path / "adapters")["rank8"]
    settings = {"dtype": "float32", "block_size": 8, "pool_bytes": 1 << 23}
    async with served_folder(folder, tmp_path / "data", redis_client, **settings) as served:

        async def tokens(model: str) -> list[int]:
            answer = await served.http.post("/tokenize", json={"model": model, **CHAT})
            assert answer.status_code == 200, answer.text
            found: list[int] = answer.json()["tokens"]
            return found

        async def num_prompt_tokens(model: str) -> int:
            answer = await served.http.post("/v1/chat/completions", json={"model": model, **CHAT})
            assert answer.status_code == 200, answer.text
            number: int = answer.json()["usage"]["prompt_tokens"]
            return number

        await served.upload("pirate", adapter)
        (adapter / "chat_template.jinja").write_text(OWN)
        key = next(key for key, tenant in KEYS.items() if tenant == "acme")
        with MotetClient(str(served.http.base_url), key) as client:
            info, is_new = await asyncio.to_thread(client.upload_adapter, "pirate", adapter)
            again, is_newer = await asyncio.to_thread(client.upload_adapter, "pirate", adapter)
        assert (info.version, is_new, again.version, is_newer) == (2, True, 2, False)
        seen = (await served.http.get("/v1/adapters/pirate")).json()
        assert seen["own_text"] == template_digest(OWN)
        own = (await served.http.post("/tokenize", json={"prompt": "abc user"})).json()["tokens"]
        of_base = await tokens(served.base)
        assert await tokens("pirate") == await tokens("pirate@2") == own != of_base == await tokens("pirate@1")
        assert await num_prompt_tokens("pirate") == len(own)
        promoted = await served.http.post("/v1/adapters/pirate/promote", json={"version": "1"})
        assert promoted.status_code == 200, promoted.text
        assert await tokens("pirate") == of_base and await tokens("pirate@2") == own
        assert await num_prompt_tokens("pirate@2") == len(own)
    (file,) = (tmp_path / "data").rglob("*.jinja")
    assert file.parent.name in AdapterStore(file.parents[2]).digests() and file.read_text() == OWN


async def test_a_versions_answers_end_with_its_token(tmp_path: Path, redis_client: Redis) -> None:
    """It stands in the place of one that the base reserves, as trainers do where the vocabulary has no room."""
    folder = write_model("llama", tmp_path / "model")
    write_tokenizer(folder)
    adapter = write_adapters(folder, tmp_path / "adapters")["rank8"]
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    reserved = next(token for token in tokenizer["added_tokens"] if token["content"] == "<pad3>")
    reserved["content"] = "<over>"
    (adapter / "tokenizer.json").write_text(json.dumps(tokenizer))
    (adapter / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<over>"}))
    settings = {"dtype": "float32", "block_size": 8, "pool_bytes": 1 << 23}
    async with served_folder(folder, tmp_path / "data", redis_client, **settings) as served:
        key = next(key for key, tenant in KEYS.items() if tenant == "acme")
        with MotetClient(str(served.http.base_url), key) as client:
            info, _ = await asyncio.to_thread(client.upload_adapter, "pirate", adapter)
        assert "own_text" in info.fields and "<over>" in str(info.warnings), "it is not trained"
        for model, name in (("pirate", "<over>"), (served.base, "<pad3>")):
            fields = {"prompt": f"ab{name}", "max_tokens": 3, "logit_bias": {reserved["id"]: 100}, "temperature": 0}
            answer = await served.http.post("/v1/completions", json={"model": model, "logprobs": 0, **fields})
            assert answer.status_code == 200, answer.text
            (choice,) = answer.json()["choices"]
            num_tokens = answer.json()["usage"]["completion_tokens"]
            ends = model == "pirate"
            assert (choice["finish_reason"], num_tokens) == (("stop", 1) if ends else ("length", 3))
            assert (choice["text"], choice["stop_reason"]) == ("", None)
            tokens = (await served.http.post("/tokenize", json={"model": model, **fields})).json()["tokens"]
            assert tokens[-1] == reserved["id"]


async def test_a_token_is_read_as_it_was_trained(tmp_path: Path, redis_client: Redis) -> None:
    """A tokenizer with a token of its own, its trained row, and LoRA of the head: the answers of PEFT."""
    folder = write_model("llama", tmp_path / "model")
    write_tokenizer(folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    reserved = next(token for token in tokenizer["added_tokens"] if token["content"] == "<pad3>")
    reserved["content"] = "<act>"
    other = next(token for token in tokenizer["added_tokens"] if token["content"] == "<pad1>")
    other["content"] = "<idle>"
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    rows = {"embed_tokens": [reserved["id"]]}
    config = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "lm_head"], trainable_token_indices=rows)
    model, generator = get_peft_model(base, config).eval(), torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            parameter.data = torch.randn(parameter.shape, generator=generator) * (2 if "token" in name else 0.3)
    model.save_pretrained(tmp_path / "adapter")
    (tmp_path / "adapter" / "tokenizer.json").write_text(json.dumps(tokenizer))
    settings = {"dtype": "float32", "block_size": 8, "pool_bytes": 1 << 23}
    async with served_folder(folder, tmp_path / "data", redis_client, **settings) as served:
        key = next(key for key, tenant in KEYS.items() if tenant == "acme")
        with MotetClient(str(served.http.base_url), key) as client:
            info, _ = await asyncio.to_thread(client.upload_adapter, "pirate", tmp_path / "adapter")
        (warning,) = info.warnings
        assert warning.startswith("the adapter's tokenizer adds <idle>, and the adapter does not change"), warning
        assert "embed_tokens" in info.targets
        for text in ("ab<act>c", "<act>", "abc"):
            body = {"model": "pirate", "prompt": text, "max_tokens": 6, "temperature": 0, "return_token_ids": True}
            answer = await served.http.post("/v1/completions", json={**body, "ignore_eos": True})
            assert answer.status_code == 200, answer.text
            ids = (await served.http.post("/tokenize", json={"model": "pirate", "prompt": text})).json()["tokens"]
            assert (reserved["id"] in ids) == ("<act>" in text)
            for token_id in answer.json()["choices"][0]["token_ids"]:
                with torch.inference_mode():
                    assert int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()) == token_id
                ids.append(token_id)
