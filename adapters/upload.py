"""Uploads of adapters: validate, store, register. An upload that is refused changes nothing."""

from __future__ import annotations

import asyncio
import logging
import secrets
import signal
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final, TypeVar

import msgspec
from msgspec import structs

from .adapter import AdapterVersion, BaseTensor
from .errors import AdapterInvalid, NoSuchName, UploadTooLarge, UploadUnchecked
from .format.combination import Combination
from .format.own_tokenizer import NO_OWN_TEXT, OwnText
from .format.peft import CONFIG_FILE, TENSORS_FILE
from .format.score_head import ScoreHead
from .names import PLAIN_SIGHT, Sight, check_name, check_tenant
from .packing.layout import AdapterLayout, packed_bytes
from .processes.child_processes import ChildEnded, ChildProcess, ChildProcesses
from .registry.events import AdapterSet
from .registry.name_records import no_such_name
from .registry.registry import DigestSet, Registry
from .registry.registry_view import RegistryView
from .registry.stored_counts import Unswept
from .registry.tenants.records import Admission, AuditEntry, StorageBound, StorageUse, check_storage
from .registry.versions.name_state import NameState, VersionNote, no_version_yet
from .registry.versions.rollout import MAX_VERSIONS, versions_of
from .store.store import BEGINNINGS, AdapterStore
from .tenant_places import TenantPlaces
from .upload_process import CHECK, COMBINE, FORGET, STORE, Answer, Check, UploadFacts, UploadRefused

# Uploads that are checked, and then stored, by a process beside this one.

_MODULE: Final = "motet.adapters.upload_process"
CPU_S: Final = 20.0  # for an upload of no size
CPU_S_PER_GIB: Final = 60.0  # of tensors
_DEADLINE_S: Final = 900.0  # to check or to store one: its process has the lowest priority
_log = logging.getLogger(__name__)


class UploadProcesses:
    """At most `max_processes` uploads at once. Belongs to one event loop."""

    def __init__(
        self, max_processes: int, store: Path, layouts: Sequence[AdapterLayout], base: Mapping[str, BaseTensor]
    ) -> None:
        """`layouts`: for which adapters are packed. `base`: see `BaseWeights`."""
        self._processes = ChildProcesses(_MODULE, max_processes, _DEADLINE_S)
        self._store, self._layouts, self._base = store, tuple(layouts), dict(base)

    @asynccontextmanager
    async def checked(
        self,
        config: bytes | Combination,
        tensors: Path,
        num_bytes: int,
        max_packed_bytes: int,
        own_token_ids: tuple[int, ...] = (),
    ) -> AsyncIterator[CheckedUpload]:
        """The upload, if it is an adapter of the base, or the combination of stored ones, written to `tensors`.

        `num_bytes`: of the file `tensors`, or of the combination's parts. `own_token_ids`: see `Check`.

        Raises AdapterInvalid, UploadTooLarge, UploadUnchecked, and OSError if the disk fails.
        """
        cpu_s = CPU_S + CPU_S_PER_GIB * num_bytes / (1 << 30)
        check = Check(
            tensors=str(tensors),
            store=str(self._store),
            layouts=self._layouts,
            max_packed_bytes=max_packed_bytes,
            cpu_s=cpu_s,
            base=self._base,
            own_token_ids=own_token_ids,
        )
        async with self._processes.process() as process:
            kind, source = (CHECK, config) if isinstance(config, bytes) else (COMBINE, msgspec.msgpack.encode(config))
            facts = await _ask(process, cpu_s, kind, msgspec.msgpack.encode(check), source)
            upload = CheckedUpload(process, cpu_s, facts)
            try:
                yield upload
            finally:
                await upload.forget()


class CheckedUpload:
    """`module_ranks`, `base`: as in `AdapterVersion`. `num_bytes`: of its tensors. The others: see `AdapterContent`."""

    def __init__(self, process: ChildProcess, cpu_s: float, facts: UploadFacts) -> None:
        self.digest, self.num_bytes, self.base = facts.digest, facts.num_bytes, facts.base
        self.left_out, self.unknown_field, self.warnings = facts.left_out, facts.unknown_field, facts.warnings
        self.invocation_token_ids, self.num_labels = facts.invocation_token_ids, facts.num_labels
        self.untrained_token_ids = facts.untrained_token_ids  # see `UploadFacts`
        self.module_ranks: Mapping[str, int] = facts.module_ranks
        self._process, self._cpu_s = process, cpu_s
        self._is_held = True

    async def store(self) -> None:
        """Stores it, once. Its ranks are then those of an earlier upload of the same digest, if there was one.

        Raises as `UploadProcesses.checked`.
        """
        self._is_held = False
        self.module_ranks = (await _ask(self._process, self._cpu_s, STORE)).module_ranks

    async def forget(self) -> None:
        """Has the process close the upload's file, if that is still open."""
        if self._is_held and not self._process.is_last:
            self._is_held = False
            with suppress(ChildEnded, OSError, TimeoutError):  # then the process has ended, which closes it, too
                await self._process.ask([FORGET], lambda frames: None)


def refuse_doubtful(upload: CheckedUpload) -> None:
    """Raises AdapterInvalid if not all of it is served, or its config has a field that nobody knows."""
    if problem := upload.left_out or upload.unknown_field:
        raise AdapterInvalid(problem)


async def _ask(process: ChildProcess, cpu_s: float, *frames: bytes) -> UploadFacts:
    try:
        answer = await process.ask(frames, lambda reply: msgspec.msgpack.decode(reply[0], type=Answer))
    except ChildEnded as error:
        if error.status == -signal.SIGPROF:
            raise AdapterInvalid(f"this adapter takes more than {cpu_s:.0f} s of CPU to check or to pack") from error
        _log.warning("an upload could not be checked: %s", error)
        raise UploadUnchecked("the process that checks uploads has ended: try again") from error
    except TimeoutError as error:
        _log.warning("an upload could not be checked within %g s", _DEADLINE_S)
        raise UploadUnchecked("the machine is too busy to check this upload: try again later") from error
    if isinstance(answer, UploadFacts):
        return answer
    assert isinstance(answer, UploadRefused)
    if answer.kind == "disk":
        raise OSError(answer.errno, answer.message)
    errors = {"invalid": AdapterInvalid, "too_large": UploadTooLarge, "unavailable": UploadUnchecked}
    raise errors[answer.kind](answer.message)


T = TypeVar("T")
_SWEEP_LEASE_S = 60.0  # of a 256th of a store; then another router takes over from one that died


@dataclass(frozen=True, kw_only=True)
class UploadLimits:
    max_tensors_bytes: int  # of adapter_model.safetensors
    max_config_bytes: int = 1 << 20
    max_packed_bytes: int | None = None  # of its pages on all workers of a gang; None: twice max_tensors_bytes
    max_concurrent: int = 2  # uploads validated and packed at once, each in a process, of one tenant one

    @property
    def packed_bytes_limit(self) -> int:
        return 2 * self.max_tensors_bytes if self.max_packed_bytes is None else self.max_packed_bytes


class UploadService:
    """Uploads, lists, changes and deletes adapters. Owned by one event loop; processes beside it handle tensors.

    Adapters are packed for each of `layouts`, which are of one base. `reserved`: names that no adapter may have.
    """

    def __init__(
        self,
        store: AdapterStore,
        registry: Registry,
        view: RegistryView,
        layouts: Sequence[AdapterLayout],
        limits: UploadLimits,
        reserved: Collection[str] = (),
        base: Mapping[str, BaseTensor] = MappingProxyType({}),
    ) -> None:
        """`base`: see `BaseWeights`; without it adapters whose products depend on the base's weights are refused."""
        if not layouts or any(layout.shape != layouts[0].shape for layout in layouts):
            raise ValueError(f"{len(layouts)} layouts: at least one is needed, and all must be of one base")
        self.limits = limits
        self._store = store
        self._registry = registry
        self._view = view
        self._layouts = tuple(layouts)
        self._reserved = frozenset(reserved)
        self._places = TenantPlaces(self.limits.max_concurrent)
        self._processes = UploadProcesses(self.limits.max_concurrent, store.root, layouts, base)

    async def upload(
        self,
        tenant: str,
        name: str,
        config: bytes | Path | Combination,
        tensors: Path,
        *,
        response_template: str = "",
        own_text: OwnText = NO_OWN_TEXT,
        activate: bool = True,
        must_be_new: bool = False,
        note: VersionNote | None = None,
        admission: Admission | None = None,
        entry: AuditEntry | None = None,
        bounds: Sequence[StorageBound] = (),
        take_room: Callable[[int], None] = lambda num_bytes: None,
        check: Callable[[CheckedUpload], None] = refuse_doubtful,
    ) -> tuple[AdapterVersion, bool]:
        """The version with this content, and whether this upload made it: the same content does not.

        The name points to it from now on, unless `activate` is False: then it is only in the name's history.

        `config` is adapter_config.json, as bytes or a file; `tensors` is the file adapter_model.safetensors. The caller
        removes both afterwards. A combination is made of stored adapters, and is written to `tensors`, which is empty.
        Once this returns, the adapter and `own_text` are on disk.
        `admission` and `entry`: see `NameRecords.register`. `take_room` gets the bytes of its pages before they are
        written, and may raise, as may `check`.

        Raises AdapterInvalid, UploadTooLarge, CallerGone, VersionRefused for a new name without `activate`, NameTaken
        for a name that there is, if it `must_be_new`, QuotaExceeded if more would be stored than `bounds` let, and
        UploadUnchecked and RegistryUnavailable, after which the same upload may be repeated.
        """
        check_tenant(tenant)
        check_name(name, self._reserved)
        await self._registry.ping()  # no work for an upload that cannot be registered
        data, num_bytes = await asyncio.to_thread(self._within_limits, config, tensors)
        async with self._places.of(tenant):  # until it is registered, so that the next one finds it counted
            limit, own_ids = self.limits.packed_bytes_limit, tuple(token.id for token in own_text.tokens)
            async with self._processes.checked(data, tensors, num_bytes, limit, own_ids) as upload:
                check(upload)
                await self._check_registrable(tenant, name, upload, bounds, activate=activate)
                take_room(packed_bytes(self._layouts, upload.module_ranks))
                await upload.store()
                own_digest = ""
                if own_text != NO_OWN_TEXT:
                    own_digest = await asyncio.to_thread(self._store.put_own_text, upload.digest, own_text)
            adapter, current, created = await self._registry.names.register(
                tenant,
                name,
                digest=upload.digest,
                module_ranks=upload.module_ranks,
                num_bytes=upload.num_bytes,
                packed_bytes=packed_bytes(self._layouts, upload.module_ranks),
                base=upload.base,
                response_template=response_template,
                invocation_token_ids=upload.invocation_token_ids,
                own_text=own_digest,
                num_labels=upload.num_labels,
                activate=activate,
                must_be_new=must_be_new,
                note=note,
                admission=admission,
                entry=entry,
                bounds=bounds,
            )
        self._view.apply(AdapterSet(current))
        await self._view.spread()
        return adapter, created

    @property
    def vocab_size(self) -> int:
        """Rows of the base's embedding."""
        ends = self._layouts[0].shape.ends
        return 0 if ends is None else ends.vocab_size

    async def own_text(self, adapter: AdapterVersion) -> OwnText:
        """The version's. Raises AdapterCorrupt, StoreUnavailable."""
        if not adapter.own_text:
            return NO_OWN_TEXT
        return await asyncio.to_thread(self._store.load_own_text, adapter.digest, adapter.own_text)

    async def score_head(self, adapter: AdapterVersion) -> ScoreHead:
        """The version's, which it has, in float32. Raises AdapterCorrupt, StoreUnavailable."""
        return await asyncio.to_thread(self._store.load_head, adapter.digest)

    async def state(self, tenant: str, name: str, sight: Sight = PLAIN_SIGHT) -> NameState:
        """The name with its history, if the caller sees it. Raises NoSuchName, RegistryUnavailable."""
        return await self._registry.names.get(tenant, await self._registered(tenant, name, sight))

    async def _registered(self, tenant: str, requested: str, sight: Sight) -> str:
        """The registered name that the caller means; there may be no such adapter. Raises NoSuchName."""
        names = sight.names(requested)
        if not names:
            raise no_such_name(requested)
        if len(names) == 1:
            return names[0]
        adapters = await self._registry.get_many([(tenant, name) for name in names])
        return next((adapter.name for adapter in adapters if adapter is not None), requested)

    async def change(
        self,
        tenant: str,
        name: str,
        change: Callable[[NameState, float], NameState],
        entry: AuditEntry | None = None,
        admission: Admission | None = None,
        most_pinned_bytes: int | None = None,
        sight: Sight = PLAIN_SIGHT,
    ) -> NameState:
        """The name after a change (`name_state.py`). The other arguments: see `NameRecords.change`.

        Raises as the change does, NoSuchName, CallerGone, QuotaExceeded, RegistryUnavailable.
        """
        name = await self._registered(tenant, name, sight)
        entry = entry and structs.replace(entry, target=name)
        state = await self._registry.names.change(tenant, name, change, entry, admission, most_pinned_bytes)
        self._view.apply(AdapterSet(state.current))
        await self._view.spread()
        return state

    async def delete(
        self,
        tenant: str,
        name: str,
        entry: AuditEntry | None = None,
        sight: Sight = PLAIN_SIGHT,
        admission: Admission | None = None,
    ) -> str | None:
        """Deletes the name with its versions. Returns the registered name; None: the caller sees no such name.

        Sequences that run on it finish. Raises CallerGone, RegistryUnavailable.
        """
        try:
            name = await self._registered(tenant, name, sight)
        except NoSuchName:
            return None
        deleted = await self._registry.names.delete(
            tenant, name, entry and structs.replace(entry, target=name), admission
        )
        if deleted is None:
            return None
        self._view.apply(deleted)
        await self._view.spread()
        return name

    async def list_page(
        self, tenant: str, after: str, limit: int, sight: Sight = PLAIN_SIGHT
    ) -> Sequence[AdapterVersion]:
        """At most `limit` of those that the caller sees, from behind the name `after`. Raises RegistryUnavailable."""
        return await self._registry.list_adapters(tenant, after, limit, sight)

    async def owners(self, tenant: str, after: str, limit: int) -> Sequence[str]:
        """See `Registry.owners`."""
        return await self._registry.owners(tenant, after, limit)

    async def get(self, tenant: str, name: str, sight: Sight = PLAIN_SIGHT) -> AdapterVersion | None:
        """The name's current version, if the caller sees it. Raises RegistryUnavailable."""
        adapters = await self._registry.get_many([(tenant, candidate) for candidate in sight.names(name)])
        return next((adapter for adapter in adapters if adapter is not None), None)

    async def sweep(self, older_than_s: float = 3600.0, rest_s: float = 0.0) -> int | None:
        """Removes stored adapters that no name has had as a version for `older_than_s`, and returns their number.

        Packed files of layouts that are no longer in use are removed too; those of this service's layouts are kept.
        None: another router sweeps this store, or did so less than its `rest_s` ago. The caller calls it at intervals.
        Raises RegistryUnavailable.
        """
        keeps = await self._tidied(self._store.keep_layouts, self._layouts) is not None  # also if another router sweeps
        store_id, sweep_id = await asyncio.to_thread(self._store.store_id), secrets.token_hex(16)
        if not await self._registry.hold_sweep(store_id, sweep_id, _SWEEP_LEASE_S):
            return None
        num_removed, num_packed, is_held, lease_s = 0, 0, True, 0.0
        try:
            last_event = await self._registry.num_events()
            referenced = await self._registry.digests()
            for beginning in BEGINNINGS:
                is_held = await self._registry.hold_sweep(store_id, sweep_id, _SWEEP_LEASE_S)
                if not is_held:  # this router was suspended, and another one sweeps now
                    return num_removed
                removed = await asyncio.to_thread(self._store.sweep_some, beginning, referenced, older_than_s)
                num_removed += len(removed)
                if keeps:
                    num_packed += await self._tidied(self._store.sweep_packed, beginning) or 0
            await self._release_swept(referenced, last_event)
            await asyncio.to_thread(self._store.sweep_unfinished)
            lease_s = rest_s
        finally:
            if num_packed:
                _log.info("removed %d packed files of layouts that are no longer used", num_packed)
            if is_held:
                await self._registry.hold_sweep(store_id, sweep_id, lease_s)
        return num_removed

    async def _release_swept(self, referenced: DigestSet, last_event: int) -> None:
        """Has content that tenants' names have lost count for them no more once it is gone, or is another name's.

        `referenced`: by names after the event `last_event`; what was lost later may still have been a name's then.
        """

        def released_of(page: Sequence[Unswept]) -> list[Unswept]:
            candidates = (unswept for unswept in page if unswept.event_number <= last_event)
            return [entry for entry in candidates if entry.digest in referenced or not self._store.has(entry.digest)]

        async for tenant, page in self._registry.stored.unswept():
            if released := await asyncio.to_thread(released_of, page):
                await self._registry.stored.release(tenant, released)

    @staticmethod
    async def _tidied(work: Callable[[T], int], argument: T) -> int | None:
        """None: the disk was full, or had another error. The sweep goes on without it."""
        try:
            return await asyncio.to_thread(work, argument)
        except OSError as error:
            _log.warning("unused packed files stay for now: %s", error)
            return None

    async def stored(self, tenant: str, owner: str) -> tuple[StorageUse, StorageUse]:
        """What the tenant has stored, and the part of a key or a `~user` in it. Raises RegistryUnavailable."""
        return await self._registry.stored.of(tenant, owner)

    async def _check_registrable(
        self, tenant: str, name: str, upload: CheckedUpload, bounds: Sequence[StorageBound], *, activate: bool
    ) -> None:
        """Raises what the registration would raise already now, so that it takes no disk. The registration decides."""
        if activate and all(bound.is_open for bound in bounds):
            return
        current = await self._registry.get(tenant, name)
        if current is None and not activate:
            raise no_version_yet(name)
        versions = [] if current is None else [*versions_of(current)]
        if any(version.digest == upload.digest for version in versions):
            return  # perhaps nothing new
        counts = Counter(version.digest for version in versions)
        freed = 0  # what a version that goes gives back at once: its content stays until it is swept
        if len(versions) >= MAX_VERSIONS:
            freed = max((candidate.stored_bytes for candidate in versions if counts[candidate.digest] > 1), default=0)
        freed += await self._registry.stored.unswept_bytes(tenant, upload.digest)
        num_bytes = upload.num_bytes + packed_bytes(self._layouts, upload.module_ranks)
        more = StorageUse(0 if versions else 1, num_bytes - freed)
        for bound in bounds:
            use = (await self._registry.stored.of(tenant, bound.owner))[1]
            check_storage(bound, use, more)

    def _within_limits(self, config: bytes | Path | Combination, tensors: Path) -> tuple[bytes | Combination, int]:
        """The config, and the size of the tensors' file. Raises UploadTooLarge for those over the limits."""
        if isinstance(config, Combination):
            return config, config.num_bytes
        config_bytes = config.stat().st_size if isinstance(config, Path) else len(config)
        _check_size(CONFIG_FILE, config_bytes, self.limits.max_config_bytes)
        num_bytes = tensors.stat().st_size
        _check_size(TENSORS_FILE, num_bytes, self.limits.max_tensors_bytes)
        return config.read_bytes() if isinstance(config, Path) else config, num_bytes


def _check_size(label: str, num_bytes: int, limit: int) -> None:
    if num_bytes > limit:
        raise UploadTooLarge(f"{label} has {num_bytes} bytes: at most {limit} are accepted")
