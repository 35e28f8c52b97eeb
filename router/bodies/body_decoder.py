"""Decodes large bodies in processes beside the router."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

import msgspec

from ..openai_api.errors import ApiError
from ..openai_api.request_schema import GenerationFields
from .decode_process import LAST, Question, Refusal
from .packed_request import PackedRequest, unpacked
from .process_frames import read_frames, write_frames

NUM_PROCESSES: Final = 2
DEADLINE_S: Final = 60.0  # for one body; the largest take a second or two

_COMMAND: Final = (sys.executable, "-m", "motet.router.bodies.decode_process")
_log = logging.getLogger(__name__)

R = TypeVar("R", bound=GenerationFields)


class BodyDecoder:
    """Starts its processes at first use; they end with it. Belongs to one event loop."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(NUM_PROCESSES, thread_name_prefix="bodies")
        self._places = asyncio.Semaphore(NUM_PROCESSES)
        self._idle: list[subprocess.Popen[bytes]] = []
        weakref.finalize(self, _end_all, self._idle)

    async def decode(self, body: bytearray, kind: type[R], context: int | None) -> R:
        """The request in the body, checked for its extent. Raises ApiError for one that does not fit the schema.

        Raises 413 for a body that cannot be decoded in time or in the memory that is there.
        """
        loop = asyncio.get_running_loop()
        async with self._places:
            process = self._idle_process()
            if process is None:
                process = await loop.run_in_executor(self._threads, _started)
            is_last = True  # also if the request is cancelled: then the process is busy in vain
            try:
                async with asyncio.timeout(DEADLINE_S):
                    answer = loop.run_in_executor(self._threads, _decoded, process, body, kind, context)
                    request, is_last = await answer
            except (OSError, EOFError, TimeoutError) as error:
                _log.warning("a body of %d bytes could not be decoded: %r", len(body), error)
                raise ApiError(413, "The request's body takes too long to decode.", code="request_too_large") from error
            finally:
                if is_last:
                    _end(process)
                else:
                    self._idle.append(process)
        if isinstance(request, Refusal):
            raise ApiError(request.status_code, request.message, param=request.param, code=request.code)
        return request

    def _idle_process(self) -> subprocess.Popen[bytes] | None:
        """An idle process; None: there is none."""
        while self._idle:
            process = self._idle.pop()
            if process.poll() is None:
                return process
            _end(process)
        return None


def _started() -> subprocess.Popen[bytes]:
    return subprocess.Popen(_COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def _decoded(
    process: subprocess.Popen[bytes], body: bytearray, kind: type[R], context: int | None
) -> tuple[R | Refusal, bool]:
    """What is in the body, and whether the process ends after it."""
    assert process.stdin is not None
    assert process.stdout is not None
    question = msgspec.msgpack.encode(Question(kind.__name__, context))
    write_frames(process.stdin, [question, body])
    frames = read_frames(process.stdout)
    if not frames:
        raise EOFError("the process ended")
    state, head, *rest = frames
    if not rest:
        return msgspec.msgpack.decode(head, type=Refusal), state == LAST
    values, *pieces = rest
    return unpacked(PackedRequest(head, values, pieces), kind), state == LAST


def _end_all(processes: list[subprocess.Popen[bytes]]) -> None:
    while processes:
        _end(processes.pop())


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            try:
                pipe.close()
            except OSError:  # what is left in the buffer has no reader
                pass
