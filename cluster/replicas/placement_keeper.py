"""Frees what dead gangs still hold of the nodes.

A gang of several workers has a placement group of the name of its replica. Serve's controller removes it with the
replica, but loses sight of a replica that dies while a new controller recovers: its placement group stays, and where it
holds the last room, no gang takes the dead one's place. No public part of Serve looks for it, so each router does.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping
from typing import Any

LOOK_S = 15.0

_log = logging.getLogger(__name__)


class PlacementKeeper:
    """Removes the placement groups of a deployment that had no living replica at two looks, one after the other.

    Serve makes a placement group a moment before the actor, which is known by its name from then on, wherever it waits.
    """

    def __init__(self, app: str, deployment: str, look: Callable[[], Mapping[str, str]] | None = None) -> None:
        """`look`: ids of placement groups that belong to no actor, by name; the default asks Ray."""
        self._look = look or (lambda: placements_without_actor(app, deployment))
        self._seen: set[str] = set()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._keep_forever(), name="placement keeper")

    def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def keep(self) -> None:
        """One look; it waits for Ray."""
        found = self._look()
        for name in self._seen & found.keys():
            _log.warning("what a dead gang held is freed, as Serve has lost sight of it: %s", name)
            try:
                remove_placement(found[name])
            except Exception as error:  # the others are freed nevertheless
                _log.warning("the placement group of %s could not be removed: %s", name, error)
        self._seen = set(found)

    async def _keep_forever(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                # In a thread: where the head is gone, Ray waits a minute or two before it says so.
                await asyncio.to_thread(self.keep)
            except Exception as error:  # Ray's are many, and none may end the looking
                _log.warning("placement groups could not be checked: %s", error)


def placements_without_actor(app: str, deployment: str) -> Mapping[str, str]:
    """Ids of the deployment's placement groups whose replica is gone, by their names, which are the replicas'."""
    import ray
    from ray.serve._private.common import DeploymentID, ReplicaID
    from ray.serve._private.constants import SERVE_NAMESPACE

    table: Mapping[str, Mapping[str, Any]] = ray.util.placement_group_table()
    # After the table: each of its groups had its actor by then, or has none.
    actors = ray.util.list_named_actors(all_namespaces=True)
    living = {actor["name"] for actor in actors if actor["namespace"] == SERVE_NAMESPACE}
    prefix = ReplicaID("", DeploymentID(name=deployment, app_name=app)).to_full_id_str()
    return ownerless(table, living, prefix)


def ownerless(table: Mapping[str, Mapping[str, Any]], living: Collection[str], prefix: str) -> Mapping[str, str]:
    """Existing placement groups by id, from Ray's table, whose name begins so and is not an actor's."""
    return {
        entry["name"]: placement_id
        for placement_id, entry in table.items()
        if entry["state"] != "REMOVED" and entry["name"].startswith(prefix) and entry["name"] not in living
    }


def remove_placement(placement_id: str) -> None:
    import ray
    from ray._raylet import PlacementGroupID
    from ray.util.placement_group import PlacementGroup

    ray.util.remove_placement_group(PlacementGroup(PlacementGroupID(bytes.fromhex(placement_id))))
