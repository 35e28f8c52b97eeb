"""Translates tenants' grammars for llguidance, and tries them, in processes beside the router."""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from functools import partial
from hashlib import blake2b
from typing import Final

import msgspec

from ...adapters.processes.child_processes import ChildProcesses
from ...adapters.tenant_places import TenantPlaces
from ..http.errors import RETRY_AFTER_S, ApiError, invalid_value, unavailable
from .check_process import MAX_GRAMMAR_BYTES, GrammarQuestion, Verdict
from .response_format import WantedGrammar

# How much of a processor each tenant may take, and how long it rests after it has taken more.


class CpuShares:
    """Keeps only tenants that have taken something lately."""

    def __init__(self, share: float, burst_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """`share`: of one processor. `burst_s`: seconds of it that may be taken at once."""
        self._share, self._burst_s, self._clock = share, burst_s, clock
        self._paid_at: dict[str, float] = {}  # when what a tenant has taken is made up for

    def used_s(self, tenant: str) -> float:
        """Seconds that the tenant has taken lately beyond its share."""
        return max(0.0, self._paid_at.get(tenant, 0.0) - self._clock()) * self._share

    def rest_s(self, tenant: str, cpu_s: float) -> float:
        """The tenant has taken this: how long it must take nothing now."""
        now = self._clock()
        self._paid_at = {name: paid_at for name, paid_at in self._paid_at.items() if paid_at > now}
        self._paid_at[tenant] = paid_at = self._paid_at.get(tenant, now) + cpu_s / self._share
        return max(0.0, paid_at - now - self._burst_s / self._share)


# An LRU cache of grammars that were checked, bounded by bytes.

MAX_TENANT_BYTES: Final = 1 << 20
MAX_BYTES: Final = 32 << 20
_FIXED_BYTES: Final = 512  # of each, about


class KnownGrammars:
    """Kept by tenant: the time of an answer shows no tenant what another has requested.

    Beyond the bound of a tenant its least recently used grammars are dropped; beyond the bound of all, those of the
    tenant that has requested none for longest.
    """

    def __init__(self) -> None:
        self._of_tenant: OrderedDict[str, OrderedDict[bytes, Verdict]] = OrderedDict()  # the last used one last
        self._num_bytes: dict[str, int] = {}

    def get(self, tenant: str, digest: bytes) -> Verdict | None:
        verdicts = self._of_tenant.get(tenant)
        verdict = None if verdicts is None else verdicts.get(digest)
        if verdicts is not None and verdict is not None:
            verdicts.move_to_end(digest)
            self._of_tenant.move_to_end(tenant)
        return verdict

    def put(self, tenant: str, digest: bytes, verdict: Verdict) -> None:
        verdicts = self._of_tenant.setdefault(tenant, OrderedDict())
        self._of_tenant.move_to_end(tenant)
        verdicts[digest] = verdict
        self._num_bytes[tenant] = self._num_bytes.get(tenant, 0) + _num_bytes(verdict)
        while self._num_bytes[tenant] > MAX_TENANT_BYTES:
            _, oldest = verdicts.popitem(last=False)
            self._num_bytes[tenant] -= _num_bytes(oldest)
        while sum(self._num_bytes.values()) > MAX_BYTES:
            tenant, _ = self._of_tenant.popitem(last=False)
            del self._num_bytes[tenant]

    def check_integrity(self) -> None:
        """Raises AssertionError if bytes are miscounted, or are too many."""
        counted = {tenant: sum(map(_num_bytes, verdicts.values())) for tenant, verdicts in self._of_tenant.items()}
        assert counted == self._num_bytes
        assert all(0 < num_bytes <= MAX_TENANT_BYTES for num_bytes in counted.values())
        assert sum(counted.values()) <= MAX_BYTES


def _num_bytes(verdict: Verdict) -> int:
    return _FIXED_BYTES + len(verdict.lark.encode()) + len(verdict.problem)


NUM_PROCESSES: Final = 2  # of which a tenant has one
DEADLINE_S: Final = 30.0  # for one grammar, on a machine that is busy: its CPU is bounded more closely
MAX_WAITING: Final = 64  # grammars of a tenant
CPU_SHARE: Final = 0.2  # of one processor, for a tenant
CPU_BURST_S: Final = 1.0  # beside it: some 70 schemas of 20 KB
PROMPT_S: Final = 0.1  # of that burst: who has taken more lately waits where processors are busy

_MODULE: Final = "motet.router.grammars.check_process"
_log = logging.getLogger(__name__)


class GrammarCheck:
    """Belongs to one event loop. Its processes start at first use."""

    def __init__(self, special_ids: Mapping[str, int]) -> None:
        """`special_ids`: of the model's special tokens, by name."""
        self._special_ids = dict(special_ids)
        self._processes = ChildProcesses(_MODULE, NUM_PROCESSES, DEADLINE_S)
        self._turns = TenantPlaces(sys.maxsize)  # a tenant's grammars are tried one by one
        self._places = TenantPlaces(NUM_PROCESSES)
        self._waiting_places = TenantPlaces(NUM_PROCESSES - 1)  # for tenants that may wait: others find a process
        self._shares = CpuShares(CPU_SHARE, CPU_BURST_S)
        self._trials: dict[tuple[str, bytes], asyncio.Task[Verdict]] = {}  # by tenant and digest
        self.cache = KnownGrammars()

    async def lark(self, tenant: str, grammar: WantedGrammar, vocab_size: int) -> str:
        """The grammar for the engine. Raises a 400 that names the field for one that llguidance does not take.

        Raises 429 where too many of the tenant's grammars wait, and 503 where none can be tried.
        """
        try:
            data = msgspec.msgpack.encode(grammar)
        except UnicodeEncodeError:
            raise invalid_value(grammar.param, "it has half of a surrogate pair, which is not a character.") from None
        except OverflowError:
            raise invalid_value(grammar.param, "it has a whole number of more than 64 bits.") from None
        except RecursionError:
            raise invalid_value(grammar.param, "it is nested too deeply.") from None
        if len(data) > MAX_GRAMMAR_BYTES:
            message = f"it has {len(data)} bytes: at most {MAX_GRAMMAR_BYTES} are accepted."
            raise invalid_value(grammar.param, message)
        digest = blake2b(data, digest_size=16).digest()
        verdict = self.cache.get(tenant, digest) or await self._awaited(tenant, digest, data, vocab_size)
        if verdict.problem:
            raise invalid_value(grammar.param, verdict.problem)
        return verdict.lark

    async def _awaited(self, tenant: str, digest: bytes, data: bytes, vocab_size: int) -> Verdict:
        """The first of simultaneous requests with the same grammar has it tested.

        That goes on if the requests are given up: to end its process would leave the next tenant to start one.
        """
        key = tenant, digest
        task = self._trials.get(key)
        if task is None:
            if sum(name == tenant for name, _ in self._trials) >= MAX_WAITING:
                message = f"{MAX_WAITING} grammars of yours wait to be compiled: try again in a moment."
                raise ApiError(429, message, code="overloaded", headers={"Retry-After": str(RETRY_AFTER_S)})
            task = self._trials[key] = asyncio.create_task(self._verdict(tenant, digest, data, vocab_size))
            task.add_done_callback(partial(self._end, key))
        return await asyncio.shield(task)

    def _end(self, key: tuple[str, bytes], task: asyncio.Task[Verdict]) -> None:
        del self._trials[key]
        if not task.cancelled():
            task.exception()  # else asyncio logs it where no request waits for it any more

    async def _verdict(self, tenant: str, digest: bytes, data: bytes, vocab_size: int) -> Verdict:
        async with AsyncExitStack() as places:
            turn = await places.enter_async_context(self._turns.of(tenant))
            may_wait = self._shares.used_s(tenant) > PROMPT_S
            if may_wait:
                await places.enter_async_context(self._waiting_places.of(tenant))
            await places.enter_async_context(self._places.of(tenant))
            verdict, cpu_s = await self._run(GrammarQuestion(vocab_size, self._special_ids, may_wait), data)
            turn.rest_s = self._shares.rest_s(tenant, cpu_s)
        self.cache.put(tenant, digest, verdict)
        return verdict

    async def _run(self, question: GrammarQuestion, data: bytes) -> tuple[Verdict, float]:
        """The verdict, and the seconds of CPU that it took."""

        def read(frames: list[bytes]) -> tuple[Verdict, float]:
            verdict, cpu_s = frames
            return msgspec.msgpack.decode(verdict, type=Verdict), float(cpu_s)

        try:
            async with self._processes.process() as process:
                return await process.ask([msgspec.msgpack.encode(question), data], read)
        except (OSError, EOFError, TimeoutError) as error:
            _log.warning("a grammar of %d bytes could not be tried: %r", len(data), error)
            raise unavailable("The grammar cannot be compiled now.", "overloaded") from error
