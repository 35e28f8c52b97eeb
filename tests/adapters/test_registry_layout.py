"""Layout 1 of the registry in Redis: routers of the release before read and write it beside those of this one.

`registry_layout_1.json` has the rows that motet 0.1.0 wrote, with a Lua script for each change, when it made `changes`.
"""

from __future__ import annotations

import json
import random
import secrets
import time
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs
from redis.asyncio import Redis

from motet.adapters.adapter import BaseIdentity
from motet.adapters.errors import CallerGone, QuotaExceeded
from motet.adapters.registry.administration.administration import Administration
from motet.adapters.registry.batches.batch_registry import BatchRegistry
from motet.adapters.registry.batches.file_registry import FileRegistry
from motet.adapters.registry.batches.records import BatchRecord, FileRecord
from motet.adapters.registry.canary_counts import CanaryCounts, Outcome
from motet.adapters.registry.launches import Launches
from motet.adapters.registry.registry import Registry, hash_key
from motet.adapters.registry.registry_keys import AUDIT_ORDER, EVENTS, PREFIX
from motet.adapters.registry.tenants.records import (
    Actor,
    Admission,
    AuditEntry,
    KeyRecord,
    Quota,
    StorageBound,
    TenantRecord,
)
from motet.adapters.registry.versions import name_state
from motet.adapters.registry.versions.name_state import VersionNote

ROWS = Path(__file__).with_name("registry_layout_1.json")
OPERATOR = Actor(kind="operator", request_id="req-1")
NOW = 1_750_000_000.25


async def changes(client: Redis) -> None:
    """Some of each kind, all of which leave something."""
    registry, administration = Registry(client, clock=lambda: NOW), Administration.of(client)
    tenants, keys = administration.tenants, administration.keys
    tenants._clock = keys._clock = lambda: NOW
    files, batches = FileRegistry(client, clock=lambda: NOW), BatchRegistry(client, clock=lambda: NOW)
    await registry.claim_base(BaseIdentity("b" * 64, "base"), "", if_empty=False)
    await registry.share_stream_key(b"a secret")
    await registry.set_launch_keys("launch", [("acme", "first"), ("zoo", "second")])
    await registry.set_launch_keys("another", [("acme", "first"), ("zoo", "third")])
    await registry.set_launch_keys("another", [("acme", "first")])
    await Launches(client).heartbeat("launch")
    await administration.audit.note_settings({"max_naps": 3})
    await administration.audit.note_settings({"max_naps": 4})

    await tenants.create(TenantRecord(name="acme", quota=Quota(pinned_bytes=50_000)), OPERATOR)
    await tenants.change("acme", {"weight": 2.5, "user_quota": {"adapters": 3}}, OPERATOR)
    admission = Admission(incarnation=0, last_event=await registry.num_events(), user="ann")
    draft = KeyRecord(key_id="", tenant="acme", label="ann's", user="ann", expires_at=NOW + 1000)
    ann, ann_key = await keys.create(draft, OPERATOR, admission)
    _, bob_key = await keys.create(KeyRecord(key_id="", tenant="acme", user="bob"), OPERATOR)
    await keys.rotate(hash_key(ann_key), ann, 60.0, Actor(kind="key", id="k", tenant="acme"))

    upload = AuditEntry(
        action="adapter.upload", tenant="acme", target="x", actor=Actor(kind="key", id="k", tenant="acme")
    )
    for content in range(1, 15):
        await registry.names.register(
            "acme",
            f"n{content % 3}" if content % 4 else "~ann/private",
            digest=f"{content % 9:064x}",
            module_ranks={"q_proj": 8, "v_proj": content},
            num_bytes=content * 1000,
            packed_bytes=content % 2 * 500,
            activate=content < 12,
            note=VersionNote("" if content % 5 else f"note {content}", f"k{content % 2}", ("", "ann")[content % 2]),
            entry=upload,
            admission=admission,
            bounds=(StorageBound("", 10, 10**6), StorageBound("k1", None, 10**6)),
        )
    with pytest.raises(QuotaExceeded):
        await registry.names.register(
            "acme", "n9", digest="e" * 64, module_ranks={}, num_bytes=1, bounds=(StorageBound("", 2, None),)
        )
    for change in (
        lambda state, now: name_state.with_pin(state, 2),
        lambda state, now: name_state.with_alias(state, "prod", str(state.current.version)),
        lambda state, now: name_state.with_canary(state, "1", 0.25, "abc", now),
        lambda state, now: name_state.with_note(state, "1", "text"),
    ):
        await registry.names.change("acme", "n1", change, upload, admission)
    await registry.names.change("acme", "n2", lambda state, now: name_state.rolled_back(state, now))
    await registry.names.delete("acme", "n0", upload, admission)

    counts = CanaryCounts(client)
    await counts.add(
        [
            Outcome(
                "acme", "acme/n1", f"cmpl-{number}", "abc", "canary", ("answers", "first_token 2"), f"s{number % 2}"
            )
            for number in range(8)
        ]
    )
    assert await counts.rate("acme", "cmpl-1", is_good=False, comment="bad")

    for number in range(3):
        file = FileRecord(
            id=f"file-{number}",
            tenant="acme",
            user="ann",
            key_id="k1",
            num_bytes=100 + number,
            created_at=1,
            expires_at=1_750_000_100 + number,
        )
        await files.add(file, (StorageBound("~ann", None, 10**6),), admission.last_event)
    await files.delete(file)
    for number in range(2):
        batch = BatchRecord(
            id=f"batch_{number}",
            tenant="acme",
            key_id="k1",
            endpoint="/v1/completions",
            input_file_id="file-0",
            completion_window="24h",
            created_at=1,
            expires_at=2,
        )
        await batches.add(batch, NOW + 500, admission.last_event)
    await batches.change("acme", "batch_0", lambda batch: structs.replace(batch, status="in_progress", num_bytes=70))
    output = FileRecord(id=batch.output_file_id, tenant="acme", key_id="k1", num_bytes=70, created_at=1, expires_at=9)
    await batches.change(
        "acme",
        "batch_1",
        lambda batch: structs.replace(batch, status="completed", num_bytes=30, has_output=True),
        files=lambda _: [output],
        kept_until=NOW + 900,
        entry=upload,
    )

    await keys.delete_of_user("acme", "bob", [hash_key(bob_key)], OPERATOR)
    with pytest.raises(CallerGone):
        await keys.create(draft, OPERATOR, structs.replace(admission, user="bob"))
    await registry.names.register("zoo", "x", digest="f" * 64, module_ranks={"q_proj": 1}, num_bytes=5)
    await tenants.delete("zoo", OPERATOR)


async def rows_of(redis_client: Redis) -> dict[str, Any]:
    """All that is stored, without what the clock of Redis decides."""
    client: Any = redis_client
    rows: dict[str, Any] = {}
    for key in sorted(map(str, await client.keys())):
        match await client.type(key):
            case "string":
                rows[key] = await client.get(key)
            case "hash":
                rows[key] = dict(sorted((await client.hgetall(key)).items()))
            case "set":
                rows[key] = sorted(await client.smembers(key))
            case "zset":
                rows[key] = list(map(list, await client.zrange(key, 0, -1, withscores=True)))
            case "list":
                rows[key] = await client.lrange(key, 0, -1)
            case "stream":
                rows[key] = [fields for _, fields in await client.xrange(key)]
    return rows


@pytest.fixture(autouse=True)
def no_chance(monkeypatch: pytest.MonkeyPatch) -> None:
    chooser = random.Random(1)
    monkeypatch.setattr(secrets, "token_urlsafe", lambda num_bytes: f"{chooser.getrandbits(8 * num_bytes):x}")
    monkeypatch.setattr(time, "time", lambda: NOW)


async def test_the_same_changes_leave_the_same_rows(redis_client: Redis) -> None:
    await changes(redis_client)
    rows = await rows_of(redis_client)
    expected = json.loads(ROWS.read_text())
    assert {key for key in rows if not key.startswith(PREFIX)} == set(), "a Redis cluster needs them in one slot"
    assert rows == expected


async def test_changes_go_on_with_the_rows_of_the_release_before(redis_client: Redis) -> None:
    client: Any = redis_client
    for key, rows in json.loads(ROWS.read_text()).items():
        if isinstance(rows, str):
            await client.set(key, rows)
        elif isinstance(rows, dict):
            await client.hset(key, mapping=rows)
        elif key in (EVENTS, AUDIT_ORDER) or key.startswith(PREFIX + "audit"):
            for fields in rows:
                await client.xadd(key, fields)
        elif isinstance(rows[0], list):
            await client.zadd(key, dict(rows))
        elif "canary_comments" in key:
            await client.rpush(key, *rows)
        else:
            await client.sadd(key, *rows)
    registry = Registry(redis_client)
    counted = await client.hgetall(PREFIX + "stored:acme")
    await registry.stored.recount()
    assert await client.hgetall(PREFIX + "stored:acme") == counted
    async for tenant, page in registry.stored.unswept():
        await registry.stored.release(tenant, page)
    state = await registry.names.change(
        "acme", "n1", lambda state, now: name_state.without_canary(state, "stopped", "", now)
    )
    assert state.current.revision == await registry.num_events()
    assert await registry.names.delete("acme", "n1") is not None
    batch, _ = await BatchRegistry(redis_client).change(
        "acme", "batch_0", lambda batch: structs.replace(batch, status="completed")
    )
    assert batch is not None and not await client.exists(PREFIX + "batch_queue:acme", PREFIX + "file_uses:acme")
    await Administration.of(redis_client, [FileRegistry(redis_client).retire]).tenants.delete("acme", OPERATOR)
    assert not [
        key
        async for key in client.scan_iter(f"{PREFIX}*acme*")
        if not key.startswith(PREFIX + "audit") and not key.startswith(PREFIX + "ended_users")
    ]
