"""A router's copy of the registry, which every request reads, so that serving does not depend on Redis."""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from hashlib import sha256

from ..adapter import AdapterVersion
from ..ended_tasks import end_tasks
from ..errors import RegistryFull, RegistryUnavailable
from ..names import PLAIN_SIGHT, Sight
from .events import AdapterDeleted, AdapterSet, KeySet, RegistryEvent, TenantSet, UserDeleted, decode_key, decode_tenant
from .kept_adapters import KeptAdapters, Name
from .known_keys import KnownKeys
from .registry import PAGE_SIZE, NumberedEvent, Registry
from .tenants.records import KeyRecord, TenantRecord
from .versions.pins import KnownPins, Pin, pin_of, read_pin

# Lookups of single names in the registry, many at once: each name once, and all that wait as one command.

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
                answer = await asyncio.shield(future)
        except TimeoutError as error:
            raise RegistryUnavailable(f"the registry gave no answer within {deadline_s:g} s: try again") from error
        if isinstance(answer, RegistryUnavailable):
            raise RegistryUnavailable(str(answer)) from answer
        return answer

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
            for name, answer in zip(names, answers, strict=True):
                if not isinstance(answer, RegistryUnavailable):
                    answer = _newest(answer, self._events.get(name, []))
                    self._on_found(name, answer)
                self._answer(name, answer)
            self._under_way, self._events = {}, {}
        self._task = None

    def _answer(self, name: Name, answer: _Found) -> None:
        future = self._under_way.pop(name, None) or self._waiting.pop(name, None)
        if future is not None and not future.done():
            future.set_result(answer)


def _newest(adapter: AdapterVersion | None, events: Sequence[AdapterSet | AdapterDeleted]) -> AdapterVersion | None:
    """What the name means after the events, some of which the answer may already reflect."""
    for event in events:
        if isinstance(event, AdapterSet):
            if adapter is None or event.adapter.order > adapter.order:
                adapter = event.adapter
        elif adapter is not None and adapter.order <= event.order:
            adapter = None
    return adapter


CAPACITY = 65_536  # adapters: some 40 MB
_LOOKUP_S = 1.0
_CATCH_UP_S = 1.0
_SPREAD_S = 1.0  # for other routers to have an event
_SPREAD_LOOK_S = 0.003
_WAIT_S = 1.0  # for events; less than the client's socket timeout
_FIRST_BACKOFF_S = 0.05
_MAX_BACKOFF_S = 2.0
_STREAM_KEY_BYTES = 32


class _EventsMissed(Exception):  # noqa: N818
    """Events came faster than they were read, or Redis lost its data: what was loaded cannot be brought up to date."""


class RegistryView:
    """All API keys, all tenants, and up to `capacity` adapters, the most requested ones.

    It applies every event, and reads the adapters page by page; a name that is not kept is looked up on request.
    After an outage it goes on with the events where it stopped, or loads again if some are lost. While Redis is down it
    answers with the last state that it knew, but not about names that it does not keep. Owned by one event loop.
    """

    def __init__(self, registry: Registry, capacity: int = CAPACITY) -> None:
        self._registry = registry
        self._names = KeptAdapters(capacity)
        self._keys = KnownKeys()
        self.pins = KnownPins()  # as of the last event of the stream; read only
        self._stream_keys: tuple[bytes, ...] = (secrets.token_bytes(_STREAM_KEY_BYTES),)
        self._lookups = AdapterLookups(registry.get_many, self._keep)
        self._event_id = "0-0"
        self._event_number = 0
        self._advanced = asyncio.Condition()  # notified when events were applied
        self._applied_meanwhile: list[RegistryEvent] | None = None  # a list while it loads
        self._connected = False
        self.on_outdated: Callable[[str], None] = lambda digest: None  # gets digests that a name no longer points to
        self.num_routers: Callable[[], int] = lambda: 1  # of this motet, this one included
        self._name = secrets.token_hex(8)  # among them
        self.on_tenant: Callable[[TenantRecord], None] = lambda tenant: None  # gets a tenant's record that may be new
        self._filler: asyncio.Task[None] | None = None
        self.is_unreachable = False  # the registry has not answered when it was last asked for events
        self._may_resume = False  # whether to go on after the last event that was read
        self._task: asyncio.Task[None] | None = None

    @property
    def connected(self) -> bool:
        """Whether the view receives the registry's events now."""
        return self._connected

    @property
    def last_event(self) -> int:
        """Number of the last event that was applied: the keys are those of that moment."""
        return self._event_number

    @property
    def is_whole(self) -> bool:
        """Whether all adapters of the registry are kept."""
        return self._names.whole

    @property
    def num_kept(self) -> int:
        return len(self._names)

    async def start(self) -> None:
        """Loads the registry and begins to apply its events. Raises RegistryUnavailable."""
        await self._load()
        self._task = asyncio.create_task(self._follow(), name="registry view")

    async def stop(self) -> None:
        tasks = (self._task, self._filler)
        self._task = self._filler = None
        await end_tasks(*tasks)
        await self._lookups.stop()
        self._connected = False

    async def resolve(self, tenant: str, name: str, sight: Sight = PLAIN_SIGHT) -> AdapterVersion | None:
        """The current version of the adapter that `name` refers to for this caller; None: there is none, or none that
        the caller may see.

        Raises RegistryUnavailable for a name that is not kept and cannot be looked up.
        """
        names = sight.names(name)
        for number, candidate in enumerate(names):
            is_known, adapter = self._names.find((tenant, candidate))
            if not is_known:
                return await self._look_up(tenant, names[number:])
            if adapter is not None:
                return adapter
        return None

    async def _look_up(self, tenant: str, names: Sequence[str]) -> AdapterVersion | None:
        """The first of these that exists."""
        if not self._connected:
            raise RegistryUnavailable(
                "the registry cannot be reached, and this router does not keep this name: try again in a moment"
            )
        adapters = await asyncio.gather(*(self._lookups.get((tenant, candidate), _LOOKUP_S) for candidate in names))
        return next((adapter for adapter in adapters if adapter is not None), None)

    async def list_adapters(
        self, tenant: str, after: str = "", limit: int = PAGE_SIZE, sight: Sight = PLAIN_SIGHT
    ) -> Sequence[AdapterVersion]:
        """At most `limit` of the tenant's adapters that the caller sees, sorted by name, from the first after `after`.

        They are read from the registry. While that cannot be reached, a view that is whole lists its copy; another one
        raises RegistryUnavailable.
        """
        try:
            if self.is_unreachable:
                raise RegistryUnavailable("the registry cannot be reached: try again in a moment")
            return await self._registry.list_adapters(tenant, after, limit, sight)
        except RegistryUnavailable:
            if not self.is_whole:
                raise
            seen = [adapter for adapter in self._names.of(tenant) if sight.sees(adapter.name)]
            return [adapter for adapter in seen if adapter.name > after][:limit]

    def key(self, key: str) -> KeyRecord | None:
        """The record of an API key; None: there is no such key."""
        return self._keys.key(sha256(key.encode()).digest())

    def tenant(self, name: str) -> TenantRecord:
        """The record of a tenant, or one with the defaults."""
        return self._keys.tenant(name)

    @property
    def keys(self) -> KnownKeys:
        """All keys and tenants, read only."""
        return self._keys

    async def catch_up(self) -> None:
        """Returns when this view has every change that was made before the call.

        Raises RegistryUnavailable, also where that takes longer than a second.
        """
        goal = await self._registry.num_events()
        async with self._advanced:
            try:
                async with asyncio.timeout(_CATCH_UP_S):
                    await self._advanced.wait_for(lambda: self._connected and self._event_number >= goal)
            except TimeoutError as error:
                raise RegistryUnavailable("this router's copy of the registry is behind: try again") from error

    async def spread(self) -> None:
        """Returns when all routers have every change that was made before the call, so that no later request misses it.

        It waits no longer than a second for a router that hangs or has lost the registry, and raises nothing: the
        changes are made.
        """
        if self.num_routers() < 2:
            return
        now = asyncio.get_running_loop().time
        until = now() + _SPREAD_S  # since a client of Redis may lose the cancellation that ends the block
        with suppress(RegistryUnavailable, TimeoutError):
            async with asyncio.timeout(_SPREAD_S):
                goal = await self._registry.num_events()
                while now() < until and await self._registry.num_routers_at(goal) < self.num_routers():  # noqa: ASYNC110
                    await asyncio.sleep(_SPREAD_LOOK_S)

    @property
    def stream_keys(self) -> tuple[bytes, ...]:
        """Secrets with which routers seal event ids: the current one, then the one before Redis last lost its data."""
        return self._stream_keys

    def apply(self, event: RegistryEvent) -> None:
        """Applies an event at once, before the stream brings it. An event older than the view's state is ignored."""
        if self._applied_meanwhile is not None:
            self._applied_meanwhile.append(event)
        self._lookups.observe(event)
        outdated = _apply(event, self._names, self._keys)
        if outdated is not None:
            self.on_outdated(outdated)
        if isinstance(event, TenantSet):
            self.on_tenant(event.tenant)

    def check_integrity(self) -> None:
        """Raises AssertionError if an invariant is broken."""
        self._names.check_integrity()
        self._keys.check_integrity()
        self.pins.check_integrity()

    def _keep(self, name: Name, adapter: AdapterVersion | None) -> None:
        self._names.keep(name, adapter)

    async def _load(self) -> None:
        """Loads the registry, and again if events were missed meanwhile."""
        self._applied_meanwhile = []
        try:
            while True:
                try:
                    await self._load_once()
                    break
                except _EventsMissed as error:
                    _LOG.info("%s: loading again", error)
            stream_key = await self._registry.share_stream_key(self._stream_keys[0])
            if stream_key != self._stream_keys[0]:
                self._stream_keys = (stream_key, self._stream_keys[0])
            meanwhile, self._applied_meanwhile = self._applied_meanwhile, None
        finally:
            self._applied_meanwhile = None
        for event in meanwhile:  # they may be newer than what was loaded
            self.apply(event)
        self._connected = self._may_resume = True
        await self._notify_advanced()

    async def _load_once(self) -> None:
        position = await self._registry.position()
        names = await self._load_kept(filling=position.num_adapters <= self._names.capacity)
        keys = KnownKeys()
        async for tenants in self._registry.scan_tenants():
            for _, record in tenants:
                keys.set_tenant(decode_tenant(record))
        async for page in self._registry.scan_keys():
            for key_hash, record in page:
                keys.set_key(key_hash, decode_key(key_hash, record))
        # Each page was read at another moment, all after `position`. Applying the events since then makes the copy
        # consistent.
        pins: dict[Name, Pin | None] = {}
        async for pin_page in self._registry.scan_pins():
            pins.update([read_pin(field, text) for field, text in pin_page])
        event_id, number = position.event_id, position.event_number
        goal = await self._registry.num_events()
        while number < goal:
            entries = await self._registry.read_events(event_id, 0.0)
            if not entries:
                raise _EventsMissed(f"events up to {goal} are missing")
            for entry in entries:
                _check_next(entry, number)
                _apply(entry.event, names, keys)
                pins.update(_pins_of(entry.event))
                event_id, number = entry.event_id, entry.number
        self._lookups.forget()  # their answers may be older than the events that were applied here
        self._names, self._keys = names, keys
        self.pins.replace({name: pin for name, pin in pins.items() if pin is not None})
        self._event_id, self._event_number = event_id, number
        self._filler = self._refill()
        for tenant in keys.tenants():
            self.on_tenant(tenant)

    def _refill(self) -> asyncio.Task[None] | None:
        """Adds all other adapters, while requests are served already, if there is room for them."""
        if self._filler is not None:
            self._filler.cancel()
        return asyncio.create_task(self._fill(self._names), name="registry fill") if self._names.filling else None

    async def _fill(self, names: KeptAdapters) -> None:
        while names.filling:
            try:
                async for page in self._registry.scan_adapters():
                    if not names.add_page(page):
                        return
                names.end_filling()
            except RegistryUnavailable as error:
                _LOG.info("reading all adapters begins again: %s", error)
                await asyncio.sleep(_MAX_BACKOFF_S)
            except Exception:  # requests look names up one by one instead
                _LOG.exception("the registry's adapters cannot be read")
                return

    async def _load_kept(self, filling: bool) -> KeptAdapters:
        """The names that are kept now, with versions just read from the registry."""
        names = KeptAdapters(self._names.capacity, filling=filling)
        current_names = self._names.names()
        for start in range(0, len(current_names), PAGE_SIZE // 4):
            some = current_names[start : start + PAGE_SIZE // 4]
            for name, adapter in zip(some, await self._registry.get_many(some), strict=True):
                names.keep(name, adapter)
        return names

    async def _follow(self) -> None:
        backoff_s = _FIRST_BACKOFF_S
        while True:
            try:
                if not self._connected:
                    await self._reconnect()
                    _LOG.info("following the registry again: %d adapters kept", self.num_kept)
                await self._read()
                self.is_unreachable = False
                backoff_s = _FIRST_BACKOFF_S
                continue
            except RegistryUnavailable as error:
                self.is_unreachable = True
                self._enter_outage("lost the registry, serving from memory: %s", error)
            except Exception as error:  # a view without events would serve old versions for ever
                self._may_resume = False  # the next event may be the one that cannot be read
                self._enter_outage("cannot follow the registry, serving from memory: %r", error)
            await asyncio.sleep(backoff_s * random.uniform(0.5, 1.0))
            backoff_s = min(2 * backoff_s, _MAX_BACKOFF_S)

    async def _reconnect(self) -> None:
        if self._may_resume and await self._registry.has_event(self._event_id, self._event_number):
            self._connected = True
            await self._notify_advanced()
        else:
            await self._load()

    async def _read(self) -> None:
        entries = await self._registry.read_events(self._event_id, _WAIT_S)
        if not entries and await self._registry.num_events() != self._event_number:
            entries = await self._registry.read_events(self._event_id, 0.0)  # they may have come since
            if not entries:  # Redis lost its data, and the ids of its new events are not above the last known one
                _LOG.info("the registry has lost its events: loading again")
                await self._load()
        for entry in entries:
            try:
                _check_next(entry, self._event_number)
            except _EventsMissed as error:
                _LOG.info("%s: loading again", error)
                await self._load()
                return
            self.apply(entry.event)
            for name, pin in _pins_of(entry.event).items():
                self.pins.change(name, pin)
            self._event_id, self._event_number = entry.event_id, entry.number
        if entries:
            await self._notify_advanced()

    async def _notify_advanced(self) -> None:
        async with self._advanced:
            self._advanced.notify_all()
        if self.num_routers() > 1:
            with suppress(RegistryFull):  # others wait for it in vain, a second
                await self._registry.note_position(self._name, self._event_number)

    def _enter_outage(self, message: str, error: Exception) -> None:
        if self._connected:  # once per outage
            _LOG.warning(message, error)
        self._connected = False


def _check_next(entry: NumberedEvent, number: int) -> None:
    if entry.number != number + 1:  # Redis trimmed unread events, or it lost its data
        raise _EventsMissed(f"missed events {number + 1} to {entry.number - 1}")


def _apply(event: RegistryEvent, names: KeptAdapters, keys: KnownKeys) -> str | None:
    """The digest that a name no longer points to, if it is known."""
    match event:
        case AdapterSet(adapter):
            return names.set(adapter)
        case AdapterDeleted(tenant, name):
            return names.delete((tenant, name), event.order)
        case KeySet() | TenantSet():
            keys.apply(event)
        case UserDeleted():
            pass  # its number alone counts: see `last_event`
    return None


def _pins_of(event: RegistryEvent) -> dict[Name, Pin | None]:
    """The adapter's name with its pin after the event; empty: the event changes no adapter."""
    match event:
        case AdapterSet(adapter):
            return {(adapter.tenant, adapter.name): pin_of(adapter)}
        case AdapterDeleted(tenant, name):
            return {(tenant, name): None}
    return {}
