"""Converts a chat's messages and tools to the values that chat templates take."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from ..openai_api.chat_messages import ChatMessage, FunctionCall, Tool, ToolCall
from ..openai_api.errors import invalid_value, unsupported
from ..openai_api.request_schema import ChatRequest
from ..text.template_forms import TemplateForms

# The call of a function has no id. Mistral's templates want nine letters and digits.
_OLD_CALL_ID: Final = "call00000"


def template_messages(messages: Sequence[ChatMessage], forms: TemplateForms) -> list[dict[str, Any]]:
    """The messages as plain values, which templates need. Raises a 400 that names what is wrong."""
    return [_fields_of(message, position, forms) for position, message in enumerate(messages)]


def template_tools(request: ChatRequest) -> list[dict[str, Any]] | None:
    """The tools as plain values; None: there are none."""
    tools = request.tools or [Tool("function", function) for function in request.functions or ()]
    return [msgspec.to_builtins(tool) for tool in tools] or None


def template_variables(request: ChatRequest, forms: TemplateForms) -> dict[str, Any]:
    """`chat_template_kwargs`, and what `reasoning_effort` says, where they do not.

    Raises 400 if the template does not use `reasoning_effort`.
    """
    given = dict(request.chat_template_kwargs or {})
    effort, switch = request.reasoning_effort, forms.thinking_switch
    if effort is None:
        return given
    if not forms.knows_effort and switch is None:
        raise unsupported("reasoning_effort", "the model's chat template does not know it; leave it out.")
    if forms.knows_effort:
        given.setdefault("reasoning_effort", effort)
    if switch is not None:
        given.setdefault(switch, effort != "none")
    return given


def _fields_of(message: ChatMessage, position: int, forms: TemplateForms) -> dict[str, Any]:
    """Without fields that the message lacks."""
    param = f"messages[{position}]"
    if message.audio is not None:
        raise unsupported(f"{param}.audio", "only text is supported here; leave it out.")
    role, call_id = message.role, message.tool_call_id
    if role == "developer" and not forms.knows_developer:
        role = "system"  # as older clients, and most templates, call it
    elif role == "function":
        role, call_id = "tool", call_id or _OLD_CALL_ID
    calls = message.tool_calls
    if message.function_call is not None and not calls:
        calls = [ToolCall(message.function_call, _OLD_CALL_ID)]
    content = _content_of(message, param)
    reasoning = message.reasoning if message.reasoning is not None else message.reasoning_content
    if content is None and not (role == "assistant" and (calls or reasoning is not None)):
        raise invalid_value(f"{param}.content", "a text is needed.")
    if content is None:
        shown: Any = forms.empty_content if calls else ""
    else:
        shown = _as_template_reads(content, role, forms)
    fields: dict[str, Any] = {"role": role, "content": shown}
    if message.name is not None:
        fields["name"] = message.name
    if reasoning is not None:
        fields[forms.reasoning] = reasoning
    if calls:
        fields["tool_calls"] = [
            _call_of(call, f"{param}.tool_calls[{number}]", forms) for number, call in enumerate(calls)
        ]
    if call_id is not None:
        fields["tool_call_id"] = call_id
    return fields


def _content_of(message: ChatMessage, param: str) -> str | list[str] | None:
    """A text, or the texts of parts."""
    content = message.content
    if not isinstance(content, list):
        return message.refusal if content is None else content
    texts = []
    for position, part in enumerate(content):
        at = f"{param}.content[{position}]"
        if part.type not in ("text", "refusal"):
            what = f"only 'text' and 'refusal' parts are supported here, not {part.type!r}."
            raise unsupported(f"{at}.type", what)
        text = part.text if part.type == "text" else part.refusal
        if text is None:
            raise invalid_value(f"{at}.{part.type}", "a text is needed.")
        texts.append(text)
    return texts


def _as_template_reads(content: str | list[str], role: str, forms: TemplateForms) -> Any:
    is_list = isinstance(content, list)
    as_parts = role in forms.roles_of_parts and (is_list or role not in forms.roles_of_text)
    texts = content if isinstance(content, list) else [content]
    return [{"type": "text", "text": text} for text in texts] if as_parts else "\n".join(texts)


def _call_of(call: ToolCall, param: str, forms: TemplateForms) -> dict[str, Any]:
    function = {"name": call.function.name, "arguments": _arguments_of(call.function, param, forms)}
    return {**({} if call.id is None else {"id": call.id}), "type": call.type, "function": function}


def _arguments_of(function: FunctionCall, param: str, forms: TemplateForms) -> Any:
    text = function.arguments or "{}"
    if forms.arguments == "text":
        return text
    try:
        arguments = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        arguments = None
    if isinstance(arguments, dict):
        return arguments
    if forms.takes_text_arguments:
        return text  # models write invalid JSON, too, and are shown their own text
    raise invalid_value(f"{param}.function.arguments", "the chat template needs JSON of an object.")
