"""The API keys and tenants that a router knows: all of them, by hash, by id and by name."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

from .events import KEY_ID_CHARS, KeySet, TenantSet, key_id_of
from .tenants.records import ALL_OF_A_TENANT, KeyRecord, Quota, TenantRecord

_NO_QUOTA = Quota()
_ID_BYTES = KEY_ID_CHARS // 2


class KnownKeys:
    """Keys that share all but their ids share their parts in memory: some 400 bytes each."""

    def __init__(self) -> None:
        self._keys: dict[bytes, KeyRecord] = {}  # by the key's hash
        self._hashes: dict[str, set[bytes]] = {}  # of a tenant's keys
        self._by_id: dict[bytes, bytes] = {}  # hash by its beginning
        self._tenants: dict[str, TenantRecord] = {}

    @property
    def num_keys(self) -> int:
        return len(self._keys)

    def key(self, key_hash: bytes) -> KeyRecord | None:
        return self._keys.get(key_hash)

    def key_with_id(self, key_id: str) -> tuple[str, KeyRecord] | None:
        """Hash and record of a key; None: there is none."""
        try:
            key_hash = self._by_id.get(bytes.fromhex(key_id))
        except ValueError:
            return None
        return None if key_hash is None else (key_hash.hex(), self._keys[key_hash])

    def keys_of_user(self, tenant: str, user: str) -> Sequence[tuple[str, KeyRecord]]:
        """Hash and record of each."""
        mine = ((raw, self._keys[raw]) for raw in self._hashes.get(tenant, ()))
        return [(raw.hex(), record) for raw, record in mine if record.user == user]

    def keys_of(self, tenant: str) -> Sequence[KeyRecord]:
        """Sorted by id."""
        return sorted((self._keys[one] for one in self._hashes.get(tenant, ())), key=lambda key: key.key_id)

    def tenant(self, name: str) -> TenantRecord:
        """A tenant without a record has the defaults."""
        found = self._tenants.get(name)
        return TenantRecord(name=name) if found is None else found

    def has_tenant(self, name: str) -> bool:
        """Whether there is such a tenant: it was created, or it has a key."""
        found = self._tenants.get(name)
        return name in self._hashes or (found is not None and not found.is_gone)

    def tenant_names(self) -> Iterator[str]:
        """Of all tenants that there are, in no order."""
        yield from self._hashes
        yield from (name for name, tenant in self._tenants.items() if not tenant.is_gone and name not in self._hashes)

    def set_key(self, key_hash: str, record: KeyRecord) -> None:
        raw = bytes.fromhex(key_hash)
        before = self._keys.get(raw)
        if before is not None and before.tenant != record.tenant:
            self._drop(raw, before)
        if before is None or before.tenant != record.tenant:
            self._hashes.setdefault(sys.intern(record.tenant), set()).add(raw)
            self._by_id[raw[:_ID_BYTES]] = raw
        self._keys[raw] = _compact(record)

    def set_tenant(self, record: TenantRecord) -> None:
        self._tenants[record.name] = record

    def apply(self, event: KeySet | TenantSet) -> None:
        match event:
            case TenantSet(tenant):
                self.set_tenant(tenant)
            case KeySet(key_hash, None):
                raw = bytes.fromhex(key_hash)
                before = self._keys.pop(raw, None)
                if before is not None:
                    self._drop(raw, before)
            case KeySet(key_hash, str() as tenant, record):
                self.set_key(key_hash, record or KeyRecord(key_id=key_id_of(key_hash), tenant=tenant))

    def check_integrity(self) -> None:
        """Raises AssertionError if an invariant is broken."""
        assert sum(map(len, self._hashes.values())) == len(self._keys) == len(self._by_id)
        for tenant, hashes in self._hashes.items():
            assert hashes, f"{tenant} has no key, and is listed"
            for raw in hashes:
                assert self._keys[raw].tenant == tenant and self._by_id[raw[:_ID_BYTES]] == raw

    def _drop(self, raw: bytes, record: KeyRecord) -> None:
        hashes = self._hashes[record.tenant]
        hashes.discard(raw)
        if not hashes:
            del self._hashes[record.tenant]
        del self._by_id[raw[:_ID_BYTES]]


def _compact(record: KeyRecord) -> KeyRecord:
    """The same, with parts that others have too."""
    return KeyRecord(
        key_id=record.key_id,
        tenant=sys.intern(record.tenant),
        scopes=ALL_OF_A_TENANT if record.scopes == ALL_OF_A_TENANT else record.scopes,
        label=record.label,
        user=record.user,
        created_at=record.created_at,
        expires_at=record.expires_at,
        quota=_NO_QUOTA if record.quota == _NO_QUOTA else record.quota,
    )
