"""Parses the multipart form of an adapter's upload as it arrives, and writes the tensors to disk."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import msgspec
from msgspec import Meta
from python_multipart import MultipartParser
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import parse_options_header
from starlette.requests import Request

from ...adapters.format.own_tokenizer import NO_TOKENIZER, OwnTokenizer
from ...adapters.format.peft import CONFIG_FILE, TENSORS_FILE
from ...adapters.names import PART
from ...adapters.registry.versions.name_state import MAX_NOTE_CHARS
from ..bodies.body_limits import ArrivalPace
from ..openai_api.errors import ApiError
from .upload_spool import UploadRoom

if TYPE_CHECKING:  # the library has it for type checkers only
    from python_multipart.multipart import MultipartCallbacks

NAME_FIELD: Final = "name"
NOTE_FIELD: Final = "note"
ACTIVATE_FIELD: Final = "activate"
PRIVATE_FIELD: Final = "private"
TOKENIZER_FIELD: Final = "tokenizer"  # a JSON `OwnTokenizer`
FIELDS: Final = (NAME_FIELD, CONFIG_FILE, TENSORS_FILE)
OPTIONAL_FIELDS: Final = (NOTE_FIELD, ACTIVATE_FIELD, PRIVATE_FIELD, TOKENIZER_FIELD)
MAX_NAME_BYTES: Final = 1024
MAX_NOTE_BYTES: Final = 4 * MAX_NOTE_CHARS
MAX_CONFIG_BYTES: Final = 1 << 20
MAX_TOKENIZER_BYTES: Final = 1 << 18  # some ten thousand added tokens, compared in milliseconds
MAX_FRAMING_BYTES: Final = 1 << 16  # boundaries and headers of the parts
FLUSH_BYTES: Final = 1 << 20  # tensors in memory are written to disk when they reach this size


_File = {"contentMediaType": "application/octet-stream"}


class AdapterForm(msgspec.Struct, frozen=True, kw_only=True):
    """The parts of an upload, as PEFT saves an adapter."""

    name: Annotated[
        str,
        Meta(
            pattern=f"^(~[^/]*/)?({PART}/)?{PART}$",
            description="What requests call it in `model`; not the base's name. `~user/name`: private to that user.",
        ),
    ]
    config: Annotated[
        str, Meta(description=f"The file as PEFT writes it, at most {MAX_CONFIG_BYTES} bytes.", extra_json_schema=_File)
    ] = msgspec.field(name=CONFIG_FILE)
    tensors: Annotated[str, Meta(description="The file as PEFT writes it.", extra_json_schema=_File)] = msgspec.field(
        name=TENSORS_FILE
    )


@dataclass(frozen=True)
class UploadForm:
    name: str
    config: bytes  # adapter_config.json
    note: str = ""  # of the uploader, on this version
    activate: bool = True  # the name points to it from now on
    is_private: bool = False  # the uploader's own, and not the tenant's
    tokenizer: OwnTokenizer = NO_TOKENIZER  # that it was trained with, and that is not served


def declared_bytes(request: Request) -> int | None:
    """The length of the body in bytes; None: the client does not declare it."""
    declared = request.headers.get("content-length", "")
    return int(declared) if declared.isascii() and declared.isdigit() else None


def check_form(request: Request, max_tensors_bytes: int) -> bytes:
    """The boundary of the form's parts.

    Raises 400 for another kind of body, 413 for a declared length over the limit.
    """
    content_type, options = parse_options_header(request.headers.get("content-type"))
    boundary = options.get(b"boundary")
    if content_type != b"multipart/form-data" or not boundary:
        raise _bad_form(f"The body must be multipart/form-data with the parts {', '.join(FIELDS)}.")
    largest = max_tensors_bytes + MAX_CONFIG_BYTES + MAX_NAME_BYTES + MAX_NOTE_BYTES + MAX_FRAMING_BYTES
    largest += MAX_TOKENIZER_BYTES
    if (declared_bytes(request) or 0) > largest:
        raise _too_large(TENSORS_FILE, max_tensors_bytes)
    return boundary


async def receive_upload(
    request: Request, tensors_path: Path, max_tensors_bytes: int, idle_s: float, pace: ArrivalPace, room: UploadRoom
) -> UploadForm:
    """The small fields of the form; the tensors are written to `tensors_path`.

    Raises 413 for a part over its limit, 400 for any other form, 408 if nothing arrives for `idle_s` or the upload
    falls behind the pace, and OSError if the disk fails or has no room for what arrives.
    """
    boundary = check_form(request, max_tensors_bytes)
    limits = {
        NAME_FIELD: MAX_NAME_BYTES,
        NOTE_FIELD: MAX_NOTE_BYTES,
        ACTIVATE_FIELD: len("false"),
        PRIVATE_FIELD: len("false"),
        TOKENIZER_FIELD: MAX_TOKENIZER_BYTES,
        CONFIG_FILE: MAX_CONFIG_BYTES,
        TENSORS_FILE: max_tensors_bytes,
    }
    reader = _FormReader(limits)
    began_at, num_bytes = time.monotonic(), 0
    try:
        parser = MultipartParser(boundary, reader.callbacks())
        with tensors_path.open("wb") as file:
            chunks = request.stream()
            while chunk := await _next(chunks, idle_s, began_at + pace.latest_s(num_bytes)):
                num_bytes += len(chunk)
                room.grow(num_bytes)
                parser.write(chunk)
                if len(reader.tensors) >= FLUSH_BYTES:
                    room.wrote(await asyncio.to_thread(file.write, reader.take_tensors()))
            room.wrote(await asyncio.to_thread(file.write, reader.take_tensors()))
    except FormParserError as error:
        raise _bad_form(f"The multipart body is malformed: {error}") from error
    return reader.form()


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


class _FormReader:
    """Receives the parser's callbacks: collects the bytes of each field, and checks them against its limit."""

    def __init__(self, limits: dict[str, int]) -> None:
        self.tensors = bytearray()  # bytes that have arrived and that `take_tensors` has not returned yet
        self._limits = limits
        self._fields = {field: bytearray() for field in limits}
        self._fields[TENSORS_FILE] = self.tensors
        self._num_bytes: dict[str, int] = {}  # by field whose part has begun
        self._part = ""
        self._header_name = bytearray()
        self._header_value = bytearray()
        self._is_complete = False

    def callbacks(self) -> MultipartCallbacks:
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

    def take_tensors(self) -> bytes:
        """The bytes of the tensors that arrived since the last call."""
        taken = bytes(self.tensors)
        self.tensors.clear()
        return taken

    def form(self) -> UploadForm:
        """The small fields. Raises 400 unless the whole form has arrived."""
        if not self._is_complete:
            raise _bad_form("The multipart body is truncated: its closing boundary is missing.")
        for field in FIELDS:
            if field not in self._num_bytes:
                raise ApiError(
                    400,
                    f"Missing required part: '{field}'. The parts are {', '.join(FIELDS)}.",
                    param=field,
                    code="missing_required_parameter",
                )
        try:
            name = self._fields[NAME_FIELD].decode()
        except UnicodeDecodeError as error:
            raise _bad_form("The adapter's name is not UTF-8.", NAME_FIELD) from error
        return UploadForm(
            name,
            bytes(self._fields[CONFIG_FILE]),
            self._note(),
            self._flag(ACTIVATE_FIELD, default=True),
            self._flag(PRIVATE_FIELD, default=False),
            self._tokenizer(),
        )

    def _note(self) -> str:
        try:
            note = self._fields[NOTE_FIELD].decode()
        except UnicodeDecodeError as error:
            raise _bad_form("The note is not UTF-8.", NOTE_FIELD) from error
        if len(note) > MAX_NOTE_CHARS:
            raise _too_large(NOTE_FIELD, MAX_NOTE_BYTES)
        return note

    def _flag(self, field: str, *, default: bool) -> bool:
        value = bytes(self._fields[field])
        if value not in (b"", b"true", b"false"):
            raise _bad_form(f"The part '{field}' is true or false.", field)
        return value == b"true" if value else default

    def _tokenizer(self) -> OwnTokenizer:
        value = bytes(self._fields[TOKENIZER_FIELD])
        try:
            return msgspec.json.decode(value, type=OwnTokenizer) if value else NO_TOKENIZER
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise _bad_form(f"The part '{TOKENIZER_FIELD}' is malformed: {error}.", TOKENIZER_FIELD) from error

    def _begin_part(self) -> None:
        self._part = ""

    def _begin_header(self) -> None:
        self._header_name.clear()
        self._header_value.clear()

    def _end_header(self) -> None:
        if self._header_name.lower() == b"content-disposition":
            _, options = parse_options_header(self._header_value.decode("latin-1"))
            self._part = options.get(b"name", b"").decode("utf-8", "replace")

    def _begin_data(self) -> None:
        if self._part not in self._limits:
            raise _bad_form(f"Unknown part {self._part[:80]!r}. The parts are {', '.join(FIELDS + OPTIONAL_FIELDS)}.")
        if self._part in self._num_bytes:
            raise _bad_form(f"The part '{self._part}' came twice.", self._part)
        self._num_bytes[self._part] = 0

    def _take_data(self, data: bytes, start: int, end: int) -> None:
        self._num_bytes[self._part] += end - start
        if self._num_bytes[self._part] > self._limits[self._part]:
            raise _too_large(self._part, self._limits[self._part])
        self._fields[self._part].extend(data[start:end])

    def _end(self) -> None:
        self._is_complete = True


def _bad_form(message: str, param: str | None = None) -> ApiError:
    return ApiError(400, message, param=param, code="invalid_form")


def _too_large(field: str, limit: int) -> ApiError:
    return ApiError(413, f"{field} is too large: at most {limit} bytes are accepted.", param=field, code="too_large")
