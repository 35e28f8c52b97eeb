"""One completion as it grows: takes updates of a sequence, returns text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ...workers.wire.messages import FinishReason, SequenceUpdate, TokenLogprobs
from ...workers.wire.prompt_scores import PromptScores
from ..text.response_reader import Piece
from ..text.stop_strings import StopMatcher, StopStrings
from ..text.text import Detokenizer
from .end_rules import PLAIN_ENDS, EndRules


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
                found = self._stop.find(piece)
                if found is not None and self.num_tokens > self._ends.min_tokens:
                    start, end = num_before + found[0], num_before + found[1]
                    self.stop_reason = self._held_text[start:end]
                    return end if self._ends.shows_stop else start
        return None

    def _with_tokens(self, text: str, *, is_cut: bool) -> Delta:
        """The delta of `text` and of the held tokens that go with it; at the end all of them go."""
        num_sent = self._num_sent_chars
        if self.finish_reason is None:
            sent = [token for token in self._held_tokens if token.offset < num_sent]
            self._held_tokens = self._held_tokens[len(sent) :]  # offsets never fall, so those were the first ones
        else:
            sent, self._held_tokens = self._held_tokens, []
        shown = [
            ShownToken(token.token_id, token.logprobs, token.offset)
            for token in sent
            if token.logprobs is not None
            and (self._keep_hidden or not (token.is_hidden or (is_cut and token.offset >= num_sent)))
        ]
        token_ids = [token.token_id for token in sent] if self._keep_token_ids else []
        return Delta(text, token_ids, shown if self._keep_logprobs else [], self.finish_reason, self.stop_reason)
