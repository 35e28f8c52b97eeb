"""Grammars that are compiled, by tenant and text, within a bound of bytes."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from llguidance import LLMatcher, LLParserLimits

from .vocabulary import Vocabulary

MAX_GRAMMAR_CHARS: Final = 1 << 18
MAX_PROBLEM_CHARS: Final = 300  # of a message, which may repeat the grammar
COMPILE_S: Final = 2.0  # of CPU, at most
COMPILE_BYTES: Final = 1 << 30  # at most, beside the tokenizer
COMPILE_STACK_BYTES: Final = 64 << 20
_BYTES_PER_CHAR, _LEAST_BYTES = 64, 64 << 10  # that a compiled grammar takes, about
MOST_BYTES: Final = 256 << 20
_LIMITS: Final = LLParserLimits(  # the library's own, but for memory, and without the grammar in messages
    max_lexer_states=20_000, verbose_errors=False
)


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

    def matcher(self, tenant: str, grammar: str, vocabulary: Vocabulary, why_not: Callable[[str], str]) -> LLMatcher:
        """A matcher of its own before any token. Compiles the grammar, if need be. Raises GrammarError.

        `why_not`: why it must not be compiled in this process; empty: it may be.
        """
        with self._lock:
            own = self._by_tenant.get(tenant)
            kept = None if own is None else own.get(grammar)
            if own is not None and kept is not None:
                own.move_to_end(grammar)
        if kept is None:
            kept = _compile(grammar, vocabulary, why_not)
            with self._lock:
                self._keep(tenant, grammar, kept)
        if kept.matcher is None:
            raise GrammarError(kept.problem)
        return kept.matcher.deep_copy()

    def _keep(self, tenant: str, grammar: str, kept: _Kept) -> None:
        """Where all take too much, the tenant that has most loses what it has not used for longest."""
        own = self._by_tenant.setdefault(tenant, OrderedDict())
        if grammar in own:  # another thread was as quick
            return
        own[grammar] = kept
        self._bytes[tenant] = self._bytes.get(tenant, 0) + kept.num_bytes
        while sum(self._bytes.values()) > self._most_bytes:
            largest = max(self._bytes, key=lambda each: self._bytes[each])
            _, dropped = self._by_tenant[largest].popitem(last=False)
            self._bytes[largest] -= dropped.num_bytes
            if not self._by_tenant[largest]:
                del self._by_tenant[largest], self._bytes[largest]

    def check_integrity(self) -> None:
        """Raises AssertionError if bytes are miscounted."""
        counted = {tenant: sum(kept.num_bytes for kept in own.values()) for tenant, own in self._by_tenant.items()}
        assert counted == self._bytes and sum(counted.values()) <= self._most_bytes


def compiled(grammar: str, vocabulary: Vocabulary) -> LLMatcher:
    """A matcher before any token; `is_error` if the text is no grammar. Other threads run meanwhile."""
    return LLMatcher(vocabulary.tokens, grammar, log_level=0, limits=_LIMITS)


def _compile(grammar: str, vocabulary: Vocabulary, why_not: Callable[[str], str]) -> _Kept:
    if len(grammar) > MAX_GRAMMAR_CHARS:
        problem = f"it has {len(grammar)} characters, and at most {MAX_GRAMMAR_CHARS} are compiled"
    elif not (problem := why_not(grammar)):
        matcher = compiled(grammar, vocabulary)
        if not matcher.is_error():
            return _Kept(matcher, "", _LEAST_BYTES + _BYTES_PER_CHAR * len(grammar))
        problem = matcher.get_error()
    return _Kept(None, problem[:MAX_PROBLEM_CHARS], _LEAST_BYTES + len(grammar))
