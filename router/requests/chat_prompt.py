"""The prompt of a chat: its messages, rendered and tokenized."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from ...workers.wire.messages import GangInfo
from ..openai_api.chat_messages import ChatMessage
from ..openai_api.errors import ApiError, invalid_value
from ..openai_api.request_schema import ChatRequest
from ..text.chat_renderer import ChatTemplateError
from ..text.template_forms import TemplateForms
from ..text.text import MAX_CHARS_ON_LOOP, MAX_MESSAGES_ON_LOOP, TextService
from .model_limits import check_text, num_kept
from .template_messages import template_messages, template_tools, template_variables


class ChatPrompt(NamedTuple):
    token_ids: list[int]
    continued: str  # the text that the answer continues
    left_out: list[str]  # names of what the prompt has not


async def chat_prompt(request: ChatRequest, text: TextService, gang: GangInfo) -> ChatPrompt:
    """The messages, rendered by the model's chat template. Raises 400."""
    continues = bool(request.continue_final_message)
    if continues and request.add_generation_prompt:
        raise invalid_value("continue_final_message", "it cannot be combined with add_generation_prompt: true.")
    begins = not continues if request.add_generation_prompt is None else request.add_generation_prompt
    convert = partial(template_messages, request.messages, text.forms)
    messages, left_out = convert() if _are_few(request.messages) else await asyncio.to_thread(convert)
    try:
        prompt = await text.render_chat(
            messages,
            add_generation_prompt=begins,
            continue_final_message=continues,
            arguments=template_variables(request, text.forms),
            tools=template_tools(request, text.forms),
            documents=request.documents,
        )
    except ChatTemplateError as error:
        raise ApiError(400, f"{error}.", param="messages", code="invalid_messages") from error
    max_tokens = request.max_completion_tokens or request.max_tokens
    most = num_kept(request.truncate_prompt_tokens, max_tokens, gang)
    if most is None:
        check_text(prompt.text, text, gang, "messages")
    # The template writes the special tokens itself.
    token_ids = await text.encode_chat(prompt, add_special_tokens=bool(request.add_special_tokens), most=most)
    if not token_ids:
        raise invalid_value("messages", "the chat template rendered an empty prompt.")
    left_out += fields_not_shown(request, text.forms)
    return ChatPrompt(token_ids, prompt.text if begins or continues else "", left_out)


def fields_not_shown(request: ChatRequest, forms: TemplateForms) -> list[str]:
    """Fields that the template leaves out of the prompt, as it does in transformers, or does not know."""
    is_left_out = {
        "tools": bool(request.tools) and not forms.shows_tools,
        "functions": bool(request.functions) and not forms.shows_tools,
        "documents": bool(request.documents) and not forms.shows_documents,
        "reasoning_effort": request.reasoning_effort is not None
        and not (forms.knows_effort or forms.thinking_switch is not None),
        "verbosity": request.verbosity not in (None, "medium"),
        "web_search_options": request.web_search_options is not None,
        "messages[].tool_calls": not forms.shows_calls and any(one.tool_calls for one in request.messages),
    }
    others = [f"tools[{at}]" for at, tool in enumerate(request.tools or ()) if tool.type != "function"]
    return [*others, *(field for field, is_so in is_left_out.items() if is_so)]


def _are_few(messages: Sequence[ChatMessage]) -> bool:
    """A quick check whether converting them takes no noticeable time."""
    if len(messages) > MAX_MESSAGES_ON_LOOP:
        return False
    calls = (call.function for message in messages for call in message.tool_calls or ())
    return sum(len(call.arguments or "") for call in calls) <= MAX_CHARS_ON_LOOP
