"""One answer of a chat under way: a choice whose text is parsed to thoughts, tool calls and content."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import Any

from ...workers.wire.messages import SequenceUpdate
from ..text.call_parsing import Call
from ..text.response_reader import Piece, ResponseReader
from .choice import Choice, Delta, ShownToken


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
        for one in _by_token(update):
            was_reasoning = self._reader.is_reasoning
            delta = super().fold(one)
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
        joined += parts if number is None else [Call(number, calls[0].name, "".join(one.arguments for one in calls))]
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
