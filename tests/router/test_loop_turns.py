"""Tenants share a router's event loop: pieces of work advance a clock of the test's own."""

from __future__ import annotations

import asyncio
import random
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from motet.router.http.loop_turns import ACTIVE_S, BURST_S, PIECE_S, WINDOW_S, LoopTurns, TenantTurns
from motet.tests.rigs.router_rig import BASE, RouterRig, text_service
from motet.workers.wire.messages import SequenceUpdate, TokenLogprobs


class Loop:
    """`turns` of a loop whose time passes only while pieces of work hold it."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.turns = LoopTurns(lambda: self.now_s)
        self.had_s: defaultdict[str, float] = defaultdict(float)
        self.waits_s: list[float] = []  # of the tenant "light"

    async def work(self, tenant: str, num_pieces: int, piece_s: float, weight: float = 1.0) -> None:
        turns = self.turns.of(tenant, weight)
        for _ in range(num_pieces):
            began_s = self.now_s
            if not self.turns.begin(turns):
                await self.turns.wait(turns)
            if tenant == "light":
                self.waits_s.append(self.now_s - began_s)
            self.now_s += piece_s
            self.had_s[tenant] += piece_s
            await asyncio.sleep(0)

    async def until(self, is_so: Callable[[], bool]) -> None:
        while not is_so():  # noqa: ASYNC110  # the time of the test passes as the loop turns
            await asyncio.sleep(0)


async def test_a_tenant_that_is_alone_never_waits() -> None:
    loop = Loop()
    turns = loop.turns.of("heavy")
    for _ in range(1000):
        assert loop.turns.begin(turns)
        loop.now_s += 0.01


async def test_who_uses_less_than_its_share_does_not_wait() -> None:
    """Beside 256 pieces of work at once, its next piece begins after the one that has the loop."""
    loop = Loop()
    heavy = [asyncio.create_task(loop.work("heavy", 50, 0.004)) for _ in range(256)]
    for _ in range(20):
        await asyncio.sleep(0)
    for _ in range(40):
        await loop.work("light", 1, 0.0002)
        for _ in range(5):  # rounds of the loop, as between a request's arrival and its first token
            came_s = loop.now_s
            await asyncio.sleep(0)
            assert loop.now_s - came_s <= 2 * 0.004 + PIECE_S
    assert max(loop.waits_s) == 0
    for task in heavy:
        task.cancel()
    await asyncio.gather(*heavy, return_exceptions=True)


async def test_short_requests_do_not_add_up_to_more_than_a_tenant_has_had() -> None:
    """What it had a while ago is forgotten, however often it comes."""
    loop = Loop()
    light, *_ = [loop.turns.of(name) for name in ("light", *map(str, range(19)))]
    for _ in range(200):
        assert loop.turns.of("light") is light
        await loop.work("light", 1, 0.001)
        await asyncio.sleep(0)
        loop.now_s += 0.1
    assert light.recent_s < 0.01
    assert not loop.turns._is_over_its_share(light, loop.now_s)


async def test_what_a_tenant_had_is_forgotten_while_it_is_silent() -> None:
    loop = Loop()
    loop.turns.of("other")
    await loop.work("heavy", 500, 0.001)
    heavy = loop.turns.of("heavy")
    assert loop.turns._is_over_its_share(heavy, loop.now_s)
    loop.now_s += WINDOW_S
    assert not loop.turns._is_over_its_share(heavy, loop.now_s)


async def test_a_tenant_has_one_share_however_long_its_streams_were_silent() -> None:
    loop = Loop()
    streams = list[TenantTurns]()
    for _ in range(4):
        streams.append(loop.turns.of("heavy"))
        loop.now_s += 2 * ACTIVE_S
        loop.turns.of("other")
        assert "heavy" not in loop.turns._tenants
    assert len({*map(id, streams)}) == 1
    assert loop.turns.begin(streams[0])
    assert loop.turns._tenants["heavy"] is streams[0]
    assert loop.turns._total_weight == 2


@settings(deadline=None, max_examples=10)
@given(seed=st.integers(0, 2**32))
def test_tenants_that_always_have_work_share_the_loop_by_weight(seed: int) -> None:
    """Whatever their number of tasks, and however long their pieces."""
    rng = random.Random(seed)
    weights = {name: rng.choice([1.0, 1.0, 2.0, 0.5]) for name in ("a", "b", "c")[: rng.randint(2, 3)]}

    async def main() -> None:
        loop, tasks = Loop(), list[asyncio.Task[None]]()
        for name, weight in weights.items():
            piece_s = rng.uniform(0.0005, 0.004)
            tasks += [asyncio.create_task(loop.work(name, 1 << 20, piece_s, weight)) for _ in range(rng.randint(6, 30))]
        await loop.until(lambda: loop.now_s >= 101)
        before = loop.had_s.copy()
        await loop.until(lambda: loop.now_s >= 103)
        shares = [(loop.had_s[name] - before[name]) / weight for name, weight in weights.items()]
        assert max(shares) - min(shares) <= 0.1 * max(shares) + 4 * BURST_S
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(main())


async def test_work_that_is_cancelled_while_it_waits_takes_no_turn() -> None:
    loop = Loop()
    loop.turns.of("light")
    tasks = [asyncio.create_task(loop.work("heavy", 40, 0.01)) for _ in range(8)]
    await loop.until(lambda: len(loop.turns.of("heavy").waiting) == 6)
    for task in tasks[2:]:
        task.cancel()
    await asyncio.gather(*tasks[:2])
    assert not loop.turns.of("heavy").waiting and not loop.turns._order


async def test_each_piece_of_an_answer_takes_a_turn_of_its_tenant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So 96 tokens with 20 log-probabilities each, which came at once, hold the loop 8 times for a short while."""
    turns, begin = Counter[str](), LoopTurns.begin

    def begin_counted(self: LoopTurns, one: TenantTurns) -> bool:
        turns[next(name for name, each in self._tenants.items() if each is one)] += 1
        return begin(self, one)

    monkeypatch.setattr(LoopTurns, "begin", begin_counted)
    rig = RouterRig(tmp_path, text_service())
    values = TokenLogprobs(-0.5, [*range(40, 60)], [-1.25 - place / 7 for place in range(20)])
    rig.dispatcher.script = lambda request: [SequenceUpdate(1, [50] * 96, [values] * 96, "length")]
    async with rig.client() as client:
        body = {"model": BASE, "prompt": [5], "max_tokens": 96, "logprobs": 20, "stream": True}
        assert (await client.post("/v1/completions", json=body)).status_code == 200
    assert turns["acme"] >= 8
    assert turns.keys() == {"acme"}
