"""The form of an adapter's upload."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import tempfile
import time
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import msgspec
from msgspec import Meta
from python_multipart import MultipartParser
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import parse_options_header
from starlette.requests import Request

from ...adapters.format.combination import Combination
from ...adapters.format.own_tokenizer import NO_TOKENIZER, OwnText, OwnTokenizer
from ...adapters.format.peft import CONFIG_FILE, TENSORS_FILE
from ...adapters.names import PART
from ...adapters.registry.versions.name_state import MAX_NOTE_CHARS
from ..bodies.request_decoder import ArrivalPace
from ..http.errors import ApiError
from ..text.answer_format import FORMATS

if TYPE_CHECKING:
    from python_multipart.multipart import MultipartCallbacks


# The files that hold the tensors of uploads while they arrive.

_PREFIX: Final = "upload-"
OF_ADAPTERS: Final = 3  # copies: in the spool, in the store as uploaded, in the store as pages
_ABANDONED_S: Final = 24 * 3600.0  # a file that was not written for this long belongs to no upload any more


class UploadSpool:
    """A folder with a file for each upload in progress. Routers of one machine may share it."""

    def __init__(self, path: Path, min_free_bytes: int = 0, num_copies: int = OF_ADAPTERS) -> None:
        """Makes the folder, and removes files that routers left there when they were killed long ago.

        `num_copies`: of an upload that there may be on the disk.
        """
        self._path, self.num_copies = path, num_copies
        self._min_free_bytes = min_free_bytes
        self._num_promised = 0  # bytes on the disk of uploads in progress, by what they declared, or what has come
        self._num_written = 0  # of these, to the spool
        path.mkdir(parents=True, exist_ok=True)
        oldest = time.time() - _ABANDONED_S
        for leftover in path.glob(f"{_PREFIX}*"):
            if leftover.stat().st_mtime < oldest:
                leftover.unlink(missing_ok=True)

    @contextmanager
    def room(self, num_bytes: int) -> Iterator[UploadRoom]:
        """Room on the disk for an upload of `num_bytes`; see `UploadRoom`. It is given back when the block ends."""
        room = UploadRoom(self)
        try:
            room.grow(num_bytes)
            yield room
        finally:
            self._num_promised -= room.num_promised
            self._num_written -= room.num_written

    def _promise(self, num_bytes: int) -> None:
        num_unwritten = self._num_promised + num_bytes - self._num_written  # to be written by uploads in progress
        if shutil.disk_usage(self._path).free < num_unwritten + self._min_free_bytes:
            raise OSError(errno.ENOSPC, "the disk has no room for this upload")
        self._num_promised += num_bytes

    @contextmanager
    def file(self) -> Iterator[Path]:
        """An empty file, which is removed when the block ends, also by an error."""
        handle, name = tempfile.mkstemp(prefix=_PREFIX, dir=self._path)
        os.close(handle)
        path = Path(name)
        try:
            yield path
        finally:
            path.unlink(missing_ok=True)


class UploadRoom:
    """What the disk must have for one upload: in the spool, in the store, and as pages, beside `min_free_bytes`.

    Uploads in progress are counted with what they may still write, so that they do not fill the disk together.
    """

    def __init__(self, spool: UploadSpool) -> None:
        self._spool = spool
        self._num_bytes = 0  # of the upload
        self.num_promised = 0  # bytes on the disk
        self.num_written = 0

    def grow(self, num_bytes: int) -> None:
        """The upload turns out to have `num_bytes`. Raises OSError (ENOSPC) where there is no room for them."""
        if num_bytes > self._num_bytes:
            self._promise(self._spool.num_copies * num_bytes)
            self._num_bytes = num_bytes

    def pack(self, num_bytes: int) -> None:
        """Its pages turn out to take `num_bytes`. Raises as `grow`."""
        self._promise((self._spool.num_copies - 1) * self._num_bytes + num_bytes)

    def _promise(self, num_bytes: int) -> None:
        more = num_bytes - self.num_promised
        if more > 0:
            self._spool._promise(more)
            self.num_promised = num_bytes

    def wrote(self, num_bytes: int) -> None:
        """So many bytes more are in the spool, and no longer in what the disk has free."""
        self.num_written += num_bytes
        self._spool._num_written += num_bytes


# Parses a multipart form as it arrives: small fields into memory, and one file to the disk.

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

    def text(self, field: str, label: str) -> str:
        """Raises 400 if `label` is not UTF-8."""
        try:
            return self._fields[field].decode()
        except UnicodeDecodeError as error:
            raise bad_form(f"{label} is not UTF-8.", field) from error

    def flag(self, field: str, *, default: bool) -> bool:
        value = self.bytes_of(field)
        if value not in (b"", b"true", b"false"):
            raise bad_form(f"The part '{field}' is true or false.", field)
        return value == b"true" if value else default

    def _take_arrived(self) -> bytes:
        chunk = bytes(self._arrived)
        self._arrived.clear()
        return chunk

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


NAME_FIELD: Final = "name"
NOTE_FIELD: Final = "note"
ACTIVATE_FIELD: Final = "activate"
PRIVATE_FIELD: Final = "private"
TOKENIZER_FIELD: Final = "tokenizer"  # a JSON `OwnTokenizer`
FIELDS: Final = (NAME_FIELD, CONFIG_FILE, TENSORS_FILE)
TEMPLATE_FIELD: Final = "response_template"
CHAT_TEMPLATE_FIELD: Final = "chat_template"
MAX_NAME_BYTES: Final = 1024
MAX_NOTE_BYTES: Final = 4 * MAX_NOTE_CHARS
MAX_CONFIG_BYTES: Final = 1 << 20
MAX_CHAT_TEMPLATE_BYTES: Final = 1 << 16  # those of published models have 1 to 20 KB
MAX_TOKENIZER_BYTES: Final = 1 << 19  # some ten thousand added tokens, compared in milliseconds


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
    config: bytes | Combination  # adapter_config.json, or what stored adapters it is made of
    note: str = ""  # of the uploader, on this version
    activate: bool = True  # the name points to it from now on
    must_be_new: bool = False  # the name
    is_private: bool = False  # it belongs to the uploader, not to the whole tenant
    tokenizer: OwnTokenizer = NO_TOKENIZER  # that it was trained with
    response_template: str = ""  # name of the form in which it writes; empty: in the base's
    chat_template: str = ""  # by which its chats are rendered; empty: the base's
    own_text: OwnText | None = None  # None: what is in the two fields before, where it is not the base's


def check_form(request: Request, max_tensors_bytes: int) -> None:
    """Raises 400 for another kind of body, 413 for a declared length over the limit."""
    _reader(max_tensors_bytes).boundary(request)


async def receive_upload(
    request: Request, tensors_path: Path, max_tensors_bytes: int, idle_s: float, pace: ArrivalPace, room: UploadRoom
) -> UploadForm:
    """The small fields of the form; the tensors are written to `tensors_path`. Raises as `FormReader.receive`."""
    reader = _reader(max_tensors_bytes)
    await reader.receive(request, tensors_path, idle_s, pace, room)
    return UploadForm(
        reader.text(NAME_FIELD, "The adapter's name"),
        reader.bytes_of(CONFIG_FILE),
        note=_note(reader),
        activate=reader.flag(ACTIVATE_FIELD, default=True),
        is_private=reader.flag(PRIVATE_FIELD, default=False),
        tokenizer=_tokenizer(reader),
        response_template=_template(reader),
        chat_template=reader.text(CHAT_TEMPLATE_FIELD, "The chat template"),
    )


def _reader(max_tensors_bytes: int) -> FormReader:
    limits = {
        NAME_FIELD: MAX_NAME_BYTES,
        CONFIG_FILE: MAX_CONFIG_BYTES,
        TENSORS_FILE: max_tensors_bytes,
        NOTE_FIELD: MAX_NOTE_BYTES,
        ACTIVATE_FIELD: len("false"),
        PRIVATE_FIELD: len("false"),
        TOKENIZER_FIELD: MAX_TOKENIZER_BYTES,
        TEMPLATE_FIELD: max(map(len, FORMATS)),
        CHAT_TEMPLATE_FIELD: MAX_CHAT_TEMPLATE_BYTES,
    }
    return FormReader(limits, TENSORS_FILE, FIELDS)


def _note(reader: FormReader) -> str:
    note = reader.text(NOTE_FIELD, "The note")
    if len(note) > MAX_NOTE_CHARS:
        raise too_large(NOTE_FIELD, MAX_NOTE_BYTES)
    return note


def _template(reader: FormReader) -> str:
    name = reader.bytes_of(TEMPLATE_FIELD).decode("utf-8", "replace")
    if name and name not in FORMATS:
        raise bad_form(f"The part '{TEMPLATE_FIELD}' is one of {', '.join(FORMATS)}.", TEMPLATE_FIELD)
    return name


def _tokenizer(reader: FormReader) -> OwnTokenizer:
    value = reader.bytes_of(TOKENIZER_FIELD)
    try:
        return msgspec.json.decode(value, type=OwnTokenizer) if value else NO_TOKENIZER
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise bad_form(f"The part '{TOKENIZER_FIELD}' is malformed: {error}.", TOKENIZER_FIELD) from error
