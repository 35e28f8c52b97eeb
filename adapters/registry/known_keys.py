"""The API keys and tenants that a router knows: all of them, by hash, by id and by name."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import Final

from .events import KEY_ID_CHARS, KeySet, TenantSet, key_id_of
from .key_table import DIGEST_BYTES, KeyTable
from .tenants.records import KeyRecord, TenantRecord

_ID_BYTES: Final = KEY_ID_CHARS // 2


class _Owner:
    """A tenant that has, or has had, keys."""

    __slots__ = ("ids", "name", "number")

    def __init__(self, name: str, number: int) -> None:
        self.name = name
        self.number = number  # in the rows of its keys
        self.ids = array("Q")  # of its keys: what their hashes begin with


class KnownKeys:
    """Keys are kept as bytes, since a router may know a million; a record is made of one when it is requested."""

    def __init__(self) -> None:
        self._table = KeyTable()
        self._owners: dict[str, _Owner] = {}
        self._by_number: list[_Owner] = []
        self._tenants: dict[str, TenantRecord] = {}

    @property
    def num_keys(self) -> int:
        return len(self._table)

    def key(self, key_hash: bytes) -> KeyRecord | None:
        found = self._find(key_hash) if len(key_hash) == DIGEST_BYTES else None
        return None if found is None else found[1]

    def key_with_id(self, key_id: str) -> tuple[str, KeyRecord] | None:
        """Hash and record of a key; None: there is none."""
        try:
            prefix = bytes.fromhex(key_id)
        except ValueError:
            return None
        return self._find(prefix) if len(prefix) == _ID_BYTES else None

    def keys_of_user(self, tenant: str, user: str) -> Sequence[tuple[str, KeyRecord]]:
        """Hash and record of each."""
        return [(key_hash, record) for key_hash, record in self._of(tenant) if record.user == user]

    def keys_of(self, tenant: str, after: str = "") -> Iterator[KeyRecord]:
        """Sorted by id, from behind the id `after`. Each is made when it is taken."""
        return (record for _, record in self._of(tenant, after))

    def num_keys_of(self, tenant: str) -> int:
        owner = self._owners.get(tenant)
        return 0 if owner is None else len(owner.ids)

    def tenant(self, name: str) -> TenantRecord:
        """A tenant without a record has the defaults."""
        found = self._tenants.get(name)
        return TenantRecord(name=name) if found is None else found

    def has_tenant(self, name: str) -> bool:
        """Whether there is such a tenant: it was created, or it has a key."""
        found = self._tenants.get(name)
        return self.num_keys_of(name) > 0 or (found is not None and not found.is_gone)

    def tenant_names(self) -> Iterator[str]:
        """The names of all existing tenants, in no order."""
        yield from (name for name, owner in self._owners.items() if owner.ids)
        yield from (name for name, tenant in self._tenants.items() if not tenant.is_gone and not self.num_keys_of(name))

    def set_key(self, key_hash: str, record: KeyRecord) -> None:
        digest, owner = bytes.fromhex(key_hash), self._owner(record.tenant)
        before = self._table.put(digest, owner.number, record)
        if before is not None and before.owner != owner.number:
            self._by_number[before.owner].ids.remove(_id_of(digest))
        if before is None or before.owner != owner.number:
            owner.ids.append(_id_of(digest))

    def set_tenant(self, record: TenantRecord) -> None:
        self._tenants[record.name] = record

    def apply(self, event: KeySet | TenantSet) -> None:
        match event:
            case TenantSet(tenant):
                self.set_tenant(tenant)
            case KeySet(key_hash, None):
                self._delete_key(bytes.fromhex(key_hash))
            case KeySet(key_hash, str() as tenant, record):
                self.set_key(key_hash, record or KeyRecord(key_id=key_id_of(key_hash), tenant=tenant))

    def check_integrity(self) -> None:
        """Raises AssertionError if an invariant is broken."""
        rows: dict[int, list[int]] = {}
        for row in self._table:
            rows.setdefault(row.owner, []).append(_id_of(row.digest))
        assert sum(map(len, rows.values())) == len(self._table)
        assert [owner.number for owner in self._by_number] == list(range(len(self._by_number)))
        for name, owner in self._owners.items():
            assert self._by_number[owner.number] is owner and owner.name == name
            assert sorted(owner.ids) == sorted(rows.pop(owner.number, []))
        assert not rows, f"keys of tenants that are not known: {rows}"

    def _delete_key(self, digest: bytes) -> None:
        before = self._table.remove(digest)
        if before is not None:
            self._by_number[before.owner].ids.remove(_id_of(digest))

    def _find(self, prefix: bytes) -> tuple[str, KeyRecord] | None:
        row = self._table.find(prefix)
        return None if row is None else (row.digest.hex(), row.record(self._by_number[row.owner].name))

    def _of(self, tenant: str, after: str = "") -> Iterator[tuple[str, KeyRecord]]:
        """Hash and record of a tenant's keys, sorted by id."""
        owner = self._owners.get(tenant)
        for key_id in () if owner is None else sorted(owner.ids):
            prefix = key_id.to_bytes(_ID_BYTES)
            if prefix.hex() > after:
                found = self._find(prefix)
                assert found is not None
                yield found

    def _owner(self, name: str) -> _Owner:
        owner = self._owners.get(name)
        if owner is None:
            owner = self._owners[name] = _Owner(name, len(self._by_number))
            self._by_number.append(owner)
        return owner


def _id_of(digest: bytes) -> int:
    return int.from_bytes(digest[:_ID_BYTES])
