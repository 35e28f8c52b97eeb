"""The text that a chat template makes of messages, in which only the template writes control tokens."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, Final, Literal

from .control_tokens import TEMPLATE_ERRORS, Apply, ControlTokens, Marks

# In which form a chat template reads what OpenAI's API has one form for, found by rendering probes.

Message = Mapping[str, Any]
_Form = Literal["object", "text"]
_FORMS: Final[tuple[_Form, _Form]] = ("object", "text")
REASONING_NAMES: Final = ("reasoning_content", "reasoning", "thinking")
THINKING_SWITCHES: Final = ("enable_thinking", "thinking")
_DEVELOPER: Final = re.compile(r"""["']developer["']""")
_QUESTION, _ANSWER, _THOUGHT, _RESULT = "Motet's question", "Motet's answer", "Motet's thought", "Motet's result"
_TEXT: Final = "Motet's text"
_LATE: Final = "Motet's note"
_PARTS: Final = ("Motet's first part", "Motet's second part")
_DUMPED: Final = re.compile(r"""["']type["']: ["']text["']""")
_ARGUMENTS: Final[Mapping[str, str]] = MappingProxyType({"motet_key": "motet value"})
_NAME: Final = "motet_tool"
_CALL_ID: Final = "call00001"  # Mistral's templates want nine letters and digits


@dataclass(frozen=True)
class TemplateForms:
    """What a template knows, and how. A template that shows something in no form gets OpenAI's."""

    arguments: _Form = "object"  # of tool calls
    takes_text_arguments: bool = False  # besides objects, for arguments that are not JSON
    empty_content: str | None = None  # of a message that has tool calls and no text
    roles_of_parts: frozenset[str] = frozenset()  # the content of such messages may be a list of parts
    roles_of_text: frozenset[str] = frozenset()  # and of such a text
    reasoning: str = REASONING_NAMES[0]  # the field for what an assistant thought
    knows_developer: bool = False  # the role
    shows_tools: bool = False
    shows_calls: bool = False
    shows_documents: bool = False
    knows_effort: bool = False  # the variable `reasoning_effort`
    thinking_switch: str | None = None  # the variable that turns thinking on and off
    system_places: Literal["any", "first", "none"] = "any"  # where messages of the role `system` are shown
    takes_any_turn: bool = True  # a user's message behind another one, and behind a tool's result
    takes_bare_tools: bool = True  # tools without a description and parameters


def template_forms(template: str, apply: Apply) -> TemplateForms:
    """Renders some thirty small chats. `template`: its source."""
    probe = _Probe(apply)
    probe.find_question()
    arguments, takes_text, empty, shows_calls = probe.call_forms()
    in_parts, in_text = probe.content_forms(arguments, empty)
    return TemplateForms(
        arguments=arguments,
        takes_text_arguments=takes_text,
        empty_content=empty,
        roles_of_parts=in_parts,
        roles_of_text=in_text,
        reasoning=probe.reasoning_name(arguments, empty),
        knows_developer=_DEVELOPER.search(template) is not None,
        shows_calls=shows_calls,
        shows_tools=probe.is_changed_by(tools=([_tool()], None)),
        shows_documents=probe.is_changed_by(documents=([{"title": _QUESTION, "text": _ANSWER}], None)),
        knows_effort=probe.is_changed_by(reasoning_effort=("low", "high")),
        thinking_switch=next(
            (name for name in THINKING_SWITCHES if probe.is_changed_by(**{name: (True, False)})), None
        ),
        system_places=probe.system_places(in_parts, in_text),
        takes_any_turn=probe.takes_any_turn(arguments, empty),
        takes_bare_tools=probe.takes_bare_tools(),
    )


class _Probe:
    def __init__(self, apply: Apply) -> None:
        self._apply = apply
        self._ask: Message = _message("user", _QUESTION)

    def _text(self, messages: Sequence[Message], **options: Any) -> str | None:
        """None: the template refuses them."""
        try:
            return self._apply(messages, **options)
        except TEMPLATE_ERRORS:
            return None

    def find_question(self) -> None:
        """Has further probes ask in a form that the template shows: some read only lists of parts."""
        parts = [{"type": "text", "text": _QUESTION}]
        if _QUESTION not in (self._text([self._ask]) or "") and _QUESTION in (
            self._text([_message("user", parts)]) or ""
        ):
            self._ask = _message("user", parts)

    def content_forms(self, arguments: _Form, empty: str | None) -> tuple[frozenset[str], frozenset[str]]:
        """The roles whose content may be parts, and those whose content may be a text."""
        calling = _calling(_arguments_in(arguments), empty)
        befores: dict[str, list[Message]] = {
            "user": [], "system": [], "assistant": [self._ask], "tool": [self._ask, calling]
        }  # fmt: skip
        in_parts, in_text = set(), set()
        for role, before in befores.items():
            after = [self._ask] if role == "system" else []
            text = self._text([*before, _content(role, _TEXT), *after])
            in_text |= {role} if _TEXT in (text or "") else set()
            parts = [{"type": "text", "text": part} for part in _PARTS]
            text = self._text([*before, _content(role, parts), *after]) or ""
            is_dumped = _DUMPED.search(text) is not None  # the list as Python or JSON writes it
            in_parts |= {role} if all(part in text for part in _PARTS) and not is_dumped else set()
            if role not in in_parts | in_text:  # it refuses the probe; the first is the user's
                in_parts |= {role} if "user" in in_parts else set()
                in_text |= {role} if "user" in in_text else set()
        return frozenset(in_parts), frozenset(in_text)

    def call_forms(self) -> tuple[_Form, bool, str | None, bool]:
        """The form of arguments, whether they may be any text, the content of a message without one; are they shown?"""
        of_objects, of_texts = (
            {empty: self._call_text(_arguments_in(form), empty) for empty in ("", None)} for form in _FORMS
        )
        takes_objects = any(_shows_arguments(text) for text in of_objects.values())
        takes_texts = any(_arguments_in("text") in (text or "") for text in of_texts.values())
        outputs = of_texts if takes_texts and not takes_objects else of_objects
        none, empty = outputs[None], outputs[""]
        is_wrong = _says_none(none, empty) or (_shows_arguments(empty) and not _shows_arguments(none))
        form: _Form = "text" if outputs is of_texts else "object"
        return form, takes_texts, "" if is_wrong else None, takes_objects or takes_texts

    def _call_text(self, arguments: Any, content: str | None) -> str | None:
        return self._text(
            [self._ask, _calling(arguments, content), _result(_RESULT)], tools=[_tool()], add_generation_prompt=True
        )

    def reasoning_name(self, form: _Form, empty: str | None) -> str:
        """The field of an assistant's message whose text the template shows."""
        calling = _calling(_arguments_in(form), empty)
        for name in REASONING_NAMES:
            thought = {name: _THOUGHT}
            chats: tuple[list[Message], ...] = (
                [self._ask, {**calling, **thought}, _result(_RESULT)],
                [self._ask, {**_message("assistant", _ANSWER), **thought}],
            )
            if any(_THOUGHT in (self._text(chat) or "") for chat in chats):
                return name
        return REASONING_NAMES[0]

    def system_places(self, in_parts: frozenset[str], in_text: frozenset[str]) -> Literal["any", "first", "none"]:
        """Where messages of the role `system` may stand: some templates read one at the begin, and refuse others."""
        of_text = "system" in in_text or "system" not in in_parts
        first, late = (
            _message("system", text if of_text else [{"type": "text", "text": text}]) for text in (_TEXT, _LATE)
        )
        answer = _message("assistant", _ANSWER)
        chats = ([first, self._ask, late], [self._ask, answer, late, self._ask], [first, late, self._ask])
        if all(_LATE in (self._text(chat, add_generation_prompt=True) or "") for chat in chats):
            return "any"
        return "first" if _TEXT in (self._text([first, self._ask]) or "") else "none"

    def takes_any_turn(self, form: _Form, empty: str | None) -> bool:
        called = [self._ask, _calling(_arguments_in(form), empty), _result(_RESULT)]
        chats = ([self._ask], called)
        return all(self._text(chat) is None or self._text([*chat, self._ask]) is not None for chat in chats)

    def takes_bare_tools(self) -> bool:
        """True as well where tools are never shown."""
        bare = {"type": "function", "function": {"name": _NAME}}
        text = self._text([self._ask], tools=[bare], add_generation_prompt=True)
        return text is not None or self._text([self._ask], tools=[_tool()], add_generation_prompt=True) is None

    def is_changed_by(self, **options: tuple[Any, Any]) -> bool:
        """Whether the template makes something else of the one value than of the other, or refuses one."""
        texts = [self._text([self._ask], **variant, add_generation_prompt=True) for variant in _both(options)]
        return texts[0] != texts[1]


def _both(options: Mapping[str, tuple[Any, Any]]) -> Iterator[dict[str, Any]]:
    for which in (0, 1):
        yield {name: values[which] for name, values in options.items()}


def _arguments_in(form: _Form) -> Any:
    return json.dumps(dict(_ARGUMENTS)) if form == "text" else dict(_ARGUMENTS)


def _tool() -> dict[str, Any]:
    place = {"type": "string", "description": "Where."}
    parameters = {"type": "object", "properties": {"place": place}}
    return {"type": "function", "function": {"name": _NAME, "description": "Motet's tool.", "parameters": parameters}}


def _message(role: str, content: Any) -> Message:
    return {"role": role, "content": content}


def _calling(arguments: Any, content: str | None) -> Message:
    call = {"id": _CALL_ID, "type": "function", "function": {"name": _NAME, "arguments": arguments}}
    return {**_message("assistant", content), "tool_calls": [call]}


def _result(content: Any) -> Message:
    return {**_message("tool", content), "tool_call_id": _CALL_ID, "name": _NAME}


def _content(role: str, content: Any) -> Message:
    return _result(content) if role == "tool" else _message(role, content)


def _shows_arguments(text: str | None) -> bool:
    """And not as Python writes an object, nor as a text within JSON."""
    if text is None or not all(part in text for pair in _ARGUMENTS.items() for part in pair):
        return False
    return "{'motet_key'" not in text and '\\"motet_key' not in text


def _says_none(text: str | None, other: str | None) -> bool:
    """Whether a template wrote None where there is no content."""
    return (text or "").count("None") > (other or "").count("None")


_ANSWERER: Final = "assistant"


class ChatTemplateError(Exception):
    """Messages that cannot be made a prompt. `str()` of it is fit for the client."""


@dataclass(frozen=True)
class RenderedChat:
    """A prompt as text."""

    text: str
    # The same for `ControlTokens.encode`; None: the text has no control tokens but the template's.
    aliased: str | None = None


class ChatRenderer:
    """Renders messages so that control tokens in them are text.

    The template is given messages in which one character of each such token is hidden, by one that no other can
    write. So whatever it does to them, the control tokens of the result are its own.
    """

    def __init__(self, apply: Apply, tokens: ControlTokens, answer_names: frozenset[str]) -> None:
        """`answer_names`: the control tokens in what assistants have said."""
        self._apply = apply
        self._tokens = tokens
        self._answer_names = answer_names

    def render(self, messages: Sequence[Message], arguments: Mapping[str, Any], **options: bool) -> RenderedChat:
        """Raises ChatTemplateError, and what the template itself raises. `arguments`: more of the template's."""
        hider = _Hider(self._tokens, self._answer_names)
        messages = [hider.message(message) for message in messages]
        if arguments:
            arguments = hider.value(arguments, hider.names)
        text = hider.marks.unescaped(self._apply(messages, **options, **arguments))
        if not hider.has_pieces:
            return RenderedChat(text)
        strict = self._without_pieces(text, hider.marks, messages, arguments, **options)
        if not hider.has_hidden and strict is text:
            return RenderedChat(text)
        return RenderedChat(hider.marks.restore(text), self._tokens.with_aliases(strict, hider.marks))

    def _without_pieces(
        self, text: str, marks: Marks, messages: Sequence[Message], arguments: Mapping[str, Any], **options: bool
    ) -> str:
        """The text if the template made no control token of pieces in the messages, else with the pieces hidden.

        A template makes one where it joins texts of messages, leaves something out of one, or writes <> around one.
        """

        def hide(piece: str) -> str:
            return self._tokens.hide_pieces(piece, marks) if self._tokens.has_pieces(piece) else piece

        copies = [_with_same_role(message, hide) for message in messages]
        try:
            strict = marks.unescaped(self._apply(copies, **options, **_mapped(arguments, hide)))
        except TEMPLATE_ERRORS:  # it looks for what is hidden
            strict = None
        if strict is not None:
            written = [span.name for span in self._tokens.written(text)]
            if written == [span.name for span in self._tokens.written(strict)]:
                return text
            if marks.restore(strict) == marks.restore(text):
                return strict
        raise ChatTemplateError("the model's chat template may make a control token of parts of the messages")


class _Hider:
    """Copies messages with the control tokens in them hidden, and notes whether there may be pieces of some."""

    def __init__(self, tokens: ControlTokens, answer_names: frozenset[str]) -> None:
        self.names = tokens.names
        self.marks = Marks()
        self.has_hidden = False
        self.has_pieces = False
        self._tokens = tokens
        self._answer_names = answer_names

    def message(self, message: Message) -> Message:
        """Roles are a few words that templates compare. Arguments of tools are data, not text of an answer."""
        names = self._answer_names if message.get("role") == _ANSWERER else self.names
        changed = _with_same_role(message, partial(self._text, names=names))
        calls = message.get("tool_calls")
        return {**changed, "tool_calls": self.value(calls, self.names)} if calls else changed

    def value(self, value: Any, names: frozenset[str]) -> Any:
        """A copy of any value of JSON."""
        return _mapped(value, partial(self._text, names=names))

    def _text(self, text: str, *, names: frozenset[str]) -> str:
        if not self._tokens.may_hold_names(text):
            return text
        hidden = self._tokens.hide(text, names, self.marks)
        self.has_hidden |= hidden != text
        self.has_pieces |= hidden != text or self._tokens.has_pieces(text)
        return hidden


def _with_same_role(message: Message, change: Callable[[str], str]) -> Message:
    """A copy of a message with its strings changed but for the role."""
    return {field: content if field == "role" else _mapped(content, change) for field, content in message.items()}


def _mapped(value: Any, change: Callable[[str], str]) -> Any:
    """A copy of a value of JSON with its strings changed, keys included."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {_mapped(key, change): _mapped(child, change) for key, child in value.items()}
    if isinstance(value, list):
        return [_mapped(child, change) for child in value]
    return value
