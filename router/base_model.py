"""The base that this router serves: its limits, and which names ask for it or for an adapter of it."""

from __future__ import annotations

import asyncio

from ..adapters.registry.registry_view import RegistryView
from ..workers.wire.messages import AdapterRef, GangInfo
from .fleet.dispatch import Dispatcher
from .fleet.probe import probe
from .openai_api.errors import model_not_found, unavailable


class BaseModel:
    """Answers from memory. Remembers a gang's facts, so that requests can be checked while it is being replaced."""

    def __init__(self, name: str, dispatcher: Dispatcher, view: RegistryView, *, scales_from_zero: bool) -> None:
        self.name = name
        self._scales_from_zero = scales_from_zero
        self._first_gang = asyncio.Lock()  # requests that wait for it share one probe
        self._dispatcher = dispatcher
        self._view = view
        self._last_gang: GangInfo | None = None

    def known_gang(self) -> GangInfo | None:
        """Facts of a connected gang, else of the last one."""
        self._last_gang = self._dispatcher.gang() or self._last_gang
        return self._last_gang

    async def meet_a_gang(self) -> None:
        """Where gangs come when they are asked for, waits for the first one that this router meets, and asks for it.

        Raises 503 if none comes. Returns at once when one was ever met, and where there is always to be one.
        """
        if not self._scales_from_zero or self.known_gang() is not None:
            return
        async with self._first_gang:
            if self.known_gang() is None:
                problem = await probe(self._dispatcher)
                if problem is not None:
                    raise unavailable(f"No gang of workers is connected yet: {problem}.", "gang_lost")

    def gang(self) -> GangInfo:
        """As `known_gang`. Raises 503 as long as none has ever been connected."""
        gang = self.known_gang()
        if gang is None:
            raise unavailable("No gang of workers is connected yet, try again.", "gang_lost")
        return gang

    def adapter(self, tenant: str, model: str) -> AdapterRef | None:
        """What a request's `model` means for the tenant; None: the base. Raises 404."""
        if model == self.name:
            return None
        version = self._view.resolve(tenant, model)
        if version is None:
            raise model_not_found(model)
        return AdapterRef(version.digest, dict(version.module_ranks))
