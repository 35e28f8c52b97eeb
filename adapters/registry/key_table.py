"""API keys in a compact table: 80 bytes of memory each, where Python records take 500."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import msgspec

from .events import key_id_of
from .tenants.records import ALL_OF_A_TENANT, KeyRecord, Quota, Scope

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
    rest = (record.expires_at, record.label, scopes, record.quota)
    if rest == _USUAL:
        return _encoder.encode((owner, record.user, record.created_at))
    return _encoder.encode((owner, record.user, record.created_at, *rest))
