"""The state of motet as Ray Serve's controller reports it, polled."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Any

from ...router.serve_facts import ServeFacts
from .replica_directory import serve_controller

INTERVAL_S = 15.0
ANSWER_S = 10.0  # after which the controller counts as away
DEPLOYING = "DEPLOYING"

_log = logging.getLogger(__name__)

Details = Mapping[str, Any]


class ServeWatch:
    """Calls `on_change` with what the controller says, and when it answers no more. Belongs to one event loop."""

    def __init__(
        self,
        app: str,
        gang_deployment: str,
        on_change: Callable[[ServeFacts], None],
        ask: Callable[[], Awaitable[Details]] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`ask`: the details of all applications, as Serve's REST API has them; None: read from the controller."""
        self._app, self._gang, self._on_change, self._clock = app, gang_deployment, on_change, clock
        self._ask = ask or _ask_controller
        self._facts: ServeFacts | None = None
        self._deploying_since: float | None = None
        self._question: asyncio.Task[Details] | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._look_forever(), name="serve watch")

    def stop(self) -> None:
        for task in (self._task, self._question):
            if task is not None:
                task.cancel()

    async def look(self) -> None:
        """Asks once. A question that is still open is waited for again: there is never a second one."""
        if self._question is None:
            self._question = asyncio.ensure_future(_as_coroutine(self._ask))
        done, _ = await asyncio.wait([self._question], timeout=ANSWER_S)
        if not done:
            return self._note_silence("no answer")
        question, self._question = self._question, None
        try:
            facts = self._facts_in(question.result())
        except Exception as error:  # Ray's are many, and none may end the watch
            return self._note_silence(repr(error))
        if self._facts is not None and not self._facts.is_head_connected:
            _log.info("Serve's controller answers again")
        self._take(facts)

    def _facts_in(self, details: Details) -> ServeFacts:
        """Raises KeyError if Serve has no such application."""
        application = details["applications"][self._app]
        gang = application["deployments"][self._gang]
        config = gang["deployment_config"]
        bounds = config.get("autoscaling_config")
        wanted = gang["target_num_replicas"]
        now = self._clock()
        if application["status"] != DEPLOYING:
            self._deploying_since = None
        elif self._deploying_since is None:
            self._deploying_since = now
        return ServeFacts(
            status=application["status"],
            num_wanted_gangs=wanted,
            min_gangs=wanted if bounds is None else bounds["min_replicas"],
            max_gangs=wanted if bounds is None else bounds["max_replicas"],
            rollout_s=0.0 if self._deploying_since is None else now - self._deploying_since,
            is_head_connected=True,
        )

    def _note_silence(self, why: str) -> None:
        if self._facts is None or not self._facts.is_head_connected:
            return
        _log.warning("Serve's controller, on the head, does not answer: %s", why)
        self._take(replace(self._facts, is_head_connected=False))

    def _take(self, facts: ServeFacts) -> None:
        self._facts = facts
        self._on_change(facts)

    async def _look_forever(self) -> None:
        while True:
            await self.look()
            await asyncio.sleep(INTERVAL_S)


async def _as_coroutine(ask: Callable[[], Awaitable[Details]]) -> Details:
    return await ask()


async def _ask_controller() -> Details:
    # In a thread: where the head is gone, Ray searches for a minute or two.
    controller = await asyncio.to_thread(serve_controller)
    details: Details = await controller.get_serve_instance_details.remote()
    return details
