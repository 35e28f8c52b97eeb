"""The text that a chat template makes of messages, in which only the template writes control tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from .control_names import TEMPLATE_ERRORS, Apply
from .control_tokens import ControlTokens, Marks

Message = Mapping[str, Any]
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
        messages, arguments = [hider.message(one) for one in messages], hider.value(arguments, hider.names)
        text = hider.marks.unescaped(self._apply(messages, **options, **arguments))
        if not hider.has_pieces:
            return RenderedChat(text)
        strict = self._without_pieces(text, hider.marks, messages, arguments, **options)
        if not hider.has_hidden and strict is text:
            return RenderedChat(text)
        return RenderedChat(hider.marks.shown(text), self._tokens.with_aliases(strict, hider.marks))

    def _without_pieces(
        self, text: str, marks: Marks, messages: Sequence[Message], arguments: Mapping[str, Any], **options: bool
    ) -> str:
        """The text if the template made no control token of pieces in the messages, else with the pieces hidden.

        A template makes one where it joins texts of messages, leaves something out of one, or writes <> around one.
        """

        def hide(piece: str) -> str:
            return self._tokens.hide_pieces(piece, marks) if self._tokens.has_pieces(piece) else piece

        copies = [_with_same_role(message, lambda one: _mapped(one, hide)) for message in messages]
        try:
            strict = marks.unescaped(self._apply(copies, **options, **_mapped(arguments, hide)))
        except TEMPLATE_ERRORS:  # it looks for what is hidden
            strict = None
        if strict is not None:
            written = [span.name for span in self._tokens.written(text)]
            if written == [span.name for span in self._tokens.written(strict)]:
                return text
            if marks.shown(strict) == marks.shown(text):
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
        changed = _with_same_role(message, lambda one: self.value(one, names))
        calls = message.get("tool_calls")
        return {**changed, "tool_calls": self.value(calls, self.names)} if calls else changed

    def value(self, value: Any, names: frozenset[str]) -> Any:
        """A copy of any value of JSON."""
        return _mapped(value, lambda text: self._text(text, names))

    def _text(self, text: str, names: frozenset[str]) -> str:
        if not self._tokens.may_hold_names(text):
            return text
        hidden = self._tokens.hide(text, names, self.marks)
        self.has_hidden |= hidden != text
        self.has_pieces |= hidden != text or self._tokens.has_pieces(text)
        return hidden


def _with_same_role(message: Message, change: Callable[[Any], Any]) -> Message:
    """A copy of a message with its fields changed but for the role."""
    return {field: one if field == "role" else change(one) for field, one in message.items()}


def _mapped(value: Any, change: Callable[[str], str]) -> Any:
    """A copy of a value of JSON with its strings changed, keys included."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {_mapped(key, change): _mapped(one, change) for key, one in value.items()}
    if isinstance(value, list):
        return [_mapped(one, change) for one in value]
    return value
