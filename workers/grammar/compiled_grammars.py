"""Grammars that are compiled, by tenant and text, within a bound of bytes."""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

from llguidance import LLMatcher

from ..wire.grammar_limits import GRAMMAR_LIMITS
from .vocabulary import Vocabulary

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
            own = self._by_tenant.get(tenant)
            kept = None if own is None else own.get(grammar)
            if own is not None and kept is not None:
                own.move_to_end(grammar)
        if kept is None:
            kept = _compile(grammar, vocabulary)
            with self._lock:
                self._keep(tenant, grammar, kept)
        if kept.matcher is None:
            raise GrammarError(kept.problem)
        return kept.matcher.deep_copy()

    def _keep(self, tenant: str, grammar: str, kept: _Kept) -> None:
        """Beyond the bound of all tenants, evicts the least recently used grammars of the tenant that holds most."""
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
        with self._lock:
            counted = {tenant: sum(kept.num_bytes for kept in own.values()) for tenant, own in self._by_tenant.items()}
            assert counted == self._bytes and sum(counted.values()) <= self._most_bytes


def _compile(grammar: str, vocabulary: Vocabulary) -> _Kept:
    """Other threads run meanwhile."""
    matcher = LLMatcher(vocabulary.tokens, grammar, log_level=0, limits=GRAMMAR_LIMITS)
    if matcher.is_error():
        return _Kept(None, matcher.get_error()[:MAX_PROBLEM_CHARS], _LEAST_BYTES + len(grammar))
    return _Kept(matcher, "", _LEAST_BYTES + _BYTES_PER_CHAR * len(grammar))
