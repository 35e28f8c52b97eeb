"""Log records as lines: JSON for machines, text for people.

A record is one line that its content cannot forge: JSON is plain ASCII in which line ends are escaped; in text values
are quoted where they need it, and the lines of a traceback are indented.

What a client sent is never in a line. The code does not log it; and since exceptions may quote the values that they are
about, those that meet requests are logged as type and stack, without their messages: all of `motet.router`, and of
other people's libraries. Of these only a message's first line is taken, as asyncio shows objects in the others.
"""

from __future__ import annotations

import json
import logging
import traceback
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any, Final

import msgspec

OWN: Final = ("motet.workers.", "motet.cluster.", "motet.adapters.", "motet.kernels.")  # whose errors are about motet
MAX_CHARS: Final = 8192  # of a message, or of a field; the rest is cut off
MAX_FRAMES: Final = 32
_DELETE: Final = 0x7F  # the one control character that JSON lets stand
_quick: Final = msgspec.json.Encoder(enc_hook=str).encode
_thorough: Final = json.JSONEncoder(ensure_ascii=True, separators=(",", ":"), default=str).encode


class JsonLines(logging.Formatter):
    """`origin`: fields of every line that say which process it is."""

    def __init__(self, origin: Mapping[str, Any]) -> None:
        super().__init__()
        self._origin = origin

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": time_of(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": _message(record),
            **self._origin,
        }
        for name, value in fields_of(record).items():
            line.setdefault(name, _cut(value) if isinstance(value, str) else value)
        if record.exc_info and record.exc_info[1] is not None:
            error = record.exc_info[1]
            line |= {"exception": summary_of(error, record.name), "stack": stack_of(error, record.name)}
        return _encode(line)


class TextLines(logging.Formatter):
    """The same for people: time, level, logger, message, then the fields as name=value."""

    def format(self, record: logging.LogRecord) -> str:
        parts = [time_of(record), record.levelname, f"{record.name}:", _printable(_message(record))]
        parts += [f"{name}={_word(value)}" for name, value in fields_of(record).items()]
        lines = [" ".join(parts)]
        if record.exc_info and record.exc_info[1] is not None:
            error = record.exc_info[1]
            stack = [*stack_of(error, record.name), summary_of(error, record.name)]
            lines += [f"    | {_printable(line)}" for line in stack]
        return "\n".join(lines)


def fields_of(record: logging.LogRecord) -> Mapping[str, Any]:
    """What the record's `extra={"fields": …}` gave."""
    fields: Mapping[str, Any] = getattr(record, "fields", {})
    return fields


def time_of(record: logging.LogRecord) -> str:
    """UTC, to the millisecond, as RFC 3339 writes it."""
    second, rest = divmod(record.created, 1)
    return f"{_second(int(second))}.{int(rest * 1000):03d}Z"


def summary_of(error: BaseException, logger: str) -> str:
    """The error's type, and its message where that is about motet."""
    name = type(error).__name__
    return f"{name}: {_cut(str(error))}" if _may_quote(logger) and str(error) else name


def stack_of(error: BaseException, logger: str) -> list[str]:
    """Where the error was raised, innermost last, and what it came from before it. No values, and no source lines."""
    chain: list[BaseException] = []
    one: BaseException | None = error
    while one is not None and one not in chain:
        chain.append(one)
        one = one.__cause__ or (None if one.__suppress_context__ else one.__context__)
    lines: list[str] = []
    for cause in reversed(chain):
        frames = traceback.extract_tb(cause.__traceback__, limit=-MAX_FRAMES)
        lines += [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in frames]
        if cause is not error:
            lines.append(f"{summary_of(cause, logger)}, which led to")
    return lines


def _message(record: logging.LogRecord) -> str:
    message = record.getMessage()
    return _cut(message if record.name.startswith("motet.") else message.partition("\n")[0])


@lru_cache(maxsize=2)
def _second(seconds: int) -> str:
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%dT%H:%M:%S}"


def _encode(value: Any) -> str:
    """JSON of ASCII characters that all can be seen."""
    try:
        data = _quick(value)
    except UnicodeEncodeError:  # half of a pair of surrogates
        data = b"\xff"
    if data.isascii() and _DELETE not in data:
        return data.decode("ascii")
    return _thorough(value).replace(chr(_DELETE), "\\u007f")


def _may_quote(logger: str) -> bool:
    return logger.startswith(OWN)


def _cut(text: str) -> str:
    return text if len(text) <= MAX_CHARS else f"{text[:MAX_CHARS]}…"


def _printable(text: str) -> str:
    """The text with characters that are not printable, line breaks above all, escaped as in a Python string."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode("ascii") for one in text)


def _word(value: Any) -> str:
    text = str(value)
    is_plain = text.isascii() and text.isprintable() and not set(text) & {" ", '"', "=", "\\"}
    return text if is_plain and text else _encode(_cut(text))
