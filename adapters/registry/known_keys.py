"""The API keys and tenants that a router knows: all of them, by hash, by id and by name."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import Final

import msgspec

from .events import KEY_ID_CHARS, KeySet, TenantSet, key_id_of
from .tenants.records import ALL_OF_A_TENANT, KeyRecord, Quota, Scope, TenantRecord

# API keys in a compact table: 80 bytes of memory each, where Python records take 500.

DIGEST_BYTES: Final = 32
_NUM_BUCKETS: Final = 16_384  # with a million keys, 61 in each: some 4 KB to search, and to copy for a change
_OFFSET_BYTES: Final = 4
_PLACE_BYTES: Final = DIGEST_BYTES + _OFFSET_BYTES


class _Fields(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A key's record beside its digest."""

    owner: int  # the number of its tenant
    user: str = ""
    created_at: float = 0.0
    expires_at: float | None = None
    label: str = ""
    scopes: frozenset[Scope] | None = None  # None: the default scopes
    quota: Quota = Quota()


_USUAL: Final = msgspec.structs.astuple(_Fields(owner=0))[3:]  # the values of most keys, which are not stored
_decoder = msgspec.msgpack.Decoder(_Fields)
_encoder = msgspec.msgpack.Encoder()


class KeyRow:
    """The stored record of one key."""

    __slots__ = ("_fields", "digest")

    def __init__(self, digest: bytes, fields: bytes) -> None:
        self.digest = digest
        self._fields = _decoder.decode(fields)

    @property
    def owner(self) -> int:
        """The number of its tenant."""
        return self._fields.owner

    def record(self, tenant: str) -> KeyRecord:
        fields = self._fields
        return KeyRecord(
            key_id=key_id_of(self.digest.hex()),
            tenant=tenant,
            scopes=ALL_OF_A_TENANT if fields.scopes is None else fields.scopes,
            label=fields.label,
            user=fields.user,
            created_at=fields.created_at,
            expires_at=fields.expires_at,
            quota=fields.quota,
        )


class _Bucket:
    """Rows whose digests begin with the same bits: `places` has a digest and where its fields begin for each, in the
    order of `fields`. Both are bytes, replaced by each change, since only structures that grow in place waste space.
    """

    __slots__ = ("fields", "places")

    def __init__(self) -> None:
        self.places = b""
        self.fields = b""

    def find(self, prefix: bytes) -> int | None:
        """The position in `places` of a digest with this beginning."""
        at = self.places.find(prefix)
        while at > 0 and at % _PLACE_BYTES:  # the end of one and the beginning of the next
            at = self.places.find(prefix, at + 1)
        return None if at < 0 else at

    def row(self, at: int) -> KeyRow:
        start, end = self._bounds(at)
        return KeyRow(self.places[at : at + DIGEST_BYTES], self.fields[start:end])

    def add(self, digest: bytes, fields: bytes) -> None:
        self.places += digest + len(self.fields).to_bytes(_OFFSET_BYTES)
        self.fields += fields

    def remove(self, at: int) -> None:
        (start, end), ends_at = self._bounds(at), at + _PLACE_BYTES
        moved = [self.places[:at]]
        for later in range(ends_at, len(self.places), _PLACE_BYTES):
            offset = self._offset(later) - (end - start)
            moved += [self.places[later : later + DIGEST_BYTES], offset.to_bytes(_OFFSET_BYTES)]
        self.places = b"".join(moved)
        self.fields = self.fields[:start] + self.fields[end:]

    def _bounds(self, at: int) -> tuple[int, int]:
        """Start and end of a row's fields in `fields`."""
        ends_at = at + _PLACE_BYTES
        return self._offset(at), len(self.fields) if ends_at == len(self.places) else self._offset(ends_at)

    def _offset(self, at: int) -> int:
        return int.from_bytes(self.places[at + DIGEST_BYTES : at + _PLACE_BYTES])


class KeyTable:
    """Rows by digest. A change touches one bucket, and the table is never rebuilt, so no change takes long."""

    def __init__(self) -> None:
        self._buckets = [_Bucket() for _ in range(_NUM_BUCKETS)]
        self._num_rows = 0

    def __len__(self) -> int:
        return self._num_rows

    def __iter__(self) -> Iterator[KeyRow]:
        for bucket in self._buckets:
            for at in range(0, len(bucket.places), _PLACE_BYTES):
                yield bucket.row(at)

    def find(self, prefix: bytes) -> KeyRow | None:
        """A row whose digest is this, or begins with it: at least two bytes."""
        bucket = self._bucket(prefix)
        at = bucket.find(prefix)
        return None if at is None else bucket.row(at)

    def put(self, digest: bytes, owner: int, record: KeyRecord) -> KeyRow | None:
        """Adds a row, and returns the one that it replaces."""
        if len(digest) != DIGEST_BYTES:
            raise ValueError(f"{digest.hex()!r} is not the hash of a key: those have {2 * DIGEST_BYTES} digits")
        fields = _packed(owner, record)
        before = self.remove(digest)
        self._bucket(digest).add(digest, fields)
        self._num_rows += 1
        return before

    def remove(self, digest: bytes) -> KeyRow | None:
        """Removes and returns a row; None: it does not exist."""
        bucket = self._bucket(digest)
        at = bucket.find(digest)
        if at is None:
            return None
        before = bucket.row(at)
        bucket.remove(at)
        self._num_rows -= 1
        return before

    def _bucket(self, prefix: bytes) -> _Bucket:
        return self._buckets[int.from_bytes(prefix[:2]) % _NUM_BUCKETS]


def _packed(owner: int, record: KeyRecord) -> bytes:
    scopes = None if record.scopes == ALL_OF_A_TENANT else record.scopes
    extras = (record.expires_at, record.label, scopes, record.quota)
    if extras == _USUAL:
        return _encoder.encode((owner, record.user, record.created_at))
    return _encoder.encode((owner, record.user, record.created_at, *extras))


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
        entry = self._find(key_hash) if len(key_hash) == DIGEST_BYTES else None
        return None if entry is None else entry[1]

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
        record = self._tenants.get(name)
        return TenantRecord(name=name) if record is None else record

    def has_tenant(self, name: str) -> bool:
        """Whether there is such a tenant: it was created, or it has a key."""
        record = self._tenants.get(name)
        return self.num_keys_of(name) > 0 or (record is not None and not record.is_gone)

    def tenants(self) -> Iterator[TenantRecord]:
        """The records, in no order; a tenant that has only keys has none."""
        yield from self._tenants.values()

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
                entry = self._find(prefix)
                assert entry is not None
                yield entry

    def _owner(self, name: str) -> _Owner:
        owner = self._owners.get(name)
        if owner is None:
            owner = self._owners[name] = _Owner(name, len(self._by_number))
            self._by_number.append(owner)
        return owner


def _id_of(digest: bytes) -> int:
    return int.from_bytes(digest[:_ID_BYTES])
