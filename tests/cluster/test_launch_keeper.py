"""Two clusters that share one Redis and one data folder, as during an upgrade: what their routers register."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from redis.asyncio import Redis

from motet.adapters.errors import KeyTaken, OtherBase
from motet.adapters.registry.launches import ExpiredLaunches, Launches
from motet.adapters.registry.registry import Registry
from motet.cluster.application.registration import register_router
from motet.cluster.application.secret_files import shared_token
from motet.cluster.config import MotetConfig
from motet.cluster.launch_secrets import LaunchSecrets
from motet.cluster.replicas.launch_keeper import BEAT_S, LONGEST_GAP_S, SILENCE_S, LaunchKeeper
from motet.cluster.settings.setting_field import ConfigError
from motet.tests.cluster.test_registration import other_base as other_base
from motet.tests.rigs.given_keys import give_key, tenant_of_key
from motet.tests.rigs.ray_nodes import DEMO

Keys = tuple[tuple[str, str], ...]


class Cluster:
    """One router of a cluster. `keys` is what its secrets say, and `now` the time there."""

    def __init__(self, name: str, client: Redis, config: MotetConfig, keys: Keys) -> None:
        self.name, self.registry, self.config = name, Registry(client), config
        self.keys: Keys | None = keys
        self.now = 0.0
        self.keeper = LaunchKeeper(self.registry, Launches(client), name, lambda: self.keys, lambda: self.now)

    async def start(self) -> None:
        await register_router(self.registry, self.config, self.name, self.keys)
        await self.keeper.start(self.keys)
        await self.keeper.stop()  # the test looks by itself

    async def pass_time(self, seconds: float) -> None:
        for _ in range(int(seconds / BEAT_S)):
            self.now += BEAT_S
            await self.keeper.look()


@pytest.fixture
def config(tmp_path: Path) -> MotetConfig:
    return MotetConfig.of(model_path=DEMO / "base", data_dir=tmp_path)


async def known(client: Redis, *keys: str) -> list[str | None]:
    return [await tenant_of_key(Registry(client), key) for key in keys]


async def test_keys_of_both_let_in_until_one_has_been_gone_for_long(redis_client: Redis, config: MotetConfig) -> None:
    old = Cluster("old", redis_client, config, (("acme", "former"), ("acme", "both")))
    new = Cluster("new", redis_client, config, (("acme", "both"), ("zoo", "next")))
    await old.start()
    await new.start()
    assert await known(redis_client, "former", "both", "next") == ["acme", "acme", "zoo"]
    await old.start()  # another of its routers: takes nothing away
    assert await known(redis_client, "former", "both", "next") == ["acme", "acme", "zoo"]
    for _ in range(40):
        await old.pass_time(BEAT_S)
        await new.pass_time(BEAT_S)
    assert await known(redis_client, "former") == ["acme"]
    await new.pass_time(SILENCE_S + BEAT_S)  # the old one has ended
    assert await known(redis_client, "former", "both", "next") == [None, "acme", "zoo"]


async def test_a_listener_that_was_away_takes_no_launch_for_gone(redis_client: Redis, config: MotetConfig) -> None:
    old = Cluster("old", redis_client, config, (("acme", "former"),))
    new = Cluster("new", redis_client, config, (("acme", "next"),))
    await old.start()
    await new.start()
    new.now += 10 * SILENCE_S  # Redis did not answer for as long, the old one neither
    await new.keeper.look()
    assert await known(redis_client, "former") == ["acme"]


async def test_who_was_taken_for_gone_gives_its_keys_again(redis_client: Redis, config: MotetConfig) -> None:
    cut_off = Cluster("cut-off", redis_client, config, (("acme", "kept"),))
    other = Cluster("other", redis_client, config, (("acme", "next"),))
    await cut_off.start()
    await other.start()
    await other.pass_time(SILENCE_S + 2 * BEAT_S)  # the first one does not reach Redis for as long
    assert await known(redis_client, "kept") == [None]
    await cut_off.pass_time(BEAT_S)
    assert await known(redis_client, "kept") == ["acme"]


async def test_a_key_of_another_is_tried_again(redis_client: Redis, config: MotetConfig) -> None:
    first = Cluster("first", redis_client, config, (("acme", "one"), ("acme", "contested")))
    second = Cluster("second", redis_client, config, (("zoo", "two"),))
    await first.start()
    await second.start()
    second.keys = (("zoo", "two"), ("zoo", "contested"))
    await second.pass_time(BEAT_S)
    first.keys = (("acme", "one"),)
    await first.pass_time(BEAT_S)
    await second.pass_time(BEAT_S)
    assert await known(redis_client, "two", "contested") == ["zoo", "zoo"]


async def test_keys_that_change_are_taken_over(redis_client: Redis, config: MotetConfig) -> None:
    cluster = Cluster("one", redis_client, config, (("acme", "first"),))
    await cluster.start()
    cluster.keys = (("acme", "second"),)
    await cluster.keeper.look()
    assert await known(redis_client, "first", "second") == [None, "acme"]
    await give_key(Registry(redis_client), "zoo", "of zoo")
    cluster.keys = (("acme", "of zoo"),)  # refused: what was there stays
    await cluster.keeper.look()
    assert await known(redis_client, "second", "of zoo") == ["acme", "zoo"]
    cluster.keys = None  # the file is gone
    await cluster.keeper.look()
    assert await known(redis_client, "second", "of zoo") == [None, "zoo"]


async def test_any_number_of_routers_register_at_once(redis_client: Redis, config: MotetConfig) -> None:
    clusters = [Cluster(name, redis_client, config, (("acme", "key"),)) for name in ("one", "one", "two", "two")]
    await asyncio.gather(*(cluster.start() for cluster in clusters))
    assert await known(redis_client, "key") == ["acme"]


async def test_another_base_and_anothers_key_are_refused(
    redis_client: Redis, config: MotetConfig, tmp_path: Path, other_base: Path
) -> None:
    await Cluster("old", redis_client, config, (("acme", "key"),)).start()
    changed = MotetConfig.of(model_path=other_base, name="base", data_dir=tmp_path / "other")
    with pytest.raises(OtherBase, match="REDIS_URL"):
        await Cluster("new", redis_client, changed, (("acme", "new"),)).start()
    with pytest.raises(KeyTaken):
        await Cluster("new", redis_client, config, (("zoo", "key"),)).start()
    assert await known(redis_client, "key", "new") == ["acme", None]


async def test_an_objective_needs_a_tenant_with_a_key(redis_client: Redis, tmp_path: Path) -> None:
    hasty = MotetConfig.of(model_path=DEMO / "base", data_dir=tmp_path, latency_objectives_s=(("acme", 2.0),))
    with pytest.raises(ConfigError, match="no tenant acme"):
        await Cluster("one", redis_client, hasty, (("zoo", "key"),)).start()
    await Cluster("one", redis_client, hasty, (("acme", "key"),)).start()


async def test_routers_and_gangs_agree_on_a_token(redis_client: Redis, redis_url: str) -> None:
    secrets = LaunchSecrets(redis_url=redis_url)
    tokens = set(await asyncio.gather(*(shared_token(secrets) for _ in range(8))))
    assert len(tokens) == 1
    assert len(tokens.pop()) == 64
    assert await shared_token(LaunchSecrets(redis_url=redis_url, token="given")) == "given"


@given(st.lists(st.tuples(st.floats(0.1, 400), st.booleans()), max_size=40))
def test_a_launch_with_heartbeats_never_expires(steps: list[tuple[float, bool]]) -> None:
    """For any gaps between checks: a launch with a heartbeat since the last two checks has not expired."""
    expired, now, beats = ExpiredLaunches(SILENCE_S, LONGEST_GAP_S), 0.0, 0
    unchanged_since, listened_at = 0.0, None
    for gap, has_beaten in steps:
        now += gap
        if has_beaten or listened_at is None or now - listened_at > LONGEST_GAP_S:
            unchanged_since = now
        beats += has_beaten
        listened_at = now
        assert ("it" in expired.observe({"it": beats}, now)) == (now - unchanged_since >= SILENCE_S)
