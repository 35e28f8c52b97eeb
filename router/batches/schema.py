"""Requests and answers of OpenAI's API for files and batches."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal, TypeVar

import msgspec
from msgspec import Meta
from starlette.requests import Request

from ...adapters.registry.batches.records import BatchRecord, BatchTokens, FileRecord, Purpose, Status
from ..http.auth import Identity
from ..http.errors import invalid_value

# How often things are done for batches.


@dataclass(frozen=True, kw_only=True)
class BatchPace:
    look_s: float = 1.0  # between looks for batches, and after what became of those that run
    lease_s: float = 20.0  # after which another router takes over the batch of a silent router
    flush_s: float = 0.5  # for which results are collected before they are written
    retry_s: float = 1.0  # before a line that was refused for now is tried again; doubled each time
    longest_retry_s: float = 30.0
    disk_s: float = 5.0  # before a disk that was full is tried again
    turn_s: float = 120.0  # after which a batch gives its place to another tenant's that waits
    stop_s: float = 5.0  # that lines under way have when their router ends


# Whose a file or a batch is: they hold prompts and answers, so they are separated as usage is.

Record = TypeVar("Record", FileRecord, BatchRecord)
ORDER_QUERY: Final = "order"


def sees(identity: Identity, record: FileRecord | BatchRecord) -> bool:
    """A user sees its own, a key of no user those of such keys, an administrator all of the tenant."""
    return identity.is_admin or record.user == identity.user


async def page_of(
    pages: AsyncIterator[Sequence[Record]], limit: int, is_shown: Callable[[Record], bool]
) -> tuple[list[Record], bool]:
    """The first records that are shown, and whether more follow."""
    records: list[Record] = []
    async for page in pages:
        records += filter(is_shown, page)
        if len(records) > limit:
            break
    return records[:limit], len(records) > limit


def requested_order(request: Request) -> bool:
    """Whether the oldest are to come first. Raises 400."""
    order = request.query_params.get(ORDER_QUERY, "desc")
    if order not in ("asc", "desc"):
        raise invalid_value(ORDER_QUERY, "it is asc or desc.")
    return order == "asc"


Endpoint = Literal[
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/embeddings",
    "/v1/responses",
    "/v1/classify",
    "/v1/score",
    "/v1/rerank",
]
_Key = Annotated[str, Meta(max_length=64)]
_Value = Annotated[str, Meta(max_length=512)]
_File: dict[str, Any] = {"contentMediaType": "application/octet-stream"}


class FileForm(msgspec.Struct, frozen=True, kw_only=True):
    """The parts of an upload."""

    file: Annotated[str, Meta(description="JSON lines.", extra_json_schema=_File)]
    purpose: Literal["batch"]
    anchor: Annotated[Literal["created_at"] | None, Meta(description="From when on it expires.")] = msgspec.field(
        name="expires_after[anchor]", default=None
    )
    seconds: Annotated[int, Meta(ge=3600, le=2_592_000, description="After how many it expires.")] | None = (
        msgspec.field(name="expires_after[seconds]", default=None)
    )


class File(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int  # Unix time, seconds, as are all times
    expires_at: int
    filename: str
    purpose: Purpose
    status: Literal["processed"] = "processed"


class DeletedFile(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["file"] = "file"
    deleted: Literal[True] = True


class ExpiresAfter(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    anchor: Literal["created_at"]
    seconds: Annotated[int, Meta(ge=3600, le=2_592_000)]


class BatchBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    endpoint: Endpoint
    input_file_id: Annotated[str, Meta(max_length=64)]
    completion_window: Literal["24h"]
    metadata: Annotated[dict[_Key, _Value], Meta(max_length=16)] | None = None
    output_expires_after: ExpiresAfter | None = None  # of the files of its results


class InputError(msgspec.Struct, frozen=True, kw_only=True):
    code: str
    message: str
    param: str | None
    line: int | None  # from 1 on


class InputErrors(msgspec.Struct, frozen=True, kw_only=True):
    object: Literal["list"] = "list"
    data: list[InputError]


class RequestCounts(msgspec.Struct, frozen=True, kw_only=True):
    total: int
    completed: int
    failed: int


class CachedTokens(msgspec.Struct, frozen=True):
    cached_tokens: int


class ReasoningTokens(msgspec.Struct, frozen=True):
    reasoning_tokens: int


class BatchUsage(msgspec.Struct, frozen=True, kw_only=True):
    """The usage of the answers so far, each counted once."""

    input_tokens: int
    input_tokens_details: CachedTokens
    output_tokens: int
    output_tokens_details: ReasoningTokens
    total_tokens: int


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["batch"] = "batch"
    endpoint: Endpoint
    model: str | None  # that the lines name; null: they are not validated yet
    errors: InputErrors | None
    input_file_id: str
    completion_window: str
    status: Status
    output_file_id: str | None  # of lines that were answered with 200
    error_file_id: str | None  # of all others
    created_at: int
    in_progress_at: int | None
    expires_at: int
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: RequestCounts
    usage: BatchUsage | None  # null: no line has begun
    metadata: dict[str, str] | None


def shown_file(file: FileRecord) -> File:
    return File(
        id=file.id,
        bytes=file.num_bytes,
        created_at=file.created_at,
        expires_at=file.expires_at,
        filename=file.filename,
        purpose=file.purpose,
    )


def shown_batch(batch: BatchRecord) -> Batch:
    errors = [
        InputError(code=error.code, message=error.message, param=error.param, line=error.line) for error in batch.errors
    ]
    return Batch(
        id=batch.id,
        endpoint=batch.endpoint,  # type: ignore[arg-type]  # a record says only what a body has said
        model=batch.model or None,
        errors=InputErrors(data=errors) if errors else None,
        input_file_id=batch.input_file_id,
        completion_window=batch.completion_window,
        status=batch.status,
        output_file_id=batch.output_file_id if batch.has_output else None,
        error_file_id=batch.error_file_id if batch.has_errors else None,
        created_at=batch.created_at,
        in_progress_at=batch.in_progress_at,
        expires_at=batch.expires_at,
        finalizing_at=batch.finalizing_at,
        completed_at=batch.completed_at,
        failed_at=batch.failed_at,
        expired_at=batch.expired_at,
        cancelling_at=batch.cancelling_at,
        cancelled_at=batch.cancelled_at,
        request_counts=RequestCounts(total=batch.num_lines, completed=batch.num_completed, failed=batch.num_failed),
        usage=None if batch.tokens is None else _shown_tokens(batch.tokens),
        metadata=batch.metadata,
    )


def _shown_tokens(tokens: BatchTokens) -> BatchUsage:
    return BatchUsage(
        input_tokens=tokens.num_input,
        input_tokens_details=CachedTokens(tokens.num_cached),
        output_tokens=tokens.num_output,
        output_tokens_details=ReasoningTokens(tokens.num_reasoning),
        total_tokens=tokens.num_input + tokens.num_output,
    )
