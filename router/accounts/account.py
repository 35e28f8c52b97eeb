"""What is kept of each answer beside the answer: quotas, usage, how a version does.

An `Accountant` opens an account for every answer before it is made, and may refuse it. The account is settled when the
answer has ended, before its last bytes go out: so a client that has received the end finds what it cost. An answer that
is cut off is settled when its gangs have reported what they computed, shortly after its end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Protocol

from ...adapters.adapter import AdapterVersion
from ...adapters.registry.canary_counts import TrialMember
from ..openai_api.errors import ApiError
from ..tenants.identity import Identity


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """What an answer has cost so far: all that gangs computed for it, each position of a sequence once.

    That may be more or less than its client receives, whose `usage` is OpenAI's.
    """

    num_prompt_tokens: int  # that were computed or found in the cache; the latter once for each prompt
    num_cached_tokens: int  # of these, those that were found in the cache
    num_completion_tokens: int  # that were generated
    num_recomputed_tokens: int = 0  # computed again after a preemption or a lost gang: the operator's cost
    kv_page_ms: int = 0  # pages of KV in device memory times milliseconds
    adapter_page_ms: int = 0  # the same, of its part of its adapter's pages

    @property
    def has_cost(self) -> bool:
        """Something was computed or found for the answer."""
        return bool(self.num_prompt_tokens or self.num_completion_tokens)


@dataclass(frozen=True, kw_only=True, slots=True)
class AnswerRequest:
    """An answer that is about to be made."""

    identity: Identity
    response_id: str  # the same when a client comes back for the rest of a stream, at any router
    model: str  # as the client named it
    version: AdapterVersion | None  # None: the base
    user: str  # the client's name for whom it asks; empty: none
    trial: TrialMember | None = None  # in which the answer counts
    num_prompt_tokens: int
    num_new_tokens: int  # at most, of all sequences together
    num_sequences: int
    is_resumed: bool  # its client has had a part of it, through this router or another
    is_stream: bool = False  # so its client may come back for the rest
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
    """Of one answer."""

    @property
    def headers(self) -> Sequence[tuple[bytes, bytes]]:
        """For the answer, as ASGI has them."""

    def settle(self, ending: Ending) -> None:
        """The answer has ended. Called once. It must return at once, and what it took in outlives this process."""


class Accountant(Protocol):
    async def open(self, request: AnswerRequest) -> Account:
        """Raises `ApiError` if the answer must not be made."""


# (identity, is_resuming: whether the client resumes a stream) -> headers
Precheck = Callable[[Identity, bool], Sequence[tuple[bytes, bytes]]]


class Accounts:
    """Several accountants as one: an answer that any of them refuses is opened at none."""

    def __init__(
        self, accountants: Sequence[Accountant], precheck: Precheck = lambda identity, is_resuming: ()
    ) -> None:
        """The accountants are opened in order: put those that refuse most cheaply first.

        `precheck` is called before a request is read. It raises ApiError, or returns headers for answers that open no
        account, such as one that says what is wrong with the request.
        """
        self._accountants = tuple(accountants)
        self.precheck = precheck

    async def open(self, request: AnswerRequest) -> Account:
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
        return _AllAccounts(accounts)


class _AllAccounts:
    def __init__(self, accounts: Sequence[Account]) -> None:
        self._accounts = tuple(accounts)

    @property
    def headers(self) -> Sequence[tuple[bytes, bytes]]:
        return [header for account in self._accounts for header in account.headers]

    def settle(self, ending: Ending) -> None:
        with ExitStack() as settled:  # all of them, whatever one of them does
            for account in reversed(self._accounts):
                settled.callback(account.settle, ending)
