"""The baselines: transformers + PEFT, tuned (mixed batches, as fast as possible) and plain (one by one)."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from motet.benchmarks.rigs.workload import Job


@dataclass(frozen=True)
class BaselineRun:
    num_output_tokens: int  # that the jobs requested; what a batch makes beyond them does not count
    wall_s: float
    cpu_s: float
    num_threads: int


class PeftBaseline:
    """The base in bfloat16 and all of `adapters` in float32: PEFT's own choice, and faster on a CPU than bfloat16."""

    def __init__(self, model_path: Path, adapters: Sequence[Path]) -> None:
        base = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.bfloat16, attn_implementation="sdpa")
        model = PeftModel.from_pretrained(base, adapters[0], adapter_name="0", low_cpu_mem_usage=True)
        for index, path in enumerate(adapters[1:], start=1):
            model.load_adapter(path, adapter_name=str(index), low_cpu_mem_usage=True)
        self._model = model.eval()

    def best_num_threads(self, jobs: Sequence[Job], candidates: Sequence[int], num_tokens: int = 3) -> int:
        """The fastest of `candidates`, by the better of two times of a short generation."""
        times = {count: float("inf") for count in candidates}
        for _ in range(2):
            for count in candidates:
                torch.set_num_threads(count)
                started = time.perf_counter()
                self._generate(jobs, num_tokens)
                times[count] = min(times[count], time.perf_counter() - started)
        return min(times, key=times.__getitem__)

    def run(self, jobs: Sequence[Job], batch_size: int, num_threads: int) -> BaselineRun:
        """Runs static batches in the order of the jobs: a batch ends with its longest output."""
        torch.set_num_threads(num_threads)
        started, cpu_started = time.perf_counter(), time.process_time()
        for start in range(0, len(jobs), batch_size):
            batch = jobs[start : start + batch_size]
            self._generate(batch, max(job.num_output_tokens for job in batch))
        return BaselineRun(
            num_output_tokens=sum(job.num_output_tokens for job in jobs),
            wall_s=time.perf_counter() - started,
            cpu_s=time.process_time() - cpu_started,
            num_threads=num_threads,
        )

    def run_one_by_one(self, jobs: Sequence[Job], num_threads: int) -> BaselineRun:
        """Runs each job alone, as in PEFT's quick tour: `set_adapter`, then `generate`."""
        torch.set_num_threads(num_threads)
        started, cpu_started = time.perf_counter(), time.process_time()
        for job in jobs:
            self._model.set_adapter(str(job.adapter))
            input_ids = torch.tensor([job.prompt_token_ids])
            with torch.inference_mode():
                self._model.generate(
                    input_ids=input_ids,
                    attention_mask=torch.ones_like(input_ids),
                    do_sample=False,
                    max_new_tokens=job.num_output_tokens,
                    min_new_tokens=job.num_output_tokens,
                    pad_token_id=0,
                )
        return BaselineRun(
            num_output_tokens=sum(job.num_output_tokens for job in jobs),
            wall_s=time.perf_counter() - started,
            cpu_s=time.process_time() - cpu_started,
            num_threads=num_threads,
        )

    @torch.inference_mode()
    def _generate(self, jobs: Sequence[Job], num_tokens: int) -> None:
        width = max(len(job.prompt_token_ids) for job in jobs)
        padding = [[0] * (width - len(job.prompt_token_ids)) for job in jobs]
        input_ids = [pad + job.prompt_token_ids for pad, job in zip(padding, jobs, strict=True)]
        mask = [pad + [1] * len(job.prompt_token_ids) for pad, job in zip(padding, jobs, strict=True)]
        made = self._model.generate(
            input_ids=torch.tensor(input_ids),
            attention_mask=torch.tensor(mask),
            adapter_names=["__base__" if job.adapter is None else str(job.adapter) for job in jobs],
            do_sample=False,
            max_new_tokens=num_tokens,
            min_new_tokens=num_tokens,
            pad_token_id=0,
        )
        if made.shape[1] != width + num_tokens:
            raise RuntimeError(f"generate() made {made.shape[1] - width} tokens where {num_tokens} were requested")
