"""Which log-probabilities of its prompts a request asks for: `echo` with `logprobs`, or vLLM's `prompt_logprobs`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from ..openai_api.errors import invalid_value, unsupported
from ..openai_api.request_schema import CompletionRequest, GenerationFields

MAX_SCORE_VALUES: Final = 1 << 20  # of all prompts and choices of an answer; each is some 50 bytes of its JSON


def num_echoed_logprobs(request: GenerationFields) -> int | None:
    """Likeliest tokens for each token of the prompt in the choices' `logprobs`; None: the prompt is not in them."""
    return request.logprobs if isinstance(request, CompletionRequest) and request.echo else None


def num_prompt_logprobs(request: GenerationFields) -> int | None:
    """Likeliest tokens for each token of the prompt that gangs compute; None: no log-probabilities are needed."""
    requested = (num_echoed_logprobs(request), request.prompt_logprobs)
    return max((number for number in requested if number is not None), default=None)


def check_prompt_scoring(request: GenerationFields) -> None:
    """Raises a 400 for fields that contradict it."""
    if num_prompt_logprobs(request) is None:
        return
    field = "echo" if request.prompt_logprobs is None else "prompt_logprobs"
    if request.stream:
        raise unsupported(field, "log probabilities of the prompt come with a whole answer only: leave stream out.")
    if request.use_beam_search:
        raise unsupported(field, "beam search does not compute log probabilities of the prompt: leave it out.")


def check_num_scores(request: GenerationFields, token_lists: Sequence[Sequence[int]]) -> None:
    """Raises a 400 for more of them than an answer may have."""
    num_top = num_prompt_logprobs(request)
    if num_top is None:
        return
    num_values = sum(map(len, token_lists)) * (request.n or 1) * (1 + num_top)
    if num_values > MAX_SCORE_VALUES:
        field = "prompt_logprobs" if request.prompt_logprobs == num_top else "logprobs"
        raise invalid_value(
            field,
            f"prompt tokens times n times {1 + num_top} log probabilities of each are {num_values}: at most "
            f"{MAX_SCORE_VALUES} are accepted in one request. Send fewer prompts, or ask for fewer.",
        )
