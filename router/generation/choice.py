"""One completion as it grows: updates of a sequence in, text out."""

from __future__ import annotations

from typing import NamedTuple

from ...workers.wire.messages import FinishReason, SequenceUpdate, TokenLogprobs
from ..text.stop_strings import StopStrings
from ..text.text import Detokenizer


class ShownToken(NamedTuple):
    """A token whose log probabilities are told. `offset`: where its text starts in the completion's, in characters."""

    token_id: int
    logprobs: TokenLogprobs
    offset: int


class Delta(NamedTuple):
    """What an update added to what the client may see.

    A token goes out with the text that it starts, so held-back text holds its tokens back too.
    """

    text: str
    token_ids: list[int]  # kept only if asked for
    logprobs: list[ShownToken]
    finish_reason: FinishReason | None

    @property
    def is_empty(self) -> bool:
        return not self.text and not self.token_ids and not self.logprobs and self.finish_reason is None


class _Waiting(NamedTuple):
    token_id: int
    logprobs: TokenLogprobs | None
    offset: int
    is_hidden: bool  # an end-of-sequence token: it is counted, and its text is not shown


class Choice:
    """Folds updates into deltas, watching for stop strings. Done once `finish_reason` is set."""

    def __init__(
        self,
        detokenizer: Detokenizer,
        stop: StopStrings,
        *,
        keep_token_ids: bool = False,
        keep_logprobs: bool = False,
    ) -> None:
        """With both `keep_…` every token has log probabilities told; else only those that are in the text."""
        self.num_tokens = 0  # up to the one that completed a stop string
        self.finish_reason: FinishReason | None = None
        self._detokenizer = detokenizer
        self._stop = stop
        self._keep_token_ids = keep_token_ids
        self._keep_logprobs = keep_logprobs
        self._held = ""  # text that may turn out to start a stop string
        self._num_sent_chars = 0
        self._waiting: list[_Waiting] = []  # tokens that did not go out yet

    def fold(self, update: SequenceUpdate) -> Delta:
        """What this update lets the client see. Tokens after a stop string are dropped."""
        assert self.finish_reason is None
        cut = self._take_tokens(update)
        text = self._held
        if cut is not None:
            self.finish_reason = "stop"
            text, self._held = text[:cut], ""
        elif update.finish_reason is not None:
            self.finish_reason = update.finish_reason
            text, self._held = text + self._detokenizer.flush(), ""
        elif self._stop.strings:
            num_held = self._stop.num_held(text)
            if num_held:
                text, self._held = text[:-num_held], text[-num_held:]
            else:
                self._held = ""
        else:
            self._held = ""
        self._num_sent_chars += len(text)
        if not self._waiting:
            return Delta(text, [], [], self.finish_reason)
        return self._with_tokens(text, is_cut=cut is not None)

    def _take_tokens(self, update: SequenceUpdate) -> int | None:
        """Where in the held text a stop string starts, once one is complete."""
        has_end_token = update.finish_reason == "stop" and update.token_ids
        num_shown = len(update.token_ids) - bool(has_end_token)
        keeps = self._keep_token_ids or self._keep_logprobs
        for position, token_id in enumerate(update.token_ids):
            self.num_tokens += 1
            if keeps:
                logprobs = update.logprobs[position] if update.logprobs is not None else None
                offset = self._num_sent_chars + len(self._held)
                self._waiting.append(_Waiting(token_id, logprobs, offset, position >= num_shown))
            if position >= num_shown:
                continue
            piece = self._detokenizer.step(token_id)
            if not piece:
                continue
            self._held += piece
            if self._stop.strings:
                cut = self._stop.find(self._held)
                if cut is not None:
                    return cut
        return None

    def _with_tokens(self, text: str, *, is_cut: bool) -> Delta:
        """The delta of `text` and of the waiting tokens that go with it: at the end all of them."""
        num_sent = self._num_sent_chars
        if self.finish_reason is None:
            sent = [token for token in self._waiting if token.offset < num_sent]
            self._waiting = self._waiting[len(sent) :]  # offsets never fall, so those were the first ones
        else:
            sent, self._waiting = self._waiting, []
        shown = [
            ShownToken(token.token_id, token.logprobs, token.offset)
            for token in sent
            if token.logprobs is not None
            and (self._keep_token_ids or not (token.is_hidden or (is_cut and token.offset >= num_sent)))
        ]
        token_ids = [token.token_id for token in sent] if self._keep_token_ids else []
        return Delta(text, token_ids, shown if self._keep_logprobs else [], self.finish_reason)
