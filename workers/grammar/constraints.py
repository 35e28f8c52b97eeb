"""The grammars of a gang's sequences: compiled, followed token by token, and as masks for the worker that chooses."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from types import MappingProxyType

from ..decoding.mask_source import TokenMask
from ..plan import SampledToken, StepPlan
from ..wire.messages import SequenceError
from .compiled_grammars import CompiledGrammars, GrammarError
from .constraint import Constraint
from .fair_threads import FairThreads
from .vocabulary import Vocabulary, VocabularyError

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

    @property
    def num(self) -> int:
        """Sequences with a grammar."""
        return len(self._by_id)

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

    def take(self, wanted: Sequence[tuple[int, int]], is_over: Callable[[], bool]) -> dict[int, TokenMask]:
        """See `MaskSource`."""
        found = dict[int, TokenMask]()
        while True:
            for sequence_id, index in wanted:
                constraint = self._by_id.get(sequence_id)
                if sequence_id in found or constraint is None:
                    continue
                constraint.is_late = True  # before the look: a thread that makes it from here on wakes the loop
                mask = constraint.mask(index)
                if mask is not None:
                    constraint.is_late = False
                    found[sequence_id] = mask
            if len(found) == len(wanted) or is_over():
                return found
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
