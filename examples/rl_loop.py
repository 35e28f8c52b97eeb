"""Reinforcement learning whose rollouts motet serves: TRL's own AsyncGRPOTrainer, client and rollout loop.

The demo's model has learnt capitals, colours, opposites, sums and what animals say. Asked something else, it answers
with any of these; a LoRA adapter learns here to answer with an animal. Each step uploads its version, which the next
rollouts use. A line for each step has the mean reward of the step's rollouts, and the greatest difference between the
log-probabilities that motet gives for an answer of the newest version and those of the trainer's model.

    pip install "trl[vllm]==1.16.0" peft           # on a CPU: trl==1.16.0 peft aiohttp requests
    motet serve examples/demo/base --dtype float32 --adapter-folders "/shared/{tenant}"
    python examples/rl_loop.py http://:KEY@127.0.0.1:8000 examples/demo/base /shared/TENANT/run

On a GPU nothing of TRL is replaced. On a CPU three things are (`replace_what_needs_a_gpu`), none of which is its HTTP.
"""

from __future__ import annotations

import argparse
import json
import random
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import requests
import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import PrinterCallback, TrainerCallback
from trl.experimental.async_grpo import (
    AsyncGRPOConfig,
    AsyncGRPOTrainer,
    async_grpo_trainer,
    async_rollout_worker,
    packing,
)

PROMPTS = [
    "Hello!",
    "Tell me a story.",
    "Say a word.",
    "blue",
    "Why?",
    "What does the number say?",
    "What is the capital of the cow?",
    "What is the opposite of the capital?",
]
NUM_TOKENS = 24  # of an answer, at most
NAME = "trl-policy-v"  # that TRL gives its versions, with their numbers


def reward(completions: list[list[dict[str, str]]], **_: Any) -> list[float]:
    return [float(" says " in messages[-1]["content"]) for messages in completions]


# What TRL needs a GPU for.


def attention_by_segments(
    query: torch.Tensor,  # [num_tokens, num_heads, head_dim]
    key: torch.Tensor,  # [num_keys, num_kv_heads, head_dim]
    value: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    *_: Any,
    softmax_scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    **__: Any,
) -> torch.Tensor:
    """FlashAttention 3's `flash_attn_varlen_func`, causal: each segment's queries are the last of its keys."""
    bounds = zip(pairwise(cu_seqlens_q.tolist()), pairwise(cu_seqlens_k.tolist()), strict=True)
    outputs = []
    for (start, stop), (first, end) in bounds:
        num_queries, num_keys = stop - start, end - first
        distance = torch.arange(num_keys - num_queries, num_keys)[:, None] - torch.arange(num_keys)
        mask = distance >= 0
        if window_size[0] >= 0:
            mask &= distance <= window_size[0]
        segment = (part.transpose(0, 1) for part in (query[start:stop], key[first:end], value[first:end]))
        output = torch.nn.functional.scaled_dot_product_attention(
            *segment, attn_mask=mask, scale=softmax_scale, enable_gqa=True
        )
        outputs.append(output.transpose(0, 1))
    return torch.cat(outputs)


def replace_what_needs_a_gpu() -> None:
    """TRL's attention, which is a kernel of the hub for GPUs; its wish for an installed vLLM, of which it then imports
    only what sends whole weights; and its question for the GPU's name.
    """
    kernels = SimpleNamespace(flash_attn_varlen_func=attention_by_segments)
    packing._flash_attn = lambda: kernels
    async_rollout_worker.is_vllm_available = lambda: True
    async_grpo_trainer.get_peak_flops_per_device = lambda accelerator, dtype: None


# What the steps are measured by.


class StepLines(TrainerCallback):
    """Prints a line of JSON for each step."""

    def __init__(self, url: str) -> None:
        self.trainer: AsyncGRPOTrainer  # set before the first step
        self._url, self._error = url, 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """The trainer's weights are the version that was uploaded last."""
        chat = [{"role": "user", "content": PROMPTS[state.global_step % len(PROMPTS)]}]
        tokenizer = self.trainer.processing_class
        prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        body = {
            "model": f"{NAME}{self.trainer.model_version}",
            "prompt": prompt,
            "max_tokens": NUM_TOKENS,
            "temperature": 1.0,
            "return_token_ids": True,
            "logprobs": 0,
            "seed": random.getrandbits(63),
        }
        answer = requests.post(f"{self._url}/v1/completions", json=body, timeout=600)
        answer.raise_for_status()
        choice = answer.json()["choices"][0]
        logprobs = choice["logprobs"]["token_logprobs"]
        self._error = off_policy_error(self.trainer.model, prompt, choice["token_ids"], logprobs)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        if logs is not None and "reward" in logs:
            line = {"step": state.global_step, "reward": logs["reward"], "off_policy_error": self._error}
            print(json.dumps({**line, "staleness": logs.get("sample/staleness_max")}), flush=True)


def off_policy_error(model: torch.nn.Module, prompt: list[int], answer: list[int], logprobs: list[float]) -> float:
    """The greatest difference between these log-probabilities of the answer's tokens and the trainer's own."""
    row = packing.TreeRow()
    mask = [0] * len(prompt) + [1] * len(answer)
    sample = {"input_ids": [*prompt, *answer], "completion_mask": mask, "old_log_probs": [0.0] * len(prompt) + logprobs}
    row.add({name: np.array(values) for name, values in sample.items()} | {"advantage": 0.0, "group_id": 0})
    packed = {name: values.to(next(model.parameters()).device) for name, values in row.pack().items()}
    longest_q, longest_k = packed["tree_max_seqlens"].tolist()
    with torch.no_grad():
        output = model(
            **{name: packed[name][None] for name in ("input_ids", "position_ids", "shift_labels")},
            **{name: packed[name] for name in ("tree_kv_index", "tree_cu_seqlens_q", "tree_cu_seqlens_k")},
            tree_max_seqlen_q=longest_q,
            tree_max_seqlen_k=longest_k,
            fused_lm_head=True,
        )
    own = output.log_probs.flatten()[packed["token_index"]]
    return float((own - packed["old_log_probs"]).abs().max())


def forget_last_run(url: str) -> None:
    """Deletes versions that an earlier run has left, whose names TRL would give again."""
    listed = requests.get(f"{url}/v1/adapters", timeout=60)
    listed.raise_for_status()
    for adapter in listed.json()["data"]:
        if adapter["name"].startswith(NAME):
            deleted = requests.post(f"{url}/v1/unload_lora_adapter", json={"lora_name": adapter["name"]}, timeout=60)
            deleted.raise_for_status()


def train(url: str, model: str, folder: str, num_steps: int) -> None:
    has_gpu = torch.cuda.is_available()
    if not has_gpu:
        replace_what_needs_a_gpu()
    forget_last_run(url)
    config = AsyncGRPOConfig(
        output_dir=folder,
        vllm_server_base_url=url,
        max_steps=num_steps,
        learning_rate=5e-3,
        per_device_train_batch_size=16,
        token_budget=0,  # batches of 16 rollouts
        num_generations=8,
        max_completion_length=NUM_TOKENS,
        max_staleness=2,
        queue_maxsize=16,  # rollouts that wait grow stale
        bf16=False,
        gradient_checkpointing=False,
        use_cpu=not has_gpu,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        seed=7,
    )
    lines = StepLines(url)
    trainer = AsyncGRPOTrainer(
        model,
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_list([{"prompt": [{"role": "user", "content": prompt}]} for prompt in PROMPTS]),
        peft_config=LoraConfig(r=8, lora_alpha=16, target_modules="all-linear"),
        callbacks=[lines],
    )
    lines.trainer = trainer
    trainer.remove_callback(PrinterCallback)
    trainer.train()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", help="of motet, with a key as its password")
    parser.add_argument("model", help="the folder or the id of the hub that motet serves")
    parser.add_argument("folder", help="in one of motet's --adapter-folders")
    parser.add_argument("--steps", type=int, default=20)
    given = parser.parse_args()
    train(given.url, given.model, given.folder, given.steps)
