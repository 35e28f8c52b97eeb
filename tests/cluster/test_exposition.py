"""A process's own page of metrics: who may read it, where it is, and what a gang shows on it."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from motet.cluster.config import part_config
from motet.cluster.exposition.exposition_config import ExpositionConfig
from motet.cluster.exposition.gang_metrics import GangFacts, GangMetrics
from motet.cluster.exposition.loaded_adapters import MOST_LISTED, loaded_adapters
from motet.cluster.exposition.lora_requests import MAX_CHARS, lora_requests
from motet.cluster.exposition.metrics_server import MAX_CONNECTIONS, MetricsServer
from motet.cluster.exposition.process_page import METRICS_ADDRESS, METRICS_NAME, ProcessPage, targets_of
from motet.cluster.launch.local_serve import free_ports
from motet.router.exposition.families import Families
from motet.tests.rigs.leader_rig import TOKEN, Router
from motet.tests.rigs.part_configs import DEFAULTS, leader_config
from motet.tests.rigs.patience import PATIENCE_S, eventually_in_loop
from motet.tests.rigs.stand_in_engine import INFO, StandInEngine
from motet.workers.leader.asked_adapters import AskedAdapters
from motet.workers.leader.frame_server import FrameServer
from motet.workers.wire.engine_load import EngineCounters, EngineGauges, EngineLoad
from motet.workers.wire.messages import AdapterRef, Cancel, Pinned, SamplingParams, SequenceRequest, Submit
from motet.workers.wire.short_digest import short_digest

LOOPBACK = "127.0.0.1"
KEY = {"Authorization": "Bearer secret"}


async def page_of_one() -> bytes:
    return b"one 1.0\n"


@asynccontextmanager
async def server(key: str | None = "secret") -> AsyncIterator[str]:
    found = MetricsServer(page_of_one, key)
    port = await found.start(LOOPBACK, free_port())
    try:
        yield f"http://{LOOPBACK}:{port}"
    finally:
        await found.stop()


def free_port() -> int:
    """A port whose followers are most likely free too."""
    return free_ports(1)[0]


@pytest.mark.parametrize(
    ("path", "headers", "status"),
    [
        ("/metrics", {}, 401),
        ("/metrics", {"Authorization": "Bearer wrong"}, 401),
        ("/metrics", {"Authorization": "Basic secret"}, 401),
        ("/metrics", KEY, 200),
        ("/metrics?x=1", {"authorization": "bearer  secret"}, 200),
        ("/status", KEY, 404),
    ],
)
async def test_the_operators_key_opens_it(path: str, headers: dict[str, str], status: int) -> None:
    async with server() as url, httpx.AsyncClient(trust_env=False) as client:
        answer = await client.get(url + path, headers=headers)
        assert answer.status_code == status
        assert (answer.text == "one 1.0\n") == (status == 200)
        assert (await client.post(url + path, headers=headers)).status_code in (404, 405)


async def test_it_may_be_open_to_all() -> None:
    async with server(key=None) as url, httpx.AsyncClient(trust_env=False) as client:
        assert (await client.get(url + "/metrics")).text == "one 1.0\n"


async def test_who_says_nothing_or_too_much_takes_no_place_for_good(monkeypatch: pytest.MonkeyPatch) -> None:
    deadline_s = "motet.cluster.exposition.metrics_server.DEADLINE_S"
    monkeypatch.setattr(deadline_s, 0.5)
    async with server() as url, httpx.AsyncClient(trust_env=False) as client:
        port = int(url.rpartition(":")[2])
        streams = [await asyncio.open_connection(LOOPBACK, port) for _ in range(MAX_CONNECTIONS)]
        refused = await asyncio.open_connection(LOOPBACK, port)
        assert await asyncio.wait_for(refused[0].read(), PATIENCE_S) == b""
        for reader, _ in streams:  # each is closed when its time is over
            assert await asyncio.wait_for(reader.read(), PATIENCE_S) == b""
        monkeypatch.setattr(deadline_s, PATIENCE_S)
        assert (await client.get(url + "/metrics", headers=KEY)).status_code == 200
        reader, writer = await asyncio.open_connection(LOOPBACK, port)
        writer.write(b"GET /metrics HTTP/1.1\r\n" + b"x" * (1 << 20))
        with suppress(ConnectionResetError):
            assert await asyncio.wait_for(reader.read(), PATIENCE_S) == b""
        assert (await client.get(url + "/metrics", headers=KEY)).status_code == 200
        for _, stream in (*streams, refused, (reader, writer)):
            stream.close()


async def test_processes_of_one_machine_take_the_next_free_port() -> None:
    first, second = MetricsServer(page_of_one, None), MetricsServer(page_of_one, None)
    port = await first.start(LOOPBACK, free_port())
    assert port is not None
    found = await second.start(LOOPBACK, port)
    assert found is not None
    assert found > port
    await first.stop()
    await second.stop()


async def test_a_process_without_a_free_port_serves_all_the_same(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("motet.cluster.exposition.metrics_server.NUM_PORTS", 1)
    with socket.create_server((LOOPBACK, 0)) as taken:
        assert await MetricsServer(page_of_one, None).start(LOOPBACK, taken.getsockname()[1]) is None
    assert "are in use" in caplog.text


def one_metric() -> Iterator[Metric]:
    yield Families({"router": "r1"}).gauge("motet_open_generations", "Some.", 3)


async def test_a_page_tells_of_its_process_and_where_it_is() -> None:
    config = part_config(ExpositionConfig, DEFAULTS, name="llama", metrics_port=free_port())
    page = ProcessPage(config, "r1", "secret", one_metric)
    assert page.metadata == {}
    await page.start(LOOPBACK)
    try:
        address = page.metadata[METRICS_ADDRESS]
        assert page.metadata[METRICS_NAME] == "r1"
        async with httpx.AsyncClient(trust_env=False) as client:
            text = (await client.get(f"http://{address}/metrics", headers=KEY)).raise_for_status().text
        names = {family.name for family in text_string_to_metric_families(text)}
        assert {"motet_open_generations", "process_cpu_seconds", "process_start_time_seconds"} <= names
        routers = [page.metadata, {}]  # the second one found no port
        (target,) = targets_of(config, routers, [])
        assert (target.process, target.name, target.address, target.base) == ("router", "r1", address, "llama")
    finally:
        await page.stop()


async def test_port_0_is_no_page() -> None:
    page = ProcessPage(
        part_config(ExpositionConfig, DEFAULTS, name="llama", metrics_port=0), "r1", "secret", one_metric
    )
    await page.start(LOOPBACK)
    assert page.metadata == {}


def stepped(number: int, num_tokens: int, busy_s: float) -> EngineLoad:
    return EngineLoad(
        EngineGauges(num_running=3, num_pages=100, num_free_pages=20, num_idle_prefix_pages=5),
        EngineCounters(num_steps=number, num_computed_tokens=num_tokens, busy_s=busy_s),
    )


def told(families: Iterator[Metric]) -> dict[str, float]:
    return {sample.name: sample.value for family in families for sample in family.samples if "le" not in sample.labels}


async def test_a_gangs_steps_are_counted() -> None:
    metrics = GangMetrics(INFO, "llama")
    frames = FrameServer(StandInEngine(), INFO, TOKEN, leader_config(), metrics.observe)
    metrics.observe(stepped(1, 40, 0.25))
    metrics.observe(stepped(2, 40, 0.26))  # a heartbeat
    metrics.observe(stepped(3, 50, 0.5))
    found = told(metrics.families(GangFacts.of(frames)))
    assert found["motet_engine_step_seconds_count"] == found["motet_engine_step_tokens_count"] == 2
    assert found["motet_engine_step_seconds_sum"] == pytest.approx(0.25 + 0.24)
    assert found["motet_engine_step_tokens_sum"] == 50
    assert found["motet_engine_step_sequences_sum"] == 6


async def test_a_gang_serves_what_gateways_ask_for() -> None:
    """Names and labels of the endpoint picker's defaults."""
    metrics = GangMetrics(INFO, "llama")
    engine = StandInEngine()
    engine.paused = True  # what is asked of it stays until it is looked at
    frames = FrameServer(engine, INFO, TOKEN, leader_config(), metrics.observe)
    address = await frames.start(LOOPBACK)
    router = Router(address)
    await router.read()
    request = SequenceRequest(
        sequence_id=1,
        prompt_token_ids=[1, 2],
        sampling=SamplingParams(max_tokens=3),
        tenant="acme",
        adapter=AdapterRef("d1", {}),
        adapter_name="support",
    )
    await router.send(Submit(request))
    await eventually_in_loop(lambda: frames.num_sequences == 1)
    families = {family.name: family for family in metrics.families(GangFacts.of(frames))}
    assert {
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "vllm:kv_cache_usage_perc",
        "vllm:cache_config_info",
        "vllm:lora_requests_info",
    } <= families.keys()
    (lora,) = families["vllm:lora_requests_info"].samples
    assert lora.labels == {
        "max_lora": str(INFO.max_num_sequences),
        "running_lora_adapters": "",
        "waiting_lora_adapters": "support",
    }
    assert lora.value > 1.7e9  # seconds since 1970: the newest list counts
    await router.send(Cancel(1))
    await eventually_in_loop(lambda: frames.num_sequences == 0)
    assert not frames.asked_adapters.num_open
    await router.channel.close()
    await frames.stop()


DIGESTS = st.lists(st.integers(0, 30), unique=True, max_size=20)


@given(DIGESTS, st.sets(st.integers(0, 30)), st.sets(st.integers(0, 30)), st.integers(1, 40))
def test_a_gangs_adapters_for_gateways(asked: list[int], open_: set[int], resident: set[int], places: int) -> None:
    names = {str(digest): f"name-{digest}" for digest in asked}
    labels = lora_requests(names, {str(d): 1 for d in open_}, {str(d) for d in resident}, places)
    running = [name for name in labels["running_lora_adapters"].split(",") if name]
    waiting = [name for name in labels["waiting_lora_adapters"].split(",") if name]
    assert {f"name-{d}" for d in asked if d in open_ and d in resident} <= set(running)
    assert set(waiting) == {f"name-{d}" for d in asked if d in open_ and d not in resident}
    assert set(running) <= {f"name-{d}" for d in asked if d in resident}
    idle = set(running) - {f"name-{d}" for d in open_}
    if idle:  # they leave a place, so that a gateway sends new adapters here too
        assert len(running) + len(waiting) < places


def test_ten_thousand_adapters_make_a_short_label() -> None:
    names = {str(number): f"adapter-of-somebody-{number}" for number in range(10_000)}
    labels = lora_requests(names, dict.fromkeys(names, 1), names.keys(), 4096)
    assert len(labels["running_lora_adapters"]) <= MAX_CHARS
    assert labels["running_lora_adapters"].startswith("adapter-of-somebody-9999,")  # asked for last


async def test_a_gang_tells_which_adapters_it_has_at_hand() -> None:
    metrics, engine = GangMetrics(INFO, "llama"), StandInEngine()
    frames = FrameServer(engine, INFO, TOKEN, leader_config(), metrics.observe)
    router = Router(await frames.start(LOOPBACK))
    await router.read()

    def told() -> dict[str, dict[str, str]]:
        (family,) = (one for one in metrics.families(GangFacts.of(frames)) if one.name == "vllm:lora_adapter_loaded")
        assert all(sample.value == 1 for sample in family.samples)
        return {sample.labels["adapter_name"]: sample.labels for sample in family.samples}

    for number, name in enumerate(("support", "sales"), 1):
        request = SequenceRequest(
            sequence_id=number,
            prompt_token_ids=[1, 2],
            sampling=SamplingParams(max_tokens=1),
            tenant="acme",
            adapter=AdapterRef(f"d{number}", {"q_proj": 8, "v_proj": 4 << number}),
            adapter_name=name,
        )
        await router.send(Submit(request))
    await router.send(Pinned(["d2"]))
    await eventually_in_loop(lambda: len(told()) == 2 and told()["sales"]["pinned"] == "true")
    facts = {"model_name": "llama", "level": "gpu", "pinned": "false"}
    assert told()["support"] == facts | {"adapter_name": "support", "rank": "8"}
    assert told()["sales"] == facts | {"adapter_name": "sales", "rank": "16", "pinned": "true"}
    await eventually_in_loop(lambda: frames.num_sequences == 0)
    engine.host("d2")
    engine.evict("d1")
    engine.evict("d2")
    params = SamplingParams(max_tokens=1)
    await router.send(Submit(SequenceRequest(sequence_id=3, prompt_token_ids=[1], sampling=params, tenant="acme")))
    # Its step reports both.
    await eventually_in_loop(lambda: told().keys() == {"sales"} and told()["sales"]["level"] == "cpu")
    await router.channel.close()
    await frames.stop()


NAMED = st.dictionaries(st.integers(0, 400), st.integers(0, 3), max_size=30)  # names that several share, by digest


@given(NAMED, st.sets(st.integers(0, 400)), st.sets(st.integers(0, 400)), st.sets(st.integers(0, 400)))
def test_each_name_is_told_once_at_its_nearest_level(
    named: dict[int, int], resident: set[int], hosted: set[int], pinned: set[int]
) -> None:
    """Two samples of the same labels would make the whole page unreadable."""
    asked = AskedAdapters()
    asked.names = {str(digest): f"name-{name}" for digest, name in named.items()}
    asked.ranks = dict.fromkeys(asked.names, 8)
    hosted_shorts = {short_digest(str(digest)) for digest in hosted}
    found = loaded_adapters(asked, {str(d) for d in resident}, hosted_shorts, {str(d) for d in pinned})
    levels = {adapter.adapter_name: adapter.level for adapter in found}
    assert len(levels) == len(found)
    in_pool = {f"name-{name}" for digest, name in named.items() if digest in resident}
    in_host = {f"name-{name}" for digest, name in named.items() if digest in hosted}
    assert levels == dict.fromkeys(in_host, "cpu") | dict.fromkeys(in_pool, "gpu")


def test_those_asked_for_last_are_told_of_too_many() -> None:
    asked = AskedAdapters()
    asked.names = {str(number): f"name-{number}" for number in range(4 * MOST_LISTED)}
    asked.ranks = dict.fromkeys(asked.names, 8)
    in_pool = {str(number) for number in range(100)}
    found = loaded_adapters(asked, in_pool, {short_digest(digest) for digest in asked.names}, set())
    newest_hosted = [f"name-{4 * MOST_LISTED - 1 - i}" for i in range(MOST_LISTED - 100)]
    assert [adapter.adapter_name for adapter in found] == [*(f"name-{99 - i}" for i in range(100)), *newest_hosted]
