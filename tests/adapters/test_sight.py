"""Which adapters a caller sees: the same by a name, by what a name may mean, and by the ranges of a list."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from redis.asyncio import Redis

from motet.adapters.errors import AdapterInvalid, RegistryUnavailable
from motet.adapters.names import (
    FULL_SIGHT,
    PLAIN_SIGHT,
    Sight,
    check_name,
    check_user,
    owner_of,
    private_name,
    split_selector,
)
from motet.adapters.registry import kept_adapters
from motet.adapters.registry.registry import Registry
from motet.adapters.registry.registry_view import RegistryView
from motet.tests.rigs.patience import eventually_in_loop

users = st.sampled_from(["a", "ab", "a.b", "a-b", "a|b", "a@b.example", "b", "zz", "0", "a:b=c+d"])
plain = st.sampled_from(["x", "x.y", "zebra", "0", "A-1"])
names = plain | st.builds(private_name, users, plain)
sights = st.builds(Sight, users | st.just(""), st.booleans())


@given(sights, names)
def test_a_list_has_what_is_seen(sight: Sight, name: str) -> None:
    assert any(first <= name < end for first, end in sight.ranges()) == sight.sees(name)
    assert sight.sees(name) == (owner_of(name) in ("", sight.user) or sight.sees_all)


@given(sights, names | st.builds(lambda name: f"~/{name}", plain))
def test_a_name_means_only_what_is_seen(sight: Sight, requested: str) -> None:
    meant = sight.names(requested)
    assert all(sight.sees(name) for name in meant)
    if owner_of(requested):
        assert meant == ((requested,) if sight.sees(requested) else ())
    else:
        assert meant[-1] == requested.removeprefix("~/") and meant[:-1] in (
            (),
            (private_name(sight.user, requested),),
        )
        assert (len(meant) == 2) == bool(sight.user and not requested.startswith("~/"))


@given(sights, names | st.builds(lambda name: f"~/{name}", plain), st.booleans())
def test_an_upload_is_the_tenants_or_private_to_who_may(sight: Sight, name: str, is_private: bool) -> None:
    try:
        registered = sight.uploaded(name, is_private=is_private)
    except AdapterInvalid:
        assert (owner_of(name) and not sight.sees(name)) or (is_private and (not sight.user or name.startswith("~/")))
        return
    check_name(registered)
    assert sight.sees(registered)
    assert bool(owner_of(registered)) == (is_private or bool(owner_of(name)))


@pytest.mark.parametrize("name", ["", "~", "a/b/c", "a b", "-a", "a\n", "a\tb", "ä", "x" * 65, "..", "a\x00"])
def test_names_that_no_user_may_have(name: str) -> None:
    with pytest.raises(AdapterInvalid):
        check_user(name)
    with pytest.raises(AdapterInvalid):
        check_name(private_name(name, "x"))


def test_a_version_is_distinguished_from_a_users_name() -> None:
    assert split_selector("x@2") == ("x", "2")
    assert split_selector("~eve@id.example/x") == ("~eve@id.example/x", None)
    assert split_selector("~eve@id.example/x@prod") == ("~eve@id.example/x", "prod")
    assert split_selector("x@") == ("x", "")


@pytest.fixture
async def registry(redis_client: Redis) -> Registry:
    registry = Registry(redis_client)
    for number, name in enumerate(["x", "y", "~a/x", "~a/z", "~a.b/x", "~b/y", "~b/x"]):
        await registry.names.register("acme", name, digest=f"{number:064x}", module_ranks={"q_proj": 8}, num_bytes=1)
    await registry.names.register("zoo", "~a/x", digest="f" * 64, module_ranks={"q_proj": 8}, num_bytes=1)
    return registry


SEEN = {
    PLAIN_SIGHT: ["x", "y"],
    Sight("a"): ["x", "y", "~a/x", "~a/z"],
    Sight("b"): ["x", "y", "~b/x", "~b/y"],
    Sight("c"): ["x", "y"],
    FULL_SIGHT: ["x", "y", "~a.b/x", "~a/x", "~a/z", "~b/x", "~b/y"],
    Sight("b", sees_all=True): ["x", "y", "~a.b/x", "~a/x", "~a/z", "~b/x", "~b/y"],
}


@pytest.mark.parametrize("sight", SEEN)
@pytest.mark.parametrize("limit", [1, 2, 3, 100])
async def test_pages_of_a_list(registry: Registry, sight: Sight, limit: int) -> None:
    found: list[str] = []
    while page := await registry.list_adapters("acme", found[-1] if found else "", limit, sight):
        found += [adapter.name for adapter in page]
        assert len(page) == limit or found == SEEN[sight]
    assert found == SEEN[sight]


@pytest.mark.parametrize("capacity", [100, 2])
async def test_a_view_finds_ones_own_first_and_nothing_of_others(registry: Registry, capacity: int) -> None:
    """Also where it keeps few names, and looks up the others."""
    view = RegistryView(registry, capacity)
    await view.start()

    async def found(sight: Sight, requested: str) -> str | None:
        adapter = await view.resolve("acme", requested, sight)
        return None if adapter is None else adapter.name

    for _ in range(2):
        for sight, seen in SEEN.items():
            for requested in ("x", "y", "z"):
                own = private_name(sight.user, requested)
                expected = own if sight.user and own in seen else requested if requested in seen else None
                assert await found(sight, requested) == expected
                assert await found(sight, f"~/{requested}") == (requested if requested in seen else None)
            for name in ("~a/x", "~a.b/x", "~b/y", "~a/nothing"):
                assert await found(sight, name) == (name if name in seen else None)
    assert [one.name for one in await view.list_adapters("acme", sight=Sight("a"))] == SEEN[Sight("a")]
    view.check_integrity()
    await view.stop()


async def test_names_that_are_not_seen_are_not_looked_up(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    """So the time of an answer reveals nothing."""
    view = RegistryView(registry, 1)
    await view.start()
    monkeypatch.setattr(view._lookups, "get", lambda *_: pytest.fail("it was looked up"))
    monkeypatch.setattr(view._names, "find", lambda *_: pytest.fail("it was looked for"))
    assert await view.resolve("acme", "~b/y", Sight("a")) is None
    assert await view.resolve("acme", "~b/y") is None
    await view.stop()


async def test_a_registry_without_redis_lists_what_is_seen(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    view = RegistryView(registry)
    await view.start()
    await eventually_in_loop(lambda: view.is_whole)

    async def away(*_: object) -> None:
        raise RegistryUnavailable("away")

    monkeypatch.setattr(registry, "list_adapters", away)
    for sight, seen in SEEN.items():
        assert [one.name for one in await view.list_adapters("acme", sight=sight)] == seen
    await view.stop()


async def test_a_router_keeps_no_more_for_many_users(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_adapters, "_MAX_ABSENT", 16)
    view = RegistryView(registry, 2)
    await view.start()
    for number in range(100):
        found = await view.resolve("acme", "x", Sight(f"u{number}"))
        assert found is not None and found.name == "x"
    assert view.num_kept <= 2
    view.check_integrity()  # what is known to be absent, too, is bounded
    await view.stop()
