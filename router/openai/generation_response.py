"""The HTTP response of a generation: one JSON document, or server-sent events.

It is an ASGI response of its own because every token passes through it: one event a step goes straight to the server.
The status is sent with the first token, or after a second: an early failure gets its own. When the client disconnects,
the sequences are cancelled.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Final

from starlette.types import Receive, Scope, Send

from ..generation.choice import Delta
from ..generation.generation import Generation, GenerationRequest, SequenceFailedError
from ..generation.usage import Usage
from ..http.access_log import RequestRecord, record_of
from ..http.errors import ApiError, answer_too_large, from_sequence_error, internal_error
from ..http.loop_turns import LoopShare
from ..metrics import Metrics
from ..tenancy.account import Account, Ending
from ..text.response_reader import TextPiece
from .answer_form import AnswerForm

# How long a whole answer is, as JSON, before it is made and while it grows: estimates that err upwards.

_FIXED_BYTES: Final = 4096  # of an answer beside its tokens
_CHOICE_BYTES: Final = 256
_TOKEN_BYTES: Final = 16  # of its text and its id
_LIKELY_BYTES: Final = 96  # of a token with its log-probability and bytes
_NUMBER_BYTES: Final = 24  # of an embedding
_CHAR_BYTES: Final = 2  # escapes included


def max_answer_bytes(request: GenerationRequest, context: int, hidden_size: int) -> int:
    """Of an answer that uses all tokens that it may. `context`: tokens of a sequence, its prompt included."""
    total = _FIXED_BYTES
    for prompt in request.prompts:
        sampling, num_prompt = prompt.sampling, len(prompt.token_ids)
        if sampling.pooling is not None:
            total += _CHOICE_BYTES + hidden_size * _NUMBER_BYTES
            continue
        room = max(0, context - num_prompt)
        num_new = room if sampling.max_tokens is None else min(sampling.max_tokens, room)
        total += request.n * (_CHOICE_BYTES + num_new * (_TOKEN_BYTES + _likely_bytes(sampling.num_logprobs)))
        if request.is_echoed or request.keep_token_ids or sampling.num_prompt_logprobs is not None:
            total += request.n * num_prompt * (_TOKEN_BYTES + _likely_bytes(sampling.num_prompt_logprobs))
    return total


def delta_bytes(delta: Delta) -> int:
    """What a delta adds to its answer."""
    total = len(delta.text) * _CHAR_BYTES + len(delta.token_ids) * _TOKEN_BYTES
    for piece in delta.pieces:
        text = piece.text if isinstance(piece, TextPiece) else piece.arguments
        total += len(text) * _CHAR_BYTES
    if delta.logprobs:
        total += len(delta.logprobs) * _likely_bytes(len(delta.logprobs[0].logprobs.top_ids))
    if delta.prompt_scores is not None:
        total += delta.prompt_scores.num_rows * _likely_bytes(delta.prompt_scores.num_top)
    if delta.embedding is not None:
        total += len(delta.embedding) // 4 * _NUMBER_BYTES
    return total


def _likely_bytes(num_top: int | None) -> int:
    """Of a token's log-probability and those of the likeliest tokens; None: there are none."""
    return 0 if num_top is None else (1 + num_top) * _LIKELY_BYTES


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
_HEARTBEAT: Final = b": waiting\n"  # a comment, which readers of events skip
_PIECE_BYTES: Final = 256 << 10
_log = logging.getLogger(__name__)


class GenerationResponse:
    """An ASGI response. `status_code` is the status that was sent, once the call has returned."""

    def __init__(
        self,
        generation: Generation,
        form: AnswerForm,
        metrics: Metrics,
        account: Account,
        complete: Callable[[Usage], Awaitable[None]] | None = None,
        max_bytes: int | None = None,
    ) -> None:
        """`account`: is settled before the last of the answer goes out. `complete`: stores the answer before that, or
        computes what its form needs; an answer for which it raises ApiError fails. `max_bytes`: a whole answer that
        grows beyond about so many fails; None: it may have any length.

        The account of an answer that is cut off while gangs compute it is settled when they have reported its cost,
        at most REPORT_WAIT_S after its end.
        """
        self.status_code = CLIENT_CLOSED_REQUEST
        self.raw_headers = [*account.headers]  # beside its own
        self._generation = generation
        self._form, self._complete, self._max_bytes = form, complete, max_bytes
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
        disconnect = asyncio.create_task(_client_gone(receive))
        self._metrics.num_open_generations += 1
        try:
            silence_s, num_sent = HEADERS_AFTER_S if self._form.is_stream else None, 0
            while not (
                await asyncio.wait((answer, disconnect), timeout=silence_s, return_when=asyncio.FIRST_COMPLETED)
            )[0]:
                if self._num_sent == num_sent and not self._is_ending:
                    await self._start(send)
                    if self._num_sent == num_sent and not self._is_ending:  # nothing came while that took its time
                        # A blank line lets readers that split there go on. After an event with an id, openai-python
                        # and httpx-sse take it for one more event, without data.
                        await self._send_body(send, _HEARTBEAT if self._has_opened else _HEARTBEAT + b"\n")
                silence_s, num_sent = HEARTBEAT_S, self._num_sent
        finally:
            self._metrics.num_open_generations -= 1
            self._generation.cancel()
            is_cancelled = not answer.done()
            self._settle(is_cancelled=True)  # no-op unless the client has left before the end
            self._fill_record(record_of(scope), is_cancelled=is_cancelled)
            disconnect.cancel()
            answer.cancel()  # a no-op when it is done
            await asyncio.gather(answer, disconnect, return_exceptions=True)
            if self._settling is not None:
                await asyncio.shield(self._settling)
        if answer.cancelled():
            disconnect.result()  # raises if the server failed while it waited for the client to disconnect
        else:
            answer.result()

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            if self._form.is_stream:
                await self._send_events(send)
            else:
                await self._send_whole(send)
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
        generation, form = self._generation, self._form
        async with aclosing(generation.deltas()) as arriving:
            num_bytes = 0
            async for index, delta in arriving:
                form.take(index, delta)
                if self._max_bytes is not None:
                    num_bytes += delta_bytes(delta)
                    if num_bytes > self._max_bytes:
                        raise answer_too_large(self._max_bytes)
        usage = generation.usage()
        if self._complete is not None:
            await self._complete(usage)
        share = LoopShare()
        bodies, body = list[bytes](), bytearray()
        for piece in form.document(usage):
            body += piece
            if len(body) >= _PIECE_BYTES:
                bodies.append(bytes(body))
                body.clear()
            await share.pause()
            await generation.take_turn()
        bodies.append(bytes(body))
        self.status_code = 200
        self._has_started = True
        self._settle()
        await self._send_document(send, bodies, share)

    async def _send_events(self, send: Send) -> None:
        generation, form = self._generation, self._form
        async with aclosing(generation.deltas()) as arriving:
            async for index, delta in arriving:
                events = b"" if self._has_opened else await self._start_events(send, is_over=False)
                events += form.delta(index, delta)
                if events:
                    await self._send_body(send, events)
        events = b"" if self._has_opened else await self._start_events(send, is_over=True)
        usage = generation.usage()
        if self._complete is not None:
            if events:
                await self._send_body(send, events)
                events = b""
            await self._complete(usage)
        events += form.ending(usage)
        self._is_ending = True
        self._settle()
        await self._send_body(send, events, more=False)

    async def _start_events(self, send: Send, *, is_over: bool) -> bytes:
        """Sends the headers. Returns those of the events before the first token that it has not sent."""
        opening = self._form.opening(self._generation.usage(), is_over=is_over)
        await self._start(send)
        self._has_opened = True
        share, events = LoopShare(), b""
        for event in opening:
            events += event
            if len(events) >= _PIECE_BYTES:
                await self._send_body(send, events)
                events = b""
            await share.pause()
            await self._generation.take_turn()
        return events

    async def _start(self, send: Send) -> None:
        """Sends the headers of a stream, unless they are out."""
        async with self._starting:
            if not self._has_started:
                self.status_code = 200
                self._has_started = True
                await send({"type": "http.response.start", "status": 200, "headers": _HEADERS + self.raw_headers})

    async def _send_error(self, error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the error as the answer, or as the last event of a stream that has begun."""
        self._is_ending = True
        self._generation.cancel()
        self._settle(error.detail.code or "internal_error", reason=error.detail.message)
        record_of(scope).error = error.detail.code or ""
        self._metrics.count_error(error)
        async with self._starting:  # the headers may be on their way
            has_started, self._has_started = self._has_started, True
        if has_started:
            self._metrics.num_broken_streams += 1
            await self._send_body(send, self._form.failure(error), more=False)
        else:
            self.status_code = error.status_code
            response = self._form.refusal(error)
            response.raw_headers += self.raw_headers
            self._num_sent_bytes += len(response.body)
            await response(scope, receive, send)

    async def _send_body(self, send: Send, body: bytes, *, more: bool = True) -> None:
        self._num_sent += 1
        self._num_sent_bytes += len(body)
        await send({"type": "http.response.body", "body": body, "more_body": more})

    async def _send_document(self, send: Send, bodies: Sequence[bytes], share: LoopShare) -> None:
        """Sends JSON, which may be long, piece by piece."""
        headers = [
            (b"content-length", str(sum(map(len, bodies))).encode()),
            (b"content-type", b"application/json"),
            *self.raw_headers,
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for number, body in enumerate(bodies, 1):
            await self._send_body(send, body, more=number < len(bodies))
            await share.pause()
            await self._generation.take_turn()

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
        record.is_stream, record.is_cancelled = self._form.is_stream, is_cancelled
        record.num_prompt_tokens, record.num_completion_tokens = usage.prompt_tokens, usage.completion_tokens
        record.num_cached_tokens = generation.num_cached_tokens
        if generation.first_token_at is not None:
            record.first_token_s = generation.first_token_at - record.started_at
        reasons = Counter(choice.finish_reason or "unfinished" for choice in generation.choices)
        record.finish = ",".join(f"{reason}:{count}" for reason, count in sorted(reasons.items()))
        record.num_sent_bytes = self._num_sent_bytes


async def _client_gone(receive: Receive) -> None:
    """Returns when the client has closed the connection. The request's body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass
