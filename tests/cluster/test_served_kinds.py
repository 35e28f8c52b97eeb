"""Other kinds of adapters than LoRA, from their uploads to answers over HTTP."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path

import pytest
import torch
from peft import IA3Config, LoHaConfig, LoraConfig, PeftConfig, get_peft_model
from redis.asyncio import Redis
from transformers import AutoModelForCausalLM

from motet.tests.rigs.grammar_tokenizer import write_tokenizer
from motet.tests.rigs.oracle import write_model
from motet.tests.rigs.served_folder import served_folder

pytestmark = pytest.mark.slow
TOLERANCE = 4e-4  # of log-probabilities in float32
PROMPT = [10 + place % 50 for place in range(30)]
FIELDS = {"max_tokens": 8, "temperature": 0, "ignore_eos": True, "return_token_ids": True, "logprobs": 1}
KINDS: dict[str, PeftConfig] = {
    "dora": LoraConfig(r=3, use_dora=True, target_modules=["q_proj", "down_proj"]),
    "ia3": IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
    "loha": LoHaConfig(r=2, target_modules=["v_proj", "up_proj"]),
}


async def test_kinds_are_served(tmp_path: Path, redis_client: Redis) -> None:
    folder = write_model("llama_bias", tmp_path / "model")
    write_tokenizer(folder)
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    models = {}
    for name, config in KINDS.items():
        models[name], generator = get_peft_model(deepcopy(base), config).eval(), torch.Generator().manual_seed(3)
        for key, parameter in models[name].named_parameters():
            if parameter.requires_grad:
                parameter.data += (0.3 if "magnitude" in key else 0.15) * torch.randn(
                    parameter.shape, generator=generator
                )
        models[name].save_pretrained(tmp_path / name)
    settings = {"dtype": "float32", "block_size": 8, "pool_bytes": 1 << 23}
    async with served_folder(folder, tmp_path / "data", redis_client, **settings) as served:
        for name in KINDS:
            await served.upload(name, tmp_path / name)
        for adapter in (*KINDS, None):
            model = base if adapter is None else models[adapter]
            choice = (await served.complete(adapter, PROMPT, **FIELDS)).json()["choices"][0]
            token_ids = choice["token_ids"]
            with torch.inference_mode():
                logits = model(input_ids=torch.tensor([PROMPT + token_ids[:-1]]), use_cache=False).logits[0]
            logprobs = logits[len(PROMPT) - 1 :].log_softmax(-1)
            expected = logprobs.gather(1, torch.tensor(token_ids)[:, None])[:, 0]
            torch.testing.assert_close(
                torch.tensor(choice["logprobs"]["token_logprobs"]), expected, atol=TOLERANCE, rtol=0
            )
            assert (logprobs.amax(-1) - expected).max() < TOLERANCE, "greedy by the numbers of PEFT"
        seen = (await served.http.get("/v1/adapters/ia3")).json()
        assert (seen["rank"], seen["targets"]) == (0, ["k_proj", "up_proj"])
