"""What a router assumes about a gang between two of its frames."""

from __future__ import annotations

from motet.router.fleet.adapter_uses import LATELY_S, AdapterUses, asker_of
from motet.router.fleet.affinity import RoutingConfig, RoutingRequest
from motet.router.fleet.known_gang import KnownGang
from motet.tests.rigs.engine_loads import engine_load
from motet.workers.wire.engine_load import EngineLoad
from motet.workers.wire.messages import Frame, OrphanChange, ResidencyChange

CONFIG = RoutingConfig()


def frame(load: EngineLoad | None = None, came: tuple[str, ...] = (), went: tuple[str, ...] = ()) -> Frame:
    return Frame([], load or EngineLoad(), ResidencyChange([*came], [*went]))


def test_adapters_come_and_go_as_the_gang_reports() -> None:
    known = KnownGang(CONFIG, ["a", "b"])
    known.receive(frame(came=("c",), went=("a", "never known")))
    assert [digest for digest in "abc" if known.has(digest)] == ["b", "c"]


def test_what_was_sent_there_is_on_its_way_until_its_last_sequence_ends() -> None:
    known = KnownGang(CONFIG)
    for _ in range(2):
        known.add_sequence(RoutingRequest("a", 10, 1))
    known.add_sequence(RoutingRequest(None, 10, 0))
    known.receive(frame())  # that the gang has not begun to load it does not mean that it will not
    known.ended("a")
    assert known.has("a")
    known.ended(None)
    known.ended("a")
    assert not known.has("a")


def test_what_the_gang_holds_outlives_the_sequences() -> None:
    known = KnownGang(CONFIG)
    known.add_sequence(RoutingRequest("a", 10, 1))
    known.receive(frame(came=("a",)))
    known.ended("a")
    assert known.has("a")


def test_a_tenant_sees_an_adapter_only_where_it_has_used_it_itself() -> None:
    """Two tenants have the same bytes. What one sees is as if the other were not there."""
    known = KnownGang(CONFIG, ["a"])
    known.add_sequence(RoutingRequest("a", 10, 1, tenant="acme"))
    assert known.has("a")
    assert known.tier_for("acme", "a")
    assert known.tier_for("zenith", "a") is known.tier_for("zenith", "of no sequence") is None
    known.ended("a", "", "acme")
    assert known.tier_for("acme", "a")  # it is still in the pool
    known.add_sequence(RoutingRequest("a", 10, 1, tenant="zenith"))
    assert known.tier_for("zenith", "a")
    known.ended("a", "", "zenith")
    known.receive(frame(went=("a",)))
    known.receive(frame(came=("a",)))  # this router cannot know for which tenant
    assert known.has("a")
    assert not known.tier_for("acme", "a") and not known.tier_for("zenith", "a")


def test_a_user_sees_its_private_adapter_only_where_it_has_used_it_itself() -> None:
    """Neither what another user of the tenant did with the same bytes, nor what the tenant did."""
    known = KnownGang(CONFIG, ["a"])
    ann, bob = asker_of("acme", "ann"), asker_of("acme", "bob")
    known.add_sequence(RoutingRequest("a", 10, 1, tenant="acme", owner="ann"))
    assert known.tier_for(ann, "a")
    assert not known.tier_for(bob, "a") and not known.tier_for("acme", "a")
    known.add_sequence(RoutingRequest("a", 10, 1, tenant="acme"))
    assert known.tier_for("acme", "a") and not known.tier_for(bob, "a")
    known.ended("a", "", ann)
    known.ended("a", "", "acme")
    assert known.tier_for(ann, "a") and known.tier_for("acme", "a")
    assert asker_of("acme", "") == "acme"


def test_uses_are_forgotten_in_time_and_with_the_adapter() -> None:
    now = [0.0]
    uses = AdapterUses(lambda: now[0])
    uses.begin("a", "acme")
    now[0] += 2 * LATELY_S
    assert uses.is_lately_by("a", "acme")  # a long answer
    uses.ended("a", "acme")
    assert uses.is_lately_by("a", "acme")
    now[0] += LATELY_S
    assert not uses.is_lately_by("a", "acme")
    known = KnownGang(CONFIG)
    for number in range(100):
        known.add_sequence(RoutingRequest(f"{number}", 10, 1, tenant="acme"))
        known.receive(frame(came=(f"{number}",) if number % 2 else ()))
        known.ended(f"{number}", "", "acme")
        known.receive(frame(went=(f"{number}",)))
    assert len(known._uses) == 0


def test_what_was_sent_since_the_last_frame_counts_as_queued() -> None:
    known = KnownGang(CONFIG)
    known.receive(frame(engine_load(num_running=3, num_waiting=2, num_queued_tokens=500)))
    known.add_sequence(RoutingRequest("a", 70, 1))
    known.add_sequence(RoutingRequest(None, 30, 0))
    view = known.view("key", "a")
    assert (view.key, view.has_adapter, view.num_queued_tokens, view.num_sequences) == ("key", True, 600, 7)
    known.receive(frame(engine_load(num_running=5, num_queued_tokens=5)))
    view = known.view("key", None)
    assert (view.has_adapter, view.num_queued_tokens, view.num_sequences) == (False, 5, 5)
    assert view.costs == CONFIG.belief  # nothing was shown yet


def test_pages_are_there_as_the_gang_reports_or_when_a_sequence_that_computes_them_was_sent() -> None:
    known = KnownGang(CONFIG, resident_pages=[1, 2, 5])
    assert known.num_cached_pages([1, 2, 3, 4]) == 2
    known.add_sequence(RoutingRequest(None, 70, 0), [1, 2, 3, 4])
    assert known.num_cached_pages([1, 2, 3, 4]) == 4
    known.receive(Frame([], EngineLoad(), ResidencyChange(pages_came=[3, 4])))
    known.receive(Frame([], EngineLoad(), ResidencyChange(pages_went=[4, 2])))
    assert known.num_cached_pages([1, 2, 3, 4]) == 1
    assert known.num_cached_pages([5]) == 1
    assert known.view("key", None, 16).num_cached_tokens == 16


def test_pages_that_never_come_are_forgotten_in_time() -> None:
    known = KnownGang(CONFIG)
    known.add_sequence(RoutingRequest(None, 70, 0), [1])
    for number in range(0, 40_000, 1000):
        known.add_sequence(RoutingRequest(None, 70, 0), range(number + 2, number + 1002))
    assert known.num_cached_pages([1]) == 0
    assert known.num_cached_pages([40_001]) == 1


def test_a_frame_without_a_new_load_cannot_count_what_was_sent() -> None:
    """A frame with the load of an earlier step shows only that a sequence has arrived: no step was made since."""
    known = KnownGang(CONFIG)
    known.receive(frame(engine_load(num_steps=1)))
    known.add_sequence(RoutingRequest(None, 30, 0))
    known.receive(frame(engine_load(num_steps=1)))
    assert known.view("key", None).num_queued_tokens == 30
    known.receive(frame(engine_load(num_steps=2)))
    assert known.view("key", None).num_queued_tokens == 0


def test_sequences_are_kept_as_the_gang_reports() -> None:
    known = KnownGang(CONFIG, orphans=["a", "b"])
    known.receive(Frame([], EngineLoad(), orphans=OrphanChange(["c"], ["a", "never known"])))
    known.receive(frame())
    assert [key for key in "abc" if known.holds(key)] == ["b", "c"]
    assert [known.view("gang", None, sequence_key=key).has_sequence for key in ("a", "b", "")] == [False, True, False]
