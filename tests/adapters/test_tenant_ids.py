"""Tenants' ids: no two tenants have the same one, whatever they are called."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from motet.adapters.errors import AdapterInvalid
from motet.adapters.names import check_tenant
from motet.adapters.registry.tenants.records import TenantRecord, parse_tenant_id

TENANTS = st.builds(TenantRecord, name=st.from_regex(r"[A-Za-z0-9._-]{1,64}", fullmatch=True), num_ended=st.integers(0))


@given(TENANTS, TENANTS)
def test_an_id_belongs_to_one_tenant(one: TenantRecord, other: TenantRecord) -> None:
    assert (one.tenant_id == other.tenant_id) == ((one.name, one.num_ended) == (other.name, other.num_ended))
    assert parse_tenant_id(one.tenant_id) == (one.name, one.num_ended)


def test_the_first_tenants_id_is_its_name_and_a_later_one_is_no_tenants_name() -> None:
    assert TenantRecord(name="acme").tenant_id == "acme"
    with pytest.raises(AdapterInvalid):
        check_tenant(TenantRecord(name="acme", num_ended=1).tenant_id)


def test_the_id_changes_when_a_deletion_ends() -> None:
    active = TenantRecord(name="acme", num_ended=3)
    ending = structs.replace(active, is_ending=True, num_ended=4)
    gone = TenantRecord(name="acme", is_gone=True, num_ended=4)
    assert active.tenant_id == ending.tenant_id != gone.tenant_id
    assert active.incarnation == ending.incarnation == 3
