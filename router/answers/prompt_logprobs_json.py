"""Log-probabilities of a prompt as JSON that is encoded as they arrive, in the format of `echo` and in vLLM's.

The first token of a prompt has none: null takes its place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final

import msgspec

from ...workers.wire.prompt_scores import PromptScores
from ..text.token_bytes import readable
from .openai_logprobs import LEAST_LOGPROB, BytesOfToken

_encode: Final = msgspec.json.Encoder().encode
StepText = Callable[[int], str]  # the text that the prompt's next token completes


class EchoedLogprobs:
    """The fields of a completion's `logprobs`, of the tokens of its prompt."""

    def __init__(self, token_ids: Sequence[int], bytes_of: BytesOfToken, step: StepText, num_top: int) -> None:
        """`step` is called for each token, in order."""
        self.fields: dict[str, list[bytes]] = {
            "tokens": [_encode(readable(bytes_of(token_ids[0])))],
            "token_logprobs": [b"null"],
            "top_logprobs": [b"null"],
            "text_offset": [b"0"],
        }
        self._token_ids, self._bytes_of, self._step, self._num_top = token_ids, bytes_of, step, num_top
        self._position = 1  # of the next token
        self._num_chars = len(step(token_ids[0]))

    def add(self, scores: PromptScores) -> None:
        """Adds the next tokens."""
        start, num_top = self._position, self._num_top
        self._position = end = start + scores.num_rows
        token_ids = self._token_ids[start:end]
        texts = [readable(self._bytes_of(token_id)) for token_id in token_ids]
        logprobs, _, top_ids, top_logprobs = _lists(scores)
        tops = []
        for text, logprob, ids, values in zip(texts, logprobs, top_ids, top_logprobs, strict=True):
            top = dict(zip(map(self._text, ids[:num_top]), values[:num_top], strict=True))
            top.setdefault(text, logprob)
            tops.append(top)
        offsets = []
        for token_id in token_ids:
            offsets.append(self._num_chars)
            self._num_chars += len(self._step(token_id))
        for parts, found in zip(self.fields.values(), (texts, logprobs, tops, offsets), strict=True):
            parts.append(_encode(found)[1:-1])

    def _text(self, token_id: int) -> str:
        return readable(self._bytes_of(token_id))


class PromptLogprobs:
    """vLLM's `prompt_logprobs`: for each token an object with it and the likeliest ones, by id."""

    def __init__(self, token_ids: Sequence[int], bytes_of: BytesOfToken, num_top: int) -> None:
        self._token_ids, self._bytes_of, self._num_top = token_ids, bytes_of, num_top
        self._position = 1
        self._parts = [b"null"]

    def add(self, scores: PromptScores) -> None:
        """Adds the next tokens."""
        start, num_top = self._position, self._num_top
        self._position = end = start + scores.num_rows
        rows = []
        for token_id, logprob, rank, ids, values in zip(self._token_ids[start:end], *_lists(scores), strict=True):
            row = {token_id: self._entry(token_id, logprob, rank)}
            for place, (top_id, value) in enumerate(zip(ids[:num_top], values[:num_top], strict=True)):
                if top_id != token_id:
                    row[top_id] = self._entry(top_id, value, place + 1)
            rows.append(row)
        self._parts.append(_encode(rows)[1:-1])

    def whole(self) -> Iterator[bytes]:
        """JSON of the field, in pieces."""
        yield b"["
        yield from listed(self._parts)
        yield b"]"

    def _entry(self, token_id: int, logprob: float, rank: int) -> dict[str, Any]:
        return {"logprob": logprob, "rank": rank, "decoded_token": readable(self._bytes_of(token_id))}


def listed(parts: Iterable[bytes]) -> Iterator[bytes]:
    """The parts with a comma between each two."""
    for number, part in enumerate(parts):
        yield b"," + part if number else part


def _lists(scores: PromptScores) -> tuple[list[float], list[int], list[list[int]], list[list[float]]]:
    rows = scores.rows()
    # Numbers that are not finite fail their sequence, so the least is minus infinity, which JSON does not have.
    logprobs, top_logprobs = rows["logprob"].clip(LEAST_LOGPROB), rows["top_logprobs"].clip(LEAST_LOGPROB)
    return logprobs.tolist(), rows["rank"].tolist(), rows["top_ids"].tolist(), top_logprobs.tolist()
