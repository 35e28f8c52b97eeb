"""The grammar of one sequence: from its tokens to the mask of the next one."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Final

import numpy as np
from llguidance import LLMatcher

from ..decoding.mask_source import TokenMask
from .vocabulary import Vocabulary

_NOTHING: Final = "no token of the model's vocabulary can come next"
_WHY: Final = {
    "NoExtension": _NOTHING,
    "NoExtensionBias": _NOTHING,
    "ParserTooComplex": "the next tokens take too long to compute (its rules are too ambiguous)",
    "LexerTooComplex": "the next tokens take too long to compute (its expressions are too complex)",
}


class Constraint:
    """The allowed tokens depend only on the grammar and the sequence's generated tokens, not on how these were reached.

    The thread that follows plans sets tokens; another thread computes masks.
    """

    def __init__(self, tenant: str, token_ids: Sequence[int], ignores_eos: bool) -> None:
        """`token_ids`: generated earlier."""
        self.tenant, self._ignores_eos = tenant, ignores_eos
        self._token_ids = [*token_ids]
        self._lock = threading.Lock()
        self._version = 0  # of the tokens: it changes with them
        self._mask: tuple[int, TokenMask] | None = None  # with the version that it is of
        self._is_queued = True  # a thread computes its mask, or will; first once the grammar is compiled
        self._num_same = 0  # of its first tokens, unchanged since the matcher consumed them
        self._num_taken = 0  # tokens that the matcher has consumed
        self._origin: LLMatcher | None = None  # before any token
        self._matcher: LLMatcher | None = None
        self.problem = ""  # why there are no more masks
        self.is_fault = False  # the problem is an unexpected error, not one of the grammar or the model
        self.is_late = False  # a step had to do without its mask: its sequence waits for it

    def begin(self, matcher: LLMatcher) -> None:
        """The grammar is compiled. `matcher`: before any token."""
        self._origin, self._matcher = matcher, matcher.deep_copy()

    def advance(self, num_tokens: int, last: int) -> bool:
        """From now on the sequence has this number of generated tokens, and this is the last of them.

        The other tokens are unchanged. Returns whether `make_mask` must be called, from any thread.
        """
        with self._lock:
            assert num_tokens <= len(self._token_ids) + 1, "a token of a sequence with a grammar was not followed"
            if num_tokens == len(self._token_ids) and (not num_tokens or self._token_ids[-1] == last):
                return False
            keep = max(num_tokens - 1, 0)
            if num_tokens and num_tokens <= len(self._token_ids) and self._token_ids[keep] == last:
                keep = num_tokens
            self._num_same = min(self._num_same, keep)
            self._token_ids[max(num_tokens - 1, 0) :] = [last] if num_tokens else []
            self._version += 1
            must_queue, self._is_queued = not self._is_queued, True
            return must_queue

    def mask(self, index: int) -> TokenMask | None:
        """The mask for the generated token with this index; None: it is not computed yet."""
        with self._lock:
            if self._mask is None or self._mask[0] != self._version or index != len(self._token_ids):
                return None
            return self._mask[1]

    @property
    def is_ready(self) -> bool:
        """Whether the mask of its next token is computed."""
        with self._lock:
            return self._mask is not None and self._mask[0] == self._version

    def make_mask(self, vocabulary: Vocabulary) -> None:
        """Makes the mask of the next token, or sets `problem`. Only one thread may be in here."""
        while True:
            with self._lock:
                if (self._mask is not None and self._mask[0] == self._version) or self.problem:
                    self._is_queued = False
                    return
                version, num_same, token_ids = self._version, self._num_same, self._token_ids
                restarts = self._num_taken > num_same
                new = token_ids[0 if restarts else self._num_taken :]
                self._num_same = len(token_ids)
            mask, problem = self._mask_after(new, restarts, vocabulary)
            with self._lock:
                self._num_taken = (0 if restarts else self._num_taken) + len(new)
                self._mask, self.problem = None if problem else (version, mask), problem

    def _mask_after(self, new: list[int], restarts: bool, vocabulary: Vocabulary) -> tuple[TokenMask, str]:
        """The mask, or why there is none, after these tokens, which follow the consumed ones, or none."""
        assert self._origin is not None, "masks are made once the grammar is compiled"
        if restarts or self._matcher is None:
            self._matcher = self._origin.deep_copy()
        matcher = self._matcher
        if new and not matcher.consume_tokens(new):
            return b"", _why(matcher)
        words = np.zeros(vocabulary.num_words, np.int32)
        matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        if matcher.is_error():
            return b"", _why(matcher)
        if self._ignores_eos and (words & ~vocabulary.eos_mask).any():
            words &= ~vocabulary.eos_mask
        if not words.any():
            return b"", _NOTHING
        return words.tobytes(), ""


def _why(matcher: LLMatcher) -> str:
    """Why the matcher has stopped."""
    reason = matcher.get_error().partition("\n")[0]
    return _WHY.get(reason, reason) or "the tokens so far cannot begin an answer"
