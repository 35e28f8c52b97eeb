"""API keys that launches give, each key by a launch of its own."""

from __future__ import annotations

from motet.adapters.registry.events import decode_key
from motet.adapters.registry.registry import Registry, hash_key
from motet.adapters.registry.registry_keys import API_KEYS


async def give_key(registry: Registry, tenant: str, key: str) -> None:
    """Raises KeyTaken if another tenant has the key."""
    await registry.set_launch_keys(hash_key(key), [(tenant, key)])


async def take_back_key(registry: Registry, key: str) -> None:
    """Deletes a key that `give_key` has given, unless another launch gives it too."""
    await registry.set_launch_keys(hash_key(key), [])


async def tenant_of_key(registry: Registry, key: str) -> str | None:
    """None: the key is not known."""
    record = await registry._command("HGET", API_KEYS, hash_key(key))
    return None if record is None else decode_key(hash_key(key), record).tenant
