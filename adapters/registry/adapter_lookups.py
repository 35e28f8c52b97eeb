"""Lookups of single names in the registry, many at once: each name once, and all that wait as one command."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

from ..adapter import AdapterVersion
from ..ended_tasks import end_tasks
from ..errors import RegistryUnavailable
from .events import AdapterDeleted, AdapterSet, RegistryEvent
from .kept_adapters import Name
from .registry import PAGE_SIZE

_LOG = logging.getLogger(__name__)
_Found = AdapterVersion | None | RegistryUnavailable


class AdapterLookups:
    """Reads names with `get_many`, one command at a time. `on_found` gets each answer before its waiters do.

    An event that arrives while a name is looked up is merged into the answer, since the command may have read the name
    before the change. Owned by one event loop.
    """

    def __init__(
        self,
        get_many: Callable[[Sequence[Name]], Awaitable[Sequence[AdapterVersion | None]]],
        on_found: Callable[[Name, AdapterVersion | None], None],
    ) -> None:
        self._get_many = get_many
        self._on_found = on_found
        self._waiting: dict[Name, asyncio.Future[_Found]] = {}
        self._under_way: dict[Name, asyncio.Future[_Found]] = {}
        self._events: dict[Name, list[AdapterSet | AdapterDeleted]] = {}  # of names under way
        self._task: asyncio.Task[None] | None = None

    async def get(self, name: Name, deadline_s: float) -> AdapterVersion | None:
        """The name's current version; None: there is none. Raises RegistryUnavailable, also after `deadline_s`."""
        future = self._under_way.get(name) or self._waiting.get(name)
        if future is None:
            future = self._waiting[name] = asyncio.get_running_loop().create_future()
            if self._task is None:
                self._task = asyncio.create_task(self._run(), name="registry lookups")
        try:
            async with asyncio.timeout(deadline_s):
                found = await asyncio.shield(future)
        except TimeoutError as error:
            raise RegistryUnavailable(f"the registry gave no answer within {deadline_s:g} s: try again") from error
        if isinstance(found, RegistryUnavailable):
            raise RegistryUnavailable(str(found)) from found
        return found

    def observe(self, event: RegistryEvent) -> None:
        """Takes in an event of the registry, whose name may be under way."""
        match event:
            case AdapterSet(adapter):
                name = (adapter.tenant, adapter.name)
            case AdapterDeleted(tenant, own_name, _):
                name = (tenant, own_name)
            case _:
                return
        if name in self._under_way:
            self._events.setdefault(name, []).append(event)

    def forget(self) -> None:
        """Discards the answers that are under way, and looks their names up again."""
        self._waiting = {**self._under_way, **self._waiting}
        self._under_way, self._events = {}, {}

    async def stop(self) -> None:
        """Fails the lookups that still wait."""
        task, self._task = self._task, None
        await end_tasks(task)
        for name in [*self._under_way, *self._waiting]:
            self._answer(name, RegistryUnavailable("this router ends: try again"))

    async def _run(self) -> None:
        while self._waiting:
            names = list(self._waiting)[:PAGE_SIZE]
            requested = {name: self._waiting.pop(name) for name in names}
            self._under_way = requested
            try:
                answers: Sequence[_Found] = await self._get_many(names)
            except RegistryUnavailable as error:
                answers = [error] * len(names)
            except Exception as error:  # the waiters get the error, and the next lookups are made
                _LOG.exception("a lookup in the registry failed")
                answers = [RegistryUnavailable(f"the registry could not be read: {error!r}")] * len(names)
            if self._under_way is not requested:
                continue  # forgotten
            for name, found in zip(names, answers, strict=True):
                if not isinstance(found, RegistryUnavailable):
                    found = _newest(found, self._events.get(name, []))
                    self._on_found(name, found)
                self._answer(name, found)
            self._under_way, self._events = {}, {}
        self._task = None

    def _answer(self, name: Name, found: _Found) -> None:
        future = self._under_way.pop(name, None) or self._waiting.pop(name, None)
        if future is not None and not future.done():
            future.set_result(found)


def _newest(found: AdapterVersion | None, events: Sequence[AdapterSet | AdapterDeleted]) -> AdapterVersion | None:
    """What the name means after the events, some of which the answer may already reflect."""
    for event in events:
        if isinstance(event, AdapterSet):
            if found is None or event.adapter.order > found.order:
                found = event.adapter
        elif found is not None and found.order <= event.order:
            found = None
    return found
