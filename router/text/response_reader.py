"""Splits an answer's text, as it is generated, into reasoning, tool calls and content.

It reads transformers' response templates as transformers' own `ResponseParser` does, with three differences. What is
shown after k characters depends on these k alone, not on how they were split into pieces, so that a resumed stream
continues exactly. The work for a character is bounded, where transformers copies all of the text for each piece. And
text that looks like a call, but cannot be parsed as one, is content.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal, NamedTuple

from .answer_format import AnswerFormat
from .call_parsing import SELF_DELIMITING, Call, KnownTools, calls_of
from .chat_renderer import REASONING_NAMES
from .growing_calls import GrowingCalls

Part = Literal["content", "reasoning"]
MAX_HELD_CHARS: Final = 1024  # of text that may become a mark: longer text is not held back
_CONTEXT_CHARS: Final = 64  # before the text to search, for patterns that look behind
_MAX_KEPT_CHARS: Final = 512
_PIECE_CHARS: Final = 512  # so that no pattern scans a long text again and again
_MAX_EMPTY_MARKS: Final = 4  # in a row at one place
_CALLS: Final = "tool_calls"
_BETWEEN_CALLS: Final = ";, \t\r\n"
_HALF_NAME: Final = re.compile(r'\s*\{\s*"(?:name|type)"\s*:\s*"?([\w.-]*)')
_OPENING_OF_JSON: Final = re.compile(r'[\[{]\s*(?:"\w*"?\s*:?)?')  # which may be content


class TextPiece(NamedTuple):
    part: Part
    text: str


Piece = TextPiece | Call


class _Text:
    """One part of the message as it grows. Whitespace at both ends of a region is stripped."""

    def __init__(self) -> None:
        self.has_any = False
        self._in_region = False
        self._spaces: list[str] = []  # shown only if more text follows in this region

    def begin(self) -> None:
        self._in_region = False
        self._spaces = []

    def copy(self) -> _Text:
        clone = copy(self)
        clone._spaces = [*self._spaces]
        return clone

    def add(self, text: str, join: str, *, strip: bool) -> str:
        """What can be shown of the text now."""
        if not strip:
            output = (join if self.has_any and not self._in_region else "") + text
            self.has_any = self._in_region = True
            return output
        if not self._in_region:
            text = text.lstrip()
            if not text:
                return ""
        body = text.rstrip()
        output = ""
        if body:
            before = "".join(self._spaces) if self._in_region else join if self.has_any else ""
            output = before + body
            self.has_any = self._in_region = True
            self._spaces = []
        if len(body) < len(text):
            self._spaces.append(text[len(body) :])
        return output


@dataclass(frozen=True)
class Reading:
    """How to read the answers to one request."""

    format: AnswerFormat
    tools: KnownTools
    with_reasoning: bool = True  # whether the client gets it
    max_calls: int | None = None  # that the client gets; None: all

    @property
    def identity(self) -> list[object]:
        """All that what is shown depends on, besides the text."""
        return [self.format.name, self.with_reasoning, self.max_calls, self.format.has_calls, [*self.tools.properties]]


@dataclass
class _Region:
    field: Any  # of the template; None: text before the first mark of a template that has no place for it
    captures: dict[str, str] = field(default_factory=dict)
    mark: str = ""  # the text that opened it
    body: list[str] = field(default_factory=list)  # of a tool call
    calls: GrowingCalls | None = None  # if they are shown while they are generated


class ResponseReader:
    """Reads one answer. `num_scanned`: characters that patterns have searched, for tests of the cost."""

    def __init__(self, reading: Reading, prompt: str) -> None:
        """`prompt`: the rendered chat template, which may contain the beginning of the answer."""
        self.reading = reading
        template = reading.format.template
        self.num_scanned = 0
        self._template = template
        self.num_calls = 0  # complete ones
        self._num_begun = 0
        self._implicit = None if template.implicit is None else template.fields[template.implicit]
        self._opens = [field for field in template.fields.values() if field.open_re is not None]
        self._texts: dict[Part, _Text] = {"content": _Text(), "reasoning": _Text()}
        self._buffer, self._position = "", 0
        self._num_empty_marks = 0
        self._region = _Region(self._implicit)
        self._has_opened = False
        self._is_cut = False  # the answer ended before the model ended it
        self._outside: list[str] = []  # text before the first region
        self._out: list[Piece] = []
        self._feed(_prefill(template, prompt))
        self._out.clear()
        self.num_calls = self._num_begun = 0
        self._region.calls = None  # a call that the prompt begins is shown once it is complete

    def copy(self) -> ResponseReader:
        """An independent reader in the same state."""
        clone = copy(self)
        clone._texts = {part: text.copy() for part, text in self._texts.items()}
        region = self._region
        calls = None if region.calls is None else region.calls.copy()
        clone._region = replace(region, captures={**region.captures}, body=[*region.body], calls=calls)
        clone._outside, clone._out = [*self._outside], []
        return clone

    @property
    def has_reasoned(self) -> bool:
        """Whether there has been any reasoning."""
        return self._texts["reasoning"].has_any or self.is_reasoning

    @property
    def is_reasoning(self) -> bool:
        """Whether the next character belongs to the reasoning, as far as is known."""
        return self._region.field is not None and _part_of(self._region.field) == "reasoning"

    def feed(self, text: str) -> list[Piece]:
        """What the text adds to the message."""
        self._feed(text)
        return self._take_output()

    def finish(self, *, is_cut: bool = False) -> list[Piece]:
        """What is left. The reader cannot be used afterwards.

        `is_cut`: the model did not end the answer itself. Then half a call is left out, and so is half a mark.
        """
        self._is_cut = is_cut
        self._advance(is_end=True)
        self._close("", is_marked=False)
        if not self._has_opened and self._outside:
            self._show("content", "".join(self._outside), "", strip=True)
        return self._take_output()

    def _take_output(self) -> list[Piece]:
        out, self._out = self._out, []
        return out

    def _feed(self, text: str) -> None:
        for start in range(0, len(text), _PIECE_CHARS):
            if self._position > _MAX_KEPT_CHARS:
                cut = self._position - _CONTEXT_CHARS
                self._buffer, self._position = self._buffer[cut:], _CONTEXT_CHARS
            self._buffer += text[start : start + _PIECE_CHARS]
            self._advance(is_end=False)

    def _advance(self, *, is_end: bool) -> None:
        while True:
            mark, hold = self._scan(is_end=is_end)
            if mark is not None:
                self._take_mark(*mark)
                continue
            end = len(self._buffer)
            if not is_end and end - hold > MAX_HELD_CHARS:
                self._add_to(hold + 1)
                continue
            if is_end and self._is_cut:
                half = self._scan(is_end=False)[1]
                hold = end if _OPENING_OF_JSON.fullmatch(self._buffer, half) else half
            self._add_to(end if is_end and not self._is_cut else hold)
            return

    def _scan(self, *, is_end: bool) -> tuple[tuple[Any, Any] | None, int]:
        """The first complete mark, with its field, and the position of the first possible mark."""
        buffer, position = self._buffer, self._position
        hold, best_key, best = len(buffer), None, None
        for mark_field, is_open in self._watched():
            pattern = mark_field.open_re if is_open else mark_field.close_re
            self.num_scanned += len(buffer) - position
            match = pattern.search(buffer, position, partial=not is_end)
            if match is None:
                continue
            if not is_end and (match.partial or self._may_grow(mark_field, is_open, match)):
                hold = min(hold, match.start())
                continue
            key = (match.start(), match.start() - match.end(), not is_open, mark_field.name)
            if best_key is None or key < best_key:
                best_key, best = key, (mark_field if is_open else None, match)
        if best is not None and best[1].start() >= hold:
            best = None
        return best, hold

    def _watched(self) -> Sequence[tuple[Any, bool]]:
        region = self._region.field
        if region is not None and region is not self._implicit:
            return [] if region.close_re is None else [(region, False)]
        watched = [(field, True) for field in self._opens]
        if self._implicit is not None and self._implicit.close_re is not None:
            watched.append((self._implicit, False))
        return watched

    def _may_grow(self, field: Any, is_open: bool, match: Any) -> bool:
        """Whether more text could change the match."""
        literals = field.open_literals if is_open else field.close_literals
        if match.end() != len(self._buffer):
            if literals is not None:
                return False
            pattern = field.open_re if is_open else field.close_re
            longer = pattern.match(self._buffer + "\0", match.start())
            return longer is None or longer.span() != match.span() or longer.groupdict() != match.groupdict()
        if match.start() == match.end() or literals is None:
            return True
        return bool(field.open_literal_can_extend if is_open else field.close_literal_can_extend)

    def _take_mark(self, opened: Any, match: Any) -> None:
        is_empty = match.start() == match.end()
        if is_empty and match.start() == self._position:
            self._num_empty_marks += 1
            if self._num_empty_marks > _MAX_EMPTY_MARKS:  # the template would loop for ever
                self._num_empty_marks = 0
                if self._position < len(self._buffer):
                    self._add_to(self._position + 1)
                    return
        else:
            self._num_empty_marks = 0
        self._add_to(match.start())
        self._position = match.end()
        captures = {name: text for name, text in match.groupdict().items() if text is not None}
        if opened is None:
            self._region.captures |= captures
            self._close(match[0])
        else:
            self._close("")
            self._region = _Region(opened, captures, match[0])
            self._has_opened = True
            heads = self.reading.format.call_heads
            if opened.name != _CALLS:
                self._texts[_part_of(opened)].begin()
            elif heads is not None:
                self._region.calls = GrowingCalls(heads, captures, self.reading.tools, self._num_begun)

    def _add_to(self, end: int) -> None:
        """Adds the buffer up to `end` to the region."""
        text, self._position = self._buffer[self._position : end], max(self._position, end)
        if not text:
            return
        region = self._region
        if region.field is None:
            if not self._has_opened:
                self._outside.append(text)
        elif region.field.name == _CALLS:
            region.body.append(text)
            if region.calls is not None:
                self._show_calls(region.calls.feed(text))
        else:
            args = region.field.content_args
            join = "\n" if region.field.join is None else region.field.join
            self._show(_part_of(region.field), text, join, strip=bool(args.get("strip", True)))

    def _show(self, part: Part, text: str, join: str, *, strip: bool) -> None:
        output = self._texts[part].add(text, join, strip=strip)
        if output and (part == "content" or self.reading.with_reasoning):
            self._out.append(TextPiece(part, output))

    def _show_calls(self, calls: list[Call]) -> None:
        limit = self.reading.max_calls
        self._out += [call for call in calls if limit is None or call.number < limit]

    def _close(self, mark: str, *, is_marked: bool = True) -> None:
        """Ends the region. `is_marked`: a mark ended it, maybe another region's; else the end of the answer."""
        region = self._region
        self._region = _Region(self._implicit)
        if region.field is not None and region.field.name == _CALLS:
            text = self._end_calls(region, is_marked=is_marked)
            if text is None:
                text = region.mark + "".join(region.body) + mark
            if text:
                self._texts["content"].begin()
                self._show("content", text, "\n", strip=True)
        if self._implicit is not None:
            self._texts[_part_of(self._implicit)].begin()

    def _end_calls(self, region: _Region, *, is_marked: bool) -> str | None:
        """Shows what is left of a region's calls, and returns the text after them. None: there are no calls."""
        growing = region.calls
        if growing is not None and growing.num_begun:
            calls, text = growing.finish()
            self._show_calls(calls)
            self._num_begun += growing.num_begun
            self.num_calls += growing.num_whole
            if self._is_cut and not is_marked:  # without a mark, what follows may be content, or half a call
                is_content = region.field.close_re is None and text.lstrip(_BETWEEN_CALLS)[:1] not in ("", "{")
                return text if is_content else ""
            return text
        try:
            if not is_marked and region.field.close_re is not None and region.field.content not in SELF_DELIMITING:
                raise ValueError("it does not end")
            new_calls = calls_of("".join(region.body), region.field, region.captures, self.reading.tools)
        except ValueError:
            return "" if self._is_cut and not is_marked and self._is_half_call(region) else None
        self._show_calls([Call(self._num_begun + number, *call) for number, call in enumerate(new_calls)])
        self._num_begun += len(new_calls)
        self.num_calls += len(new_calls)
        return ""

    def _is_half_call(self, region: _Region) -> bool:
        """Whether a region that was cut off is one of a call. Without a mark it may be content in JSON."""
        body, names = "".join(region.body), self.reading.tools.properties
        if region.mark.strip() or any(f'"{name}"' in body or f"{name}(" in body for name in names):
            return True
        match = _HALF_NAME.fullmatch(body)
        return match is not None and any(name.startswith(match[1]) for name in names)


def _part_of(field: Any) -> Part:
    return "reasoning" if field.name in REASONING_NAMES else "content"


def _prefill(template: Any, prompt: str) -> str:
    """The beginning of the answer in the prompt: all after the last start mark of an answer."""
    if template.start_anchor_literals is not None:
        ends = [prompt.rfind(text) + len(text) for text in template.start_anchor_literals if text in prompt]
        return prompt[max(ends) :] if ends else ""
    end = None
    for match in template.start_anchor_re.finditer(prompt):
        end = match.end()
    return "" if end is None else prompt[end:]
