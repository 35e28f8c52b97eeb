"""Checks of a request against the limits of the model: its context and its vocabulary."""

from __future__ import annotations

from ...workers.wire.messages import GangInfo
from ..openai_api.errors import context_length_exceeded, invalid_value
from ..text.text import TextService


def check_length(num_prompt_tokens: int, max_tokens: int | None, gang: GangInfo, *, prompt_param: str) -> None:
    """Raises a 400 if the prompt and `max_tokens` do not fit the context. None: the completion takes what is left."""
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
    """Raises a 400 for a text whose length shows, before it is tokenized, that it is too long for the context."""
    num_tokens, context = service.min_tokens(text), gang.max_model_len
    if num_tokens > context:
        raise context_length_exceeded(
            f"The prompt has at least {num_tokens} tokens, at least {num_tokens - context} more than the model's "
            f"context of {context} tokens.",
            prompt_param,
        )


def check_token_ids(token_ids: list[int] | tuple[int, ...], vocab_size: int, param: str) -> None:
    """Raises a 400 for the first id that is not in the vocabulary."""
    if not token_ids or (min(token_ids) >= 0 and max(token_ids) < vocab_size):
        return
    position = next(i for i, token_id in enumerate(token_ids) if not 0 <= token_id < vocab_size)
    raise invalid_value(
        f"{param}[{position}]", f"token id {token_ids[position]} is not in the vocabulary, 0 to {vocab_size - 1}."
    )
