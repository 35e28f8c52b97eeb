"""One completion as it grows: takes updates of a sequence, returns text and, of chats, parts of a message."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Final, NamedTuple

from msgspec import structs

from ...workers.wire.messages import FinishReason, SequenceUpdate, TokenLogprobs
from ...workers.wire.prompt_scores import PromptScores
from ..text.call_parsing import Call
from ..text.response_reader import Piece, ResponseReader
from ..text.stop_strings import StopMatcher, StopStrings
from ..text.text import Detokenizer

# How a choice's text ends, and whether the end is shown.


@dataclass(frozen=True)
class EndRules:
    min_tokens: int = 0  # no stop string ends the text with one of them
    stop_token_ids: frozenset[int] = frozenset()  # the one that stops the choice is its `stop_reason`
    shows_stop: bool = False  # the stop string or token is part of the text
    shows_special_tokens: bool = False


PLAIN_ENDS: Final = EndRules()


class ShownToken(NamedTuple):
    """A token whose log-probabilities are shown. `offset`: where its text starts in the completion, in characters."""

    token_id: int
    logprobs: TokenLogprobs
    offset: int


class Delta(NamedTuple):
    """What an update added to what the client may see.

    A token goes out with the text that it starts, so the tokens of held-back text are held back too.
    """

    text: str
    token_ids: list[int]  # kept only if requested
    logprobs: list[ShownToken]
    finish_reason: FinishReason | None
    stop_reason: str | int | None = None  # the stop string or token that stopped the choice; None: neither did
    pieces: Sequence[Piece] = ()  # of a message, in place of the text that they were read from
    has_called: bool = False  # with the finish reason: the answer calls tools
    prompt_scores: PromptScores | None = None  # of the prompt's next tokens
    embedding: bytes | None = None  # of the prompt, packed; the answer has nothing else

    @property
    def is_empty(self) -> bool:
        return not (self.text or self.token_ids or self.logprobs or self.pieces) and self.finish_reason is None


class _HeldToken(NamedTuple):
    token_id: int
    logprobs: TokenLogprobs | None
    offset: int
    is_hidden: bool  # an end-of-sequence token: it is counted, and its text is not shown


class Choice:
    """Turns updates into deltas, and looks for stop strings. It is finished once `finish_reason` is set."""

    def __init__(
        self,
        detokenizer: Detokenizer,
        stop: StopStrings,
        *,
        keep_token_ids: bool = False,
        keep_logprobs: bool = False,
        ends: EndRules = PLAIN_ENDS,
        keep_hidden: bool = False,
    ) -> None:
        """With `keep_hidden` or both others, log-probabilities of all tokens are shown.

        Else only of those whose text is shown.
        """
        self.num_tokens = 0  # up to the one that completed a stop string
        self.finish_reason: FinishReason | None = None
        self.stop_reason: str | int | None = None
        self._ends = ends
        self._detokenizer = detokenizer
        self._stop = StopMatcher(stop.automaton) if stop.strings else None
        self._keep_token_ids = keep_token_ids
        self._keep_logprobs = keep_logprobs
        self._keep_hidden = keep_hidden or keep_token_ids
        self._held_text = ""  # text that may turn out to start a stop string
        self._num_sent_chars = 0
        self._held_tokens: list[_HeldToken] = []  # tokens that did not go out yet

    def fold(self, update: SequenceUpdate) -> Delta:
        """What this update lets the client see. Tokens after a stop string are dropped."""
        assert self.finish_reason is None
        cut = self._take_tokens(update)
        text = self._held_text
        if cut is not None:
            self.finish_reason = "stop"
            text, self._held_text = text[:cut], ""
        elif update.finish_reason is not None:
            self.finish_reason = update.finish_reason
            text, self._held_text = text + self._detokenizer.flush(), ""
        elif self._stop is not None:
            num_held = self._stop.num_held
            if num_held:
                text, self._held_text = text[:-num_held], text[-num_held:]
            else:
                self._held_text = ""
        else:
            self._held_text = ""
        self._num_sent_chars += len(text)
        if not self._held_tokens:
            return Delta(text, [], [], self.finish_reason, self.stop_reason)
        return self._with_tokens(text, is_cut=cut is not None)

    def _take_tokens(self, update: SequenceUpdate) -> int | None:
        """Where the shown part of the held text ends, once a stop string is complete."""
        num_shown = len(update.token_ids)
        if update.finish_reason == "stop" and update.token_ids:
            last = update.token_ids[-1]
            self.stop_reason = last if last in self._ends.stop_token_ids else None
            num_shown -= not self._ends.shows_stop
        keeps = self._keep_token_ids or self._keep_logprobs
        for position, token_id in enumerate(update.token_ids):
            self.num_tokens += 1
            if keeps:
                logprobs = update.logprobs[position] if update.logprobs is not None else None
                offset = self._num_sent_chars + len(self._held_text)
                self._held_tokens.append(_HeldToken(token_id, logprobs, offset, position >= num_shown))
            if position >= num_shown:
                continue
            piece = self._detokenizer.step(token_id)
            if not piece:
                continue
            num_before = len(self._held_text)
            self._held_text += piece
            if self._stop is not None:
                match = self._stop.find(piece)
                if match is not None and self.num_tokens > self._ends.min_tokens:
                    start, end = num_before + match[0], num_before + match[1]
                    self.stop_reason = self._held_text[start:end]
                    return end if self._ends.shows_stop else start
        return None

    def _with_tokens(self, text: str, *, is_cut: bool) -> Delta:
        """The delta of `text` and of the held tokens that go with it; at the end all of them go."""
        num_sent = self._num_sent_chars
        if self.finish_reason is None:
            tokens = [token for token in self._held_tokens if token.offset < num_sent]
            self._held_tokens = self._held_tokens[len(tokens) :]  # offsets never fall, so those were the first ones
        else:
            tokens, self._held_tokens = self._held_tokens, []
        logprobs = [
            ShownToken(token.token_id, token.logprobs, token.offset)
            for token in tokens
            if token.logprobs is not None
            and (self._keep_hidden or not (token.is_hidden or (is_cut and token.offset >= num_sent)))
        ]
        token_ids = [token.token_id for token in tokens] if self._keep_token_ids else []
        return Delta(text, token_ids, logprobs if self._keep_logprobs else [], self.finish_reason, self.stop_reason)


# One answer of a chat under way: a choice whose text is parsed to thoughts, tool calls and content.


class MessageChoice(Choice):
    """Parses token by token, so what is shown after k tokens depends on these k alone."""

    def __init__(self, reader: ResponseReader, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.num_reasoning_tokens = 0
        self._reader = reader

    def fold(self, update: SequenceUpdate) -> Delta:
        pieces: list[Piece] = []
        token_ids: list[int] = []
        logprobs: list[ShownToken] = []
        for token_update in _by_token(update):
            was_reasoning = self._reader.is_reasoning
            delta = super().fold(token_update)
            pieces += self._reader.feed(delta.text)
            self.num_reasoning_tokens += was_reasoning or self._reader.is_reasoning
            token_ids += delta.token_ids
            logprobs += delta.logprobs
            if self.finish_reason is not None:
                is_cut = self.finish_reason == "length" or isinstance(self.stop_reason, str)
                pieces += self._reader.finish(is_cut=is_cut)
                break
        pieces = _joined(pieces)
        has_called = self.finish_reason is not None and self._reader.num_calls > 0
        return Delta("", token_ids, logprobs, self.finish_reason, self.stop_reason, pieces, has_called)


def _joined(pieces: list[Piece]) -> list[Piece]:
    """With one piece of each call."""
    joined: list[Piece] = []
    for number, group in groupby(pieces, lambda piece: piece.number if isinstance(piece, Call) else None):
        parts = [*group]
        calls = [part for part in parts if isinstance(part, Call)]
        joined += parts if number is None else [Call(number, calls[0].name, "".join(call.arguments for call in calls))]
    return joined


def _by_token(update: SequenceUpdate) -> Iterator[SequenceUpdate]:
    """The same as updates of one token each; the last one has the finish reason."""
    token_ids, last = update.token_ids, len(update.token_ids) - 1
    if last <= 0:
        yield update
        return
    for position, token_id in enumerate(token_ids):
        logprobs = None if update.logprobs is None else update.logprobs[position : position + 1]
        reason = update.finish_reason if position == last else None
        yield SequenceUpdate(update.sequence_id, [token_id], logprobs, reason)


# An update of many tokens, as it comes of a reader that was slow or resumes a stream, in several of a few tokens.

MAX_TOKENS: Final = 32  # that are taken in at once
MAX_VALUES: Final = 256  # log-probabilities that are taken in at once: about a millisecond


def portions(update: SequenceUpdate) -> Sequence[SequenceUpdate]:
    """Splits the update into updates of at most `MAX_TOKENS` tokens, and fewer with many log-probabilities.

    Scores of a prompt come before its tokens, of as many at most in an update, too.
    """
    if update.prompt_scores is not None:
        scores, remainder = update.prompt_scores, structs.replace(update, prompt_scores=None)
        limit = _max_tokens(scores.num_top)
        parts = [scores.part(start, start + limit) for start in range(0, scores.num_rows, limit)]
        return [*(SequenceUpdate(update.sequence_id, prompt_scores=part) for part in parts), *portions(remainder)]
    token_ids, logprobs = update.token_ids, update.logprobs
    limit = _max_tokens(len(logprobs[0].top_ids) if logprobs else 0)
    if len(token_ids) <= limit:
        return (update,)
    starts = range(0, len(token_ids), limit)
    return [
        SequenceUpdate(
            update.sequence_id,
            token_ids[start : start + limit],
            None if logprobs is None else logprobs[start : start + limit],
            update.finish_reason if start == starts[-1] else None,
            update.error if start == starts[-1] else None,
            update.num_cached_tokens if start == 0 else None,
            update.computing_s if start == 0 else None,
            update.usage if start == 0 else None,
        )
        for start in starts
    ]


def _max_tokens(num_top: int) -> int:
    return min(MAX_TOKENS, 1 + MAX_VALUES // (1 + num_top))
