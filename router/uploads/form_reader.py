"""Parses a multipart form as it arrives: small fields into memory, and one file to the disk."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from python_multipart import MultipartParser
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import parse_options_header
from starlette.requests import Request

from ..bodies.body_limits import ArrivalPace
from ..openai_api.errors import ApiError
from .upload_spool import UploadRoom

if TYPE_CHECKING:  # the library has it for type checkers only
    from python_multipart.multipart import MultipartCallbacks

MAX_FRAMING_BYTES: Final = 1 << 16  # boundaries and headers of the parts
FLUSH_BYTES: Final = 1 << 20  # of the file in memory, which are written to disk when they reach this size


def declared_bytes(request: Request) -> int | None:
    """The length of the body in bytes; None: the client does not declare it."""
    declared = request.headers.get("content-length", "")
    return int(declared) if declared.isascii() and declared.isdigit() else None


class FormReader:
    """Reads one form: collects the bytes of each field, and checks them against its limit."""

    def __init__(self, limits: Mapping[str, int], file_field: str, required: Sequence[str]) -> None:
        """`limits`: bytes of each part that there may be. `file_field`: the one that goes to the disk."""
        self._limits, self._file_field, self._required = dict(limits), file_field, tuple(required)
        self._fields = {field: bytearray() for field in limits}
        self._arrived = self._fields[file_field]  # bytes that have arrived and are not written yet
        self._num_bytes: dict[str, int] = {}  # by field whose part has begun
        self._part = ""
        self._header_name = bytearray()
        self._header_value = bytearray()
        self._is_complete = False
        self.filename = ""  # of the file, as the client calls it

    @property
    def num_file_bytes(self) -> int:
        return self._num_bytes.get(self._file_field, 0)

    def boundary(self, request: Request) -> bytes:
        """The form's boundary. Raises 400 for another kind of body, 413 for a declared length over the limits."""
        content_type, options = parse_options_header(request.headers.get("content-type"))
        boundary = options.get(b"boundary")
        if content_type != b"multipart/form-data" or not boundary:
            raise bad_form(f"The body must be multipart/form-data with the parts {', '.join(self._required)}.")
        if (declared_bytes(request) or 0) > sum(self._limits.values()) + MAX_FRAMING_BYTES:
            raise too_large(self._file_field, self._limits[self._file_field])
        return boundary

    async def receive(self, request: Request, path: Path, idle_s: float, pace: ArrivalPace, room: UploadRoom) -> None:
        """Reads the whole form; its file is written to `path`.

        Raises 413 for a part over its limit, 400 for any other form, 408 if nothing arrives for `idle_s` or the upload
        falls behind the pace, and OSError if the disk fails or has no room for what arrives.
        """
        boundary = self.boundary(request)
        began_at, num_bytes = time.monotonic(), 0
        try:
            parser = MultipartParser(boundary, self._callbacks())
            with path.open("wb") as file:
                chunks = request.stream()
                while chunk := await _next(chunks, idle_s, began_at + pace.latest_s(num_bytes)):
                    num_bytes += len(chunk)
                    room.grow(num_bytes)
                    parser.write(chunk)
                    if len(self._arrived) >= FLUSH_BYTES:
                        room.wrote(await asyncio.to_thread(file.write, self._take_arrived()))
                room.wrote(await asyncio.to_thread(file.write, self._take_arrived()))
        except FormParserError as error:
            raise bad_form(f"The multipart body is malformed: {error}") from error
        if not self._is_complete:
            raise bad_form("The multipart body is truncated: its closing boundary is missing.")
        for field in self._required:
            if field not in self._num_bytes:
                raise ApiError(
                    400,
                    f"Missing required part: '{field}'. The parts are {', '.join(self._required)}.",
                    param=field,
                    code="missing_required_parameter",
                )

    def bytes_of(self, field: str) -> bytes:
        """The bytes of a small field; empty: the form does not have it."""
        return bytes(self._fields[field])

    def text(self, field: str, what: str) -> str:
        """Raises 400 if `what` is not UTF-8."""
        try:
            return self._fields[field].decode()
        except UnicodeDecodeError as error:
            raise bad_form(f"{what} is not UTF-8.", field) from error

    def flag(self, field: str, *, default: bool) -> bool:
        value = self.bytes_of(field)
        if value not in (b"", b"true", b"false"):
            raise bad_form(f"The part '{field}' is true or false.", field)
        return value == b"true" if value else default

    def _take_arrived(self) -> bytes:
        taken = bytes(self._arrived)
        self._arrived.clear()
        return taken

    def _callbacks(self) -> MultipartCallbacks:
        return {
            "on_part_begin": self._begin_part,
            "on_header_begin": self._begin_header,
            "on_header_field": lambda data, start, end: self._header_name.extend(data[start:end]),
            "on_header_value": lambda data, start, end: self._header_value.extend(data[start:end]),
            "on_header_end": self._end_header,
            "on_headers_finished": self._begin_data,
            "on_part_data": self._take_data,
            "on_end": self._end,
        }

    def _begin_part(self) -> None:
        self._part = ""

    def _begin_header(self) -> None:
        self._header_name.clear()
        self._header_value.clear()

    def _end_header(self) -> None:
        if self._header_name.lower() == b"content-disposition":
            _, options = parse_options_header(self._header_value.decode("latin-1"))
            self._part = options.get(b"name", b"").decode("utf-8", "replace")
            if self._part == self._file_field:
                self.filename = options.get(b"filename", b"").decode("utf-8", "replace")

    def _begin_data(self) -> None:
        if self._part not in self._limits:
            raise bad_form(f"Unknown part {self._part[:80]!r}. The parts are {', '.join(self._limits)}.")
        if self._part in self._num_bytes:
            raise bad_form(f"The part '{self._part}' came twice.", self._part)
        self._num_bytes[self._part] = 0

    def _take_data(self, data: bytes, start: int, end: int) -> None:
        self._num_bytes[self._part] += end - start
        if self._num_bytes[self._part] > self._limits[self._part]:
            raise too_large(self._part, self._limits[self._part])
        self._fields[self._part].extend(data[start:end])

    def _end(self) -> None:
        self._is_complete = True


async def _next(chunks: AsyncGenerator[bytes, None], idle_s: float, latest_at: float) -> bytes:
    """The next bytes to arrive; empty at the end of the body. `latest_at`: by `time.monotonic()`."""
    left_s = latest_at - time.monotonic()
    try:
        async with asyncio.timeout(min(idle_s, left_s)):
            return await anext(chunks, b"")
    except TimeoutError:
        message = (
            f"Nothing of the upload arrived for {idle_s:g} s: send it again."
            if idle_s <= left_s
            else "The upload arrives too slowly: send it again over a faster connection."
        )
        headers = {"Connection": "close"}  # what is left of the body is not read
        raise ApiError(408, message, code="upload_timeout", headers=headers) from None


def bad_form(message: str, param: str | None = None) -> ApiError:
    return ApiError(400, message, param=param, code="invalid_form")


def too_large(field: str, limit: int) -> ApiError:
    return ApiError(413, f"{field} is too large: at most {limit} bytes are accepted.", param=field, code="too_large")
