"""Reads the lines of a batch's input file piece by piece, and checks them before the first one is run."""

from __future__ import annotations

from codecs import BOM_UTF8
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any, BinaryIO, Final

import msgspec

from ...adapters.errors import quote
from ...adapters.registry.batches.records import BatchError

MAX_LINES: Final = 50_000
MAX_READ: Final = 2 * MAX_LINES  # lines, blank ones included, since each takes time to read
MAX_LINE_BYTES: Final = 1 << 20
MAX_ERRORS: Final = 20  # that a batch lists
_MAX_ID_CHARS: Final = 512
_MAX_MODEL_CHARS: Final = 512  # longer than any valid name
_PIECE_LINES, _PIECE_BYTES = 64, 1 << 20


class Line(msgspec.Struct, frozen=True):
    """One request. `body`: JSON, not decoded."""

    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


class _Body(msgspec.Struct, frozen=True):
    model: str
    stream: Any = None


_decode: Final = msgspec.json.Decoder(Line).decode
_decode_body: Final = msgspec.json.Decoder(_Body).decode


def digest_of(custom_id: str) -> bytes:
    """A short hash of an id, of which a batch holds one for each line."""
    return blake2b(custom_id.encode("utf-8", "surrogatepass"), digest_size=12).digest()


class LineReader:
    """All methods block: call them from a thread. A piece takes about a millisecond."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._number = file, 0

    def piece(self) -> list[tuple[int, bytes]] | None:
        """The next lines that are not blank, with their numbers from 1 on; None: the end of the file.

        A line of more than MAX_LINE_BYTES is cut, and what follows it must not be read.
        """
        lines: list[tuple[int, bytes]] = []
        num_bytes, last = 0, self._number + _PIECE_LINES
        while self._number < last and num_bytes < _PIECE_BYTES:
            line = self._file.readline(MAX_LINE_BYTES + 2)
            if not line:
                return lines or None
            self._number += 1
            num_bytes += len(line)
            if self._number == 1:
                line = line.removeprefix(BOM_UTF8)  # which Windows' editors write
            if stripped := line.strip():
                lines.append((self._number, stripped))
        return lines

    def checked_piece(self) -> list[Line] | None:
        """The next lines, decoded, of a file that `InputCheck` has found valid."""
        lines = self.piece()
        return None if lines is None else [_decode(line) for _, line in lines]

    @property
    def num_read(self) -> int:
        """Lines that were read, blank ones included."""
        return self._number


class InputCheck:
    """Collects the errors of a file. Holds a hash of each line's id, and no lines."""

    def __init__(self, endpoint: str) -> None:
        self.errors: list[BatchError] = []
        self.num_lines = 0
        self.model = ""  # of all lines
        self._endpoint = endpoint
        self._numbers: dict[bytes, int] = {}  # by digest of a custom_id: its line

    @property
    def is_over(self) -> bool:
        """Whether the following lines need no check."""
        return len(self.errors) >= MAX_ERRORS or any(error.code in _FATAL for error in self.errors)

    def take(self, lines: Sequence[tuple[int, bytes]], num_read: int) -> None:
        """Checks the next lines. `num_read`: lines read so far, blank ones included."""
        if num_read > MAX_READ and not self.is_over:
            self._add("too_many_lines", f"The file has more than {MAX_READ} lines, blank ones included.", None, None)
        for number, line in lines:
            if self.is_over:
                return
            self.num_lines += 1
            if (problem := self._problem(number, line)) is not None:
                self._add(*problem, number)

    def end(self) -> None:
        if not self.num_lines and not self.errors:
            self._add("empty_file", "The file is empty.", None, None)

    def _add(self, code: str, message: str, param: str | None, line: int | None) -> None:
        self.errors.append(BatchError(code=code, message=message, param=param, line=line))

    def _problem(self, number: int, line: bytes) -> tuple[str, str, str | None] | None:
        """Code, message and field of an error in the line; None: it is valid."""
        if len(line) > MAX_LINE_BYTES:
            return "line_too_large", f"A line has at most {MAX_LINE_BYTES} bytes.", None
        if self.num_lines > MAX_LINES:
            return "too_many_lines", f"A batch has at most {MAX_LINES} lines.", None
        try:
            request = _decode(line)
        except msgspec.ValidationError as error:
            return "invalid_line", f"The line is invalid: {quote(str(error), 200)}.", None
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return "invalid_json_line", "The line is not a JSON object.", None
        if not 0 < len(request.custom_id) <= _MAX_ID_CHARS:
            return "invalid_custom_id", f"custom_id must have 1 to {_MAX_ID_CHARS} characters.", "custom_id"
        first = self._numbers.setdefault(digest_of(request.custom_id), number)
        if first != number:
            return "duplicate_custom_id", f"The custom_id is the same as that of line {first}.", "custom_id"
        if request.method != "POST":
            return "invalid_method", f"The method {quote(request.method)} is not accepted: it must be POST.", "method"
        if request.url != self._endpoint:
            return "mismatched_url", f"The url {quote(request.url)} is not the batch's {self._endpoint}.", "url"
        try:
            body = _decode_body(request.body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            return "invalid_body", f"The body is invalid: {quote(str(error), 200)}.", "body"
        if body.stream not in (None, False):
            return "invalid_body", "Lines are not streamed: leave out stream.", "body.stream"
        if not 0 < len(body.model) <= _MAX_MODEL_CHARS:
            return "invalid_body", f"model must have 1 to {_MAX_MODEL_CHARS} characters.", "body.model"
        self.model = self.model or body.model
        if body.model != self.model:
            message = f"The model {quote(body.model)} is not that of earlier lines, {quote(self.model)}."
            return "mismatched_model", message, "body.model"
        return None


_FATAL: Final = frozenset({"line_too_large", "too_many_lines"})
