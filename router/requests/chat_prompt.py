"""The prompt of a chat: its messages, rendered and tokenized."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from ...workers.wire.messages import GangInfo
from ..openai_api.errors import ApiError, invalid_value, unsupported
from ..openai_api.request_schema import ChatMessage, ChatRequest
from ..text.chat_renderer import ChatTemplateError
from ..text.text import MAX_MESSAGES_ON_LOOP, TextService
from .model_limits import check_text


async def chat_prompt(request: ChatRequest, text: TextService, gang: GangInfo) -> list[int]:
    """The token ids of the messages, rendered by the model's chat template. Raises 400."""
    continues = bool(request.continue_final_message)
    if continues and request.add_generation_prompt:
        raise invalid_value("continue_final_message", "it cannot go with add_generation_prompt: true.")
    begins = not continues if request.add_generation_prompt is None else request.add_generation_prompt
    if len(request.messages) <= MAX_MESSAGES_ON_LOOP:
        messages = _as_template_expects(request.messages)
    else:
        messages = await asyncio.to_thread(_as_template_expects, request.messages)
    try:
        prompt = await text.render_chat(
            messages,
            add_generation_prompt=begins,
            continue_final_message=continues,
            arguments=request.chat_template_kwargs or {},
        )
    except ChatTemplateError as error:
        raise ApiError(400, f"{error}.", param="messages", code="invalid_messages") from error
    check_text(prompt.text, text, gang, "messages")
    # The template writes the special tokens itself.
    token_ids = await text.encode_chat(prompt, add_special_tokens=bool(request.add_special_tokens))
    if not token_ids:
        raise invalid_value("messages", "the chat template made an empty prompt of them.")
    return token_ids


def _as_template_expects(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """The messages as plain values, which templates need."""
    return [_fields_of(message, position) for position, message in enumerate(messages)]


def _fields_of(message: ChatMessage, position: int) -> dict[str, Any]:
    """Newer clients call the role "system" "developer"."""
    role = "system" if message.role == "developer" else message.role
    content = _text_of(message, f"messages[{position}].content")
    if content is None and message.tool_calls is None:
        raise invalid_value(f"messages[{position}].content", "a text is needed.")
    fields: dict[str, Any] = {"role": role, "content": content or "", "name": message.name}
    fields |= {"tool_calls": message.tool_calls, "tool_call_id": message.tool_call_id}
    return {key: value for key, value in fields.items() if value is not None}


def _text_of(message: ChatMessage, param: str) -> str | None:
    if not isinstance(message.content, list):
        return message.content
    for position, part in enumerate(message.content):
        if part.type != "text":
            raise unsupported(f"{param}[{position}].type", f"only 'text' parts are supported here, not {part.type!r}.")
        if part.text is None:
            raise invalid_value(f"{param}[{position}].text", "a text is needed.")
    return "\n".join(part.text or "" for part in message.content)
