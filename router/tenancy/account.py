"""Accounts of answers: for quotas, for usage, and for the statistics of versions.

An `Accountant` opens an account for every answer before it is generated, and may refuse it. The account is settled when
the answer has ended, before its last bytes are sent, so that its cost is recorded when the client has the whole answer.
An answer that is cut off is settled when its gangs have reported what they computed, shortly after its end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Protocol

from ...adapters.adapter import AdapterVersion
from ...adapters.registry.canary_counts import TrialMember
from ..http.auth import Identity
from ..http.errors import ApiError


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """The cost of an answer so far: all that gangs computed for it, each position of a sequence once.

    It may differ from OpenAI's `usage`, which counts what the client receives.
    """

    num_prompt_tokens: int  # that were computed or found in the cache; the latter once for each prompt
    num_cached_tokens: int  # found in the cache, of these
    num_completion_tokens: int  # that were generated
    num_recomputed_tokens: int = 0  # computed again after a preemption or a lost gang: the operator's cost
    # All of the above and what was computed again, by attempt (`SequenceRequest.attempt`; 0: the first connection's).
    computed_tokens: tuple[tuple[int, int], ...] = ()
    kv_page_ms: int = 0  # pages of KV in device memory times milliseconds
    adapter_page_ms: int = 0  # the same for its part of its adapter's pages

    @property
    def has_cost(self) -> bool:
        """Whether anything was computed for the answer, or found in the cache."""
        return bool(self.num_prompt_tokens or self.num_completion_tokens)


@dataclass(frozen=True, kw_only=True, slots=True)
class AnswerRequest:
    """An answer that is about to be generated."""

    identity: Identity
    response_id: str  # stays the same when a client resumes a stream, at any router
    model: str  # as the client named it; the base's own name
    version: AdapterVersion | None  # None: the base
    user: str  # the client's name for its end user; empty: none
    trial: TrialMember | None = None  # in which the answer counts
    num_prompt_tokens: int
    num_new_tokens: int  # at most, of all sequences together
    num_sequences: int
    is_resumed: bool  # its client has received a part of it from this router or another
    deadline: float | None = None  # of its last token, by `time.perf_counter()`
    is_stream: bool = False  # so its client may resume it
    progress: Callable[[], Progress]  # as of the moment of the call


@dataclass(frozen=True, kw_only=True, slots=True)
class Ending:
    """How an answer has ended."""

    progress: Progress
    error: str  # code of the error that its client gets; empty: none
    is_cancelled: bool  # its client has left before the end
    first_token_s: float | None  # from the request's arrival; None: no token came
    duration_s: float
    reason: str = ""  # the message of the error that its client gets


class Account(Protocol):
    """The account of one answer."""

    @property
    def headers(self) -> Sequence[tuple[bytes, bytes]]:
        """Headers for the answer, as ASGI pairs."""

    def settle(self, ending: Ending) -> None:
        """Records the ending. Called once. It must not block, and the record must survive a kill of this process."""


class Accountant(Protocol):
    async def open(self, request: AnswerRequest) -> Account:
        """Opens an account. Raises `ApiError` to refuse the answer."""


# (identity, whether the client resumes a stream) -> headers
Precheck = Callable[[Identity, bool], Sequence[tuple[bytes, bytes]]]


@dataclass(frozen=True, slots=True)
class AnswerAccount:
    """All accounts of one answer, and the headers that they give it."""

    accounts: Sequence[Account]
    headers: Sequence[tuple[bytes, bytes]]

    def settle(self, ending: Ending) -> None:
        """Records the ending. Called once. It does not block, and the record survives a kill of this process."""
        with ExitStack() as settled:  # all of them, whatever one of them does
            for account in reversed(self.accounts):
                settled.callback(account.settle, ending)


class Accounts:
    """Several accountants as one: if any refuses an answer, no account stays open."""

    def __init__(self, accountants: Sequence[Accountant], precheck: Precheck | None = None) -> None:
        """The accountants are opened in order: put those that refuse most cheaply first.

        `precheck` is called before a request is read. It raises ApiError, or returns headers for answers that open no
        account, such as errors.
        """
        self._accountants = tuple(accountants)
        self.precheck = precheck

    async def open(self, request: AnswerRequest) -> AnswerAccount:
        accounts: list[Account] = []
        try:
            for accountant in self._accountants:
                accounts.append(await accountant.open(request))
        except BaseException as error:
            code = error.detail.code or "" if isinstance(error, ApiError) else "internal_error"
            refused = Ending(
                progress=Progress(num_prompt_tokens=0, num_cached_tokens=0, num_completion_tokens=0),
                error=code,
                is_cancelled=not isinstance(error, Exception),
                first_token_s=None,
                duration_s=0.0,
            )
            for account in reversed(accounts):
                with suppress(Exception):
                    account.settle(refused)
            raise
        return AnswerAccount(accounts, [header for account in accounts for header in account.headers])
