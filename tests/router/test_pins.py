"""An adapter is pinned by its tenant, and gangs keep it: as many as were requested, others where some go."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest
from redis.asyncio import Redis

from motet.adapters.registry.registry_keys import TENANTS
from motet.adapters.registry.tenants.records import Quota, TenantRecord
from motet.adapters.registry.versions.pins import KnownPins
from motet.router.fleet.dispatch import FleetDispatcher
from motet.router.fleet.pin_keeper import SETTLE_S, PinKeeper, places_of
from motet.router.text.text import TextService
from motet.tests.rigs.part_configs import admission_config, leader_config
from motet.tests.rigs.patience import PATIENCE_S
from motet.tests.rigs.patience import eventually_in_loop as eventually
from motet.tests.rigs.router_rig import text_service
from motet.tests.rigs.stand_in_engine import INFO, StandInEngine, adapter_pages
from motet.tests.rigs.version_rig import VersionRig, version_rigs
from motet.workers.leader.frame_server import FrameServer
from motet.workers.wire.messages import GangInfo, News, Pinned, SamplingParams, SequenceRequest

ZENITH = {"Authorization": "Bearer key-of-zenith"}
PIN, RESIDENCY = "/v1/adapters/x/pin", "/v1/adapters/x/residency"
TOKEN = "a secret"


@pytest.fixture(scope="module")
def text() -> TextService:
    return text_service()


@pytest.fixture
async def rigs(redis_client: Redis, tmp_path: Path, text: TextService) -> AsyncIterator[Sequence[VersionRig]]:
    async with version_rigs(redis_client, tmp_path, text, num=2) as rigs:
        yield rigs


@dataclass
class FakeGang:
    """A connection to a gang that keeps all that it gets, but what `failures` says."""

    gang_id: str
    failures: dict[str, str] = field(default_factory=dict)
    pinned: set[str] = field(default_factory=set)
    is_slow: bool = False
    num_reported: int = 0

    def __post_init__(self) -> None:
        self.reconnect()

    def reconnect(self) -> None:
        self.info: GangInfo = msgspec.structs.replace(INFO, gang_id=self.gang_id)

    @property
    def known_gang(self) -> FakeGang:
        return self

    def send(self, news: News) -> None:
        assert isinstance(news, Pinned)
        self.num_reported += 1
        self.pinned = ((set() if news.is_whole else self.pinned) | {*news.came}) - {*news.went}

    def is_hosted(self, digest: str) -> bool:
        return digest in self.pinned and not self.is_slow and digest not in self.failures

    def pin_failure(self, digest: str) -> str | None:
        return self.failures.get(digest)


async def reported(rig: VersionRig, **expected: Any) -> dict[str, Any]:
    """The state of the pin that the router reports, once it is this."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            answer = await rig.http.get(PIN)
            if answer.status_code == 200 and expected.items() <= answer.json().items():
                return answer.json()  # type: ignore[no-any-return]
            await asyncio.sleep(0.01)


async def test_a_pin_follows_the_current_version_and_every_router_reports_its_state(
    rigs: Sequence[VersionRig], redis_client: Redis
) -> None:
    rig, other = rigs
    gangs = [FakeGang(f"gang-{number}") for number in range(3)]
    for router in rigs:
        router.gangs = gangs
    await rig.upload(1)
    pinned = await rig.http.put(PIN, json={"gangs": 2})
    num_bytes = (await rig.http.get("/v1/adapters/x/versions/1")).json()["bytes"]
    assert pinned.status_code == 200 and pinned.json()["bytes"] == 2 * num_bytes
    for router in rigs:
        found = await reported(router, state="ready", version=1, gangs=2)
        assert [one["state"] for one in found["data"]] == ["ready", "ready"]
        assert "gang-" not in str(found["data"])
    home = places_of(rig.digests[1], [gang.gang_id for gang in gangs], 2)
    assert [gang.gang_id for gang in gangs if gang.pinned] == sorted(home)
    version = (await other.http.get(RESIDENCY)).json()["data"][0]
    assert (version["tier"], version["state"], len(version["gangs"])) == ("host", "ready", 2)
    await rig.upload(2)
    await reported(other, state="ready", version=2)
    await eventually(lambda: Counter(d for gang in gangs for d in gang.pinned) == {rig.digests[2]: 2})
    await rig.http.post("/v1/adapters/x/rollback")
    await eventually(lambda: Counter(d for gang in gangs for d in gang.pinned) == {rig.digests[1]: 2})
    assert (await rig.http.delete(PIN)).json() == {"name": "x", "object": "pin", "deleted": True}
    await eventually(lambda: not any(gang.pinned for gang in gangs))
    gone = [await rig.http.get(PIN), await rig.http.delete(PIN)]
    assert [(one.status_code, one.json()["error"]["code"]) for one in gone] == [(404, "version_not_found")] * 2
    log: Any = await redis_client.xrange("motet:{registry}:audit:acme")
    changed = [msgspec.json.decode(entry[1]["entry"]) for entry in log]
    assert [(one["action"], one["changed"]["pinned_gangs"]) for one in changed if "pin." in one["action"]] == [
        ("pin.set", {"from": None, "to": 2}),
        ("pin.delete", {"from": 2, "to": None}),
    ]


async def test_why_a_pin_fails_is_reported(rigs: Sequence[VersionRig]) -> None:
    rig, _ = rigs
    await rig.upload(1)
    rig.gangs = [FakeGang("gang-0", {rig.digests[1]: "host memory of gangs is full of pins"})]
    await rig.http.put(PIN)
    found = await reported(rig, state="failed")
    assert found["reason"] == found["data"][0]["reason"] == "host memory of gangs is full of pins"
    version = (await rig.http.get(RESIDENCY)).json()["data"][0]
    assert (version["tier"], version["state"], version["reason"]) == ("store", "failed", found["reason"])
    rig.gangs[0].failures.clear()
    rig.gangs[0].is_slow = True
    await reported(rig, state="coming")
    rig.gangs[0].is_slow = False
    assert (await reported(rig, state="ready"))["reason"] is None


async def test_what_may_not_be_pinned(rigs: Sequence[VersionRig], redis_client: Redis) -> None:
    rig, _ = rigs
    await rig.upload(1)
    num_bytes = (await rig.http.get("/v1/adapters/x/versions/1")).json()["bytes"]
    record = TenantRecord(name="acme", quota=Quota(pinned_bytes=2 * num_bytes))
    await redis_client.hset(TENANTS, "acme", msgspec.json.encode(record).decode())
    codes = []
    for name, body, headers in (
        ("unknown", {}, {}),
        ("x", {}, ZENITH),
        ("x", {"gangs": 0}, {}),
        ("x", {"gangs": 17}, {}),
        ("x", {"version": 1}, {}),
        ("x", {"gangs": 3}, {}),
    ):
        answer = await rig.http.put(f"/v1/adapters/{name}/pin", json=body, headers=headers)
        codes.append((answer.status_code, answer.json()["error"]["code"]))
    assert codes == [
        (404, "adapter_not_found"),
        (404, "adapter_not_found"),
        (400, "invalid_value"),
        (400, "invalid_value"),
        (400, "invalid_value"),
        (429, "insufficient_quota"),
    ]
    assert (await rig.http.put(PIN, json={"gangs": 2})).status_code == 200
    assert (await rig.http.get(PIN, headers=ZENITH)).json()["error"]["code"] == "adapter_not_found"


def test_pins_move_once_gangs_have_settled_and_nothing_is_reported_twice() -> None:
    pins, gangs = KnownPins(), [FakeGang(f"gang-{number}") for number in range(4)]
    digests = [f"{number:064x}" for number in range(40)]
    for digest in digests:
        pins.change(("acme", digest), (digest, 2))
    connected: list[FakeGang] = gangs[:1]
    keeper = PinKeeper(pins, lambda: connected)
    keeper.update(100.0)
    connected = gangs
    keeper.update(100.25)
    keeper.update(100.25 + SETTLE_S - 0.01)
    assert not any(gang.num_reported for gang in gangs), "the first gang that connects must not get all of them"
    keeper.update(100.25 + SETTLE_S)
    counts = Counter(digest for gang in gangs for digest in gang.pinned)
    assert counts == dict.fromkeys(digests, 2)
    for number in range(8):
        keeper.update(102 + number)
    assert [gang.num_reported for gang in gangs] == [1] * 4
    before = {gang.gang_id: set(gang.pinned) for gang in gangs}
    connected = gangs[1:]
    keeper.update(120.0)
    assert [gang.num_reported for gang in gangs] == [1] * 4, "it may be back at once"
    keeper.update(120.0 + SETTLE_S)
    assert Counter(digest for gang in connected for digest in gang.pinned) == dict.fromkeys(digests, 2)
    assert all(before[gang.gang_id] <= gang.pinned for gang in connected), "only what the lost gang had has moved"
    gangs[1].reconnect()
    gangs[1].pinned = set()
    keeper.update(130.0)
    assert Counter(digest for gang in connected for digest in gang.pinned) == dict.fromkeys(digests, 2)
    assert keeper.states(digests[0]).keys() == {gang.gang_id for gang in connected if digests[0] in gang.pinned}


def test_gangs_that_never_settle_hold_nothing_up() -> None:
    pins, gangs = KnownPins(), [FakeGang("gang-0"), FakeGang("gang-1")]
    pins.change(("acme", "x"), ("a" * 64, 2))
    connected = gangs
    keeper = PinKeeper(pins, lambda: connected)
    for number in range(40):
        connected = gangs[: 1 + number % 2]
        keeper.update(10.0 + 0.25 * number)
    assert gangs[0].pinned == {"a" * 64}


async def test_leaders_receive_shares_of_all_routers_and_forget_none_that_is_there() -> None:
    engines = {key: StandInEngine() for key in "abc"}
    servers = {
        key: FrameServer(engine, msgspec.structs.replace(INFO, gang_id=f"gang {key}"), TOKEN, leader_config())
        for key, engine in engines.items()
    }
    addresses = {key: await server.start("127.0.0.1") for key, server in servers.items()}
    pins = KnownPins()
    digests = [f"{number:064x}" for number in range(10_000)]
    for digest in digests[:-1]:
        pins.change(("acme", digest), (digest, 1))
    routers, keepers = [], []
    for _ in range(2):
        known = KnownPins()
        known.replace({("acme", digest): (digest, 1) for digest in digests[:-1]})
        routers.append(
            FleetDispatcher(TOKEN, gang_wait_s=PATIENCE_S, adapter_pages=adapter_pages, admission=admission_config())
        )
        routers[-1].update(addresses)
        keepers.append((PinKeeper(known, routers[-1].connected), known))
        keepers[-1][0].start()
    ids = [f"gang {key}" for key in "abc"]
    expected = {key: {d for d in digests[:-1] if places_of(d, ids, 1) == [f"gang {key}"]} for key in "abc"}
    await eventually(lambda: all(engines[key].pinned == expected[key] for key in "abc"))
    for _, known in keepers:
        known.change(("acme", digests[0]), None)
        known.change(("zenith", "y"), (digests[-1], 3))
    await eventually(lambda: all(digests[-1] in engine.pinned for engine in engines.values()))
    await eventually(lambda: not any(digests[0] in engine.pinned for engine in engines.values()))
    home = places_of(digests[-1], ids, 3)[0]
    engine = engines[home[-1]]
    engine.host(digests[-1])
    request = SequenceRequest(prompt_token_ids=[0], sampling=SamplingParams(max_tokens=1), tenant="acme")
    routers[0].bring(request, 3, PATIENCE_S)  # so that each engine makes a step
    await eventually(lambda: keepers[0][0].states(digests[-1])[home] is None)
    await keepers[0][0].stop()
    await routers[0].close()
    for key in "abc":
        assert engines[key].pinned >= expected[key] - {digests[0]}, "the other router still says so"
    await keepers[1][0].stop()
    await routers[1].close()
    for server in servers.values():
        await server.stop()
