"""What has come for one sequence and was not read yet: one update that grows, and that is read in pieces.

Adding an update costs what is added, however much is there, and log-probabilities are kept as bytes.
"""

from __future__ import annotations

from array import array
from typing import Final

import msgspec

from .beams import BeamRound
from .kept_logprobs import KeptLogprobs
from .messages import SequenceUpdate, SequenceUsage
from .prompt_scores import PromptScores, row_bytes

# The most that msgpack makes of an update without tokens, of a token, of its log-probability, and of a likely token.
_UPDATE_BYTES: Final = 112
_TOKEN_BYTES: Final = 5
_LOGPROB_BYTES: Final = 20
_TOP_BYTES: Final = 14
_MAX_CHAR_BYTES: Final = 4
_CANDIDATE_BYTES: Final = 24  # the most of a beam's candidate, without likely tokens


def update_bytes(update: SequenceUpdate) -> int:
    """At least as many bytes as the update takes in a frame."""
    num_bytes = _UPDATE_BYTES + _TOKEN_BYTES * len(update.token_ids)
    if update.logprobs is not None:
        for row in update.logprobs:
            num_bytes += _LOGPROB_BYTES + _TOP_BYTES * len(row.top_ids)
    if update.prompt_scores is not None:
        num_bytes += len(update.prompt_scores.data)
    if update.embedding is not None:
        num_bytes += len(update.embedding)
    if update.beam_rounds is not None:
        num_bytes += sum(map(round_bytes, update.beam_rounds))
    if update.error is not None:
        num_bytes += _UPDATE_BYTES + _MAX_CHAR_BYTES * len(update.error.message)
    return num_bytes


def round_bytes(beam_round: BeamRound) -> int:
    """At least as many bytes as a round of a beam search takes in a frame."""
    num_tops = sum([len(candidate.top_ids) for candidate in beam_round.candidates])
    return _TOKEN_BYTES + _CANDIDATE_BYTES * len(beam_round.candidates) + _TOP_BYTES * num_tops


class UnreadUpdate:
    """Updates of one sequence, in order, as one."""

    __slots__ = (
        "_last",
        "_logprobs",
        "_num_at_first",
        "_num_scores_taken",
        "_num_taken",
        "_num_top",
        "_rounds",
        "_scores",
        "_started",
        "_token_ids",
        "usage",
    )

    def __init__(
        self, first: SequenceUpdate, token_ids: array[int] | None = None, logprobs: KeptLogprobs | None = None
    ) -> None:
        """`token_ids`, `logprobs`: what comes before the first update; they are the object's own from now on."""
        self._token_ids = array("I") if token_ids is None else token_ids
        self._logprobs = logprobs
        self._num_taken = 0  # tokens that were read
        self._scores = bytearray()  # rows of `PromptScores`
        self._num_top = 0  # of them
        self._num_scores_taken = 0  # rows that were read
        self._rounds = list[BeamRound]()  # of a beam search, not read yet
        self._last = SequenceUpdate(first.sequence_id)  # its end, if that has come
        self._started = SequenceUpdate(first.sequence_id)  # what comes with the first token
        self.usage: SequenceUsage | None = None  # the latest that was not read yet
        self._num_at_first = 0
        self.add(first)
        self._num_at_first = self.num_added_values

    def __bool__(self) -> bool:
        """There is something to send."""
        has_ended = self._last.finish_reason is not None or self._last.error is not None
        return has_ended or self._num_taken < len(self._token_ids) or self._num_scores_left > 0 or bool(self._rounds)

    @property
    def num_added_values(self) -> int:
        """Tokens and log-probabilities, some 6 bytes each, that were added since it was made."""
        num_values = len(self._token_ids) + (0 if self._logprobs is None else self._logprobs.num_values)
        return num_values + self.num_score_values - self._num_at_first

    @property
    def num_score_values(self) -> int:
        """Numbers in the scores of the prompt that were added."""
        return len(self._scores) // 4

    @property
    def _num_scores_left(self) -> int:
        return len(self._scores) // row_bytes(self._num_top) - self._num_scores_taken

    @property
    def max_bytes(self) -> int:
        """At least as many bytes as all that is left of it takes in a frame."""
        num_left = len(self._token_ids) - self._num_taken
        num_bytes = update_bytes(self._last) + num_left * _TOKEN_BYTES
        if self._logprobs is not None:
            num_bytes += self._logprobs.num_bytes(self._num_taken)
        return num_bytes + self._num_scores_left * row_bytes(self._num_top) + sum(map(round_bytes, self._rounds))

    def add(self, update: SequenceUpdate) -> None:
        self._token_ids.extend(update.token_ids)
        if update.logprobs is not None:
            if self._logprobs is None:
                self._logprobs = KeptLogprobs()
            self._logprobs.extend(update.logprobs)
        if update.prompt_scores is not None:
            self._num_top = update.prompt_scores.num_top
            self._scores += update.prompt_scores.data
        if update.beam_rounds is not None:
            self._rounds += update.beam_rounds
        if update.finish_reason is not None or update.error is not None:
            self._last = SequenceUpdate(
                update.sequence_id,
                finish_reason=update.finish_reason,
                error=update.error,
                embedding=update.embedding,
            )
        started = self._started
        if update.num_cached_tokens is not None and started.num_cached_tokens is None:
            self._started = started = msgspec.structs.replace(started, num_cached_tokens=update.num_cached_tokens)
        if update.computing_s is not None and started.computing_s is None:
            self._started = msgspec.structs.replace(started, computing_s=update.computing_s)
        if update.usage is not None:
            self.usage = update.usage

    def take_all(self) -> SequenceUpdate:
        """All that is left of it."""
        return self.take(self.max_bytes)[0]

    def take(self, num_bytes: int) -> tuple[SequenceUpdate, bool]:
        """The next tokens that fit into this many bytes of a frame, at least one; and whether nothing is left.

        Scores of the prompt come before them. The end comes with the last of them.
        """
        room = num_bytes - update_bytes(self._last)
        scores = self._take_scores(room) if self._num_scores_left else None
        if self._num_scores_left:
            piece = SequenceUpdate(self._last.sequence_id, usage=self.usage, prompt_scores=scores)
            self.usage = None
            return piece, False
        room -= 0 if scores is None else len(scores.data)
        rounds = self._take_rounds(room)
        start, num_left = self._num_taken, len(self._token_ids) - self._num_taken
        if self._logprobs is None:
            count = room // _TOKEN_BYTES
        else:
            count = self._logprobs.num_fitting(start, room, _TOKEN_BYTES)
        end = start + min(max(1, count), num_left)
        is_all = end == len(self._token_ids) and not self._rounds
        last, started = self._last, self._started
        piece = SequenceUpdate(
            last.sequence_id,
            self._token_ids[start:end].tolist(),
            None if self._logprobs is None else self._logprobs.rows(start, end),
            last.finish_reason if is_all else None,
            last.error if is_all else None,
            started.num_cached_tokens,
            started.computing_s,
            self.usage,
            scores,
            last.embedding if is_all else None,
            rounds or None,
        )
        self._num_taken, self._started, self.usage = end, SequenceUpdate(last.sequence_id), None
        return piece, is_all

    def _take_scores(self, num_bytes: int) -> PromptScores:
        """The next rows that fit into this many bytes, at least one."""
        size, start = row_bytes(self._num_top), self._num_scores_taken
        self._num_scores_taken += min(self._num_scores_left, max(1, num_bytes // size))
        return PromptScores(self._num_top, bytes(self._scores[start * size : self._num_scores_taken * size]))

    def _take_rounds(self, num_bytes: int) -> list[BeamRound]:
        """The next rounds of a beam search that fit into this many bytes, at least one if there is any."""
        num, rounds = 0, self._rounds
        for beam_round in rounds:
            num_bytes -= round_bytes(beam_round)
            if num and num_bytes < 0:
                break
            num += 1
        self._rounds = rounds[num:]
        return rounds[:num]
