"""What an answer has cost in tokens, as OpenAI reports it."""

from __future__ import annotations

import msgspec
from msgspec import UNSET, UnsetType


class PromptTokensDetails(msgspec.Struct, frozen=True):
    cached_tokens: int  # whose KV was found in the prefix cache and not computed


class CompletionTokensDetails(msgspec.Struct, frozen=True):
    reasoning_tokens: int  # of the completion's, marks of the model's thoughts included


class Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | UnsetType = UNSET  # UNSET until it is known
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET  # of answers that are taken apart
