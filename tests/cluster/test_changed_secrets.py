"""The operators' key and the password of Redis, changed in the folder of secrets while a replica runs."""

from __future__ import annotations

from pathlib import Path

import pytest
from redis.asyncio import Redis

from motet.cluster.application.secret_files import (
    SECRETS_VARIABLE,
    OperatorKeyWatch,
    connect_with_secrets,
    secrets_of_this_node,
)
from motet.cluster.launch_secrets import LaunchSecrets
from motet.router.http.auth import OperatorKey


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "redis-url").write_text("redis://:one@host:6379")
    (tmp_path / "operator-key").write_text("first")
    return tmp_path


def of(folder: Path) -> LaunchSecrets:
    return secrets_of_this_node({SECRETS_VARIABLE: str(folder)})


async def test_an_operators_key_counts_as_soon_as_it_is_read(folder: Path) -> None:
    key = OperatorKey("first")
    watch = OperatorKeyWatch(key, lambda: of(folder))
    (folder / "operator-key").write_text("second\n")
    await watch.look()
    assert key.now == "second" and "second" not in repr(key)
    (folder / "operator-key").unlink()  # without a key no operator could get in: the last one stays
    await watch.look()
    assert key.now == "second"
    (folder / "nonsense").write_text("x")
    (folder / "operator-key").write_text("third")
    await watch.look()
    assert key.now == "second"


async def test_a_new_connection_uses_the_password_that_the_secrets_say_then(
    redis_client: Redis, redis_url: str, folder: Path
) -> None:
    place = redis_url.removeprefix("unix://")
    await redis_client.acl_setuser("m", enabled=True, passwords=["+one"], keys=["*"], categories=["+@all"])
    try:
        (folder / "redis-url").write_text(f"unix://m:one@{place}")
        client = connect_with_secrets(of(folder).redis_url, lambda: of(folder))
        assert await client.ping()
        await redis_client.acl_setuser(
            "m", enabled=True, passwords=["-one", "+t%w o"], keys=["*"], categories=["+@all"]
        )
        (folder / "redis-url").write_text(f"unix://m:t%25w%20o@{place}")
        await client.connection_pool.disconnect()
        assert await client.ping()
        await client.aclose()
    finally:
        await redis_client.acl_deluser("m")


async def test_without_a_password_there_is_nothing_to_follow(redis_url: str) -> None:
    client = connect_with_secrets(redis_url, lambda: pytest.fail("read"))
    assert await client.ping()
    await client.aclose()
