"""Sends a share of a name's requests to its shadow as well. Answers are discarded; how they end is counted."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from contextlib import aclosing
from dataclasses import replace
from typing import Final

from msgspec import structs

from ...adapters.adapter import AdapterVersion
from ...adapters.registry.canary_counts import Outcome
from ...adapters.registry.versions.rollout import Shadow, gets_canary, version_of
from ..fleet.dispatch import Dispatcher
from ..generation.generation import Generation, GenerationRequest, SequenceFailedError
from ..http.auth import Identity
from ..http.errors import ApiError, from_sequence_error
from ..http.stream_position import fingerprint_of, new_response_id
from ..metrics import Metrics
from ..tenancy.account import Accounts, AnswerRequest, Ending
from ..text.text import TextService
from .canary_book import CanaryBook, counted_of
from .version_choice import VersionChoice, adapter_ref

MAX_AT_ONCE: Final = 32  # shadowed requests of a router
MAX_OF_TENANT: Final = 4  # of these; what comes meanwhile is not shadowed
MAX_TOKENS: Final = 512  # of a shadowed answer
TIMEOUT_S: Final = 120.0
ID_PREFIX: Final = "shadow-"
_log = logging.getLogger(__name__)


def may_begin(num_of_tenant: int, num_of_all: int) -> bool:
    """Whether one more request of a tenant is shadowed, beside those that are.

    The second half of the places is for tenants that have none: as many tenants as that are shadowed at once, before
    any of them can keep another one out.
    """
    if num_of_all >= MAX_AT_ONCE or num_of_tenant >= MAX_OF_TENANT:
        return False
    return num_of_tenant == 0 or num_of_all < MAX_AT_ONCE // 2


class ShadowSender:
    """Owned by one event loop. Its requests are background work of the tenant, and count in its quotas and usage.

    It counts in no metrics of requests.
    """

    def __init__(self, dispatcher: Dispatcher, text: TextService, book: CanaryBook, accounts: Accounts) -> None:
        """`accounts`: of all answers; a shadow that they refuse is not sent."""
        self._dispatcher, self._text, self._book, self._accounts = dispatcher, text, book, accounts
        self._running: set[asyncio.Task[None]] = set()
        self._num_of: Counter[str] = Counter()  # by tenant

    @property
    def num_running(self) -> int:
        return len(self._running)

    def send(self, choice: VersionChoice, request: GenerationRequest, response_id: str, identity: Identity) -> None:
        """Returns at once. Only a new request of one sequence is shadowed."""
        shadow, tenant = choice.shadow, identity.name
        if shadow is None or choice.current is None:
            return
        if request.num_seen or request.n * len(request.prompts) > 1 or request.beams:
            return
        if not may_begin(self._num_of[tenant], len(self._running)):
            return
        version = version_of(choice.current, shadow.version)
        if version is None or not gets_canary(shadow.share, response_id, shadow.id):
            return
        (prompt,) = request.prompts
        limit = MAX_TOKENS if prompt.sampling.max_tokens is None else min(MAX_TOKENS, prompt.sampling.max_tokens)
        copy = replace(
            request,
            prompts=[replace(prompt, sampling=structs.replace(prompt.sampling, max_tokens=limit))],
            adapter=adapter_ref(version),
            key="",
            timeout_s=TIMEOUT_S,
            is_background=True,
        )
        task = asyncio.create_task(self._run(copy, version, shadow, identity), name="shadow")
        self._running.add(task)
        self._num_of[tenant] += 1
        task.add_done_callback(lambda done: self._ended(done, tenant))

    def _ended(self, task: asyncio.Task[None], tenant: str) -> None:
        self._running.discard(task)
        self._num_of[tenant] -= 1
        if not self._num_of[tenant]:
            del self._num_of[tenant]

    async def _run(
        self, request: GenerationRequest, version: AdapterVersion, shadow: Shadow, identity: Identity
    ) -> None:
        started_at = time.perf_counter()
        generation = Generation(request, self._dispatcher, self._text, Metrics(), started_at)
        (prompt,) = request.prompts
        answer = AnswerRequest(
            identity=identity,
            response_id=str(new_response_id(ID_PREFIX, int(time.time()), fingerprint_of(shadow.id))),
            model=f"{version.name}@{version.version}",
            version=version,
            user="",
            num_prompt_tokens=len(prompt.token_ids),
            num_new_tokens=prompt.sampling.max_tokens or 0,  # `send` has bounded it
            num_sequences=1,
            is_resumed=False,
            progress=generation.progress,
        )
        try:
            account = await self._accounts.open(answer)
        except ApiError:
            return
        error, is_cancelled = "internal_error", False
        try:
            async with aclosing(generation.deltas()) as arriving:
                async for _ in arriving:
                    pass
            error = ""
        except SequenceFailedError as failure:
            error = from_sequence_error(failure.error).detail.code or ""
        except asyncio.CancelledError:
            error, is_cancelled = "", True
            raise
        except Exception:
            _log.exception("a shadowed request failed")
            is_cancelled = True  # it says nothing of the version
        finally:
            generation.cancel()
            first_at = generation.first_token_at
            duration_s = time.perf_counter() - started_at
            try:
                await generation.reported()
            finally:  # even if it is cancelled once more
                ending = Ending(
                    progress=generation.progress(),
                    error=error,
                    is_cancelled=is_cancelled,
                    first_token_s=None if first_at is None else first_at - started_at,
                    duration_s=duration_s,
                )
                account.settle(ending)
        tenant_id, of = identity.tenant.tenant_id, f"{version.tenant}/{version.name}"
        self._book.count(Outcome(tenant_id, of, answer.response_id, shadow.id, "shadow", counted_of(ending)))
