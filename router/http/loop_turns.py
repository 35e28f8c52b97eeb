"""The event loop's time among tenants: while several have work there, the tenant that has had least goes first.

Each piece of work is charged by the time that it holds the loop, divided by the tenant's weight, as a gang's steps are
by tokens (virtual token counters, arXiv 2401.00588). A tenant that is alone, or uses less than its share, never waits.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush
from typing import Final
from weakref import WeakValueDictionary

# Long work on the event loop in pieces, with room for others between them.

SHARE_S: Final = 0.002


class LoopShare:
    """One for each piece of work that may be long, made when the work begins."""

    def __init__(self) -> None:
        self._since = time.perf_counter()

    async def pause(self) -> None:
        """Lets others have their turn, if the work has had the loop for a while since the last time."""
        if time.perf_counter() - self._since >= SHARE_S:
            await asyncio.sleep(0)
            self._since = time.perf_counter()


PIECE_S: Final = 0.001  # of the loop's time that tenants over their share take at once: then others have their turn
WINDOW_S: Final = 0.25  # over which a tenant's share of the loop is measured
ACTIVE_S: Final = 10.0  # for so long after its last piece a tenant counts among those that share the loop
BURST_S: Final = 0.05  # that a tenant that comes back may be behind the others
_NEWEST: Final = 0.2  # weight of the newest piece in the mean of a tenant's pieces
_SWEEP_S: Final = 1.0


class LoopTurns:
    """Belongs to one event loop.

    if not loop.begin(turns):
        await loop.wait(turns)
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self._tenants: dict[str, TenantTurns] = {}  # that share the loop
        self._all_turns: WeakValueDictionary[str, TenantTurns] = (
            WeakValueDictionary()
        )  # these, and who has answers open
        self._total_weight = 0.0  # of these
        self._swept_at = 0.0
        self._order: list[tuple[float, int, TenantTurns]] = []  # a heap of tenants that wait
        self._number = 0
        self._level = 0.0  # `value` of the tenant that had its turn last
        self._current: TenantTurns | None = None  # whose piece has the loop
        self._since = 0.0  # when that piece began
        self._round_at: float | None = None  # when pieces began in this round of the loop; None: none did yet

    def of(self, tenant: str, weight: float = 1.0) -> TenantTurns:
        """The turns of a tenant that has work. `weight`: its share of the loop, beside those of others."""
        now = self.clock()
        if now - self._swept_at >= _SWEEP_S:
            self._swept_at = now
            self._tenants = {name: turns for name, turns in self._tenants.items() if turns.is_active(now)}
            self._total_weight = sum([turns.weight for turns in self._tenants.values()])
        turns = self._all_turns.get(tenant)
        if turns is None:
            turns = self._all_turns[tenant] = TenantTurns(tenant, weight, now)
        turns.weight = weight
        self._join(turns)
        return turns

    def begin(self, turns: TenantTurns) -> bool:
        """Begins a piece of the tenant's work, which should take less than `PIECE_S` until the next one begins.

        False: others have their turn first, and `wait` begins the piece.
        """
        now = self.clock()
        self._charge(now)
        if now - turns.seen_at >= ACTIVE_S:
            self._join(turns)
        if self._round_at is None:
            self._round_at = now
            asyncio.get_running_loop().call_soon(self._begin_round)
        elif turns.waiting or (
            (self._order or now - self._round_at >= PIECE_S) and self._is_over_its_share(turns, now)
        ):
            return False
        self._current, self._since = turns, now
        return True

    async def wait(self, turns: TenantTurns) -> None:
        """Begins a piece of the tenant's work when its turn has come."""
        turn = asyncio.get_running_loop().create_future()
        turns.waiting.append(turn)
        if len(turns.waiting) == 1:
            turns.value = max(turns.value, self._level - BURST_S / turns.weight)
            self._queue(turns, turns.value)
        await turn
        now = self.clock()
        self._charge(now)
        self._current, self._since = turns, now

    def _join(self, turns: TenantTurns) -> None:
        """The tenant shares the loop from now on, unless it does so already."""
        if turns.tenant not in self._tenants:
            self._tenants[turns.tenant] = turns
            self._total_weight += turns.weight  # summed up anew with each sweep

    def _begin_round(self) -> None:
        """Lets those that wait go on, the tenant that has had least first, for as much as takes PIECE_S."""
        now = self.clock()
        self._charge(now)
        self._round_at, left_s = None, PIECE_S
        while self._order and left_s > 0:
            value, _, turns = heappop(self._order)
            self._level = max(self._level, value)
            turn = turns.waiting.popleft()
            if not turn.done():  # it was cancelled
                turn.set_result(None)
                left_s -= turns.mean_s
                value += turns.mean_s / turns.weight  # about what it is charged
            if turns.waiting:
                self._queue(turns, max(value, turns.value))
        if self._order:
            self._round_at = now
            asyncio.get_running_loop().call_soon(self._begin_round)

    def _charge(self, now: float) -> None:
        """Charges the piece that ends now, if there is one."""
        turns, self._current = self._current, None
        if turns is not None:
            taken_s = now - self._since
            turns.value += taken_s / turns.weight
            turns.mean_s += _NEWEST * (taken_s - turns.mean_s)
            turns.recent_s = turns.left_s(now) + taken_s
            turns.seen_at = now

    def _is_over_its_share(self, turns: TenantTurns, now: float) -> bool:
        return len(self._tenants) > 1 and turns.left_s(now) * self._total_weight > WINDOW_S * turns.weight

    def _queue(self, turns: TenantTurns, value: float) -> None:
        self._number += 1
        heappush(self._order, (value, self._number, turns))


class TenantTurns:
    """A tenant's part of the loop's time. `LoopTurns` owns what is written here."""

    __slots__ = ("__weakref__", "mean_s", "recent_s", "seen_at", "tenant", "value", "waiting", "weight")

    def __init__(self, tenant: str, weight: float, now: float) -> None:
        self.tenant, self.weight = tenant, weight
        self.value = 0.0  # time of the loop, divided by the weight
        self.waiting: deque[asyncio.Future[None]] = deque()  # pieces
        self.mean_s = 0.0  # of a piece
        self.recent_s = 0.0  # of the loop's time that it had had in the last WINDOW_S, about, at `seen_at`
        self.seen_at = now  # when its last piece ended

    def left_s(self, now: float) -> float:
        """Of the loop's time that it has had in the last WINDOW_S, about."""
        return self.recent_s * max(0.0, 1.0 - (now - self.seen_at) / WINDOW_S)

    def is_active(self, now: float) -> bool:
        return bool(self.waiting) or now - self.seen_at < ACTIVE_S
