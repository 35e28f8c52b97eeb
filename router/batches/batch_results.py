"""The results of a batch on the disk: what has a result is done, and all else that runs it again."""

from __future__ import annotations

import fcntl
import os
import secrets
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from ...adapters.registry.batches.records import BatchRecord, BatchTokens
from ...adapters.store.durable_file import sync_folder
from .batch_input import digest_of
from .file_store import FileStore

EXPIRED: Final = "batch_expired"


class Response(msgspec.Struct, frozen=True):
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
    response: Response | None = None
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


class _Body(msgspec.Struct, frozen=True):
    usage: _Usage = _Usage()


class _KnownResponse(msgspec.Struct, frozen=True):
    body: _Body = _Body()


class _Known(msgspec.Struct, frozen=True):
    custom_id: str
    response: _KnownResponse | None = None
    error: LineError | None = None


_encoder: Final = msgspec.json.Encoder()
_decode: Final = msgspec.json.Decoder(_Known).decode
_decode_body: Final = msgspec.json.Decoder(_Body).decode


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
                self.tokens += _decode_body(result.response.body).usage.tokens

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
                yield _decode(line)
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
