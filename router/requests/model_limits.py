"""Checks of a request against the limits of the model: its context and its vocabulary."""

from __future__ import annotations

from ...workers.wire.messages import GangInfo
from ..openai_api.errors import context_length_exceeded, invalid_value
from ..text.text import TextService


def check_length(num_prompt_tokens: int, max_tokens: int | None, gang: GangInfo, *, prompt_param: str) -> None:
    """Raises a 400 if the prompt and `max_tokens` do not fit the context. None: the completion takes what is left.

    A prompt may fill the context if nothing follows it.

    The message begins as vLLM's and OpenAI's: clients match on it, and shorten their prompts.
    """
    context = gang.max_model_len
    left = context - num_prompt_tokens
    if left < 0 or (left == 0 and max_tokens != 0):
        need = "the completion needs room, too" if left == 0 else f"these are {-left} too many"
        raise context_length_exceeded(
            f"This model's maximum context length is {context} tokens. However, your {prompt_param} resulted in "
            f"{num_prompt_tokens} tokens: {need}. Please reduce the length of the {prompt_param} by at least "
            f"{1 - left} tokens.",
            prompt_param,
        )
    if max_tokens is not None and max_tokens > left:
        raise context_length_exceeded(
            f"This model's maximum context length is {context} tokens. However, you requested "
            f"{num_prompt_tokens + max_tokens} tokens ({num_prompt_tokens} in the {prompt_param}, {max_tokens} in the "
            f"completion): these are {max_tokens - left} too many. Please reduce the length of the {prompt_param} or "
            f"completion: max_tokens may be at most {left} here.",
            "max_tokens",
        )


def num_kept(num_tokens: int | None, max_tokens: int | None, gang: GangInfo) -> int | None:
    """How many of a prompt's last tokens are kept. -1: all that leave room for `max_tokens`, or for one token.

    None: all.
    """
    if num_tokens == -1:
        return max(1, gang.max_model_len - (1 if max_tokens is None else max_tokens))
    return num_tokens


def check_num_tokens(num_tokens: int, gang: GangInfo, param: str) -> None:
    """Raises a 400 for more tokens than the context has."""
    if num_tokens > gang.max_model_len:
        raise context_length_exceeded(
            f"This model's maximum context length is {gang.max_model_len} tokens. However, your {param} are "
            f"{num_tokens} tokens.",
            param,
        )


def check_text(text: str, service: TextService, gang: GangInfo, prompt_param: str) -> None:
    """Raises a 400 for a text whose length shows, before it is tokenized, that it is too long for the context."""
    num_tokens, context = service.min_tokens(text), gang.max_model_len
    if num_tokens > context:
        raise context_length_exceeded(
            f"This model's maximum context length is {context} tokens. However, your {prompt_param} resulted in at "
            f"least {num_tokens} tokens, at least {num_tokens - context} too many. Please reduce the length of the "
            f"{prompt_param}.",
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
