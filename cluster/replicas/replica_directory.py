"""Which gangs or routers there are, as Ray Serve knows it, pushed to a router.

A replica publishes its address as replica metadata, and the Serve controller pushes the set of running replicas
to its listeners. Serve's own handles are built on the same feed. So a router learns within a tenth of a second of a
gang that comes, goes or is replaced, for any number of gangs, and without asking. A custom `RequestRouter` would
get the same set, but it exists only behind a handle's first request and cannot be handed a collaborator; asking through
`handle.broadcast` would cost every router a call to every gang each second. The price is that `LongPollClient` is not
Serve's public API: this file is the only one that knows it, and the end-to-end test goes through it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Any

import ray
from ray.serve._private.common import DeploymentID, DeploymentTargetInfo
from ray.serve._private.constants import SERVE_CONTROLLER_NAME, SERVE_NAMESPACE
from ray.serve._private.long_poll import LongPollClient, LongPollNamespace

ADDRESS = "leader_address"  # key in a gang's replica metadata

CHECK_INTERVAL_S = 1.0

_log = logging.getLogger(__name__)


Metadata = Mapping[str, str]


class ReplicaDirectory:
    """Calls `on_change` with the metadata of a deployment's replicas by replica id, at first and at each change."""

    def __init__(self, app: str, deployment: str, on_change: Callable[[Mapping[str, Metadata]], None]) -> None:
        self._deployment_id = DeploymentID(name=deployment, app_name=app)
        self._on_change = on_change
        self._client: Any = None
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Needs a running event loop, on which `on_change` is called."""
        self._listen(serve_controller())
        self._task = asyncio.create_task(self._keep_listening())

    def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
        if self._client is not None:
            self._client.stop()

    def _listen(self, controller: Any) -> None:
        self._client = LongPollClient(
            controller,
            {(LongPollNamespace.DEPLOYMENT_TARGETS, self._deployment_id): self._update},
            call_in_event_loop=asyncio.get_running_loop(),
            client_id=f"motet:{self._deployment_id}",
        )

    async def _keep_listening(self) -> None:
        """Subscribes again when the controller has died and was restarted, which stops a client for good."""
        while True:
            await asyncio.sleep(CHECK_INTERVAL_S)
            if not self._client.is_running:
                try:
                    # In a thread: where the head is gone as well, Ray waits a minute or two before it says so.
                    self._listen(await asyncio.to_thread(serve_controller))
                except Exception as error:  # Ray's are many, and none may end the watch for the next controller
                    _log.warning("the Serve controller is away; replicas known before stay in use: %s", error)

    def _update(self, targets: DeploymentTargetInfo) -> None:
        self._on_change({one.replica_id.unique_id: one.replica_metadata for one in targets.running_replicas})


def serve_controller() -> Any:
    """The handle of Serve's controller. Raises ValueError if there is none. It blocks while Ray searches."""
    return ray.get_actor(SERVE_CONTROLLER_NAME, namespace=SERVE_NAMESPACE)
