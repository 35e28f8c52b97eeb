"""What a router shows to Prometheus: names, labels, help, and where the other processes are."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import httpx
import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from motet.router.exposition.families import (
    MetricsTarget,
    RouterFacts,
    discovery,
    gang_families,
    router_families,
    text_of,
)
from motet.router.http.errors import invalid_value
from motet.router.metrics import Metrics, ServeFacts
from motet.tests.rigs.engine_loads import engine_load
from motet.tests.rigs.router_rig import BASE, HEADERS, OPERATORS, RouterRig, text_service
from motet.workers.wire.engine_load import EngineLoad
from motet.workers.wire.messages import SequenceError

FACTS = RouterFacts(num_gangs=2, num_resumed=0, num_moved=0, num_gang_faults={"engine": 2}, is_registry_connected=True)
LABELS = {"router": "r1", "base": "llama"}


@pytest.fixture
def rig(tmp_path: Path) -> RouterRig:
    rig = RouterRig(tmp_path / "spool", text_service())
    rig.dispatcher.answer = rig.ids("brown fox")
    return rig


def samples(text: bytes) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    families = text_string_to_metric_families(text.decode())
    return {(one.name, frozenset(one.labels.items())): one.value for family in families for one in family.samples}


def test_every_series_says_whose_it_is() -> None:
    metrics = Metrics()
    metrics.requests["POST /v1/completions", 200] += 1
    metrics.count_error(invalid_value("n", "too many"))
    metrics.count_failure(SequenceError("overloaded", "full", reason="full"))
    found = samples(text_of(router_families(metrics, FACTS, LABELS)))
    assert all(LABELS.items() <= set(labels) for _, labels in found)
    reported = {
        (name, tuple(sorted(set(labels) - set(LABELS.items())))): value for (name, labels), value in found.items()
    }
    assert reported["motet_errors_total", (("code", "invalid_value"), ("status", "400"))] == 1
    assert reported["motet_refused_requests_total", (("reason", "full"),)] == 1
    assert reported["motet_requests_total", (("route", "POST /v1/completions"), ("status", "200"))] == 1


def test_what_has_not_happened_is_reported_as_zero() -> None:
    """So that the first one is an increase."""
    found = samples(text_of(router_families(Metrics(), FACTS, {})))
    assert found["motet_gang_faults_total", frozenset({("kind", "engine")})] == 2
    assert found["motet_gang_faults_total", frozenset({("kind", "connection")})] == 0
    assert found["motet_finished_sequences_total", frozenset({("reason", "length")})] == 0
    assert found["motet_refused_requests_total", frozenset({("reason", "no_gang")})] == 0


def gauges(metrics: Metrics) -> set[str]:
    text = text_of(router_families(metrics, FACTS, {})).decode()
    return {family.name for family in text_string_to_metric_families(text) if family.type == "gauge"}


def test_what_cannot_be_read_now_is_no_gauge() -> None:
    """A last good value would keep an alert silent, or have it fire for ever."""
    metrics = Metrics()
    metrics.store_free_bytes, metrics.redis_memory, metrics.starts = 1, (1, 1), ()
    metrics.serve = ServeFacts(
        status="RUNNING", num_wanted_gangs=1, min_gangs=1, max_gangs=1, rollout_s=0.0, is_head_connected=True
    )
    before = gauges(metrics)
    metrics.store_free_bytes = None
    assert before - gauges(metrics) == {"motet_store_free_bytes"}
    metrics.serve = replace(metrics.serve, is_head_connected=False)
    of_redis = {"motet_waiting_starts", "motet_failed_starts", "motet_rollout_taken_back"}
    of_redis |= {"motet_redis_used_bytes", "motet_redis_max_bytes"}
    of_serve = {name for name in before - gauges(metrics) if name != "motet_store_free_bytes"}
    assert of_serve >= {"motet_wanted_gangs", "motet_max_gangs", "motet_serve_status", "motet_rollout_seconds"}
    assert "motet_head_connected" in gauges(metrics)
    metrics.redis_memory, metrics.starts = None, None
    assert before - gauges(metrics) == {"motet_store_free_bytes"} | of_serve | of_redis


def test_gangs_are_series_of_their_own() -> None:
    """Not one sum, which would fall when a gang goes."""
    loads = {"g1": engine_load(num_running=2, busy_s=1.5), "g2": engine_load(num_running=3, busy_s=2.0)}
    found = samples(text_of(gang_families(loads, {"base": "llama"})))
    for gang, num_running, busy_s in (("g1", 2, 1.5), ("g2", 3, 2.0)):
        labels = frozenset({("gang", gang), ("base", "llama")})
        assert found["motet_engine_running", labels] == num_running
        assert found["motet_engine_busy_seconds_total", labels] == busy_s


def test_names_end_in_their_units() -> None:
    text = text_of([*router_families(Metrics(), FACTS, {}), *gang_families({"g": EngineLoad()}, {})]).decode()
    for family in text_string_to_metric_families(text):
        assert not re.search(r"_(s|ms|secs|count|sum|num)$|_num_", family.name), family.name
        assert family.documentation.endswith("."), family.name
        assert re.match(r"[A-Z1]", family.documentation), family.name
    names = [family.documentation for family in text_string_to_metric_families(text)]
    assert len(set(names)) == len(names)


def test_discovery_does_not_repeat_what_the_series_say() -> None:
    """A target's label that a series has too would be renamed to exported_…."""
    targets = [MetricsTarget(address=address, base=BASE) for address in ("10.0.0.1:9400", "[fd00::2]:9401")]
    groups = msgspec.json.decode(discovery(targets))
    assert [group["targets"] for group in groups] == [["10.0.0.1:9400"], ["[fd00::2]:9401"]]
    nodes = [{name: value for name, value in group["labels"].items() if name[:2] != "__"} for group in groups]
    assert nodes == [{"node": "10.0.0.1"}, {"node": "fd00::2"}]


async def test_discovery_is_for_operators(rig: RouterRig) -> None:
    transport = httpx.ASGITransport(app=rig.app)
    async with httpx.AsyncClient(transport=transport, base_url="http://router") as client:
        answer = await client.get("/metrics/targets", headers=OPERATORS)
        assert answer.json() == []  # the rig starts no page of its own
        assert (await client.get("/metrics/targets", headers=HEADERS)).status_code == 401
        assert (await client.get("/metrics/targets")).status_code == 401


async def test_an_answer_is_counted_once(rig: RouterRig) -> None:
    async with rig.client() as client:
        body = {"model": BASE, "prompt": "hello"}
        assert (await client.post("/v1/completions", json=body)).status_code == 200
        assert (await client.post("/v1/completions", json=body | {"n": 0})).status_code == 400
        assert (await client.post("/v1/completions", json=body | {"model": "absent"})).status_code == 404
        assert (await client.get("/v1/nothing")).status_code == 404
        found = samples((await client.get("/metrics")).content)
    reported = {(name, *sorted(dict(labels).values())): value for (name, labels), value in found.items()}
    assert reported["motet_request_seconds_count",] == 1
    assert reported["motet_prompt_length_tokens_count",] == 1
    assert reported["motet_completion_length_tokens_count",] == 1
    assert reported["motet_completion_length_tokens_sum",] == reported["motet_completion_tokens_total",]
    finished = {key: value for key, value in reported.items() if key[0] == "motet_finished_sequences_total"}
    assert sorted(finished.values()) == [0, 1]
    errors = {key: value for key, value in reported.items() if key[0] == "motet_errors_total"}
    assert errors == {
        ("motet_errors_total", "400", "invalid_value"): 1,
        ("motet_errors_total", "404", "model_not_found"): 1,
        ("motet_errors_total", "404", "not_found"): 1,
    }
