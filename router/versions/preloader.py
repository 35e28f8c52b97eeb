"""Brings versions to gangs before their first requests."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from functools import partial
from typing import Final

from ...adapters.adapter import AdapterVersion
from ...adapters.errors import RegistryUnavailable
from ...adapters.registry.preloads import Preload, Preloads, place_of
from ...adapters.registry.tenants.records import TenantRecord
from ...adapters.sight import owner_of
from ...workers.wire.messages import SamplingParams, SequenceError, SequenceRequest
from ..fleet.dispatch import Dispatcher, SequenceStream
from ..openai_api.errors import RETRY_AFTER_S, ApiError, unavailable
from .canary_book import CanaryBook
from .version_choice import adapter_ref

MAX_OF_TENANT: Final = 16  # that are under way at a router, each at one gang
MAX_IN_ALL: Final = 256
WAIT_S: Final = 60.0  # for room in a gang's pool, behind everybody else's work
_MAX_REASON_CHARS: Final = 300
# One token is computed with the adapter, so that what is called ready has been used once.
_SAMPLING: Final = SamplingParams(max_tokens=1, temperature=0.0, seed=0, ignore_eos=True)
_PROMPT: Final = 0  # a token that every vocabulary has
_log = logging.getLogger(__name__)


def may_begin(num_gangs: int, num_of_tenant: int, num_of_all: int) -> bool:
    """Whether a tenant's preload at `num_gangs` begins, beside those under way, each counted once for each gang.

    The second half of the places is for tenants that have none, for one gang each: as many tenants as that bring
    something at once, before any of them can keep another one out.
    """
    if num_of_tenant + num_gangs > MAX_OF_TENANT:
        return False
    if num_of_tenant == 0 and num_gangs == 1:
        return num_of_all < MAX_IN_ALL
    return num_of_all + num_gangs <= MAX_IN_ALL // 2


class Preloader:
    """Owned by one event loop. A preload is background work of its tenant at a gang, and is charged like a cold load.

    It takes no room of what runs, nor of what others wait for; it takes what is idle as any adapter does that comes.
    """

    def __init__(self, dispatcher: Dispatcher, preloads: Preloads, book: CanaryBook) -> None:
        """`preloads`: where all routers note how they do. `book`: gets to know which versions cannot be loaded."""
        self._dispatcher, self._preloads, self._book = dispatcher, preloads, book
        self._running: set[asyncio.Task[None]] = set()
        self._num_of: Counter[str] = Counter()  # gangs that are awaited, by tenant

    async def begin(self, tenant: TenantRecord, version: AdapterVersion, num_gangs: int) -> int:
        """Brings the version to `num_gangs`, or to all that are connected; returns their number.

        Raises 429 while too many preloads are under way, 503 if no gang is connected, and RegistryUnavailable.
        """
        num_own = self._num_of[tenant.name]
        if not may_begin(num_gangs, num_own, self.num_running):
            message = f"{num_own} preloads of yours are under way at this router"
            if num_own + num_gangs > MAX_OF_TENANT:
                message += f", each at one gang: {num_gangs} more would be over {MAX_OF_TENANT}; try again later"
            else:  # the number would show other tenants' load
                message += ", and it has no places for more of them now; try again later"
                message += ", or with one gang" if num_gangs > 1 and not num_own else ""
            raise ApiError(429, message, code="overloaded", headers={"Retry-After": str(RETRY_AFTER_S)})
        owner = owner_of(version.name)
        request = SequenceRequest(
            prompt_token_ids=[_PROMPT],
            sampling=_SAMPLING,
            tenant=tenant.name,
            adapter=adapter_ref(version),
            adapter_name="" if owner else version.name,
            owner=owner,
            weight=tenant.weight,
            is_background=True,
        )
        streams = self._dispatcher.bring(request, num_gangs, WAIT_S)
        if not streams:
            raise unavailable("No gang is connected that the adapter could be brought to.", "not_ready")
        self._num_of[tenant.name] += len(streams)
        try:  # before any of them can end
            await self._preloads.note(_place(version), dict.fromkeys(streams, Preload()))
        except BaseException:
            for stream in streams.values():
                stream.cancel()
            self._leave(tenant.name, len(streams))
            raise
        for gang, stream in streams.items():
            task = asyncio.create_task(self._follow(version, gang, stream), name="preload")
            self._running.add(task)
            task.add_done_callback(partial(self._ended, tenant.name))
        return len(streams)

    @property
    def num_running(self) -> int:
        """Preloads that have not ended, each at one gang."""
        return self._num_of.total()

    def _ended(self, tenant: str, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        self._leave(tenant, 1)

    def _leave(self, tenant: str, num_gangs: int) -> None:
        self._num_of[tenant] -= num_gangs
        if not self._num_of[tenant]:
            del self._num_of[tenant]

    async def _follow(self, version: AdapterVersion, gang: str, stream: SequenceStream) -> None:
        error: SequenceError | None = None
        async for update in stream:
            error = update.error or error
        if error is None or error.kind == "adapter_failed":  # else nothing is known of the version
            self._book.note_load(version, None if error is None else error.message)
        try:
            await self._preloads.note(_place(version), {gang: Preload(is_over=True, failure=reason_of(error))})
        except RegistryUnavailable as away:
            _log.warning("how a preload has ended cannot be noted: %s", away)


def _place(version: AdapterVersion) -> str:
    return place_of(version.tenant, version.name, version.version, version.digest)


def reason_of(error: SequenceError | None) -> str:
    """Why a version could not be brought to a gang, for its tenant; empty: it could."""
    if error is None:
        return ""
    if error.kind == "overloaded" and error.reason == "waited":
        return f"the gang's pool was full of what runs for {WAIT_S:g} s; try again later"
    return f"{error.kind}: {error.message}"[:_MAX_REASON_CHARS]
