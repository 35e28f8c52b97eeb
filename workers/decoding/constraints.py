"""The grammars of a gang's sequences: compiled, followed token by token, and as masks for the worker that chooses."""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from types import MappingProxyType
from typing import Final

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer

from ..plan import SampledToken, StepPlan
from ..wire.messages import GRAMMAR_LIMITS, SequenceError
from .fair_threads import FairThreads
from .mask_source import TokenMask, mask_of

# The tokens of a model folder as grammars see them: their bytes, and which of them end an answer.


class VocabularyError(ValueError):
    """Grammars cannot be served with this folder's tokenizer; the message says why."""


class Vocabulary:
    """All tokens that logits have a column for; columns behind the tokenizer's last token are in no grammar."""

    def __init__(self, folder: Path, vocab_size: int, eos_token_ids: Collection[int]) -> None:
        """Takes a second for large vocabularies. Raises VocabularyError."""
        if not eos_token_ids:
            raise VocabularyError("the model has no end-of-sequence token, which an answer to a grammar ends with")
        file = folder / "tokenizer.json"
        if not file.is_file():
            raise VocabularyError(f"{folder.name} has no tokenizer.json, which grammars need")
        try:
            tokenizer = Tokenizer.from_file(str(file))
            tokenizer.no_padding()
            tokenizer.no_truncation()
            self.tokens = LLTokenizer(tokenizer.to_str(), n_vocab=vocab_size, eos_token=sorted(eos_token_ids))
        except Exception as error:  # both libraries raise plain exceptions
            raise VocabularyError(f"the tokenizer of {folder.name} cannot be used with grammars: {error}") from error
        self.folder, self.vocab_size, self.eos_token_ids = folder, vocab_size, sorted(eos_token_ids)
        self.num_words = -(-vocab_size // 32)  # of a mask
        self.eos_mask = np.frombuffer(mask_of((*eos_token_ids,), vocab_size), np.int32)


# Grammars that are compiled, by tenant and text, within a bound of bytes.

MAX_PROBLEM_CHARS: Final = 300  # of a message, which may repeat the grammar
_BYTES_PER_CHAR, _LEAST_BYTES = 64, 64 << 10  # that a compiled grammar takes, about
MOST_BYTES: Final = 256 << 20


class GrammarError(ValueError):
    """A grammar that cannot be used; the message says why."""


@dataclass
class _Kept:
    matcher: LLMatcher | None  # before any token
    problem: str  # why there is none
    num_bytes: int


class CompiledGrammars:
    """Used from several threads. A tenant's grammars are found by that tenant alone."""

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._most_bytes = most_bytes
        self._lock = threading.Lock()
        self._by_tenant: dict[str, OrderedDict[str, _Kept]] = {}  # the one that was used last comes last
        self._bytes: dict[str, int] = {}  # by tenant

    def matcher(self, tenant: str, grammar: str, vocabulary: Vocabulary) -> LLMatcher:
        """A new matcher, before any token. Compiles the grammar if necessary. Raises GrammarError.

        A router has tried it, within a smaller stack and less CPU than would harm this process.
        """
        with self._lock:
            tenant_grammars = self._by_tenant.get(tenant)
            entry = None if tenant_grammars is None else tenant_grammars.get(grammar)
            if tenant_grammars is not None and entry is not None:
                tenant_grammars.move_to_end(grammar)
        if entry is None:
            entry = _compile(grammar, vocabulary)
            with self._lock:
                self._keep(tenant, grammar, entry)
        if entry.matcher is None:
            raise GrammarError(entry.problem)
        return entry.matcher.deep_copy()

    def _keep(self, tenant: str, grammar: str, entry: _Kept) -> None:
        """Beyond the bound of all tenants, evicts the least recently used grammars of the tenant that holds most."""
        tenant_grammars = self._by_tenant.setdefault(tenant, OrderedDict())
        if grammar in tenant_grammars:  # another thread was as quick
            return
        tenant_grammars[grammar] = entry
        self._bytes[tenant] = self._bytes.get(tenant, 0) + entry.num_bytes
        while sum(self._bytes.values()) > self._most_bytes:
            largest = max(self._bytes, key=lambda each: self._bytes[each])
            _, dropped = self._by_tenant[largest].popitem(last=False)
            self._bytes[largest] -= dropped.num_bytes
            if not self._by_tenant[largest]:
                del self._by_tenant[largest], self._bytes[largest]

    def check_integrity(self) -> None:
        """Raises AssertionError if bytes are miscounted."""
        with self._lock:
            counted = {tenant: sum(each.num_bytes for each in lru.values()) for tenant, lru in self._by_tenant.items()}
            assert counted == self._bytes and sum(counted.values()) <= self._most_bytes


def _compile(grammar: str, vocabulary: Vocabulary) -> _Kept:
    """Other threads run meanwhile."""
    matcher = LLMatcher(vocabulary.tokens, grammar, log_level=0, limits=GRAMMAR_LIMITS)
    if matcher.is_error():
        return _Kept(None, matcher.get_error()[:MAX_PROBLEM_CHARS], _LEAST_BYTES + len(grammar))
    return _Kept(matcher, "", _LEAST_BYTES + _BYTES_PER_CHAR * len(grammar))


# The grammar of one sequence: from its tokens to the mask of the next one.

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


_COSTLY_COMPILE_S, _COSTLY_MASKS_S = 0.1, 0.01  # a job: one grammar; the masks of a tenant's sequences in a step
_STACK_BYTES = 64 << 20  # to compile with: far more than a router's trial may take
_POLL_S = 0.0002
_VOCABULARY, _GRAMMAR = "the model's vocabulary could not be read", "the grammar could not be followed"

_log = logging.getLogger(__name__)


class Constraints:
    """A `MaskSource` of the leader's process; the scheduler adds and removes sequences.

    Grammars are compiled and masks are made in threads of their own. Sequences of which something was made or has
    failed are reported by `take_ended`.
    """

    def __init__(self, folder: Path, vocab_size: int, eos_token_ids: Collection[int]) -> None:
        """The folder's tokenizer is read when the first grammar comes: a gang without any takes nothing for them."""
        self._folder, self._vocab_size, self._eos_token_ids = folder, vocab_size, eos_token_ids
        self._by_id: dict[int, Constraint] = {}
        self._compiled = CompiledGrammars()
        self._compiling, self._making = (
            FairThreads("grammar", _COSTLY_COMPILE_S, _STACK_BYTES),
            FairThreads("mask", _COSTLY_MASKS_S),
        )
        self._vocabulary: Vocabulary | None = None
        self._problem, self._is_fault = "", False  # why there is none, and whether that is unforeseen
        self._reading: threading.Thread | None = None
        self._lock = threading.Lock()  # of the next
        self._waiting: list[Callable[[], None]] | None = []  # for the vocabulary; None: it was read
        self._ended: SimpleQueue[tuple[int, Constraint]] = SimpleQueue()
        self.wake: Callable[[], None] = lambda: None  # called from other threads: `take_ended` or a mask has something

    def add(self, sequence_id: int, tenant: str, grammar: str, token_ids: Sequence[int], ignores_eos: bool) -> None:
        """Begins to compile a sequence's grammar. `token_ids`: that were generated before."""
        self._by_id[sequence_id] = constraint = Constraint(tenant, token_ids, ignores_eos)
        compile_it = partial(self._compile, sequence_id, constraint, grammar)
        submit = partial(self._compiling.submit, tenant, compile_it)
        with self._lock:
            if self._waiting is not None:
                self._waiting.append(submit)
                if self._reading is None:
                    self._reading = threading.Thread(target=self._read, name="vocabulary", daemon=True)
                    self._reading.start()
                return
        submit()

    def remove(self, sequence_id: int) -> None:
        """The sequence has ended. No-op for one without a grammar."""
        self._by_id.pop(sequence_id, None)

    def take_ended(self) -> list[tuple[int, SequenceError | None]]:
        """Sequences whose grammar was compiled (None), or that cannot go on with it, and why not."""
        ended = dict[int, SequenceError | None]()
        while not self._ended.empty():
            sequence_id, constraint = self._ended.get_nowait()
            if self._by_id.get(sequence_id) is constraint:
                ended[sequence_id] = _error_of(constraint)
        return [*ended.items()]

    def is_ready(self, sequence_id: int) -> bool:
        """The mask of the sequence's next token is made."""
        return self._by_id[sequence_id].is_ready

    def follow(self, plan: StepPlan, fed: Mapping[int, SampledToken | None] = MappingProxyType({})) -> None:
        """See `MaskSource`."""
        if not self._by_id:
            return
        by_tenant = dict[str, list[tuple[int, Constraint]]]()
        for part in plan.sequences:
            if part.sample is None or not part.sample.is_constrained:
                continue
            token_id = part.token_ids[-1]
            if part.is_fed:
                chosen = fed.get(part.sequence_id)
                if chosen is None:  # its mask was late, or no token could be chosen
                    continue
                token_id = chosen.token_id
            constraint = self._by_id.get(part.sequence_id)  # None: it was cancelled meanwhile
            if constraint is not None and constraint.advance(part.sample.index, token_id):
                by_tenant.setdefault(constraint.tenant, []).append((part.sequence_id, constraint))
        for tenant, changed in by_tenant.items():  # one job each: threads that wake hold the worker's thread up
            self._making.submit(tenant, partial(self._make_masks, changed))

    def take(self, positions: Sequence[tuple[int, int]], is_over: Callable[[], bool]) -> dict[int, TokenMask]:
        """See `MaskSource`."""
        masks = dict[int, TokenMask]()
        while True:
            num_gone = 0  # sequences that were cancelled meanwhile
            for sequence_id, index in positions:
                constraint = self._by_id.get(sequence_id)
                if sequence_id in masks or constraint is None:
                    num_gone += constraint is None and sequence_id not in masks
                    continue
                constraint.is_late = True  # before the look: a thread that makes it from here on wakes the loop
                mask = constraint.mask(index)
                if mask is not None:
                    constraint.is_late = False
                    masks[sequence_id] = mask
            if len(masks) + num_gone == len(positions) or is_over():
                return masks
            time.sleep(_POLL_S)

    def check_integrity(self, sequence_ids: Collection[int]) -> None:
        """Raises AssertionError if these are not the sequences that have a grammar."""
        assert self._by_id.keys() == {*sequence_ids}, "grammars are kept of sequences that have ended, or are lacking"
        self._compiled.check_integrity()

    def close(self) -> None:
        if (reading := self._reading) is not None:
            reading.join()
        self._compiling.close()
        self._making.close()

    def _read(self) -> None:
        """Reads the vocabulary, then has the grammars compiled that wait for it, or fail.

        After an error that was not foreseen, and may pass, the next grammar has it read again.
        """
        try:
            self._vocabulary = Vocabulary(self._folder, self._vocab_size, self._eos_token_ids)
        except VocabularyError as error:
            self._problem, self._is_fault = str(error), False
        except BaseException:  # a panic of a Rust library is not an Exception
            _log.exception(_VOCABULARY)
            self._problem, self._is_fault = _VOCABULARY, True
        with self._lock:
            waiting, self._waiting = self._waiting, [] if self._is_fault and self._vocabulary is None else None
            self._reading = None
        for submit in waiting or ():
            submit()

    def _compile(self, sequence_id: int, constraint: Constraint, grammar: str) -> None:
        if self._by_id.get(sequence_id) is not constraint:
            return  # it was cancelled meanwhile
        if self._vocabulary is None:
            constraint.problem, constraint.is_fault = self._problem, self._is_fault
        else:
            try:
                matcher = self._compiled.matcher(constraint.tenant, grammar, self._vocabulary)
                constraint.begin(matcher)
                constraint.make_mask(self._vocabulary)
            except GrammarError as error:
                constraint.problem = str(error)
            except BaseException:
                _log.exception(_GRAMMAR)
                constraint.problem, constraint.is_fault = _GRAMMAR, True
        self._ended.put((sequence_id, constraint))
        self.wake()

    def _make_masks(self, changed: Sequence[tuple[int, Constraint]]) -> None:
        assert self._vocabulary is not None
        for sequence_id, constraint in changed:
            if self._by_id.get(sequence_id) is constraint:
                try:
                    constraint.make_mask(self._vocabulary)
                except BaseException:
                    _log.exception(_GRAMMAR)
                    constraint.problem, constraint.is_fault = _GRAMMAR, True
                if constraint.problem:
                    self._ended.put((sequence_id, constraint))
                if constraint.is_late or constraint.problem:
                    self.wake()


def _error_of(constraint: Constraint) -> SequenceError | None:
    if not constraint.problem:
        return None
    if constraint.is_fault:
        return SequenceError("internal", constraint.problem)
    return SequenceError("invalid_request", f"the grammar cannot be followed: {constraint.problem}")
