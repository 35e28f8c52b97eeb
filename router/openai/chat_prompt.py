"""The prompt of a chat: its messages, rendered and tokenized."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, NamedTuple, cast

import msgspec

from ...workers.wire.messages import GangInfo
from ..http.errors import ApiError, invalid_value, unsupported
from ..http.loop_turns import LoopShare
from ..text.chat_renderer import ChatTemplateError, TemplateForms
from ..text.text import MAX_CHARS_ON_LOOP, MAX_MESSAGES_ON_LOOP, TextService
from .chat_fields import left_out_text
from .request_schema import ChatMessage, ChatRequest, CompletionRequest, FunctionCall, Tool, ToolCall, same_kind
from .sampling_params import check_length, check_text, check_token_ids, num_kept

# Converts a chat's messages and tools to the values that chat templates take.

# The call of a function has no id. Mistral's templates want nine letters and digits.
_OLD_CALL_ID: Final = "call00000"
_MAX_DEPTH: Final = 128  # of arguments
_OUT_OF_TURN: Final = (("user", "user"), ("tool", "user"), ("assistant", "assistant"))


def template_messages(messages: Sequence[ChatMessage], forms: TemplateForms) -> tuple[list[dict[str, Any]], list[str]]:
    """The messages as plain values, which templates need, and the names of what is left out of them.

    Raises a 400 that names what is wrong.
    """
    num_past = max((at for at, message in enumerate(messages, 1) if message.role == "assistant"), default=0)
    converted = [
        _Converted(message, f"messages[{at}]", forms, is_past=at < num_past) for at, message in enumerate(messages)
    ]
    names = [name for entry in converted for name in entry.left_out]
    return _placed([entry.fields for entry in converted], forms), names


def template_tools(request: ChatRequest, forms: TemplateForms) -> list[dict[str, Any]] | None:
    """The tools as plain values; None: there are none."""
    tools = [tool for tool in request.tools or () if tool.type == "function"]
    tools = tools or [Tool("function", function) for function in request.functions or ()]
    tool_fields = [msgspec.to_builtins(tool) for tool in tools]
    if not forms.takes_bare_tools:
        for tool in tool_fields:
            bare = {"name": "", "description": "", "parameters": {"type": "object", "properties": {}}}
            tool["function"] = {**bare, **tool["function"]}
    return tool_fields or None


def template_variables(request: ChatRequest, forms: TemplateForms) -> dict[str, Any]:
    """`chat_template_kwargs`, and what `reasoning_effort` says, where they do not and the template knows it."""
    variables = dict(request.chat_template_kwargs or {})
    effort, switch = request.reasoning_effort, forms.thinking_switch
    if effort is None:
        return variables
    if forms.knows_effort:
        variables.setdefault("reasoning_effort", effort)
    if switch is not None:
        variables.setdefault(switch, effort != "none")
    return variables


def _placed(messages: list[dict[str, Any]], forms: TemplateForms) -> list[dict[str, Any]]:
    """With notes of the system, and messages out of turn, in places that the template shows.

    Where it does not show a note, that is a part of the user's message before or behind it.
    """
    groups: list[_Group] = []
    for message in messages:
        last = groups[-1] if groups else None
        is_note = message["role"] == "system" and not (
            forms.system_places == "any" or (forms.system_places == "first" and last is None)
        )
        if is_note and last is not None and last.role == "system":
            last.contents.append(message["content"])
            continue
        if is_note:
            content = message["content"]
            texts = content if isinstance(content, str) else [part["text"] for part in content]
            message = {**message, "role": "user", "content": _as_template_reads(texts, "user", forms)}
        if last is not None and last.takes(message["role"], is_note=is_note, forms=forms):
            last.fields = {**message, **last.fields}
            last.contents.append(message["content"])
            last.is_note &= is_note
        else:
            last = _Group(message, [message["content"]], is_note)
            groups.append(last)
        if thought := message.get(forms.reasoning):
            last.thoughts.append(thought)
    for group in groups:
        if group.thoughts:
            group.fields = {**group.fields, forms.reasoning: "\n\n".join(group.thoughts)}
        content = group.contents[0] if len(group.contents) == 1 else _joined(group.contents)
        group.fields = {**group.fields, "content": content}
    return [group.fields for group in groups]


@dataclass
class _Group:
    """Messages that the template is to see as one. `is_note`: they are nothing but notes of the system."""

    fields: dict[str, Any]
    contents: list[Any]
    is_note: bool
    thoughts: list[str] = field(default_factory=list)

    @property
    def role(self) -> str:
        return str(self.fields["role"])

    def takes(self, role: str, *, is_note: bool, forms: TemplateForms) -> bool:
        if self.role == role == "user" and (is_note or self.is_note):
            return True
        is_out_of_turn = (self.role, role) in _OUT_OF_TURN and not self.fields.get("tool_calls")
        return is_out_of_turn and not forms.takes_any_turn


def _joined(contents: list[Any]) -> Any:
    """Contents as one, without those of an assistant that said nothing."""
    texts = [content for content in contents if content] or contents[:1]
    if len(texts) == 1:
        return texts[0]
    if all(isinstance(content, str) for content in texts):
        return "\n\n".join(texts)
    parts = [[{"type": "text", "text": text_part}] if isinstance(text_part, str) else text_part for text_part in texts]
    return [part for content in parts for part in content]


class _Converted:
    """One message. `left_out`: names of what is left out of it."""

    def __init__(self, message: ChatMessage, param: str, forms: TemplateForms, *, is_past: bool) -> None:
        """`is_past`: an answer is behind it, or it is one."""
        self._message, self._param, self._forms = message, param, forms
        self._is_past = is_past or message.role in ("tool", "function")
        self.left_out: list[str] = []
        if message.audio is not None:
            self._leave_out(f"{param}.audio")
        self.fields = self._fields()

    def _leave_out(self, param: str) -> None:
        if not self._is_past:
            raise unsupported(param, "only text is supported here; leave it out.")
        self.left_out.append(param)

    def _fields(self) -> dict[str, Any]:
        """Without fields that the message lacks."""
        message, param, forms = self._message, self._param, self._forms
        role, call_id = message.role, message.tool_call_id
        if role == "developer" and not forms.knows_developer:
            role = "system"  # as older clients, and most templates, call it
        elif role == "function":
            role, call_id = "tool", call_id or _OLD_CALL_ID
        calls = message.tool_calls
        if message.function_call is not None and not calls:
            calls = [ToolCall(message.function_call, _OLD_CALL_ID)]
        content = self._content()
        reasoning = message.reasoning if message.reasoning is not None else message.reasoning_content
        if content is None and role != "assistant":
            raise invalid_value(f"{param}.content", "a text is needed.")
        if content is None:
            content_view: Any = forms.empty_content if calls else ""
        else:
            content_view = _as_template_reads(content, role, forms)
        fields: dict[str, Any] = {"role": role, "content": content_view}
        if message.name is not None:
            fields["name"] = message.name
        if reasoning is not None:
            fields[forms.reasoning] = reasoning
        if calls:
            fields["tool_calls"] = [
                self._call(call, f"{param}.tool_calls[{number}]") for number, call in enumerate(calls)
            ]
        if call_id is not None:
            fields["tool_call_id"] = call_id
        return fields

    def _content(self) -> str | list[str] | None:
        """A text, or the texts of parts."""
        content = self._message.content
        if not isinstance(content, list):
            return self._message.refusal if content is None else content
        texts = []
        for position, part in enumerate(content):
            at = f"{self._param}.content[{position}]"
            if part.type not in ("text", "refusal"):
                if not self._is_past:
                    problem = f"only 'text' and 'refusal' parts are supported here, not {part.type!r}."
                    raise unsupported(f"{at}.type", problem)
                self.left_out.append(at)
                texts.append(left_out_text(part.type))
                continue
            text = part.text if part.type == "text" else part.refusal
            if text is None:
                raise invalid_value(f"{at}.{part.type}", "a text is needed.")
            texts.append(text)
        return texts

    def _call(self, call: ToolCall, param: str) -> dict[str, Any]:
        function = {"name": call.function.name, "arguments": self._arguments(call.function, param)}
        return {**({} if call.id is None else {"id": call.id}), "type": call.type, "function": function}

    def _arguments(self, function: FunctionCall, param: str) -> Any:
        """Of a call that was cut off, or that a model wrote wrongly, its text, where the template takes one."""
        text = (function.arguments or "").strip()
        if text in ("", "null"):
            text = "{}"
        if self._forms.arguments == "text":
            return text
        try:
            arguments = msgspec.json.decode(text)
        except (msgspec.DecodeError, UnicodeError, RecursionError):
            arguments = None
        if isinstance(arguments, dict) and not _is_deep(text, arguments):
            return arguments
        if self._forms.takes_text_arguments:
            return text
        self.left_out.append(f"{param}.function.arguments")
        return {}


def _is_deep(text: str, value: Any) -> bool:
    """Whether JSON is nested more deeply than templates can write it. `value`: what the text stands for."""
    if text.count("[") + text.count("{") <= _MAX_DEPTH:
        return False
    level = [value]
    for _ in range(_MAX_DEPTH):
        inner = [
            [*element.values()] if isinstance(element, dict) else element
            for element in level
            if isinstance(element, dict | list)
        ]
        level = [element for values in inner for element in values]
        if not level:
            return False
    return True


def _as_template_reads(content: str | list[str], role: str, forms: TemplateForms) -> Any:
    is_list = isinstance(content, list)
    as_parts = role in forms.roles_of_parts and (is_list or role not in forms.roles_of_text)
    texts = content if isinstance(content, list) else [content]
    return [{"type": "text", "text": text} for text in texts] if as_parts else "\n".join(texts)


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
    variables: dict[str, Any] = {}
    if request.chat_template_kwargs or request.reasoning_effort is not None:
        variables = template_variables(request, text.forms)
    messages, left_out = convert() if _are_few(request.messages) else await asyncio.to_thread(convert)
    try:
        prompt = await text.render_chat(
            messages,
            add_generation_prompt=begins,
            continue_final_message=continues,
            arguments=variables,
            tools=template_tools(request, text.forms) if request.tools or request.functions else None,
            documents=request.documents,
        )
    except ChatTemplateError as error:
        raise ApiError(400, f"{error}.", param="messages", code="invalid_messages") from error
    limit = None
    if request.truncate_prompt_tokens is None:
        check_text(prompt.text, text, gang, "messages")
    else:
        limit = num_kept(request.truncate_prompt_tokens, request.max_completion_tokens or request.max_tokens, gang)
    # The template writes the special tokens itself.
    token_ids = await text.encode_chat(prompt, add_special_tokens=bool(request.add_special_tokens), limit=limit)
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
        "messages[].tool_calls": not forms.shows_calls and any(message.tool_calls for message in request.messages),
    }
    other_tools = [f"tools[{at}]" for at, tool in enumerate(request.tools or ()) if tool.type != "function"]
    return [*other_tools, *(field for field, is_so in is_left_out.items() if is_so)]


def _are_few(messages: Sequence[ChatMessage]) -> bool:
    """A quick check whether converting them takes no noticeable time."""
    if len(messages) > MAX_MESSAGES_ON_LOOP:
        return False
    calls = (call.function for message in messages for call in message.tool_calls or ())
    return sum(len(call.arguments or "") for call in calls) <= MAX_CHARS_ON_LOOP


# The prompts of a completion request, tokenized.


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
    limit = None
    if request.truncate_prompt_tokens is not None:
        limit = num_kept(request.truncate_prompt_tokens, request.max_tokens, gang)
    for _, prompt in texts if limit is None else ():
        check_text(prompt, text, gang, "prompt")
        await share.pause()
    for param, token_ids in token_lists:
        await share.pause()
        if limit is None:
            check_length(len(token_ids), _least_new(request), gang, prompt_param="prompt")
        check_token_ids(token_ids, gang.vocab_size, param)
    if texts:  # then all prompts are texts
        encoded = await text.encode_all(
            [prompt for _, prompt in texts],
            add_special_tokens=request.add_special_tokens is not False,
            limit=limit,
        )
        token_lists = [(param, token_ids) for (param, _), token_ids in zip(texts, encoded, strict=True)]
    elif limit is not None:
        token_lists = [(param, ids[max(len(ids) - limit, 0) :]) for param, ids in token_lists]
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
