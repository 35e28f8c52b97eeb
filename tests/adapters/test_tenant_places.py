"""Who gets one of few places next: the tenant that has held some for the shortest time."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from dataclasses import dataclass, field

import pytest

from motet.adapters.tenant_places import TenantPlaces


@dataclass
class Places:
    """Places whose clock stands still but for `pass_s`, and tasks that hold them until they are let go."""

    num_places: int = 2
    most_each: int = 1
    now_s: float = 1000.0
    order: list[str] = field(default_factory=list)  # of tenants, as they got a place
    inside: Counter[str] = field(default_factory=Counter)
    started: list[asyncio.Task[None]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.places = TenantPlaces(self.num_places, self.most_each, lambda: self.now_s)
        self._ends: dict[asyncio.Task[None], asyncio.Event] = {}

    def ask(self, tenant: str) -> asyncio.Task[None]:
        end = asyncio.Event()
        task = asyncio.create_task(self._hold(tenant, end))
        self._ends[task] = end
        return task

    async def _hold(self, tenant: str, end: asyncio.Event) -> None:
        async with self.places.of(tenant):
            self.order.append(tenant)
            self.started += [task for task, its_end in self._ends.items() if its_end is end]
            self.inside[tenant] += 1
            try:
                await end.wait()
            finally:
                self.inside[tenant] -= 1

    async def end(self, task: asyncio.Task[None], after_s: float = 0.0) -> None:
        self.now_s += after_s
        self._ends[task].set()
        await self.settle()

    async def settle(self) -> None:
        for _ in range(5):
            await asyncio.sleep(0)
        self.places.check_integrity()


async def test_a_tenant_waits_behind_itself_and_others_do_not() -> None:
    rig = Places()
    many = [rig.ask("many") for _ in range(10)]
    await rig.settle()
    assert rig.order == ["many"]
    one = rig.ask("one")
    await rig.settle()
    assert rig.order == ["many", "one"]
    for task in many:
        await rig.end(task)
    await rig.end(one)
    assert rig.order == ["many", "one", *["many"] * 9]


async def test_a_free_place_goes_to_who_has_held_places_for_the_shortest_time() -> None:
    rig = Places(num_places=1)
    await rig.settle()
    slow = rig.ask("slow")
    await rig.settle()
    waiting = {name: rig.ask(name) for name in ("slow", "quick", "new")}
    await rig.end(slow, after_s=20.0)
    assert rig.order[-1] == "quick"  # it came before
    more = rig.ask("quick")
    await rig.end(waiting["quick"], after_s=1.0)
    assert rig.order[-1] == "new"
    await rig.end(waiting["new"], after_s=2.0)
    assert rig.order[-1] == "quick"
    await rig.end(more, after_s=1.0)
    assert rig.order == ["slow", "quick", "new", "quick", "slow"]
    await rig.end(waiting["slow"])


async def test_what_was_held_while_no_tenant_waited_does_not_count() -> None:
    rig = Places(num_places=1)
    for _ in range(10):
        task = rig.ask("often")
        await rig.settle()
        await rig.end(task, after_s=10.0)
    tasks = [rig.ask(tenant) for tenant in ("a", "b", "c", "often", "a", "b", "c")]
    await rig.settle()
    for _ in tasks:
        await rig.end(rig.started[-1], after_s=30.0)
    assert rig.order[10:] == ["a", "b", "c", "often", "a", "b", "c"]


async def test_two_places_of_a_tenant_count_for_it_together() -> None:
    rig = Places(num_places=2, most_each=2)
    both = [rig.ask("two") for _ in range(2)]
    await rig.settle()
    waiting = [rig.ask("two"), rig.ask("one")]
    await rig.settle()
    assert rig.order == ["two", "two"]
    await rig.end(both[0], after_s=5.0)
    assert rig.order[2:] == ["one"]
    await rig.end(both[1])
    assert rig.order[3:] == ["two"]
    more = rig.ask("one")
    await rig.end(waiting[1], after_s=9.0)
    assert rig.order[4:] == ["one"]  # 9 s are less than twice 5
    for task in (waiting[0], more):
        await rig.end(task)


@pytest.mark.parametrize("most_each", [1, 2])
async def test_places_after_random_arrivals_ends_and_cancellations(most_each: int) -> None:
    chooser = random.Random(7)
    rig = Places(3, most_each)
    tasks: list[asyncio.Task[None]] = []
    for _ in range(600):
        choice = chooser.random()
        if choice < 0.5 or not tasks:
            tasks.append(rig.ask(f"t{chooser.randrange(6)}"))
        else:
            task = tasks.pop(chooser.randrange(len(tasks)))
            if choice < 0.7:
                task.cancel()
            else:
                rig._ends[task].set()
        if chooser.random() < 0.7:
            await rig.settle()
            assert max(rig.inside.values(), default=0) <= most_each
            assert rig.inside.total() <= 3
            here = sum(rig.places.num_here(tenant) for tenant in rig.inside)
            assert here >= rig.inside.total()
        rig.now_s += chooser.random()
    for task in tasks:
        rig._ends[task].set()
    await asyncio.gather(*rig._ends, return_exceptions=True)
    await rig.settle()
    assert not rig.places._waiting and not rig.places._holders
    assert rig.places.num_here("t0") == 0
    assert rig.places._ended_s.keys() <= {f"t{number}" for number in range(6)}
    assert rig.places._num_free == 3
