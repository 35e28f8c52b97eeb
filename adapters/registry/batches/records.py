"""Records of files and batches, as they are stored in Redis."""

from __future__ import annotations

import secrets
import time
from typing import Final, Literal

import msgspec

from ..tenants.records import KeyRecord, make_tenant_id

FILE_PREFIX: Final = "file-"
BATCH_PREFIX: Final = "batch_"
RESPONSE_PREFIX: Final = "resp_"
Purpose = Literal["batch", "batch_output"]
Status = Literal["validating", "in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled"]
ENDED: Final[frozenset[Status]] = frozenset({"completed", "failed", "expired", "cancelled"})


class FileRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A file, or a stored response, which has neither name nor purpose."""

    id: str
    tenant: str
    incarnation: int = 0  # of the tenant
    user: str = ""  # that sees it, as administrators do; empty: the keys of the tenant that are no user's
    key_id: str = ""  # as whose it is counted, beside its tenant's and its user's
    filename: str = ""
    num_bytes: int
    purpose: Purpose = "batch"
    created_at: int  # Unix time, seconds, as are all times
    expires_at: int

    @property
    def tenant_id(self) -> str:
        return make_tenant_id(self.tenant, self.incarnation)


class BatchError(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What is wrong with an input file."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class BatchTokens(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Tokens of all of a batch's answers."""

    num_input: int = 0
    num_cached: int = 0  # of the input
    num_output: int = 0
    num_reasoning: int = 0  # of the output

    def __add__(self, other: BatchTokens) -> BatchTokens:
        return BatchTokens(
            num_input=self.num_input + other.num_input,
            num_cached=self.num_cached + other.num_cached,
            num_output=self.num_output + other.num_output,
            num_reasoning=self.num_reasoning + other.num_reasoning,
        )


class BatchRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    id: str
    tenant: str
    incarnation: int = 0
    user: str = ""
    key_id: str = ""  # of the key that its lines run with
    subject: str = ""  # of the token that it was made with; empty: it was a key
    token: KeyRecord | None = None  # what that token allows
    endpoint: str
    model: str = ""  # that its lines name; empty: they are not validated yet
    input_file_id: str
    completion_window: str
    metadata: dict[str, str] | None = None
    output_kept_s: int | None = None  # how long its result files are kept; None: as long as other files
    status: Status = "validating"
    errors: tuple[BatchError, ...] = ()
    created_at: int
    expires_at: int  # lines that have not begun by then are not run
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    num_lines: int = 0
    num_completed: int = 0
    num_failed: int = 0
    num_bytes: int = 0  # of its results
    tokens: BatchTokens | None = None  # None: no line has begun
    has_output: bool = False  # whether it has ended with these files
    has_errors: bool = False

    @property
    def tenant_id(self) -> str:
        return make_tenant_id(self.tenant, self.incarnation)

    @property
    def output_file_id(self) -> str:
        """The file of answers. Derived from the batch's id, so that a router that takes the batch over finds it."""
        return f"{FILE_PREFIX}{self.id.removeprefix(BATCH_PREFIX)}o"

    @property
    def error_file_id(self) -> str:
        return f"{FILE_PREFIX}{self.id.removeprefix(BATCH_PREFIX)}e"

    @property
    def has_ended(self) -> bool:
        return self.status in ENDED


def new_id(prefix: str) -> str:
    """Ids sort by the time when they were made. Their last 80 bits are random, so none can be guessed."""
    return f"{prefix}{time.time_ns() // 1_000_000:012x}{secrets.token_hex(10)}"


def place_of(record: FileRecord | BatchRecord) -> str:
    """Identifies a file or a batch among those of all tenants."""
    return f"{record.tenant_id}/{record.id}"
