"""Beam search over gangs that know nothing of it: each round asks for one token after each live beam.

The gang's prefix cache keeps the pages that the beams have in common, so a round computes less than a page for each.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Final

import msgspec

from ...workers.wire.messages import (
    FinishReason,
    SamplingParams,
    SequenceError,
    SequenceRequest,
    SequenceUpdate,
    TokenLogprobs,
)
from ...workers.wire.sequence_usage import SequenceUsage
from ..fleet.admission import TimeLimit
from ..fleet.dispatch import Dispatcher, SequenceStream
from ..loop_share import LoopShare
from .beam_search import NEW_SEARCH, Beam, BeamRules, advanced

_TOO_FEW: Final = "the model gives too few continuations a chance to fill {width} beams: n must be smaller"


class _BeamLostError(Exception):
    def __init__(self, error: SequenceError) -> None:
        super().__init__(error.message)
        self.error = error


class BeamRun:
    """One prompt's search. It begins at once, and is cancelled with any of its streams."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        request: SequenceRequest,
        rules: BeamRules,
        is_stopped: Callable[[Beam], bool],
        limit: Callable[[SamplingParams], TimeLimit | None],
    ) -> None:
        """`request`: for the prompt; its sampling and its key are not looked at.

        `limit` returns how much time the search has left.
        """
        self._dispatcher, self._rules = dispatcher, rules
        self._is_stopped, self._limit = is_stopped, limit
        sampling = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, num_logprobs=rules.num_candidates)
        self._request = msgspec.structs.replace(request, sampling=sampling, key="")
        self._num_cached_tokens: int | None = None  # of the prompt, as reported in the first round
        self._ended_usage = SequenceUsage()  # of the rounds before
        self._began_at: float | None = None  # when a step was first planned for it, by time.perf_counter()
        self._open: list[SequenceStream] = []  # of this round
        self._task = asyncio.create_task(self._found())

    def streams(self) -> list[BeamStream]:
        """One stream for each beam that will be found, the best first."""
        return [BeamStream(self, self._task, rank) for rank in range(self._rules.width)]

    @property
    def usage(self) -> SequenceUsage:
        """Of all sequences of all rounds."""
        return sum([stream.usage for stream in self._open], self._ended_usage)

    @property
    def is_reported(self) -> bool:
        return self._task.done() and all(stream.is_reported for stream in self._open)

    async def reported(self) -> None:
        await asyncio.wait((self._task,))
        for stream in self._open:
            await stream.reported()

    async def _found(self) -> list[SequenceUpdate]:
        """The updates of all streams, by rank: each a whole beam, or the error for which the search failed."""
        try:
            search = NEW_SEARCH
            while search.live:
                rows = await self._ask(search.live)
                search = advanced(search, rows, self._rules, self._is_stopped)
        except _BeamLostError as failure:
            return [SequenceUpdate(0, error=failure.error)] * self._rules.width
        finally:
            for stream in self._open:
                stream.cancel()
        if len(search.finished) < self._rules.width:
            error = SequenceError("invalid_request", _TOO_FEW.format(width=self._rules.width))
            return [SequenceUpdate(0, error=error)] * self._rules.width
        return [self._update(beam) for beam in search.finished]

    async def _ask(self, beams: tuple[Beam, ...]) -> list[TokenLogprobs]:
        """The likeliest next tokens of each beam. Raises _BeamLostError if a beam's sequence fails."""
        limit = self._limit(self._request.sampling)
        if beams != NEW_SEARCH.live:  # a search that was admitted is not refused half-way
            limit = replace(limit or TimeLimit(), has_begun=True)
        prompt_token_ids = self._request.prompt_token_ids
        self._ended_usage, self._open, share = self.usage, [], LoopShare()
        for beam in beams:
            request = msgspec.structs.replace(self._request, prompt_token_ids=[*prompt_token_ids, *beam.token_ids])
            self._open.append(self._dispatcher.submit(request, limit=limit))
            await share.pause()
        updates = [await _only_update(stream) for stream in self._open]
        if beams == NEW_SEARCH.live:
            self._num_cached_tokens = updates[0].num_cached_tokens
            if updates[0].computing_s is not None:
                self._began_at = time.perf_counter() - updates[0].computing_s
        return [_logprobs(update) for update in updates]

    def _update(self, beam: Beam) -> SequenceUpdate:
        # A beam that a stop string has ended says "length" here: its `Choice` finds the string, and says "stop".
        is_ended = beam.token_ids[-1] in self._rules.end_token_ids
        reason: FinishReason = "stop" if is_ended else "length"
        computing_s = None if self._began_at is None else time.perf_counter() - self._began_at
        return SequenceUpdate(
            0, [*beam.token_ids], [*beam.logprobs], reason, None, self._num_cached_tokens, computing_s
        )


class BeamStream:
    """A `SequenceStream` of one update: the beam that came out at this rank. The first one has the search's usage."""

    usage_at: float | None = None  # pages are held for a round only: its usage needs no estimate

    def __init__(self, run: BeamRun, task: asyncio.Task[list[SequenceUpdate]], rank: int) -> None:
        self._run, self._task, self._rank = run, task, rank

    async def __aiter__(self) -> AsyncIterator[SequenceUpdate]:
        await asyncio.wait((self._task,))
        if not self._task.cancelled():
            yield msgspec.structs.replace(self._task.result()[self._rank], sequence_id=self._rank)

    def cancel(self) -> None:
        """Ends the whole search; its sequences are forgotten at their leaders. No-op when it is over."""
        self._task.cancel()

    @property
    def usage(self) -> SequenceUsage:
        return SequenceUsage() if self._rank else self._run.usage

    @property
    def is_reported(self) -> bool:
        return self._run.is_reported

    async def reported(self) -> None:
        await self._run.reported()


async def _only_update(stream: SequenceStream) -> SequenceUpdate:
    async for update in stream:
        if update.error is not None:
            raise _BeamLostError(update.error)
        if update.logprobs:
            return update
    raise _BeamLostError(SequenceError("internal", "a beam's sequence ended without a token"))


def _logprobs(update: SequenceUpdate) -> TokenLogprobs:
    assert update.logprobs
    return update.logprobs[0]
