"""The HTTP response of a generation: one JSON document, or server-sent events.

It is an ASGI response of its own, because every token passes here: one event of a step goes straight to the server. The
status is sent with the first token, or after a second: an early failure gets its own. When the client disconnects, the
sequences are cancelled. Each event's id is the position in the stream; a client that reconnects with such
an id gets the events that follow it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Final

import msgspec
from msgspec import UNSET
from starlette.types import Receive, Scope, Send

from ..access.request_record import RequestRecord, record_of
from ..accounts.account import Account, Ending
from ..generation.generation import Generation, SequenceFailedError
from ..loop_share import LoopShare
from ..metrics import Metrics
from ..openai_api.answer_schema import ChunkUsage
from ..openai_api.errors import ApiError, from_sequence_error, internal_error
from ..openai_api.stream_position import AT_USAGE, EventIds, StreamPosition, wrong_position
from .answer_shape import AnswerShape

CLIENT_CLOSED_REQUEST: Final = 499  # only for the metrics: the client is not there to receive it

_HEADERS: Final = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # otherwise proxies hold streams back
]
# A refusal that is known at once gets its own status. What takes longer has been admitted, or waits for a gang: its
# client, and proxies on the way, must see that the connection is alive.
HEADERS_AFTER_S: Final = 1.0
HEARTBEAT_S: Final = 15.0  # proxies cut streams that are silent for a minute
_HEARTBEAT: Final = b": waiting\n\n"  # a comment, which readers of events skip
_NO_CHOICES: Final = b'"choices":[]'
_PIECE_BYTES: Final = 256 << 10
_encode: Final = msgspec.json.Encoder().encode
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class StreamStyle:
    """The options of a stream, and where it begins."""

    event_ids: EventIds
    include_usage: bool = False
    usage_in_every_chunk: bool = False
    position: StreamPosition | None = None  # what the client has already had; None: nothing


class GenerationResponse:
    """An ASGI response. `status_code` is the status that was sent, once the call has returned."""

    def __init__(
        self,
        generation: Generation,
        shape: AnswerShape,
        stream: StreamStyle | None,
        metrics: Metrics,
        account: Account,
    ) -> None:
        """`stream`: None for one JSON document. `account`: is settled before the last of the answer goes out.

        The account of an answer that is cut off while gangs compute it is settled when they have reported its cost,
        at most REPORT_WAIT_S after its end.
        """
        self.status_code = CLIENT_CLOSED_REQUEST
        self.raw_headers = [*account.headers]  # beside its own
        self._generation = generation
        self._shape = shape
        self._stream = stream
        self._metrics = metrics
        self._has_started = False  # the headers are out
        self._has_opened = False  # the events before the first token are out
        self._is_ending = False  # the last of the body is on its way
        self._starting = asyncio.Lock()
        self._account, self._is_settled = account, False
        self._settling: asyncio.Task[None] | None = None  # waits for gangs to report what the answer has cost
        self._started_at = generation.started_at
        self._num_sent = 0  # events
        self._num_sent_bytes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = asyncio.create_task(self._answer(scope, receive, send))
        gone = asyncio.create_task(_client_gone(receive))
        self._metrics.num_open_generations += 1
        try:
            silence_s, num_sent = None if self._stream is None else HEADERS_AFTER_S, 0
            while not (await asyncio.wait((answer, gone), timeout=silence_s, return_when=asyncio.FIRST_COMPLETED))[0]:
                if self._num_sent == num_sent and not self._is_ending:
                    await self._start(send)
                    if self._num_sent == num_sent and not self._is_ending:  # nothing came while that took its time
                        await self._send_body(send, _HEARTBEAT)
                silence_s, num_sent = HEARTBEAT_S, self._num_sent
        finally:
            self._metrics.num_open_generations -= 1
            self._generation.cancel()
            is_cancelled = not answer.done()
            self._settle(is_cancelled=True)  # no-op unless the client has left before the end
            self._fill_record(record_of(scope), is_cancelled=is_cancelled)
            gone.cancel()
            answer.cancel()  # a no-op when it is done
            await asyncio.gather(answer, gone, return_exceptions=True)
            if self._settling is not None:
                await asyncio.shield(self._settling)
        if answer.cancelled():
            gone.result()  # raises if the server failed while it waited for the client to disconnect
        else:
            answer.result()

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            if self._stream is None:
                await self._send_whole(send)
            else:
                await self._send_events(send, self._stream)
            self._generation.count_end()
            return
        except SequenceFailedError as failure:
            self._metrics.count_failure(failure.error)
            error = from_sequence_error(failure.error)
        except ApiError as refusal:
            error = refusal
        except OSError:  # some servers raise it when the client has disconnected
            return
        except Exception:
            _log.exception("a generation failed", extra=record_of(scope).tags)
            error = internal_error()
        await self._send_error(error, scope, receive, send)

    async def _send_whole(self, send: Send) -> None:
        generation, shape = self._generation, self._shape
        wholes = [shape.gathering() for _ in generation.choices]
        async with aclosing(generation.deltas()) as arriving:
            async for index, delta in arriving:
                wholes[index].add(delta)
        share = LoopShare()
        pieces: list[bytes] = []
        for place, index in enumerate(generation.answers()):
            pieces += [b",", _encode(shape.choice(place, wholes[index]))]
            await share.pause()
        # Nothing but the answer's own list can read so: in a text its quotes have backslashes before them.
        before, after = _encode(shape.without_choices(generation.usage())).split(_NO_CHOICES, 1)
        self.status_code = 200
        self._has_started = True
        self._settle()
        await self._send_document(send, [before + b'"choices":[', *pieces[1:], b"]" + after], share)

    async def _send_events(self, send: Send, style: StreamStyle) -> None:
        generation, shape = self._generation, self._shape
        async with aclosing(generation.deltas()) as arriving:
            async for index, delta in arriving:
                if not self._has_opened and style.position is not None and style.position.has_usage:
                    raise wrong_position("it is the end of the answer, and the answer has not ended.")
                usage = self._chunk_usage(style)
                opening = b"" if self._has_opened else await self._start_events(send, usage, style)
                if not delta.is_empty:
                    line = style.event_ids.line(generation.num_tokens)
                    await self._send_body(send, opening + line + _event(shape.chunk(index, delta, usage)))
                elif opening:
                    await self._send_body(send, opening)
        ending = b"" if self._has_opened else await self._start_events(send, self._chunk_usage(style), style)
        if style.include_usage and not (style.position is not None and style.position.has_usage):
            ending += style.event_ids.line(generation.num_tokens, AT_USAGE)
            ending += _event(shape.closing(generation.usage()))
        self._is_ending = True
        self._settle()
        await self._send_body(send, ending + b"data: [DONE]\n\n", more=False)

    async def _start_events(self, send: Send, usage: ChunkUsage, style: StreamStyle) -> bytes:
        """Sends the headers. Returns the events before the first token, without those that the client has had."""
        await self._start(send)
        self._has_opened = True
        none_yet = [0] * len(self._generation.choices)
        chunks = self._shape.opening(usage)
        suffixes = [*range(1, len(chunks)), ""]  # the last event needs no suffix: only tokens follow it
        num_had = 0 if style.position is None else style.position.num_openings
        if num_had is None:
            return b""
        share, opening = LoopShare(), b""
        for suffix, chunk in [*zip(suffixes, chunks, strict=False)][num_had:]:
            opening += style.event_ids.line(none_yet, suffix) + _event(chunk)
            if len(opening) >= _PIECE_BYTES:
                await self._send_body(send, opening)
                opening = b""
            await share.pause()
        return opening

    async def _start(self, send: Send) -> None:
        """Sends the headers of a stream, unless they are out."""
        async with self._starting:
            if not self._has_started:
                self.status_code = 200
                self._has_started = True
                await send({"type": "http.response.start", "status": 200, "headers": _HEADERS + self.raw_headers})

    async def _send_error(self, error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the error as the answer, or as the last event of a stream that has begun.

        No [DONE] follows, so that no client takes such a stream for complete.
        """
        self._is_ending = True
        self._generation.cancel()
        self._settle(error.detail.code or "internal_error", reason=error.detail.message)
        record_of(scope).error = error.detail.code or ""
        self._metrics.count_error(error)
        async with self._starting:  # the headers may be on their way
            has_started, self._has_started = self._has_started, True
        if has_started:
            self._metrics.num_broken_streams += 1
            await self._send_body(send, b"data: " + error.body() + b"\n\n", more=False)
        else:
            self.status_code = error.status_code
            response = error.response()
            response.raw_headers += self.raw_headers
            self._num_sent_bytes += len(response.body)
            await response(scope, receive, send)

    async def _send_body(self, send: Send, body: bytes, *, more: bool = True) -> None:
        self._num_sent += 1
        self._num_sent_bytes += len(body)
        await send({"type": "http.response.body", "body": body, "more_body": more})

    async def _send_document(self, send: Send, pieces: list[bytes], share: LoopShare) -> None:
        """Sends JSON, which may be long, piece by piece."""
        headers = [
            (b"content-length", str(sum(map(len, pieces))).encode()),
            (b"content-type", b"application/json"),
            *self.raw_headers,
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        body = bytearray()
        for piece in pieces:
            body += piece
            if len(body) >= _PIECE_BYTES:
                await self._send_body(send, bytes(body))
                body.clear()
                await share.pause()
        await self._send_body(send, bytes(body), more=False)

    def _settle(self, error: str = "", *, reason: str = "", is_cancelled: bool = False) -> None:
        """Settles the account, once: now if the answer is complete or its cost is known, else when it is known.

        A complete answer may have sequences that a stop string has ended: what their gangs compute until the cancel
        arrives is not charged.
        """
        if self._is_settled:
            return
        self._is_settled = True
        generation, first_at = self._generation, self._generation.first_token_at
        ending = Ending(
            progress=generation.progress(),
            error=error,
            is_cancelled=is_cancelled,
            first_token_s=None if first_at is None else first_at - self._started_at,
            duration_s=time.perf_counter() - self._started_at,
            reason=reason,
        )
        if generation.is_reported or not (error or is_cancelled):
            self._account.settle(ending)
        else:
            self._settling = asyncio.create_task(self._settle_when_reported(ending))

    async def _settle_when_reported(self, ending: Ending) -> None:
        try:
            await self._generation.reported()
        finally:
            self._account.settle(replace(ending, progress=self._generation.progress()))

    def _fill_record(self, record: RequestRecord, *, is_cancelled: bool) -> None:
        """Adds what the access log has of the generation. `is_cancelled`: the client has left before its end."""
        generation = self._generation
        usage = generation.usage()
        record.is_stream, record.is_cancelled = self._stream is not None, is_cancelled
        record.num_prompt_tokens, record.num_completion_tokens = usage.prompt_tokens, usage.completion_tokens
        record.num_cached_tokens = generation.num_cached_tokens
        if generation.first_token_at is not None:
            record.first_token_s = generation.first_token_at - record.started_at
        reasons = Counter(choice.finish_reason or "unfinished" for choice in generation.choices)
        record.finish = ",".join(f"{reason}:{count}" for reason, count in sorted(reasons.items()))
        record.num_sent_bytes = self._num_sent_bytes

    def _chunk_usage(self, style: StreamStyle) -> ChunkUsage:
        if style.usage_in_every_chunk:
            return self._generation.usage()
        return None if style.include_usage else UNSET


def _event(chunk: msgspec.Struct) -> bytes:
    return b"data: " + _encode(chunk) + b"\n\n"


async def _client_gone(receive: Receive) -> None:
    """Returns when the client has closed the connection. The request's body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass
