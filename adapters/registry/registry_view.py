"""A copy of the registry in memory, which a router asks at every request, so that it serves on while Redis is down."""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
from contextlib import suppress

from ..adapter import AdapterVersion
from ..errors import RegistryUnavailable
from .events import AdapterDeleted, AdapterSet, KeySet, RegistryEvent
from .registry import Registry, Snapshot, hash_key

_LOG = logging.getLogger(__name__)
_WAIT_S = 1.0  # for events; less than the client's socket timeout
_FIRST_BACKOFF_S = 0.05
_MAX_BACKOFF_S = 2.0
_STREAM_KEY_BYTES = 32


class RegistryView:
    """Loads a snapshot of the registry and applies every later event. After an outage it loads a new snapshot.

    Owned by one event loop. While Redis is down it answers with the last state that it knew.
    """

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._adapters: dict[tuple[str, str], AdapterVersion] = {}
        self._deleted: dict[tuple[str, str], int] = {}  # last version of names deleted since the snapshot
        self._key_tenants: dict[str, str] = {}  # by the key's hash
        self._stream_keys = (secrets.token_bytes(_STREAM_KEY_BYTES),)
        self._event_id = "0-0"
        self._event_number = 0
        self._applied_meanwhile: list[RegistryEvent] | None = None  # a list while a snapshot is under way
        self._connected = False
        self._task: asyncio.Task[None] | None = None

    @property
    def connected(self) -> bool:
        """Whether the view receives the registry's events now."""
        return self._connected

    async def start(self) -> None:
        """Loads the registry and begins to apply its events. Raises RegistryUnavailable."""
        await self._load()
        self._task = asyncio.create_task(self._follow(), name="registry view")

    async def stop(self) -> None:
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
        self._connected = False

    def resolve(self, tenant: str, name: str) -> AdapterVersion | None:
        """The current version of the tenant's adapter; None: the tenant has none of this name."""
        return self._adapters.get((tenant, name))

    def list(self, tenant: str) -> list[AdapterVersion]:
        """The tenant's adapters, sorted by name."""
        mine = [adapter for (owner, _), adapter in self._adapters.items() if owner == tenant]
        return sorted(mine, key=lambda adapter: adapter.name)

    def tenant_of_key(self, key: str) -> str | None:
        return self._key_tenants.get(hash_key(key))

    @property
    def stream_keys(self) -> tuple[bytes, ...]:
        """Secrets with which routers seal what they tell clients of their streams: the one to seal with, then an older.

        The older one is of before Redis lost its data, if it did.
        """
        return self._stream_keys

    def apply(self, event: RegistryEvent) -> None:
        """Applies an event at once, before it comes by the stream. An event older than the view's state is ignored."""
        if self._applied_meanwhile is not None:
            self._applied_meanwhile.append(event)
        match event:
            case AdapterSet(adapter):
                key = (adapter.tenant, adapter.name)
                known = self._adapters.get(key)
                if adapter.version > self._deleted.get(key, 0) and (known is None or adapter.version >= known.version):
                    self._adapters[key] = adapter
            case AdapterDeleted(tenant, name, version):
                key = (tenant, name)
                self._deleted[key] = max(version, self._deleted.get(key, 0))
                known = self._adapters.get(key)
                if known is not None and known.version <= version:
                    del self._adapters[key]
            case KeySet(key_hash, None):
                self._key_tenants.pop(key_hash, None)
            case KeySet(key_hash, str() as owner):
                self._key_tenants[key_hash] = owner

    async def _load(self) -> None:
        self._applied_meanwhile = []
        try:
            snapshot = await self._registry.snapshot()
            stream_key = await self._registry.share_stream_key(self._stream_keys[0])
            self._install(snapshot)
            if stream_key != self._stream_keys[0]:
                self._stream_keys = (stream_key, self._stream_keys[0])
            meanwhile, self._applied_meanwhile = self._applied_meanwhile, None
        finally:
            self._applied_meanwhile = None
        for event in meanwhile:  # they may be newer than the snapshot
            self.apply(event)
        self._connected = True

    def _install(self, snapshot: Snapshot) -> None:
        self._adapters = {(adapter.tenant, adapter.name): adapter for adapter in snapshot.adapters}
        self._deleted = {}
        self._key_tenants = dict(snapshot.key_tenants)
        self._event_id = snapshot.event_id
        self._event_number = snapshot.event_number

    async def _follow(self) -> None:
        backoff_s = _FIRST_BACKOFF_S
        task = asyncio.current_task()
        assert task is not None
        while not task.cancelling():  # asked here, because the Redis client may swallow the exception of `stop`
            try:
                if not self._connected:
                    await self._load()
                    _LOG.info("following the registry again: %d adapters", len(self._adapters))
                await self._read()
                backoff_s = _FIRST_BACKOFF_S
                continue
            except RegistryUnavailable as error:
                self._lose("lost the registry, serving from memory: %s", error)
            except Exception as error:  # a view without events would serve old versions for ever
                self._lose("cannot follow the registry, serving from memory: %r", error)
            await asyncio.sleep(backoff_s * random.uniform(0.5, 1.0))
            backoff_s = min(2 * backoff_s, _MAX_BACKOFF_S)

    async def _read(self) -> None:
        entries = await self._registry.read_events(self._event_id, _WAIT_S)
        if not entries and await self._registry.num_events() != self._event_number:
            entries = await self._registry.read_events(self._event_id, 0.0)  # events of this very moment
            if not entries:  # Redis lost its data, and the ids of its new events are not above the last known one
                _LOG.info("the registry has other events than those that were read: loading anew")
                await self._load()
        for entry in entries:
            if entry.number != self._event_number + 1:  # Redis trimmed unread events, or it lost its data
                _LOG.info("missed events %d to %d: loading anew", self._event_number + 1, entry.number - 1)
                await self._load()
                return
            self.apply(entry.event)
            self._event_id, self._event_number = entry.event_id, entry.number

    def _lose(self, message: str, error: Exception) -> None:
        if self._connected:  # once per outage
            _LOG.warning(message, error)
        self._connected = False
