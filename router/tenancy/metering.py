"""Counts what each answer has cost: an accountant that writes it to disk before the end of the answer is sent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from ...adapters.registry.ledger.entry import Entry, Stage
from ..http.errors import unavailable
from ..http.loop_turns import LoopShare
from ..http.stream_position import parse_response_id
from .account import Account, AnswerRequest, Ending, Progress
from .spool import FINAL, PARTIAL, Spool

_FIXED_BYTES: Final = 768  # a line's numbers, digest and names of fields, at their longest
_encode: Final = msgspec.json.Encoder().encode
_HEAD: Final = ("tenant", "num_ended", "began_at", "key_id", "user", "adapter", "version", "digest")


class Metering:
    """Belongs to one event loop."""

    def __init__(self, spool: Spool) -> None:
        self._spool = spool
        self._open: dict[_MeteredAnswer, None] = {}  # in the order in which they were opened

    async def open(self, request: AnswerRequest) -> Account:
        """Raises a 503 if the spool has no room for the answer's cost."""
        key = request.identity.key.key_id + request.identity.user
        num_bytes = (
            _FIXED_BYTES + len(request.response_id) + 6 * (len(request.model) + len(key))
        )  # JSON may escape names
        num_bytes *= 2 + request.num_sequences if request.is_resumed else 1  # each sequence may be of another attempt
        if not self._spool.reserve(num_bytes):
            message = "What the answer uses could not be recorded: the ledger waits for Redis, or for disk. Try again."
            raise unavailable(message, "ledger_full")
        answer = _MeteredAnswer(self, self._spool, request, num_bytes)
        self._open[answer] = None
        return answer

    def forget(self, answer: _MeteredAnswer) -> None:
        del self._open[answer]

    async def write_progress(self) -> int:
        """Writes the cost of answers under way so far. Returns the first segment that one of them still needs."""
        share = LoopShare()
        first = self._spool.current_number
        for answer in [*self._open]:
            if answer in self._open:
                first = min(first, answer.write_progress())
                await share.pause()
        return first

    @property
    def num_open(self) -> int:
        return len(self._open)


class _MeteredAnswer:
    def __init__(self, metering: Metering, spool: Spool, request: AnswerRequest, num_bytes: int) -> None:
        self._metering, self._spool, self._requested, self._num_bytes = metering, spool, request, num_bytes
        self._written: tuple[Progress, int] | None = None  # and the segment that has it

    @property
    def headers(self) -> Sequence[tuple[bytes, bytes]]:
        return ()

    def settle(self, ending: Ending) -> None:
        is_complete = not (ending.error or ending.is_cancelled)
        if is_complete or ending.progress.has_cost:  # a request that was refused is not in the ledger
            stage = Stage.COMPLETE if is_complete else Stage.CUT_OFF
            for entry in self._entries(ending.progress, stage, ending.error):
                self._spool.append(FINAL, _encode(entry))
        self._spool.release(self._num_bytes)
        self._metering.forget(self)

    def write_progress(self) -> int:
        """Writes a line if there is news. Returns the segment of its newest line, or the current one."""
        progress, number = self._requested.progress(), self._spool.current_number
        if not progress.has_cost or (progress, number) == self._written:
            return number
        numbers = list[int]()  # of segments
        for entry in self._entries(progress, Stage.UNDER_WAY, ""):
            if not self._spool.append_if_room(PARTIAL, _encode(entry)):
                break
            numbers.append(self._spool.current_number)
        else:
            self._written = progress, numbers[0]
        return number if self._written is None else self._written[1]

    def _entries(self, progress: Progress, stage: Stage, error: str) -> list[Entry]:
        """The answer's entry, and one for each attempt to resume it by which something was computed."""
        answer, computed = self._entry(progress, stage, error), dict(progress.computed_tokens)
        head = {name: getattr(answer, name) for name in _HEAD}
        attempts = [
            Entry(**head, id=f"{answer.id}~{attempt:x}", computed_tokens=number)
            for attempt, number in computed.items()
            if attempt and number
        ]
        return [msgspec.structs.replace(answer, computed_tokens=computed.get(0, 0)), *attempts]

    def _entry(self, progress: Progress, stage: Stage, error: str) -> Entry:
        request = self._requested
        version, parsed = request.version, parse_response_id(request.response_id)
        assert parsed is not None
        return Entry(
            id=request.response_id,
            tenant=request.identity.name,
            num_ended=request.identity.tenant.incarnation,
            began_at=parsed.created,
            stage=stage,
            key_id=request.identity.key.key_id,
            user=request.identity.user,
            adapter=request.model if version is None else version.name,
            version=0 if version is None else version.version,
            digest="" if version is None else version.digest,
            error=error,
            requests=1,
            cut_off=int(stage != Stage.COMPLETE),
            prompt_tokens=progress.num_prompt_tokens,
            cached_tokens=progress.num_cached_tokens,
            output_tokens=progress.num_completion_tokens,
            kv_device_page_ms=progress.kv_page_ms,
            adapter_device_page_ms=progress.adapter_page_ms,
            recomputed_tokens=progress.num_recomputed_tokens,
        )
