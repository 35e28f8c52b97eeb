"""The base model that this router serves: its limits, and which names in requests mean it or an adapter of it."""

from __future__ import annotations

import asyncio

from ..adapters.adapter import AdapterVersion
from ..adapters.names import split_selector
from ..adapters.registry.registry_view import RegistryView
from ..adapters.registry.versions.rollout import selected
from ..workers.wire.messages import GangInfo
from .fleet.dispatch import Dispatcher, probe
from .http.auth import Identity
from .http.errors import model_not_found, unavailable


class BaseModel:
    """Keeps the facts of the last gang, so that requests can be checked while gangs are replaced."""

    def __init__(self, name: str, dispatcher: Dispatcher, view: RegistryView, *, scales_from_zero: bool) -> None:
        self.name = name
        self._scales_from_zero = scales_from_zero
        self._first_gang = asyncio.Lock()  # requests that wait for the first gang share one probe
        self._dispatcher = dispatcher
        self._view = view
        self._last_gang: GangInfo | None = None

    def known_gang(self) -> GangInfo | None:
        """Facts of a connected gang, else of the last gang that was connected; None: there has been none."""
        self._last_gang = self._dispatcher.gang() or self._last_gang
        return self._last_gang

    async def wait_for_first_gang(self) -> None:
        """Waits until this router has had a connection to a gang, and makes a gang start if none runs.

        Returns at once if there has been a connection, and where gangs do not scale from zero. Raises 503 if no gang
        comes.
        """
        if not self._scales_from_zero or self.known_gang() is not None:
            return
        async with self._first_gang:
            if self.known_gang() is None:
                problem = await probe(self._dispatcher)
                if problem is not None:
                    raise unavailable(f"No gang of workers is connected yet: {problem}.", "gang_lost")

    def gang(self) -> GangInfo:
        """`known_gang`, but raises 503 if no gang has ever been connected."""
        gang = self.known_gang()
        if gang is None:
            raise unavailable("No gang of workers is connected yet, try again.", "gang_lost")
        return gang

    async def adapter(self, identity: Identity, model: str) -> AdapterVersion | None:
        """The current version of the adapter that a request's `model` names, `name` or `name@…`; None: the base itself.

        Raises 404 for a name that the caller does not see; a version or alias after an @ is ignored.
        Raises RegistryUnavailable for an adapter that this router does not keep in memory while Redis is away.
        """
        if model == self.name:
            return None
        current = await resolved(self._view, identity, split_selector(model)[0])
        if current is None:
            raise model_not_found(model)
        return current


async def resolved(view: RegistryView, identity: Identity, model: str) -> AdapterVersion | None:
    """The version that `name`, `name@3` or `name@alias` is for the caller; None: there is none.

    Raises RegistryUnavailable.
    """
    name, selector = split_selector(model)
    current = await view.resolve(identity.name, name, identity.sight)
    return selected(current, selector) if selector is not None and current is not None else current
