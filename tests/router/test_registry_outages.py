"""A registry that hangs: a tenant waits for it once, whatever it asks for."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from motet.adapters.registry.registry import Registry, connect
from motet.tests.rigs import real_front as rig
from motet.tests.rigs.late_redis import late_redis
from motet.tests.rigs.lora_files import lora_files
from motet.tests.rigs.patience import eventually_in_loop
from motet.tests.rigs.real_front import ASKER_KEY, OWNER_KEY, OWNERS_ADAPTER, RealFront, real_front
from motet.tests.rigs.router_rig import BASE, text_service

WAIT_S = 0.3
PATHS = ("adapters", f"adapters/{OWNERS_ADAPTER}/versions", "limits", "files", "batches", "keys", "users", "usage")


async def took_s(
    front: RealFront, method: str, path: str, status: int, key: str = OWNER_KEY, **options: object
) -> float:
    async with front.client() as client:
        began = time.monotonic()
        answer = await client.request(method, f"/v1/{path}", headers={"Authorization": f"Bearer {key}"}, **options)  # type: ignore[arg-type]
        assert answer.status_code == status, answer.text
        return time.monotonic() - began


async def test_a_tenant_waits_once(redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rig, "connect", lambda url, _: connect(url, WAIT_S))
    monkeypatch.setattr(rig, "Registry", lambda client, _: Registry(client, WAIT_S))
    monkeypatch.setattr("motet.adapters.registry.registry_view._WAIT_S", 0.1)
    async with late_redis(redis_url) as late, real_front(late.url, tmp_path, text_service()) as front:
        files = lora_files(seed=3)
        tensors = files.write(tmp_path).read_bytes()
        parts = {"adapter_config.json": files.config_bytes, "adapter_model.safetensors": tensors}
        late.holds_replies = True
        await eventually_in_loop(lambda: front.view.is_unreachable)
        for key in (OWNER_KEY, ASKER_KEY):
            assert await took_s(front, "GET", "files", 503, key) >= WAIT_S * 0.9
            waited = [await took_s(front, "GET", path, 503, key) for path in PATHS]
            waited.append(await took_s(front, "POST", "adapters", 503, key, data={"name": "x"}, files=parts))
            assert max(waited) < WAIT_S * 0.9
        # What the router keeps of the registry is enough.
        await took_s(front, "GET", "models", 200)
        await took_s(front, "POST", "completions", 200, json={"model": OWNERS_ADAPTER, "prompt": "hi"})
        await took_s(front, "POST", "completions", 200, json={"model": BASE, "prompt": "hi"})
        late.holds_replies = False
        await eventually_in_loop(lambda: not front.view.is_unreachable)
        for path in PATHS:
            await took_s(front, "GET", path, 200)
