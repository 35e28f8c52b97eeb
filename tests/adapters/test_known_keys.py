"""A router's keys, kept as bytes: the same as a dict of records would say."""

from __future__ import annotations

import hashlib
import tracemalloc
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from motet.adapters.registry.events import KeySet, key_id_of
from motet.adapters.registry.known_keys import KnownKeys
from motet.adapters.registry.tenants.records import ALL_OF_A_TENANT, KeyRecord, Quota

# All in one bucket of the table, and some with beginnings and ends that meet others' when they lie side by side.
_DIGESTS = [
    *(b"\x07\x07" + bytes([number]) * 30 for number in range(5)),
    b"\x07\x07" * 16,
    *(b"\x07\x07" + hashlib.sha256(bytes([number])).digest()[:30] for number in range(5)),
    b"\x07\x08" * 16,
]
_HASHES = st.sampled_from([digest.hex() for digest in _DIGESTS])
_SCOPES: Any = st.sampled_from([ALL_OF_A_TENANT, frozenset({"infer"}), frozenset({"infer", "admin"}), frozenset()])
_RECORDS = st.builds(
    KeyRecord,
    key_id=st.just(""),
    tenant=st.sampled_from(["acme", "zoo", "t3"]),
    scopes=_SCOPES,
    label=st.one_of(st.just(""), st.text(max_size=300)),
    user=st.sampled_from(["", "ann", "u" * 64]),
    created_at=st.sampled_from([0.0, 1760000000.123]),
    expires_at=st.one_of(st.none(), st.floats(0, 1e10)),
    quota=st.sampled_from([Quota(), Quota(requests_per_minute=0), Quota(adapters=3, stored_bytes=2**62)]),
)


@given(st.lists(st.tuples(_HASHES, st.one_of(st.none(), _RECORDS)), max_size=40))
@settings(max_examples=60)
def test_after_any_changes_it_knows_what_a_dict_would(changes: list[tuple[str, KeyRecord | None]]) -> None:
    known, records = KnownKeys(), dict[str, KeyRecord]()
    for key_hash, wanted in changes:
        if wanted is None:
            known.apply(KeySet(key_hash, None))
            records.pop(key_hash, None)
        else:
            fields = {name: getattr(wanted, name) for name in wanted.__struct_fields__}
            records[key_hash] = KeyRecord(**{**fields, "key_id": key_id_of(key_hash)})
            known.apply(KeySet(key_hash, wanted.tenant, records[key_hash]))
        known.check_integrity()
    assert known.num_keys == len(records)
    for digest in _DIGESTS:
        assert known.key(digest) == records.get(digest.hex())
    for tenant in ("acme", "zoo", "t3", "none"):
        theirs = {key_hash: record for key_hash, record in records.items() if record.tenant == tenant}
        by_id = sorted(theirs.values(), key=lambda record: record.key_id)
        assert [record.key_id for record in known.keys_of(tenant)] == [record.key_id for record in by_id]
        assert known.num_keys_of(tenant) == len(theirs) and known.has_tenant(tenant) == bool(theirs)
        for number, record in enumerate(by_id):
            assert list(known.keys_of(tenant, record.key_id)) == by_id[number + 1 :]
        assert dict(known.keys_of_user(tenant, "ann")) == {
            key_hash: record for key_hash, record in theirs.items() if record.user == "ann"
        }
    assert sorted(known.tenant_names()) == sorted({record.tenant for record in records.values()})


def test_a_key_is_found_by_its_whole_hash_or_by_its_id_alone() -> None:
    """A label can hold the bytes of any hash: it is no key."""
    known, key_hash = KnownKeys(), hashlib.sha256(b"key").hexdigest()
    planted = b"\x07\x07" + b"abcdefgh" * 4
    known.set_key(key_hash, KeyRecord(key_id=key_id_of(key_hash), tenant="acme", label=planted.decode()))
    known.set_key("0707" + "00" * 30, KeyRecord(key_id="0707" + "00" * 6, tenant="acme", label=planted.decode()))
    found = known.key_with_id(key_id_of(key_hash))
    assert found is not None and found[0] == key_hash and known.key(bytes.fromhex(key_hash)) == found[1]
    assert known.key(planted[:32]) is None
    assert known.key_with_id(planted[:8].hex()) is None
    for part in ("", key_hash[:4], key_hash[:14], key_hash[:18], key_hash, "no such key", key_hash[:15]):
        assert known.key_with_id(part) is None, part
    assert known.key(bytes.fromhex(key_hash)[:31]) is None and known.key(b"") is None


def test_what_is_no_hash_is_refused() -> None:
    with pytest.raises(ValueError, match="'ab' is not the hash of a key: those have 64 digits"):
        KnownKeys().set_key("ab", KeyRecord(key_id="ab", tenant="acme"))


def test_a_key_takes_fewer_than_90_bytes() -> None:
    """Of what Python allocates; what the allocator adds is measured by benchmarks/users.py."""
    tracemalloc.start()
    known, before = KnownKeys(), tracemalloc.get_traced_memory()[0]
    for number in range(50_000):
        key_hash = hashlib.sha256(str(number).encode()).hexdigest()
        record = KeyRecord(
            key_id=key_hash[:16],
            tenant=f"tenant{number // 1000}",
            user=f"user-{number:07}",
            created_at=1760000000.123,
        )
        known.set_key(key_hash, record)
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert grown / 50_000 < 90, grown
