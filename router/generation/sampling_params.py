"""`SamplingParams` of a request, checked against the model's limits."""

from __future__ import annotations

from typing import Final

import msgspec

from ...workers.wire.messages import GangInfo, SamplingParams
from ..openai_api.errors import context_length_exceeded, invalid_value
from ..openai_api.schema import GenerationFields
from ..text.stop_strings import StopStrings
from ..text.text import TextService

_NUM_SEEDS: Final = 2**64


def sampling_params(
    request: GenerationFields,
    *,
    max_tokens: int | None,
    num_logprobs: int | None,
    vocab_size: int,
) -> SamplingParams:
    """How to sample the first of a prompt's n sequences. Raises a 400 that names the field that does not fit."""
    stop_token_ids = tuple(request.stop_token_ids or ())
    check_token_ids(stop_token_ids, vocab_size, "stop_token_ids")
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=_or(request.temperature, 1.0),
        top_p=_or(request.top_p, 1.0),
        top_k=max(request.top_k or 0, 0),
        min_p=_or(request.min_p, 0.0),
        seed=request.seed,
        repetition_penalty=_or(request.repetition_penalty, 1.0),
        presence_penalty=_or(request.presence_penalty, 0.0),
        frequency_penalty=_or(request.frequency_penalty, 0.0),
        logit_bias=_logit_bias(request.logit_bias or {}, vocab_size),
        stop_token_ids=stop_token_ids,
        ignore_eos=bool(request.ignore_eos),
        num_logprobs=num_logprobs,
    )


def seeded(sampling: SamplingParams, index: int) -> SamplingParams:
    """The sampling of the index-th of a prompt's sequences: seeds count up, and wrap at 64 bits."""
    if sampling.seed is None or index == 0:
        return sampling
    half = _NUM_SEEDS // 2
    return msgspec.structs.replace(sampling, seed=(sampling.seed + index + half) % _NUM_SEEDS - half)


def check_length(num_prompt_tokens: int, max_tokens: int | None, gang: GangInfo, *, prompt_param: str) -> None:
    """Raises a 400 if prompt and completion do not fit the context together. `max_tokens` None: all that is left."""
    context = gang.max_model_len
    left = context - num_prompt_tokens
    if left < 0:
        raise context_length_exceeded(
            f"The prompt has {num_prompt_tokens} tokens, {-left} more than the model's context of {context} tokens.",
            prompt_param,
        )
    if left == 0:
        raise context_length_exceeded(
            f"The prompt fills the model's context of {context} tokens: shorten it by at least 1 token, "
            "as the completion needs room.",
            prompt_param,
        )
    if max_tokens is not None and max_tokens > left:
        raise context_length_exceeded(
            f"The prompt's {num_prompt_tokens} tokens and the {max_tokens} of max_tokens are {max_tokens - left} more "
            f"than the model's context of {context} tokens: max_tokens may be at most {left} here.",
            "max_tokens",
        )


def check_text(text: str, service: TextService, gang: GangInfo, prompt_param: str) -> None:
    """Raises a 400 for a text that is too long for the context however it is tokenized, without tokenizing it."""
    num_tokens, context = service.min_tokens(text), gang.max_model_len
    if num_tokens > context:
        raise context_length_exceeded(
            f"The prompt has at least {num_tokens} tokens, at least {num_tokens - context} more than the model's "
            f"context of {context} tokens.",
            prompt_param,
        )


def check_token_ids(token_ids: list[int] | tuple[int, ...], vocab_size: int, param: str) -> None:
    """Raises a 400 for the first id that is none of the model's."""
    if not token_ids or (min(token_ids) >= 0 and max(token_ids) < vocab_size):
        return
    position = next(i for i, token_id in enumerate(token_ids) if not 0 <= token_id < vocab_size)
    raise invalid_value(
        f"{param}[{position}]", f"token id {token_ids[position]} is not in the vocabulary, 0 to {vocab_size - 1}."
    )


def stop_strings(request: GenerationFields) -> StopStrings:
    stop = request.stop or ()
    return StopStrings((stop,) if isinstance(stop, str) else tuple(stop))


def _logit_bias(biases: dict[str, float], vocab_size: int) -> dict[int, float]:
    found = {}
    for key, bias in biases.items():
        if not (key.isascii() and key.isdigit()) or len(key) > 10 or int(key) >= vocab_size:
            raise invalid_value("logit_bias", f"key {key[:40]!r} is no token id of 0 to {vocab_size - 1}.")
        found[int(key)] = bias
    return found


def _or(value: float | None, default: float) -> float:
    return default if value is None else value
