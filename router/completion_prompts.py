"""The prompts of a completion request as token ids."""

from __future__ import annotations

from typing import TypeVar

from .openai_errors import invalid_value
from .openai_schema import CompletionRequest
from .sampling import check_token_ids
from .text import TextService

T = TypeVar("T")


async def completion_prompts(request: CompletionRequest, text: TextService, vocab_size: int) -> list[list[int]]:
    """One token list for each prompt: a text, texts, a list of token ids, or lists of them. Raises 400."""
    found = []
    for param, prompt in _listed(request):
        if isinstance(prompt, str):
            add_special_tokens = request.add_special_tokens is not False
            token_ids = await text.encode(prompt, add_special_tokens=add_special_tokens)
        else:
            token_ids = prompt
            check_token_ids(token_ids, vocab_size, param)
        if not token_ids:
            raise invalid_value(param, "the prompt is empty, and at least one token is needed.")
        found.append(token_ids)
    return found


def _listed(request: CompletionRequest) -> list[tuple[str, str | list[int]]]:
    """Each prompt with the name of its field."""
    prompt = request.prompt
    if isinstance(prompt, str):
        return [("prompt", prompt)]
    if not prompt:
        raise invalid_value("prompt", "it is an empty list, and at least one prompt is needed.")
    if isinstance(prompt[0], int):
        return [("prompt", [_same_kind(one, int, position) for position, one in enumerate(prompt)])]
    if isinstance(prompt[0], str):
        return [(f"prompt[{position}]", _same_kind(one, str, position)) for position, one in enumerate(prompt)]
    return [(f"prompt[{position}]", _same_kind(one, list, position)) for position, one in enumerate(prompt)]


def _same_kind(value: object, kind: type[T], position: int) -> T:
    if not isinstance(value, kind):
        raise invalid_value(f"prompt[{position}]", "texts, token ids and lists of token ids cannot be mixed.")
    return value
