"""Files of batches on the disk: tenants' files, the lines of an input, and the results of these."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import math
import os
import secrets
import shutil
import threading
import time
from codecs import BOM_UTF8
from collections.abc import Callable, Iterable, Iterator, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple

import msgspec
from starlette.types import Receive, Scope, Send

from ...adapters.errors import quote
from ...adapters.registry.batches.records import BatchError, BatchRecord, BatchTokens, FileRecord
from ...adapters.store.durable_file import make_folder, sync_folder

# Tenants' files, or their stored responses, on the disk: beside the adapters, so that all routers have them.
#
#     root/
#     ├── tmp/               files that arrive
#     └── <tenant_id>/
#         ├── file-…         as uploaded
#         ├── file-…o        answers of a batch, whole or growing
#         ├── file-…e        its lines that failed
#         └── resp_…         a stored response, under a root of their own
#
# All methods block: call them from a thread.

# A file as an answer: sent from the disk, no faster than its client reads.

_PIECE_BYTES: Final = 256 << 10


class FileContent:
    """An `Answer` of endpoint.py. It must be called once."""

    status_code = 200

    def __init__(self, file: BinaryIO, num_bytes: int, media_type: bytes = b"application/octet-stream") -> None:
        """`file`: is closed when the answer has ended, however it ends. `num_bytes`: that are left of it."""
        self._file = file
        self.raw_headers: list[tuple[bytes, bytes]] = [
            (b"content-type", media_type),
            (b"content-length", b"%d" % num_bytes),
            (b"cache-control", b"no-store"),
        ]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._file:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            if scope["method"] != "HEAD":
                while piece := await asyncio.to_thread(self._file.read, _PIECE_BYTES):
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
            await send({"type": "http.response.body", "body": b""})


class FileStore:
    def __init__(self, root: Path, min_free_bytes: Callable[[], int] = lambda: 0) -> None:
        """Makes no folder before there is a file. `min_free_bytes`: that results leave to others."""
        self.root, self._min_free_bytes = root, min_free_bytes

    @property
    def arriving(self) -> Path:
        return self.root / "tmp"

    def path(self, tenant_id: str, file_id: str) -> Path:
        """Both are motet's own, as records have them, and never what a request says."""
        return self.root / tenant_id / file_id

    def make_folder_of(self, tenant_id: str) -> None:
        make_folder(self.root / tenant_id)

    def keep(self, arrived: Path, file: FileRecord) -> None:
        """Moves a file that has arrived to its place. Then it survives a crash of the machine."""
        self.make_folder_of(file.tenant_id)
        with arrived.open("rb") as opened:
            os.fsync(opened.fileno())
        path = self.path(file.tenant_id, file.id)
        os.replace(arrived, path)
        sync_folder(path.parent)

    def write(self, file: FileRecord, pieces: Iterable[bytes]) -> None:
        """A new file. Then it survives a crash of the machine. Raises OSError, and leaves nothing then."""
        self.check_room(file.num_bytes)
        self.make_folder_of(file.tenant_id)
        path = self.path(file.tenant_id, file.id)
        try:
            with path.open("xb") as opened:
                opened.writelines(pieces)
                opened.flush()
                os.fsync(opened.fileno())
            sync_folder(path.parent)
        except OSError:
            path.unlink(missing_ok=True)
            raise

    def is_there(self, tenant_id: str) -> bool:
        """Whether the tenant has had a file here; False: its file system may not be mounted now."""
        return (self.root / tenant_id).is_dir()

    def check_room(self, num_bytes: int) -> None:
        """Raises OSError (ENOSPC) where the disk has no room for so many bytes more."""
        make_folder(self.root)
        if shutil.disk_usage(self.root).free < num_bytes + self._min_free_bytes():
            raise OSError(errno.ENOSPC, "the disk has no room for results")

    def open(self, tenant_id: str, file_id: str) -> BinaryIO:
        """Raises FileNotFoundError."""
        return self.path(tenant_id, file_id).open("rb")

    def delete(self, tenant_id: str, file_id: str) -> None:
        self.path(tenant_id, file_id).unlink(missing_ok=True)

    def retire(self, tenant_id: str) -> None:
        """Deletes all files of a tenant."""
        shutil.rmtree(self.root / tenant_id, ignore_errors=True)

    def old_files(self, older_than_s: float) -> Iterator[tuple[str, list[str]]]:
        """Tenant ids, each with the ids of its files that were not written for this time."""
        oldest = time.time() - older_than_s
        folders = [*self.root.iterdir()] if self.root.is_dir() else []
        for folder in folders:
            if folder != self.arriving:
                yield folder.name, [path.name for path in folder.iterdir() if _written_at(path) < oldest]


def _written_at(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:  # deleted meanwhile
        return math.inf


# Reads the lines of a batch's input file piece by piece, and checks them before the first one is run.

MAX_LINES: Final = 50_000
MAX_READ: Final = 2 * MAX_LINES  # lines, blank ones included, since each takes time to read
MAX_LINE_BYTES: Final = 1 << 20
MAX_ERRORS: Final = 20  # that a batch lists
_MAX_ID_CHARS: Final = 512
_MAX_MODEL_CHARS: Final = 512  # longer than any valid name
_PIECE_LINES, _READ_BYTES = 64, 1 << 20


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
        while self._number < last and num_bytes < _READ_BYTES:
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

EXPIRED: Final = "batch_expired"


class LineResponse(msgspec.Struct, frozen=True):
    status_code: int
    request_id: str
    body: msgspec.Raw


class LineError(msgspec.Struct, frozen=True):
    code: str
    message: str


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one line, in OpenAI's format."""

    id: str = msgspec.field(default_factory=lambda: f"batch_req_{secrets.token_hex(12)}")
    custom_id: str
    response: LineResponse | None = None
    error: LineError | None = None

    @property
    def is_good(self) -> bool:
        return self.response is not None and self.response.status_code == 200


class _Details(msgspec.Struct, frozen=True):
    cached_tokens: int = 0
    reasoning_tokens: int = 0


class _Usage(msgspec.Struct, frozen=True):
    """As chats, completions and embeddings have it, or as responses do."""

    prompt_tokens: int = 0
    prompt_tokens_details: _Details = _Details()
    completion_tokens: int = 0
    completion_tokens_details: _Details = _Details()
    input_tokens: int = 0
    input_tokens_details: _Details = _Details()
    output_tokens: int = 0
    output_tokens_details: _Details = _Details()

    @property
    def tokens(self) -> BatchTokens:
        return BatchTokens(
            num_input=self.prompt_tokens + self.input_tokens,
            num_cached=self.prompt_tokens_details.cached_tokens + self.input_tokens_details.cached_tokens,
            num_output=self.completion_tokens + self.output_tokens,
            num_reasoning=self.completion_tokens_details.reasoning_tokens + self.output_tokens_details.reasoning_tokens,
        )


class _AnswerBody(msgspec.Struct, frozen=True):
    usage: _Usage = _Usage()


class _KnownResponse(msgspec.Struct, frozen=True):
    body: _AnswerBody = _AnswerBody()


class _Known(msgspec.Struct, frozen=True):
    custom_id: str
    response: _KnownResponse | None = None
    error: LineError | None = None


_encoder: Final = msgspec.json.Encoder()
_decode_result: Final = msgspec.json.Decoder(_Known).decode
_decode_answer: Final = msgspec.json.Decoder(_AnswerBody).decode


def _encode_line(result: Result) -> bytearray:
    line = bytearray()
    _encoder.encode_into(result, line)
    line += b"\n"
    return line


class Written(NamedTuple):
    num_completed: int
    num_failed: int
    num_bytes: int
    tokens: BatchTokens


class BatchResults:
    """Opened by one process at a time. All methods block: call them from a thread."""

    def __init__(self, store: FileStore, batch: BatchRecord) -> None:
        """Reads what is there. Raises BlockingIOError while another process has it open.

        Raises FileNotFoundError if the tenant's folder is missing, as when its volume is not mounted. It is not created
        here: else the batch would seem to have lost its input, which is there too.
        """
        self.answered: set[bytes] = set()  # digests of custom_ids
        self.tokens = BatchTokens()  # of answers; a line counts once, however often it was run
        self.has_expired = False  # whether a line was not run because its batch had expired
        self._store = store
        self._writing = threading.Lock()  # a write goes on when the task that waits for it is cancelled
        self._output = _ResultFile(store.path(batch.tenant_id, batch.output_file_id))
        try:
            self._errors = _ResultFile(store.path(batch.tenant_id, batch.error_file_id))
        except BaseException:
            self._output.close()
            raise
        try:
            for file in (self._output, self._errors):
                for answer in file.read():
                    self.answered.add(digest_of(answer.custom_id))
                    if answer.response is not None:
                        self.tokens += answer.response.body.usage.tokens
                    self.has_expired |= answer.error is not None and answer.error.code == EXPIRED
            sync_folder(store.path(batch.tenant_id, batch.output_file_id).parent)
        except BaseException:
            self.close()
            raise

    @property
    def written(self) -> Written:
        return Written(self._output.num_lines, self._errors.num_lines, sum(self.sizes), self.tokens)

    @property
    def sizes(self) -> tuple[int, int]:
        """Bytes of answers and of lines that failed."""
        return self._output.num_bytes, self._errors.num_bytes

    def append(self, results: Sequence[Result]) -> None:
        """Writes results so that they survive a crash of the machine. After an OSError some may be written."""
        with self._writing:
            self._append(self._output, [result for result in results if result.is_good])
            self._append(self._errors, [result for result in results if not result.is_good])

    def _append(self, file: _ResultFile, results: Sequence[Result]) -> None:
        if not results:
            return
        lines = [_encode_line(result) for result in results]
        self._store.check_room(sum(map(len, lines)))
        file.append(lines)
        for result in results:
            self.answered.add(digest_of(result.custom_id))
            if result.response is not None:
                self.tokens += _decode_answer(result.response.body).usage.tokens

    def close(self) -> None:
        """Waits for a write that is under way. Results must not be appended afterwards."""
        with self._writing:
            self._output.close()
            self._errors.close()


class _ResultFile:
    """A locked file of lines: a router that was suspended, and has lost its batch to another, cannot write to it."""

    def __init__(self, path: Path) -> None:
        self._path, self._handle = path, os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        self.num_bytes = self.num_lines = 0
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BaseException:
            self.close()
            raise

    def read(self) -> Iterator[_Known]:
        """All lines. An incomplete last line, whose writer has died, is removed."""
        with self._path.open("rb") as file:
            for line in file:
                if not line.endswith(b"\n"):
                    break
                yield _decode_result(line)
                self.num_lines, self.num_bytes = self.num_lines + 1, self.num_bytes + len(line)
        os.ftruncate(self._handle, self.num_bytes)

    def append(self, lines: Sequence[bytearray]) -> None:
        try:
            for line in lines:
                remainder = memoryview(line)
                while remainder:
                    remainder = remainder[os.write(self._handle, remainder) :]
            os.fsync(self._handle)
        except OSError:
            os.ftruncate(self._handle, self.num_bytes)
            raise
        self.num_bytes, self.num_lines = self.num_bytes + sum(map(len, lines)), self.num_lines + len(lines)

    def close(self) -> None:
        os.close(self._handle)
