"""A process's own page of metrics: which keys may read it, where it is, and what a gang shows on it."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Literal

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from motet.cluster.config import part_config
from motet.cluster.exposition.gang_metrics import (
    MAX_CHARS,
    MOST_LISTED,
    GangFacts,
    GangMetrics,
    loaded_adapters,
    lora_requests,
)
from motet.cluster.exposition.node_page import (
    MAX_CONNECTIONS,
    METRICS_ADDRESS,
    ExpositionConfig,
    NodePage,
    ProcessPage,
    merged_pages,
    node_folder,
    targets_of,
)
from motet.cluster.launch.local_serve import free_ports
from motet.router.exposition.families import Families, text_of
from motet.tests.rigs.leader_rig import TOKEN, Router
from motet.tests.rigs.metrics_node import LOOPBACK, metrics_node, requests_of
from motet.tests.rigs.part_configs import DEFAULTS, leader_config
from motet.tests.rigs.patience import PATIENCE_S, eventually, eventually_in_loop
from motet.tests.rigs.prometheus_binaries import promtool
from motet.tests.rigs.quota_rig import until
from motet.tests.rigs.stand_in_engine import INFO, StandInEngine
from motet.workers.leader.frame_server import FrameServer
from motet.workers.leader.residency import RequestedAdapters, Residency
from motet.workers.wire.engine_load import EngineCounters, EngineGauges, EngineLoad, TenantShare
from motet.workers.wire.messages import (
    AdapterRef,
    Cancel,
    Pinned,
    ResidencyChange,
    SamplingParams,
    SequenceRequest,
    Submit,
)
from motet.workers.wire.page_keys import short_digest

KEY = {"Authorization": "Bearer secret"}


@asynccontextmanager
async def page_of(
    port: int, name: str = "r1", process: Literal["router", "gang"] = "router", key: str | None = "secret"
) -> AsyncIterator[ProcessPage]:
    """A process of this node. `key`: None: its page is open to all."""
    access = "operators" if key else "all"
    config = part_config(ExpositionConfig, DEFAULTS, name="llama", metrics_port=port, metrics_access=access)
    page = ProcessPage(config, process, name, key, requests_of(process, name))
    await page.start(LOOPBACK)
    try:
        yield page
    finally:
        await page.stop()


def free_port() -> int:
    return free_ports(1)[0]


async def scrape(port: int, key: str | None = "secret") -> httpx.Response:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    async with httpx.AsyncClient(trust_env=False, timeout=PATIENCE_S) as client:
        return await client.get(f"http://{LOOPBACK}:{port}/metrics", headers=headers)


def series_of(text: str) -> dict[tuple[str, str], float]:
    """The values by metric and process. Each series is there once, and each metric's series are together."""
    families = [*text_string_to_metric_families(text)]
    assert len({family.name for family in families}) == len(families) == text.count("# HELP ") == text.count("# TYPE ")
    samples = [sample for family in families for sample in family.samples]
    assert len({(sample.name, *sorted(sample.labels.items())) for sample in samples}) == len(samples)
    found = {}
    for sample in samples:
        process = "router" if "router" in sample.labels else "gang"
        found[sample.name, f"{process}_{sample.labels[process]}"] = sample.value
    return found


def up_in(text: str) -> dict[str, float]:
    return {process: value for (name, process), value in series_of(text).items() if name == "motet_process_up"}


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
    async with page_of(port := free_port()), httpx.AsyncClient(trust_env=False) as client:
        url = f"http://{LOOPBACK}:{port}"
        answer = await client.get(url + path, headers=headers)
        assert answer.status_code == status
        assert ("motet_requests_total" in answer.text) == (status == 200)
        assert (await client.post(url + path, headers=headers)).status_code in (404, 405)


async def test_it_may_be_open_to_all() -> None:
    async with page_of(port := free_port(), key=None):
        assert up_in((await scrape(port, None)).text) == {"router_r1": 1}
        assert up_in((await scrape(port)).text) == {"router_r1": 1}


async def test_two_motets_of_a_machine_share_a_port_and_no_key_opens_both() -> None:
    async with page_of(port := free_port()), page_of(port, "r2", key="other"), page_of(port, "g1", "gang", "other"):
        assert up_in((await scrape(port)).text) == {"router_r1": 1}
        assert up_in((await scrape(port, "other")).text) == {"router_r2": 1, "gang_g1": 1}
        assert (await scrape(port, "third")).status_code == 401


async def test_who_says_nothing_or_too_much_takes_no_place_for_good(monkeypatch: pytest.MonkeyPatch) -> None:
    deadline_s = "motet.cluster.exposition.node_page.DEADLINE_S"
    monkeypatch.setattr(deadline_s, 0.5)
    async with page_of(port := free_port()):
        streams = [await asyncio.open_connection(LOOPBACK, port) for _ in range(MAX_CONNECTIONS)]
        refused = await asyncio.open_connection(LOOPBACK, port)
        assert await asyncio.wait_for(refused[0].read(), PATIENCE_S) == b""
        for reader, _ in streams:  # each is closed when its time is over
            assert await asyncio.wait_for(reader.read(), PATIENCE_S) == b""
        monkeypatch.setattr(deadline_s, PATIENCE_S)
        assert (await scrape(port)).status_code == 200
        reader, writer = await asyncio.open_connection(LOOPBACK, port)
        writer.write(b"GET /metrics HTTP/1.1\r\n" + b"x" * (1 << 20))
        with suppress(ConnectionResetError):
            assert await asyncio.wait_for(reader.read(), PATIENCE_S) == b""
        assert (await scrape(port)).status_code == 200
        for _, stream in (*streams, refused, (reader, writer)):
            stream.close()


def test_a_pods_processes_die_hang_and_come_behind_one_port() -> None:
    """The largest pod: a router and eight gangs."""
    names = ["router_r1", *(f"gang_g{number}" for number in range(8))]
    port = free_port()

    def page() -> str:
        """Empty: no process listens yet, or the one that answered was killed meanwhile."""
        try:
            return asyncio.run(scrape(port)).raise_for_status().text
        except (httpx.TransportError, httpx.HTTPStatusError):
            return ""

    def are_up(wanted: dict[str, int]) -> bool:
        return up_in(page()) == wanted

    def with_series() -> set[str]:
        return {process for name, process in series_of(page()) if name != "motet_process_up"}

    with metrics_node(port, names, read_s=PATIENCE_S) as pids:
        processes = dict(zip(names, pids, strict=True))
        eventually(lambda: are_up(dict.fromkeys(names, 1)))
        found = series_of(page())
        for metric in ("motet_requests_total", "process_cpu_seconds_total", "process_start_time_seconds"):
            assert {process for name, process in found if name == metric} == set(names)
        promtool("check", "metrics", text=page())
        for number, name in enumerate(names[:-2], 1):  # one of these came first, and bound the port
            os.kill(processes[name], signal.SIGKILL)
            eventually(partial(are_up, dict.fromkeys(names[number:], 1)))
            assert {process for _, process in series_of(page())} == set(names[number:])
        stopped, killed = names[-2:]
        with metrics_node(port, ["router_r2"], read_s=1.0):
            eventually(partial(are_up, {stopped: 1, killed: 1, "router_r2": 1}))
            os.kill(processes[stopped], signal.SIGSTOP)  # it listens too, and takes no connection
            os.kill(processes[killed], signal.SIGKILL)
            eventually(partial(are_up, {stopped: 0, "router_r2": 1}))
            eventually(lambda: with_series() == {"router_r2"})
            os.kill(processes[stopped], signal.SIGCONT)
            eventually(partial(are_up, {stopped: 1, "router_r2": 1}))
    with socket.create_server((LOOPBACK, port)):
        pass  # its holders are gone


async def test_a_process_that_is_slow_is_missing_and_the_others_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("motet.cluster.exposition.node_page.READ_S", 0.5)

    async def hangs(key: bytes) -> bytes | None:
        await asyncio.Event().wait()
        return None

    async def fails(key: bytes) -> bytes | None:
        raise RuntimeError("no page")

    port = free_port()
    slow, broken = NodePage("gang", "g1", hangs), NodePage("gang", "g2", fails)
    await slow.start(LOOPBACK, port)
    await broken.start(LOOPBACK, port)
    async with page_of(port):

        async def others_are_there() -> bool:
            return up_in((await scrape(port)).text) == {"router_r1": 1, "gang_g1": 0, "gang_g2": 0}

        await until(others_are_there)
    assert (await scrape(port)).status_code == 401  # no process says that the key is right
    await broken.stop()
    await slow.stop()


async def test_a_port_that_another_program_has_is_taken_when_it_is_free(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("motet.cluster.exposition.node_page.RETRY_S", 0.01)
    with socket.create_server((LOOPBACK, 0)) as taken:
        port = taken.getsockname()[1]
        pages = AsyncExitStack()
        await pages.enter_async_context(page_of(port))
        await pages.enter_async_context(page_of(port, "r2"))
        await eventually_in_loop(lambda: "in use by another program" in caplog.text)
    async with pages:
        await eventually_in_loop(lambda: not free(port))
        for _ in range(1000):
            answer = await scrape(port)
            if answer.status_code == 200 and len(up_in(answer.text)) == 2:
                break
        assert up_in(answer.text) == {"router_r1": 1, "router_r2": 1}


def free(port: int) -> bool:
    try:
        socket.create_server((LOOPBACK, port)).close()
    except OSError:
        return False
    return True


async def test_a_folder_of_another_user_or_an_open_one_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as short:
        monkeypatch.setattr("tempfile.tempdir", short)
        folder = Path(short) / f"motet-metrics-{os.getuid()}"
        folder.mkdir()
        folder.chmod(0o755)
        async with page_of(free_port()) as page:
            assert page.metadata == {}
    assert "is open to other users" in caplog.text


def test_a_long_folder_of_temporary_files_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / ("x" * 90)))
    assert node_folder(30).parent == Path("/tmp")


async def test_a_page_shows_where_it_is() -> None:
    async with page_of(port := free_port()) as page, page_of(port, "g1", "gang") as other:
        assert page.metadata == other.metadata == {METRICS_ADDRESS: f"{LOOPBACK}:{port}"}
        config = part_config(ExpositionConfig, DEFAULTS, name="llama")
        (target,) = targets_of(config, [page.metadata, other.metadata, {}])  # the last one has none
        assert (target.address, target.base) == (f"{LOOPBACK}:{port}", "llama")


async def test_port_0_is_no_page() -> None:
    async with page_of(0) as page:
        assert page.metadata == {}


NAMES = st.sampled_from([f"motet_{letter}" for letter in "abcde"])


@given(st.lists(st.dictionaries(NAMES, st.tuples(st.booleans(), st.integers(0, 9)), max_size=5), max_size=4))
def test_a_merged_page_has_every_series_of_its_pages(pages: list[dict[str, tuple[bool, int]]]) -> None:
    wanted, texts = {}, []
    for number, metrics in enumerate(pages):
        make = Families({"gang": str(number)})
        families = []
        for name, (is_counter, value) in metrics.items():
            metric = f"{name}_{'c' if is_counter else 'g'}"
            families.append((make.counter if is_counter else make.gauge)(metric, "Some.", value))
            wanted[f"{metric}_total" if is_counter else metric, f"gang_{number}"] = value
        texts.append(text_of(families))
    assert series_of(merged_pages(texts).decode()) == wanted


def stepped(number: int, num_tokens: int, busy_s: float) -> EngineLoad:
    return EngineLoad(
        EngineGauges(num_running=3, num_pages=100, num_free_pages=20, num_idle_prefix_pages=5),
        EngineCounters(num_steps=number, num_computed_tokens=num_tokens, busy_s=busy_s),
    )


def reported(families: Iterator[Metric]) -> dict[str, float]:
    return {sample.name: sample.value for family in families for sample in family.samples if "le" not in sample.labels}


async def test_a_gangs_steps_are_counted() -> None:
    metrics = GangMetrics(INFO, "llama")
    frames = FrameServer(StandInEngine(), INFO, TOKEN, leader_config(), metrics.observe)
    metrics.observe(stepped(1, 40, 0.25))
    metrics.observe(stepped(2, 40, 0.26))  # a heartbeat
    metrics.observe(stepped(3, 50, 0.5))
    found = reported(metrics.families(GangFacts.of(frames)))
    assert found["motet_engine_step_seconds_count"] == found["motet_engine_step_tokens_count"] == 2
    assert found["motet_engine_step_seconds_sum"] == pytest.approx(0.25 + 0.24)
    assert found["motet_engine_step_tokens_sum"] == 50
    assert found["motet_engine_step_sequences_sum"] == 6


async def test_a_gang_serves_what_gateways_ask_for() -> None:
    """Names and labels of the endpoint picker's defaults."""
    metrics = GangMetrics(INFO, "llama")
    engine = StandInEngine()
    engine.paused = True  # requests stay queued until it is looked at
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
        "gang": INFO.gang_id,
        "max_lora": str(INFO.max_num_sequences),
        "running_lora_adapters": "",
        "waiting_lora_adapters": "support",
    }
    assert lora.value > 1.7e9  # seconds since 1970: the newest list counts
    await router.send(Cancel(1))
    await eventually_in_loop(lambda: frames.num_sequences == 0)
    assert not frames.requested_adapters.num_open
    await router.channel.close()
    await frames.stop()


DIGESTS = st.lists(st.integers(0, 30), unique=True, max_size=20)


@given(DIGESTS, st.sets(st.integers(0, 30)), st.sets(st.integers(0, 30)), st.integers(1, 40))
def test_a_gangs_adapters_for_gateways(requested: list[int], open_: set[int], resident: set[int], places: int) -> None:
    names = {str(digest): f"name-{digest}" for digest in requested}
    labels = lora_requests(names, {str(d): 1 for d in open_}, {str(d) for d in resident}, places)
    running = [name for name in labels["running_lora_adapters"].split(",") if name]
    waiting = [name for name in labels["waiting_lora_adapters"].split(",") if name]
    assert {f"name-{d}" for d in requested if d in open_ and d in resident} <= set(running)
    assert set(waiting) == {f"name-{d}" for d in requested if d in open_ and d not in resident}
    assert set(running) <= {f"name-{d}" for d in requested if d in resident}
    idle = set(running) - {f"name-{d}" for d in open_}
    if idle:  # they leave a place, so that a gateway sends new adapters here too
        assert len(running) + len(waiting) < places


def test_ten_thousand_adapters_make_a_short_label() -> None:
    names = {str(number): f"adapter-number-{number}" for number in range(10_000)}
    labels = lora_requests(names, dict.fromkeys(names, 1), names.keys(), 4096)
    assert len(labels["running_lora_adapters"]) <= MAX_CHARS
    assert labels["running_lora_adapters"].startswith("adapter-number-9999,")  # requested last


async def test_a_gang_reports_which_adapters_it_has_at_hand() -> None:
    metrics, engine = GangMetrics(INFO, "llama"), StandInEngine()
    frames = FrameServer(engine, INFO, TOKEN, leader_config(), metrics.observe)
    router = Router(await frames.start(LOOPBACK))
    await router.read()

    def reported() -> dict[str, dict[str, str]]:
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
    await eventually_in_loop(lambda: len(reported()) == 2 and reported()["sales"]["pinned"] == "true")
    facts = {"gang": INFO.gang_id, "model_name": "llama", "level": "gpu", "pinned": "false"}
    assert reported()["support"] == facts | {"adapter_name": "support", "rank": "8"}
    assert reported()["sales"] == facts | {"adapter_name": "sales", "rank": "16", "pinned": "true"}
    await eventually_in_loop(lambda: frames.num_sequences == 0)
    engine.host("d2")
    engine.evict("d1")
    engine.evict("d2")
    params = SamplingParams(max_tokens=1)
    await router.send(Submit(SequenceRequest(sequence_id=3, prompt_token_ids=[1], sampling=params, tenant="acme")))
    # Its step reports both.
    await eventually_in_loop(lambda: reported().keys() == {"sales"} and reported()["sales"]["level"] == "cpu")
    await router.channel.close()
    await frames.stop()


NAMED = st.dictionaries(st.integers(0, 400), st.integers(0, 3), max_size=30)  # names that several share, by digest


@given(NAMED, st.sets(st.integers(0, 400)), st.sets(st.integers(0, 400)), st.sets(st.integers(0, 400)))
def test_each_name_is_reported_once_at_its_nearest_level(
    named: dict[int, int], resident: set[int], hosted: set[int], pinned: set[int]
) -> None:
    """Two samples of the same labels would make the whole page unreadable."""
    requested = RequestedAdapters()
    requested.names = {str(digest): f"name-{name}" for digest, name in named.items()}
    requested.ranks = dict.fromkeys(requested.names, 8)
    hosted_shorts = {short_digest(str(digest)) for digest in hosted}
    found = loaded_adapters(requested, {str(d) for d in resident}, hosted_shorts, {str(d) for d in pinned})
    levels = {adapter.adapter_name: adapter.level for adapter in found}
    assert len(levels) == len(found)
    in_pool = {f"name-{name}" for digest, name in named.items() if digest in resident}
    in_host = {f"name-{name}" for digest, name in named.items() if digest in hosted}
    assert levels == dict.fromkeys(in_host, "cpu") | dict.fromkeys(in_pool, "gpu")


def test_of_too_many_those_requested_last_are_reported() -> None:
    requested = RequestedAdapters()
    requested.names = {str(number): f"name-{number}" for number in range(4 * MOST_LISTED)}
    requested.ranks = dict.fromkeys(requested.names, 8)
    in_pool = {str(number) for number in range(100)}
    found = loaded_adapters(requested, in_pool, {short_digest(digest) for digest in requested.names}, set())
    newest_hosted = [f"name-{4 * MOST_LISTED - 1 - i}" for i in range(MOST_LISTED - 100)]
    assert [adapter.adapter_name for adapter in found] == [*(f"name-{99 - i}" for i in range(100)), *newest_hosted]


def facts_of(shares: Sequence[TenantShare], names: dict[str, str], residency: Residency) -> GangFacts:
    requested = RequestedAdapters()
    requested.names = names
    return GangFacts(
        EngineLoad(),
        {},
        num_routers=0,
        num_orphans=0,
        requested=requested,
        resident=frozenset(),
        hosted=frozenset(),
        pinned=frozenset(),
        shares=shares,
        num_loads=residency.num_loads,
        num_evictions=residency.num_evictions,
    )


def top(facts: GangFacts, name: str) -> dict[str, float]:
    """Of each label, without the counters' `_created`."""
    metric = next(one for one in GangMetrics(INFO, "llama").families(facts) if one.name == f"motet_engine_top_{name}")
    return {next(reversed(one.labels.values())): one.value for one in metric.samples}


def test_of_ten_thousand_tenants_those_with_most_are_named() -> None:
    """Those that are served now first, so that a new one shows beside those of last month."""
    shares = [TenantShare(f"idle-{n}", 0.0, 0, 0, 0, served=1e9 + n) for n in range(10_000)]
    shares += [TenantShare(f"busy-{n}", 0.0, 1, n, 0, served=float(n)) for n in range(30)]
    facts = facts_of(shares, {}, Residency())
    busiest = {f"busy-{n}" for n in range(10, 30)}
    assert set(top(facts, "tenant_service")) == busiest
    assert top(facts, "tenant_waiting") == {f"busy-{n}": n for n in range(10, 30)}
    few = facts_of([*shares[:1000], *shares[-5:]], {}, Residency())
    assert len(top(few, "tenant_service")) == 20 and top(few, "tenant_service")["idle-999"] == 1e9 + 999


def test_loads_and_evictions_are_counted_by_the_names_that_clients_use() -> None:
    residency = Residency()
    for number in range(40):
        for _ in range(number):
            residency.apply(ResidencyChange(came=[f"d{number}"]))
            residency.apply(ResidencyChange(went=[f"d{number}"]))
    residency.apply(ResidencyChange(came=["private"] * 100 + ["d39", "same"]))
    facts = facts_of([], {"same": "a39", **{f"d{number}": f"a{number}" for number in range(40)}}, residency)
    loads, evictions = top(facts, "adapter_loads"), top(facts, "adapter_evictions")
    assert loads.pop("a39") == 41 and evictions.pop("a39") == 39
    assert loads == evictions == {f"a{number}": number for number in range(20, 39)}


def test_a_million_adapters_are_not_all_counted() -> None:
    residency = Residency()
    for number in range(20_000):
        residency.apply(ResidencyChange(came=[f"d{number}", "often"], went=[f"d{number - 1}"]))
    assert len(residency.num_loads) <= 4096 and len(residency.num_evictions) <= 4096
    assert residency.num_loads["often"] == 20_000
