"""`best_of` of a completion request: more sequences are drawn than answered, and the likeliest are the answer."""

from __future__ import annotations

from dataclasses import replace

import msgspec

from ..generation.generation import GenerationRequest, Prompt
from ..openai_api.errors import invalid_value
from ..openai_api.schema import CompletionRequest


def check_best_of(request: CompletionRequest) -> None:
    """Raises a 400 for fewer than are answered, and for a stream, which cannot take back what it has shown."""
    n = request.n or 1
    if request.best_of is None or request.best_of == n:
        return
    if request.best_of < n:
        raise invalid_value("best_of", f"it is {request.best_of}, and at least n = {n} must be drawn.")
    if request.stream:
        raise invalid_value("best_of", "which are the best is only known at the end: a stream needs it equal to n.")


def ranked(generation: GenerationRequest, best_of: int) -> GenerationRequest:
    """One that draws so many sequences for each prompt, and answers with the n best of them."""
    prompts = [prompt if prompt.sampling.num_logprobs is not None else _told(prompt) for prompt in generation.prompts]
    return replace(generation, prompts=prompts, n=best_of, num_best=generation.n)


def _told(prompt: Prompt) -> Prompt:
    return Prompt(prompt.token_ids, msgspec.structs.replace(prompt.sampling, num_logprobs=0))
