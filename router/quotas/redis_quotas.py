"""Quotas as Redis keeps them for all routers: what can be asked of it and told to it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Final

from redis.asyncio import Redis

from .bounds import Bounds
from .gcra import Bucket
from .local_shares import Report
from .quota_account import Opened, QuotaAccount
from .quota_scripts import (
    HOLD_SCRIPT,
    OPEN_SCRIPT,
    RENEW_SCRIPT,
    REPORT_SCRIPT,
    USE_SCRIPT,
    VOID_SCRIPT,
    Outcome,
    QuotaKeys,
)
from .script_batches import ScriptBatches
from .standing import Costs, Standing

LEASE_S: Final = 20.0  # after so long the streams of a router that died count no more
ANSWER_KEPT_MS: Final = 3_600_000  # of an answer that is made: longer than almost all of them take
RESUMABLE_MS: Final = 600_000  # of a stream that has ended: who comes back for the rest by then is not charged again
CHARGE_KEPT_MS: Final = 60_000  # of an answer that holds nothing: its charge has drained then
DONE_KEPT_MS: Final = 3_600_000  # that something must not be done again: longer than a network keeps what it was sent
_LEASE_US: Final = int(LEASE_S * 1e6)


class RedisQuotas:
    """Each method is one call of a script. All raise RedisAway, some of them when what they return is awaited."""

    def __init__(self, client: Redis, wait_s: float) -> None:
        scripts = OPEN_SCRIPT, USE_SCRIPT, VOID_SCRIPT, HOLD_SCRIPT, RENEW_SCRIPT, REPORT_SCRIPT
        self._batches = ScriptBatches(client, scripts, wait_s)

    async def close(self) -> None:
        await self._batches.close()

    async def open(self, account: QuotaAccount, costs: Costs) -> tuple[Outcome, Standing]:
        """Takes what the answer may need, or nothing."""
        keep_ms = ANSWER_KEPT_MS if account.is_kept else CHARGE_KEPT_MS
        asked = account.asked
        return await self._open(
            account.bounds, account.lease, asked.response_id, costs, [int(asked.is_resumed), keep_ms]
        )

    async def look(self, bounds: Bounds) -> Standing:
        """What is left; takes nothing."""
        return (await self._open(bounds, "", "", {}, [0, 0]))[1]

    def use(self, account: QuotaAccount, used: int, *, has_ended: bool) -> asyncio.Future[int]:
        """The answer has used so many tokens by now. After its end, to say it again changes nothing."""
        keep_ms = RESUMABLE_MS if account.asked.is_stream else 0
        keys = _keys_of(account.bounds, account.asked.response_id)
        return self._batches.call(USE_SCRIPT, keys, [account.lease, used, int(has_ended), keep_ms])

    def void(self, opened: Opened) -> asyncio.Future[int]:
        """Gives back what the lease was given, now or later: `open` was not heard of. May be said again."""
        keys = [*_keys_of(opened.bounds, opened.response_id), QuotaKeys(opened.bounds.life).done(opened.lease)]
        return self._batches.call(VOID_SCRIPT, keys, [opened.lease, DONE_KEPT_MS, int(opened.is_resumed)])

    def hold(self, account: QuotaAccount) -> asyncio.Future[int]:
        """The answer goes on under its lease, of which Redis was not asked. To say it again changes nothing."""
        bounds = account.bounds
        is_bound = [int(limit is not None) for limit in (bounds.tenant_streams, bounds.key_streams)]
        keys = _keys_of(bounds, account.asked.response_id)
        return self._batches.call(HOLD_SCRIPT, keys, [account.lease, _LEASE_US, *is_bound, ANSWER_KEPT_MS])

    def renew(self, accounts: Mapping[str, QuotaAccount]) -> Sequence[asyncio.Future[int]]:
        """Says that the streams of these answers, by lease, go on."""
        leases: dict[str, list[str]] = {}
        for lease, account in accounts.items():
            keys = QuotaKeys(account.bounds.life)
            if account.bounds.tenant_streams is not None:
                leases.setdefault(keys.streams(), []).append(lease)
            if account.bounds.key_streams is not None:
                leases.setdefault(keys.streams(account.bounds.key_id), []).append(lease)
        return [self._batches.call(RENEW_SCRIPT, [key], [_LEASE_US, *held]) for key, held in leases.items()]

    def report(self, reports: Sequence[Report]) -> Sequence[asyncio.Future[int]]:
        """What routers have let through while they could not ask. To say the same one again changes nothing."""
        return [
            self._batches.call(
                REPORT_SCRIPT,
                [(keys := QuotaKeys(one.life)).rates, keys.done(one.report_id)],
                [one.name, one.limit, f"{one.units:.6f}", DONE_KEPT_MS],
            )
            for one in reports
        ]

    def knock(self) -> asyncio.Future[int]:
        """Returns if Redis is there."""
        return self._batches.call(REPORT_SCRIPT, [QuotaKeys("").rates], [])

    async def _open(
        self, bounds: Bounds, lease: str, response_id: str, costs: Costs, flags: Sequence[int]
    ) -> tuple[Outcome, Standing]:
        args: list[str | int] = [
            lease,
            _LEASE_US,
            "" if bounds.tenant_streams is None else bounds.tenant_streams,
            "" if bounds.key_streams is None else bounds.key_streams,
            *flags,
        ]
        for rate in bounds.rates:
            args += (rate.name, rate.limit, costs.get(rate.kind, 0), int(rate.kind == "tokens"))
        keys = [*_keys_of(bounds, response_id), QuotaKeys(bounds.life).done(lease)]
        reply = await self._batches.call(OPEN_SCRIPT, keys, args)
        now_us = float(reply[1])
        buckets = [Bucket(float(backlog), now_us) for backlog in reply[4:]]
        limits = [float(rate.limit) for rate in bounds.rates]
        return Outcome(reply[0]), Standing(bounds, now_us, buckets, limits, reply[2], reply[3])


def _keys_of(bounds: Bounds, response_id: str) -> list[str]:
    keys = QuotaKeys(bounds.life)
    return [keys.rates, keys.streams(), keys.streams(bounds.key_id), keys.answer(response_id)]
