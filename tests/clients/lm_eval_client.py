"""lm-eval: log-likelihoods of `/v1/completions`, beside those of transformers."""

from __future__ import annotations

import os
from typing import Any

import torch
from demo import ANSWER, BASE, FOLDER, KEY, QUESTION, V1
from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalCompletionsAPI
from transformers import AutoModelForCausalLM, AutoTokenizer

TOLERANCE = 2e-2  # the demo computes in bfloat16 where the machine can
PAIRS = ((QUESTION, " " + ANSWER), ("The color of the sky is", " blue."), ("", "7 plus 5 is 12."))


def scores() -> None:
    os.environ["OPENAI_API_KEY"] = KEY
    requested: Any = LocalCompletionsAPI(base_url=f"{V1}/completions", model=BASE, tokenizer=FOLDER, num_concurrent=1)
    requests: Any = [Instance("loglikelihood", {}, pair, number) for number, pair in enumerate(PAIRS)]
    found = requested.loglikelihood(requests, disable_tqdm=True)
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)
    for (context, continuation), (value, _) in zip(PAIRS, found, strict=True):
        before, whole = requested._encode_pair(context, continuation) if context else ([tokenizer.bos_token_id], None)
        rest = whole if whole is not None else tokenizer.encode(continuation, add_special_tokens=False)
        with torch.no_grad():
            logits = model(torch.tensor([[*before, *rest]])).logits[0].log_softmax(-1)
        right = sum(float(logits[len(before) + i - 1, token]) for i, token in enumerate(rest))
        if abs(value - right) > TOLERANCE * max(1.0, abs(right)):
            raise ValueError(f"{continuation!r} has {value}, and {right} by transformers")


CHECKS = (scores,)
