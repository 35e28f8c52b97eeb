"""What each router does for the launch that it belongs to: keys that change, and keys of launches that are gone."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

from ...adapters.ended_tasks import end_tasks
from ...adapters.errors import KeyTaken, RegistryUnavailable
from ...adapters.registry.launches import ExpiredLaunches, Launches
from ...adapters.registry.registry import Registry
from ..settings.config_error import ConfigError

LOOK_S = 10.0  # between two looks at the file of keys
BEAT_S = 60.0
SILENCE_S = 15 * 60.0  # without a heartbeat, after which a launch expires
LONGEST_GAP_S = 3 * BEAT_S

Keys = Sequence[tuple[str, str]]  # (tenant, key)

_log = logging.getLogger(__name__)


class LaunchKeeper:
    """Keeps the registry as this launch's secrets say, and deletes the keys of expired launches.

    Several clusters may share a registry while one takes over from another. The keys of all that live let clients in.
    One that ends does nothing: its keys are deleted after `SILENCE_S` without a heartbeat. Belongs to one event loop.
    """

    def __init__(
        self,
        registry: Registry,
        launches: Launches,
        owner: str,
        read_keys: Callable[[], Keys | None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`owner`: the launch's id. `read_keys`: the keys that its secrets say now; it is called in a thread."""
        self.owner = owner
        self._registry, self._launches, self._read_keys, self._clock = registry, launches, read_keys, clock
        self._keys: Keys | None = None
        self._expired = ExpiredLaunches(SILENCE_S, LONGEST_GAP_S)
        self._beat_at = -BEAT_S
        self._task: asyncio.Task[None] | None = None

    async def start(self, keys: Keys | None) -> None:
        """`keys`: those that were registered. None: this launch gives none, and nothing is watched."""
        if keys is None:
            return
        self._keys = keys
        await self.look()
        self._task = asyncio.create_task(self._look_forever(), name="launch keeper")

    async def stop(self) -> None:
        await end_tasks(self._task)

    async def look(self) -> None:
        """Takes over keys that have changed, and sends the heartbeat when it is due. Raises RegistryUnavailable."""
        await self._take_over_keys()
        now = self._clock()
        if now - self._beat_at < BEAT_S:
            return
        heartbeats = await self._launches.heartbeat(self.owner)
        if heartbeats[self.owner] == 1 and self._keys:  # it had expired for others, which may have deleted its keys
            await self._register(self._keys)
        expired = self._expired.observe(heartbeats, now)
        self._beat_at = now
        for launch in expired:
            await self._registry.set_launch_keys(launch, ())
            await self._launches.forget(launch)
            _log.info("the keys of a launch that is gone were taken back: %s", launch)

    async def _take_over_keys(self) -> None:
        try:
            # A file that is gone gives no keys any more.
            keys = await asyncio.to_thread(self._read_keys) or ()
        except (ConfigError, OSError) as error:
            _log.error("the keys stay as they were: %s", error)
            return
        if keys != self._keys and await self._register(keys):
            _log.info("the keys have changed: there are %d", len(keys))

    async def _register(self, keys: Keys) -> bool:
        try:
            await self._registry.set_launch_keys(self.owner, keys)
        except KeyTaken as error:  # for as long as the other one has it
            _log.error("the keys stay as they were: %s", error)
            return False
        self._keys = keys
        return True

    async def _look_forever(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                await self.look()
            except RegistryUnavailable as error:
                _log.warning("keys and launches could not be read, trying later: %s", error)


def id_of_this_cluster() -> str:
    """One word, the same for all processes of a Ray cluster for as long as it lives, and no other's."""
    # Ray has no public call for it.
    from ray._private.worker import global_worker

    cluster_id: str = global_worker.node.cluster_id.hex()
    return f"cluster-{cluster_id}"
