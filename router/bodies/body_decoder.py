"""Decodes large bodies in processes beside the router."""

from __future__ import annotations

import logging
from typing import Final, TypeVar

import msgspec

from ...adapters.processes.child_processes import ChildProcesses
from ..openai_api.errors import ApiError, NoSuchResponse
from .decode_process import Question, Refusal
from .packed_request import BodyRequest, PackedRequest, unpacked

NUM_PROCESSES: Final = 2
DEADLINE_S: Final = 60.0  # for one body; the largest take a second or two

_MODULE: Final = "motet.router.bodies.decode_process"
_log = logging.getLogger(__name__)

R = TypeVar("R", bound=BodyRequest)


class BodyDecoder:
    """Starts its processes at first use; they end with it. Belongs to one event loop."""

    def __init__(self) -> None:
        self._processes = ChildProcesses(_MODULE, NUM_PROCESSES, DEADLINE_S)

    async def decode(
        self, body: bytearray, kind: type[R], context: int | None, kept: bytes | None
    ) -> tuple[R, list[str]]:
        """The request in the body, checked for its extent, and the fields that its schema lacks.

        `kept`: see `RequestDecoder.decode`.

        Raises ApiError for one that does not fit the schema.

        Raises 413 for a body that cannot be decoded in time or in the memory that is there.
        """

        def read(frames: list[bytes]) -> tuple[R, list[str]] | Refusal:
            head, *rest = frames
            if not rest:
                return msgspec.msgpack.decode(head, type=Refusal)
            values, unknown, *pieces = rest
            request = unpacked(PackedRequest(head, values, pieces), kind)
            return request, msgspec.msgpack.decode(unknown, type=list[str])

        question = msgspec.msgpack.encode(Question(kind.__name__, context))
        try:
            async with self._processes.process() as process:
                found = await process.ask([question, body, *([] if kept is None else [kept])], read)
        except (OSError, EOFError, TimeoutError) as error:
            _log.warning("a body of %d bytes could not be decoded: %r", len(body), error)
            raise ApiError(413, "The request's body takes too long to decode.", code="request_too_large") from error
        if isinstance(found, Refusal):
            refusal = ApiError(found.status_code, found.message, param=found.param, code=found.code)
            if found.response_ids is not None:
                refusal = NoSuchResponse(found.param or "", found.response_ids)
            refusal.is_as_sent = found.is_as_sent
            raise refusal
        return found
