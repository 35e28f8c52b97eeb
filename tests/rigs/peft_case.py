"""Adapters of PEFT's, and what an engine says with them, in one batch with the base."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel

from motet.tests.rigs.engine_rig import EngineRig, SequenceOutput, Stock
from motet.tests.rigs.oracle import VOCAB_SIZE
from motet.workers.wire.messages import SamplingParams

TOLERANCE = 1e-4  # of log-probabilities in float32
SAMPLING = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True, num_logprobs=VOCAB_SIZE)


@dataclass(frozen=True)
class PeftCase:
    base: Any
    models: Mapping[str, PeftModel]
    folders: Mapping[str, Path]
    stock: Stock
    twice: Sequence[str]  # adapters of two sequences, so that steps have segments of one row and of several

    @torch.inference_mode()
    def logprobs(self, token_ids: list[int], adapter: str | None) -> torch.Tensor:
        """`[num_tokens, vocab]`, by PEFT."""
        model = self.base if adapter is None else self.models[adapter]
        logits: torch.Tensor = model(input_ids=torch.tensor([token_ids]), use_cache=False).logits[0]
        return logits.float().log_softmax(-1)

    def check(self, rig: EngineRig) -> None:
        """The log-probabilities of all answers are PEFT's."""
        generator = random.Random(7)
        requests = [
            ([generator.randrange(VOCAB_SIZE) for _ in range(generator.randint(1, 20))], adapter)
            for adapter in (None, *self.models, None, *self.twice)
        ]
        for index, (prompt, adapter) in enumerate(requests):
            rig.submit(index, prompt, adapter, SAMPLING)
        rig.finish()
        rig.assert_idle()
        for index, (prompt, adapter) in enumerate(requests):
            output = rig.outputs[index]
            assert (output.finish_reason, output.error) == ("length", None), adapter
            expected = self.logprobs(prompt + output.token_ids[:-1], adapter)[len(prompt) - 1 :]
            difference = (logprobs_of(output) - expected).abs().max()
            assert difference <= TOLERANCE, f"{adapter}: {difference}"


def logprobs_of(output: SequenceOutput) -> torch.Tensor:
    """`[num_tokens, vocab]` of an answer by `SAMPLING`."""
    rows = torch.empty(len(output.logprobs), VOCAB_SIZE)
    for row, token in zip(rows, output.logprobs, strict=True):
        row[token.top_ids] = torch.tensor(token.top_logprobs)
    return rows
