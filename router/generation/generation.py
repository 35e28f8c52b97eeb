"""The sequences of one request, from submission to the last token."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass
from functools import partial

from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from ...workers.wire.beams import BeamRules
from ...workers.wire.messages import (
    AdapterRef,
    SamplingParams,
    SequenceError,
    SequenceRequest,
    SequenceUpdate,
    SequenceUsage,
    total_usage,
)
from ..fleet.admission import TimeLimit
from ..fleet.dispatch import Dispatcher, SequenceStream
from ..http.loop_turns import LoopShare, LoopTurns
from ..http.stream_position import wrong_position
from ..metrics import Metrics
from ..tenancy.account import Progress
from ..text.response_reader import ResponseReader
from ..text.stop_strings import StopStrings
from ..text.text import TextService
from .beam_streams import BeamRun, BeamStops
from .choice import PLAIN_ENDS, Choice, Delta, EndRules, MessageChoice, portions
from .usage import CompletionTokensDetails, PromptTokensDetails, Usage

_LOST = SequenceError("internal", "the sequence ended without saying why")
_NUM_SEEDS = 2**64


class SequenceFailedError(Exception):
    """A sequence was given up; so is the whole request."""

    def __init__(self, error: SequenceError) -> None:
        super().__init__(error.message)
        self.error = error


@dataclass(frozen=True)
class Prompt:
    token_ids: list[int]
    sampling: SamplingParams


@dataclass(frozen=True)
class GenerationRequest:
    """What to generate: `n` sequences for each prompt. Choices are numbered prompt by prompt.

    Of each prompt's choices the `num_best` likeliest are the answer's. For less than `n` the sampling must ask for
    log-probabilities.
    """

    prompts: Sequence[Prompt]
    n: int
    tenant: str
    adapter: AdapterRef | None
    stop: StopStrings
    keep_token_ids: bool
    keep_logprobs: bool
    ends: EndRules = PLAIN_ENDS
    num_best: int | None = None  # None: all
    beams: Sequence[BeamRules] = ()  # one for each prompt, n wide: the choices are beams; empty: they are drawn
    request_id: str = ""  # for logs
    key: str = ""  # of the answer; empty: its client cannot come back for its sequences
    adapter_name: str = ""  # the adapter's name in the request, for metrics; empty: the base, or a private adapter
    owner: str = ""  # the user whose private adapter it is; empty: the tenant's
    cache_salt: str = ""  # the tenant's sequences share KV only where this is the same
    timeout_s: float | None = None  # from the request's arrival to the last token; None: as long as it takes
    is_echoed: bool = False  # the answer's text begins with the prompt's
    reader: ResponseReader | None = None  # the state at each answer's start; None: text is shown unchanged
    weight: float = 1.0  # of the tenant
    priority: int = 0  # among the tenant's own
    is_background: bool = False  # it yields to everybody's other requests
    num_seen: Sequence[int] = ()  # tokens of each choice that the client had before it came back; empty: a new request
    most_at_once: int | None = None  # of its sequences that are at gangs; the others follow as these end. None: all


class Generation:
    """Submits a request's sequences in `deltas()`, and cancels what is unfinished at `cancel()`.

    Tokens that a client has had before are computed again or fetched. They go through the choices as all tokens do, but
    are not shown: so what a choice shows after k tokens follows from these k tokens alone.
    """

    def __init__(
        self,
        request: GenerationRequest,
        dispatcher: Dispatcher,
        text: TextService,
        metrics: Metrics,
        started_at: float,
        turns: LoopTurns | None = None,
    ) -> None:
        """`started_at`: when the request came, by `time.perf_counter()`. `turns`: with which it shares the event loop;
        None: with no other.
        """
        self.request = request
        self._loop = turns or LoopTurns()
        self._turns = self._loop.of(request.tenant, request.weight)
        self.choices = [_choice(request, prompt, text) for prompt in request.prompts for _ in range(request.n)]
        self._dispatcher = dispatcher
        self._text = text
        self._metrics = metrics
        self.started_at = started_at
        self._num_seen = request.num_seen or [0] * len(self.choices)
        self._attempt = secrets.randbits(63) if request.num_seen else 0
        # Of the last token, by `time.perf_counter()`; None: as long as it takes.
        self.deadline = None if request.timeout_s is None else started_at + request.timeout_s
        self._updated_at = [started_at] * len(self.choices)
        self.first_token_at: float | None = None  # by `time.perf_counter()`; None: no token has come
        self._num_unfinished = len(self.choices)
        self._num_cached: list[int | None] = [None] * len(self.choices)  # tokens of its prompt that were not computed
        self._total_logprobs = [0.0] * len(self.choices)  # as far as log-probabilities were requested
        self._num_sent_prompts = 0  # whose sequences are in `_streams`
        self._streams: list[SequenceStream] = []  # of the first choices
        self._pumps: list[asyncio.Task[None]] = []  # of the streams, if there are several
        self._queue: asyncio.Queue[tuple[int, SequenceUpdate]]  # into which they put what comes

    async def deltas(self) -> AsyncGenerator[tuple[int, Delta], None]:
        """The index of a choice, and what its client sees next of it; in the order in which tokens come.

        Ends when every choice is finished. Raises `SequenceFailedError` once any of the sequences fails.
        """
        await self._submit()
        source = self._merged() if len(self.choices) > 1 else _numbered(self._streams[0])
        async for index, whole in source:
            choice = self.choices[index]
            is_short = len(whole.token_ids) <= 1 and whole.prompt_scores is None
            for number, part in enumerate((whole,) if is_short else portions(whole)):
                if number:
                    await asyncio.sleep(0)
                if not self._loop.begin(self._turns):
                    await self._loop.wait(self._turns)
                if choice.finish_reason is not None:
                    break  # after a stop string
                if part.prompt_scores is not None:
                    yield index, Delta("", [], [], None, prompt_scores=part.prompt_scores)
                    continue
                if self._num_cached[index] is None:  # else a gang that goes on with it sends its own number
                    self._num_cached[index] = part.num_cached_tokens
                update = part if choice.num_tokens >= self._num_seen[index] else self._take_seen(index, part)
                if choice.finish_reason is None and (update.token_ids or update.finish_reason is not None):
                    yield index, self._take(index, update)
                if update.error is not None:
                    raise SequenceFailedError(update.error)
                if self._num_unfinished == 0:
                    return
                if self._num_sent_prompts < len(self.request.prompts):
                    await self._submit()
                    self._pump_new()
        raise SequenceFailedError(_LOST)

    async def take_turn(self) -> None:
        """Waits until a piece of work for the answer may hold the event loop: see `LoopTurns`."""
        if not self._loop.begin(self._turns):
            await self._loop.wait(self._turns)

    def _take(self, index: int, update: SequenceUpdate) -> Delta:
        """What the update lets the client see; its tokens and their times are counted."""
        num_tokens = self.choices[index].num_tokens
        delta = self._fold(index, update)
        if update.embedding is not None:
            delta = delta._replace(embedding=update.embedding)
        now, metrics, is_first = time.perf_counter(), self._metrics, num_tokens == 0
        elapsed_s = now - self._updated_at[index]
        if is_first:
            metrics.first_token_s.observe(elapsed_s)
            if self.first_token_at is None:
                self.first_token_at = now
            if update.computing_s is not None:
                metrics.queue_wait_s.observe(max(0.0, elapsed_s - update.computing_s))  # two machines' clocks
        else:
            metrics.inter_token_s.observe(elapsed_s)
        self._updated_at[index] = metrics.last_token_at = now
        metrics.num_completion_tokens += self.choices[index].num_tokens - num_tokens
        return delta

    def _take_seen(self, index: int, update: SequenceUpdate) -> SequenceUpdate:
        """Skips the tokens that the client has had; returns the rest. Raises a 400 if fewer were generated."""
        choice, num_seen = self.choices[index], self._num_seen[index]
        seen, remainder = _split(update, num_seen - choice.num_tokens)
        self._fold(index, seen)
        if choice.finish_reason is not None and choice.num_tokens < num_seen:
            raise wrong_position(
                f"choice {index} ends after {choice.num_tokens} tokens, and the position says {num_seen}."
            )
        return remainder

    def _fold(self, index: int, update: SequenceUpdate) -> Delta:
        choice = self.choices[index]
        num_tokens = choice.num_tokens
        delta = choice.fold(update)
        if update.logprobs is not None:  # tokens after a stop string do not count
            logprobs = update.logprobs[: choice.num_tokens - num_tokens]
            self._total_logprobs[index] += sum(token.chosen for token in logprobs)
        if choice.finish_reason is not None:
            self._metrics.finished[choice.finish_reason] += 1
            self._metrics.completion_tokens.observe(choice.num_tokens)
            self._num_unfinished -= 1
            if update.finish_reason is None:
                self._streams[index].cancel()
        return delta

    def cancel(self) -> None:
        """Cancels the sequences that are unfinished. May be called again."""
        for pump in self._pumps:
            pump.cancel()
        for stream, choice in zip(self._streams, self.choices, strict=False):  # those that are submitted
            if choice.finish_reason is None:
                stream.cancel()

    @property
    def num_tokens(self) -> list[int]:
        """Tokens of each choice that the client has had once it has all deltas so far."""
        return [max(c.num_tokens, num_seen) for c, num_seen in zip(self.choices, self._num_seen, strict=True)]

    def answers(self) -> list[int]:
        """Indices of the choices that are in the answer, prompt by prompt. Call it when all choices are finished.

        If not all choices are, the likeliest come first: by mean log-probability per token, as OpenAI ranks them.
        """
        n, num_best = self.request.n, self.request.num_best
        if num_best is None or num_best == n:
            return list(range(len(self.choices)))
        indices: list[int] = []
        for start in range(0, len(self.choices), n):
            ranked = sorted(range(start, start + n), key=self._mean_logprob, reverse=True)  # ties: in their order
            indices += ranked[:num_best]
        return indices

    def usage(self) -> Usage:
        prompt_tokens = sum(len(prompt.token_ids) for prompt in self.request.prompts)
        completion_tokens = sum(self.num_tokens)
        num_cached = self.num_cached_tokens
        details = UNSET if num_cached is None else PromptTokensDetails(num_cached)
        reasoned: CompletionTokensDetails | UnsetType = UNSET
        if self.request.reader is not None:
            token_counts = (choice.num_reasoning_tokens for choice in self.choices if isinstance(choice, MessageChoice))
            reasoned = CompletionTokensDetails(sum(token_counts))
        return Usage(prompt_tokens, completion_tokens, prompt_tokens + completion_tokens, details, reasoned)

    def progress(self) -> Progress:
        """What gangs have computed for the answer so far, whether its client received it or not."""
        n, usages = self.request.n, [self._sequence_usage(index) for index in range(len(self._streams))]
        of_prompts = (
            usages if n == 1 else [total_usage(usages[start : start + n]) for start in range(0, len(usages), n)]
        )
        total = usages[0] if len(usages) == 1 else total_usage(usages)
        # Tokens that were found in the cache count once for a prompt, however many sequences share it.
        num_prompt_tokens = sum(
            max(
                counts.num_computed_prompt_tokens,
                min(len(prompt.token_ids), counts.num_computed_prompt_tokens + counts.num_cached_prompt_tokens),
            )
            for prompt, counts in zip(self.request.prompts, of_prompts, strict=False)
        )
        by_attempt: defaultdict[int, int] = defaultdict(int, {} if self._attempt else {0: 0})
        for usage in usages:
            by_attempt[usage.attempt if self._attempt else 0] += usage.num_computed_tokens
        return Progress(
            num_prompt_tokens=num_prompt_tokens,
            num_cached_tokens=num_prompt_tokens - total.num_computed_prompt_tokens,
            num_completion_tokens=total.num_generated_tokens,
            num_recomputed_tokens=total.num_recomputed_tokens,
            kv_page_ms=round(1000 * total.kv_page_s),
            adapter_page_ms=round(1000 * total.adapter_page_s),
            computed_tokens=(*sorted(by_attempt.items()),),
        )

    def _sequence_usage(self, index: int) -> SequenceUsage:
        """As its gang has reported, and as if it had held the same pages from then up to its last token."""
        stream = self._streams[index]
        held_s = 0.0 if stream.usage_at is None else max(0.0, self._updated_at[index] - stream.usage_at)
        return stream.usage.after(held_s) if held_s else stream.usage

    @property
    def is_reported(self) -> bool:
        """`progress` will not change any more. Call it after `cancel`, or when all choices are finished."""
        return all(stream.is_reported for stream in self._streams)

    async def reported(self) -> None:
        """Waits until gangs have reported what cancelled sequences have cost, or have failed to do so in time."""
        for stream in self._streams:
            await stream.reported()

    def count_end(self) -> None:
        """Counts the answer, all of which its client was sent."""
        self._metrics.request_s.observe(time.perf_counter() - self.started_at)
        self._metrics.num_cached_prompt_tokens += self.num_cached_tokens or 0

    @property
    def num_cached_tokens(self) -> int | None:
        """Tokens of the prompts that no choice had to compute; None: not all sequences have reported yet."""
        n, total = self.request.n, 0
        for start, prompt in zip(range(0, len(self.choices), n), self.request.prompts, strict=True):
            cached_counts = [num_cached for num_cached in self._num_cached[start : start + n] if num_cached is not None]
            if len(cached_counts) < n:
                return None
            total += min(*cached_counts, len(prompt.token_ids))
        return total

    def _mean_logprob(self, index: int) -> float:
        return self._total_logprobs[index] / max(self.choices[index].num_tokens, 1)

    async def _submit(self) -> None:
        """As many as may be at gangs now."""
        request, share = self.request, LoopShare()
        max_at_once = len(self.choices) if request.most_at_once is None else request.most_at_once
        while self._num_sent_prompts < len(request.prompts):
            num_finished = len(self.choices) - self._num_unfinished
            if len(self._streams) - num_finished >= max_at_once:
                break
            position, prompt = self._num_sent_prompts, request.prompts[self._num_sent_prompts]
            self._num_sent_prompts += 1
            self._metrics.num_prompt_tokens += len(prompt.token_ids)
            self._metrics.prompt_tokens.observe(len(prompt.token_ids))
            sequence = SequenceRequest(
                prompt_token_ids=prompt.token_ids,
                sampling=prompt.sampling,
                tenant=request.tenant,
                adapter=request.adapter,
                adapter_name=request.adapter_name,
                owner=request.owner,
                cache_salt=request.cache_salt,
                request_id=request.request_id,
                attempt=self._attempt,
                weight=request.weight,
                priority=request.priority,
                is_background=request.is_background,
            )
            if request.beams:
                is_stopped = BeamStops(
                    request.stop,
                    self._text,
                    prompt.token_ids,
                    skip_special_tokens=not request.ends.shows_special_tokens,
                )
                search = BeamRun(self._dispatcher, sequence, request.beams[position], is_stopped, self._limit)
                self._streams += search.streams()
                await share.pause()
                continue
            for number in range(request.n):
                sampling = _seeded(prompt.sampling, number) if number else prompt.sampling
                if number and sampling.num_prompt_logprobs is not None:  # the first one's are the others', too
                    sampling = replace(sampling, num_prompt_logprobs=None)
                has_delivered = self._num_seen[len(self._streams)] > 0
                key = f"{request.key}/{len(self._streams)}" if request.key else ""
                self._streams.append(
                    self._dispatcher.submit(
                        replace(sequence, sampling=sampling, key=key),
                        is_resumed=bool(request.num_seen),
                        limit=self._limit(sampling, has_begun=has_delivered),
                    )
                )
                await share.pause()

    def _limit(self, sampling: SamplingParams, *, has_begun: bool = False) -> TimeLimit | None:
        """The time that a sequence has left; None: it has no limit, and is new.

        `has_begun`: its client has had tokens of it.
        """
        if self.deadline is None:
            return TimeLimit(has_begun=True) if has_begun else None
        may_end_at_once = not sampling.ignore_eos or bool(sampling.stop_token_ids) or bool(self.request.stop.strings)
        num_new_tokens = 1 if may_end_at_once else sampling.max_tokens or 1
        return TimeLimit(max(0.0, self.deadline - time.perf_counter()), num_new_tokens, has_begun)

    async def _merged(self) -> AsyncIterator[tuple[int, SequenceUpdate]]:
        # As long as one for each, so that a client that does not read holds the streams back.
        queue: asyncio.Queue[tuple[int, SequenceUpdate]] = asyncio.Queue(len(self.choices))
        self._queue = queue
        self._pump_new()
        share = LoopShare()
        while True:
            if queue.empty():
                indexed_update = await queue.get()
                share = LoopShare()
            else:  # without this a request of many sequences would take in all of a frame in one go
                indexed_update = queue.get_nowait()
                await share.pause()
            yield indexed_update

    def _pump_new(self) -> None:
        """Puts updates of streams into the queue that were submitted since the last time."""
        for index in range(len(self._pumps), len(self._streams)):
            self._pumps.append(asyncio.create_task(_pump(self._streams[index], index, self._queue)))


def _choice(request: GenerationRequest, prompt: Prompt, text: TextService) -> Choice:
    reader = request.reader
    read_as = None if reader is None else reader.reading.format
    detokenizer = text.detokenizer(
        () if prompt.sampling.pooling is not None else prompt.token_ids,  # nothing follows one that is pooled
        is_echoed=request.is_echoed,
        read_as=read_as,
        skip_special_tokens=not request.ends.shows_special_tokens,
    )
    make = Choice if reader is None else partial(MessageChoice, reader.copy())
    return make(
        detokenizer,
        request.stop,
        keep_token_ids=request.keep_token_ids,
        keep_logprobs=request.keep_logprobs,
        keep_hidden=request.is_echoed,  # clients that score a prompt drop the last entry without looking at it
        ends=request.ends,
    )


def _split(update: SequenceUpdate, num_tokens: int) -> tuple[SequenceUpdate, SequenceUpdate]:
    """The update's first `num_tokens`, with the finish reason if that comes with them, and the rest."""
    sequence_id, token_ids, logprobs = update.sequence_id, update.token_ids, update.logprobs
    if len(token_ids) <= num_tokens:
        seen = SequenceUpdate(sequence_id, token_ids, logprobs, update.finish_reason)
        return seen, SequenceUpdate(sequence_id, error=update.error)
    before, after = (None, None) if logprobs is None else (logprobs[:num_tokens], logprobs[num_tokens:])
    remainder = SequenceUpdate(sequence_id, token_ids[num_tokens:], after, update.finish_reason, update.error)
    return SequenceUpdate(sequence_id, token_ids[:num_tokens], before), remainder


async def _numbered(stream: SequenceStream) -> AsyncIterator[tuple[int, SequenceUpdate]]:
    async for update in stream:
        yield 0, update


async def _pump(stream: SequenceStream, index: int, queue: asyncio.Queue[tuple[int, SequenceUpdate]]) -> None:
    """Puts a stream's updates into the queue, and an error after them if it ends without having said why."""
    last = SequenceUpdate(index)
    try:
        async for update in stream:
            last = update
            await queue.put((index, update))
    except Exception:
        await queue.put((index, SequenceUpdate(index, error=_LOST)))
        raise
    if last.finish_reason is None and last.error is None:
        await queue.put((index, SequenceUpdate(index, error=_LOST)))


def _seeded(sampling: SamplingParams, index: int) -> SamplingParams:
    """The sampling of the index-th sequence of a prompt: its seed is the request's plus `index`, modulo 2**64."""
    if sampling.seed is None:
        return sampling
    half = _NUM_SEEDS // 2
    return replace(sampling, seed=(sampling.seed + index + half) % _NUM_SEEDS - half)
