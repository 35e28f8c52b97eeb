"""Names of lives: no two tenants have the same, whatever they are called."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from motet.adapters.errors import AdapterInvalid
from motet.adapters.names import check_tenant
from motet.adapters.registry.tenants.life import life_number, life_of, parse_life
from motet.adapters.registry.tenants.records import TenantRecord

TENANTS = st.builds(TenantRecord, name=st.from_regex(r"[A-Za-z0-9._-]{1,64}", fullmatch=True), num_ended=st.integers(0))


@given(TENANTS, TENANTS)
def test_a_life_is_one_tenants(one: TenantRecord, other: TenantRecord) -> None:
    assert (life_of(one) == life_of(other)) == ((one.name, one.num_ended) == (other.name, other.num_ended))
    assert parse_life(life_of(one)) == (one.name, one.num_ended)


def test_the_first_life_is_called_as_its_tenant_and_no_tenant_as_a_later_one() -> None:
    assert life_of(TenantRecord(name="acme")) == "acme"
    with pytest.raises(AdapterInvalid):
        check_tenant(life_of(TenantRecord(name="acme", num_ended=1)))


def test_a_life_ends_with_the_deletion_not_when_it_begins() -> None:
    lives = TenantRecord(name="acme", num_ended=3)
    ends = structs.replace(lives, is_ending=True, num_ended=4)
    gone = TenantRecord(name="acme", is_gone=True, num_ended=4)
    assert life_of(lives) == life_of(ends) != life_of(gone)
    assert life_number(lives) == 3
