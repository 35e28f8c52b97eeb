"""Requests and answers of /tokenize, /detokenize and /version, as vLLM has them."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import UNSET, Meta, UnsetType

from .chat_messages import ChatMessage
from .request_schema import ChatRequest, TokenId


class TokenizeRequest(ChatRequest, frozen=True, kw_only=True):
    """A text, or a chat's request as it is: what says nothing of its prompt makes no difference."""

    model: Annotated[str, Meta(description="The base's name, or one of your adapters'; by default the base.")] = ""
    messages: list[ChatMessage] = msgspec.field(default_factory=list)
    prompt: Annotated[str | None, Meta(description="A text, in place of messages.")] = None
    return_token_strs: Annotated[bool | None, Meta(description="The tokens as the vocabulary has them, too.")] = None


class TokenizeAnswer(msgspec.Struct, frozen=True):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | UnsetType = UNSET


class DetokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    model: Annotated[str, Meta(description="The base's name, or one of your adapters'; by default the base.")] = ""
    tokens: list[TokenId]


class DetokenizeAnswer(msgspec.Struct, frozen=True):
    prompt: str


class ServerVersion(msgspec.Struct, frozen=True):
    version: str
