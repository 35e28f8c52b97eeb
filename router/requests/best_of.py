"""`best_of` of a completion request: more sequences are generated than requested, and the likeliest are the answer."""

from __future__ import annotations

from dataclasses import replace

import msgspec

from ..generation.generation import GenerationRequest, Prompt
from ..openai_api.errors import invalid_value
from ..openai_api.request_schema import CompletionRequest


def check_best_of(request: CompletionRequest) -> None:
    """Raises a 400 for a `best_of` below n, and for one above n in a stream, which cannot choose afterwards."""
    n = request.n or 1
    if request.best_of is None or request.best_of == n:
        return
    if request.best_of < n:
        raise invalid_value("best_of", f"it is {request.best_of}, and at least n = {n} must be drawn.")
    if request.stream:
        raise invalid_value("best_of", "which are the best is only known at the end: a stream needs it equal to n.")


def with_best_of(generation: GenerationRequest, best_of: int) -> GenerationRequest:
    """`generation` with `best_of` sequences for each prompt, of which the n likeliest are the answer."""
    prompts = [_with_logprobs(prompt) for prompt in generation.prompts]
    return replace(generation, prompts=prompts, n=best_of, num_best=generation.n)


def _with_logprobs(prompt: Prompt) -> Prompt:
    """The prompt, with log probabilities of its tokens, by which sequences are ranked."""
    if prompt.sampling.num_logprobs is not None:
        return prompt
    return Prompt(prompt.token_ids, msgspec.structs.replace(prompt.sampling, num_logprobs=0))
