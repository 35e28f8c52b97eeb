"""Beam search at a gang: one request for a search, which returns its rounds as they are computed.

The gang does not know texts. Where a stop string ends a beam, the search continues differently from the gang's next
rounds, so the router submits it again from there; the gang's prefix cache has most of the pages.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

import msgspec

from ...workers.wire.beams import BeamRound, BeamRules, BeamsSoFar, SearchState, choose, score
from ...workers.wire.messages import (
    FinishReason,
    SamplingParams,
    SequenceError,
    SequenceRequest,
    SequenceUpdate,
    SequenceUsage,
    TokenLogprobs,
    total_usage,
)
from ..fleet.admission import TimeLimit
from ..fleet.dispatch import Dispatcher, SequenceStream
from ..http.loop_turns import LoopShare
from ..text.stop_strings import StopMatcher, StopStrings
from ..text.text import TextService

# A beam search as its router knows it: the gang's rounds, applied one after the other, make beams of tokens.


@dataclass(frozen=True)
class Beam:
    token_ids: tuple[int, ...] = ()  # after the prompt; an end token is the last one
    logprobs: tuple[TokenLogprobs, ...] = ()  # one for each token
    total: float = 0.0  # the natural log of its probability

    def score(self, rules: BeamRules) -> float:
        return score(self.total, len(self.token_ids), rules)


@dataclass(frozen=True)
class BeamSearch:
    """`live` and `finished` beams, the best first. The search is over when none is live."""

    live: tuple[Beam, ...]  # all of one length
    finished: tuple[Beam, ...]

    def state(self, rules: BeamRules) -> SearchState:
        """The state of a search that has not ended."""
        totals, finished = [each.total for each in self.live], [each.score(rules) for each in self.finished]
        return SearchState(totals, len(self.live[0].token_ids), finished)

    def so_far(self, rules: BeamRules) -> BeamsSoFar | None:
        """From where a gang goes on with a search that is not over; None: from its begin."""
        beams = [each.token_ids for each in self.live]
        return BeamsSoFar.of(self.state(rules), beams) if beams[0] else None


NEW_SEARCH: Final = BeamSearch((Beam(),), ())


def advanced(
    search: BeamSearch, beam_round: BeamRound, rules: BeamRules, is_stopped: Callable[[Beam], bool] = lambda _: False
) -> tuple[BeamSearch, bool]:
    """The search after a round, and whether a beam was stopped in it: the gang does not know of that."""
    grown, stopped = dict[int, Beam](), set[int]()

    def beam(index: int) -> Beam:
        if index not in grown:
            candidate = beam_round.candidates[index]
            parent = search.live[candidate.parent]
            token_logprobs = TokenLogprobs(candidate.logprob, candidate.top_ids, candidate.top_logprobs)
            grown[index] = Beam(
                (*parent.token_ids, candidate.token_id),
                (*parent.logprobs, token_logprobs),
                parent.total + candidate.logprob,
            )
        return grown[index]

    def is_stopped_here(index: int) -> bool:
        if is_stopped(beam(index)):
            stopped.add(index)
        return index in stopped

    choice = choose(search.state(rules), beam_round.candidates, rules, is_stopped_here)
    finished = [*search.finished, *map(beam, choice.finished)]
    finished.sort(key=lambda each: each.score(rules), reverse=True)
    after = BeamSearch(tuple(map(beam, choice.live)), tuple(finished[: rules.width]))
    return after, bool(stopped)


# Stop strings of beams: which beam's last token completes one of them.

_NUM_CONTEXT_TOKENS: Final = 16  # more than a detokenizer looks at


class BeamStops:
    """Remembers how far each beam of the last two rounds has come into a string, so that each token is examined once.

    To be called with the beams of one search, round by round, and with none that an earlier token has stopped.
    """

    def __init__(
        self, stop: StopStrings, text: TextService, prompt_token_ids: Sequence[int], *, skip_special_tokens: bool = True
    ) -> None:
        self._automaton = stop.automaton if stop.strings else None
        self._text, self._skip_special_tokens = text, skip_special_tokens
        self._context = [*prompt_token_ids[-_NUM_CONTEXT_TOKENS:]]
        self._before: dict[tuple[int, ...], StopMatcher] = {}  # of the beams that are one token shorter
        self._now: dict[tuple[int, ...], StopMatcher] = {}
        self._length = 0  # tokens of the beams in `_now`

    def __call__(self, beam: Beam) -> bool:
        """Whether the beam's last token completes one of the strings."""
        if self._automaton is None:
            return False
        *earlier, last = beam.token_ids
        if len(beam.token_ids) > self._length:
            self._before, self._now = self._now, {}
            self._length = len(beam.token_ids)
        parent = self._before.get(beam.token_ids[:-1])
        matcher = StopMatcher(self._automaton) if parent is None else parent.copy()
        context = [*self._context, *earlier[-_NUM_CONTEXT_TOKENS:]][-_NUM_CONTEXT_TOKENS:]
        detokenizer = self._text.detokenizer(context, skip_special_tokens=self._skip_special_tokens)
        match = matcher.find(detokenizer.step(last))
        self._now[beam.token_ids] = matcher
        return match is not None


_TOO_FEW: Final = "the model gives too few continuations a chance to fill {width} beams: n must be smaller"


class _BeamsLostError(Exception):
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
        """`request`: for the prompt; its sampling and its key are ignored.

        `is_stopped`: of a beam that grew by a token, if `rules.may_stop`. `limit` returns how much time the search has
        left.
        """
        self._dispatcher, self._rules = dispatcher, rules
        self._is_stopped, self._limit = is_stopped, limit
        sampling = SamplingParams(max_tokens=rules.max_tokens, temperature=0.0, ignore_eos=True)
        self._request = msgspec.structs.replace(request, sampling=sampling, key="", beams=rules)
        self._num_cached_tokens: int | None = None  # of the prompt, as reported with the first round
        self._ended_usage = SequenceUsage()  # of earlier streams
        self._began_at: float | None = None  # when a step was first planned for it, by time.perf_counter()
        self._stream: SequenceStream | None = None
        self._task = asyncio.create_task(self._best_updates())

    def streams(self) -> list[BeamStream]:
        """One stream for each beam that will be found, the best first."""
        return [BeamStream(self, self._task, rank) for rank in range(self._rules.width)]

    @property
    def usage(self) -> SequenceUsage:
        return self._ended_usage if self._stream is None else total_usage([self._ended_usage, self._stream.usage])

    @property
    def is_reported(self) -> bool:
        return self._task.done() and (self._stream is None or self._stream.is_reported)

    async def reported(self) -> None:
        await asyncio.wait((self._task,))
        if self._stream is not None:
            await self._stream.reported()

    async def _best_updates(self) -> list[SequenceUpdate]:
        """The updates of all streams, by rank: each a whole beam, or the error for which the search failed."""
        try:
            search = NEW_SEARCH
            while search.live:
                search = await self._follow(search)
        except _BeamsLostError as failure:
            return [SequenceUpdate(0, error=failure.error)] * self._rules.width
        finally:
            if self._stream is not None:
                self._stream.cancel()
        if len(search.finished) < self._rules.width:
            error = SequenceError("invalid_request", _TOO_FEW.format(width=self._rules.width))
            return [SequenceUpdate(0, error=error)] * self._rules.width
        return [self._update(beam) for beam in search.finished]

    async def _follow(self, search: BeamSearch) -> BeamSearch:
        """Continues the search at a gang, to its end or until a stop string ends a beam. Raises _BeamsLostError."""
        limit = self._limit(self._request.sampling)
        so_far = search.so_far(self._rules)
        if so_far is not None:  # an admitted search must not be refused later
            limit = replace(limit or TimeLimit(), has_begun=True)
            if self._stream is not None:
                await self._stream.reported()
        self._ended_usage, self._stream = self.usage, None
        request = msgspec.structs.replace(self._request, beams_so_far=so_far)
        self._stream = stream = self._dispatcher.submit(request, limit=limit)
        share = LoopShare()
        async for update in stream:
            if update.error is not None:
                raise _BeamsLostError(update.error)
            if self._num_cached_tokens is None:
                self._num_cached_tokens = update.num_cached_tokens
            if self._began_at is None and update.computing_s is not None:
                self._began_at = time.perf_counter() - update.computing_s
            for beam_round in update.beam_rounds or ():
                search, has_stopped = advanced(search, beam_round, self._rules, self._is_stopped)
                if has_stopped or not search.live:
                    stream.cancel()  # no-op if it has ended
                    return search
                await share.pause()
        raise _BeamsLostError(SequenceError("internal", "a search ended before its beams had"))

    def _update(self, beam: Beam) -> SequenceUpdate:
        # A beam that a stop string has ended gets "length" here: its `Choice` finds the string, and reports "stop".
        is_ended = beam.token_ids[-1] in self._rules.end_token_ids
        reason: FinishReason = "stop" if is_ended else "length"
        computing_s = None if self._began_at is None else time.perf_counter() - self._began_at
        return SequenceUpdate(
            0, [*beam.token_ids], [*beam.logprobs], reason, None, self._num_cached_tokens, computing_s
        )


class BeamStream:
    """A `SequenceStream` of one update: the beam of this rank. The first one has the search's usage."""

    usage_at: float | None = None  # no tokens come before its end

    def __init__(self, run: BeamRun, task: asyncio.Task[list[SequenceUpdate]], rank: int) -> None:
        self._run, self._task, self._rank = run, task, rank

    async def __aiter__(self) -> AsyncIterator[SequenceUpdate]:
        await asyncio.wait((self._task,))
        if not self._task.cancelled():
            yield msgspec.structs.replace(self._task.result()[self._rank], sequence_id=self._rank)

    def cancel(self) -> None:
        """Cancels the whole search. No-op when it has ended."""
        self._task.cancel()

    @property
    def usage(self) -> SequenceUsage:
        return SequenceUsage() if self._rank else self._run.usage

    @property
    def is_reported(self) -> bool:
        return self._run.is_reported

    async def reported(self) -> None:
        await self._run.reported()
