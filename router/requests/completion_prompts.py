"""The prompts of a completion request, tokenized."""

from __future__ import annotations

from typing import cast

from ...workers.wire.messages import GangInfo
from ..loop_share import LoopShare
from ..openai_api.errors import invalid_value
from ..openai_api.prompt_field import same_kind
from ..openai_api.request_schema import CompletionRequest
from ..text.text import TextService
from .model_limits import check_length, check_text, check_token_ids, num_kept


def count_prompts(request: CompletionRequest) -> int:
    """The number of prompts, from the shape of the field alone."""
    prompt = request.prompt
    return 1 if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)) else len(prompt)


async def completion_prompts(request: CompletionRequest, text: TextService, gang: GangInfo) -> list[list[int]]:
    """The token ids of each prompt. Raises 400.

    The field `prompt` is a text, a list of texts, a list of token ids or a list of such lists. A prompt that is too
    long for the context is refused before it is tokenized, if its length in characters already shows that.
    """
    share = LoopShare()
    prompts = _listed(request, gang)
    await share.pause()
    texts = [(param, prompt) for param, prompt in prompts if isinstance(prompt, str)]
    token_lists = [(param, prompt) for param, prompt in prompts if not isinstance(prompt, str)]
    most = num_kept(request.truncate_prompt_tokens, request.max_tokens, gang)
    for _, prompt in texts if most is None else ():
        check_text(prompt, text, gang, "prompt")
        await share.pause()
    for param, token_ids in token_lists:
        await share.pause()
        if most is None:
            check_length(len(token_ids), _least_new(request), gang, prompt_param="prompt")
        check_token_ids(token_ids, gang.vocab_size, param)
    if texts:  # then all prompts are texts
        encoded = await text.encode_all(
            [prompt for _, prompt in texts],
            add_special_tokens=request.add_special_tokens is not False,
            most=most,
        )
        token_lists = [(param, token_ids) for (param, _), token_ids in zip(texts, encoded, strict=True)]
    elif most is not None:
        token_lists = [(param, ids[max(len(ids) - most, 0) :]) for param, ids in token_lists]
    for param, token_ids in token_lists:
        if not token_ids:
            raise invalid_value(param, "the prompt is empty: at least one token is needed.")
    return [token_ids for _, token_ids in token_lists]


def _least_new(request: CompletionRequest) -> int | None:
    """0 if nothing is generated; then a prompt may fill the context."""
    return 0 if request.max_tokens == 0 else None


def _listed(request: CompletionRequest, gang: GangInfo) -> list[tuple[str, str | list[int]]]:
    """Each prompt with the name of its field."""
    prompt = request.prompt
    if isinstance(prompt, str):
        return [("prompt", prompt)]
    if not prompt:
        raise invalid_value("prompt", "it is an empty list: at least one prompt is needed.")
    if isinstance(prompt[0], int):
        if request.truncate_prompt_tokens is None:
            check_length(len(prompt), _least_new(request), gang, prompt_param="prompt")
        if {*map(type, prompt)} != {int}:
            for position, token_id in enumerate(prompt):
                same_kind(token_id, int, position)
        return [("prompt", cast("list[int]", prompt))]
    if isinstance(prompt[0], str):
        return [(f"prompt[{position}]", same_kind(text, str, position)) for position, text in enumerate(prompt)]
    return [(f"prompt[{position}]", same_kind(ids, list, position)) for position, ids in enumerate(prompt)]
