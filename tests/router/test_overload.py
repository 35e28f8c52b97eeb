"""A router and its gangs under overload: early refusals, short queues, deadlines that hold."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import httpx
import pytest

from motet.adapters.registry.registry_view import RegistryView
from motet.adapters.upload import UploadService
from motet.router.config import CurrentConfig
from motet.router.fleet.admission import SLACK, AdmissionConfig, TimeLimit
from motet.router.fleet.dispatch import FleetDispatcher
from motet.router.fleet.open_sequence import OpenSequence
from motet.router.rest_server import create_app
from motet.tests.rigs.part_configs import admission_config, leader_config, router_config
from motet.tests.rigs.patience import PATIENCE_S
from motet.tests.rigs.patience import eventually_in_loop as eventually
from motet.tests.rigs.router_rig import HEADERS, OPERATOR_KEY, OPERATORS, FakeUploads, FakeView, text_service
from motet.tests.rigs.simulated_fleet import STEP_S as SIMULATED_STEP_S
from motet.tests.rigs.simulated_fleet import requested, simulated_fleet
from motet.tests.rigs.simulated_time import run_simulated
from motet.tests.rigs.stand_in_engine import INFO, StandInEngine, adapter_pages
from motet.workers.leader.frame_server import FrameServer
from motet.workers.wire.messages import SamplingParams, SequenceError, SequenceRequest

TOKEN = "a secret"
STEP_S = 0.005
NUM_PLACES = 4
NUM_TOKENS = 5  # that each sequence generates: a place serves one in so many steps
PER_S = NUM_PLACES / (NUM_TOKENS * SIMULATED_STEP_S)  # sequences that a simulated gang serves at best
NUM_STEPS = 600  # of it, for which it is offered too much
OBJECTIVE_S = 80 * SIMULATED_STEP_S

StartRouter = Callable[[AdmissionConfig], Awaitable[FleetDispatcher]]


class Rig:
    """One gang, and routers with the admission settings of a test."""

    def __init__(self) -> None:
        self.engine = StandInEngine(STEP_S, NUM_PLACES)
        self.server = FrameServer(self.engine, INFO, TOKEN, leader_config())
        self.address = ""
        self.routers: list[FleetDispatcher] = []

    async def router(self, admission: AdmissionConfig) -> FleetDispatcher:
        router = FleetDispatcher(TOKEN, PATIENCE_S, adapter_pages=adapter_pages, admission=admission)
        self.routers.append(router)
        router.update({"a": self.address})
        await eventually(lambda: router.gang() is not None)
        return router


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    rig = Rig()
    rig.address = await rig.server.start("127.0.0.1")
    yield rig
    for router in rig.routers:
        await router.close()
    await rig.server.stop()


@dataclass
class Outcome:
    was_refused_at_once: bool
    error: SequenceError | None = None
    first_token_s: float | None = None
    whole_s: float | None = None


def submit(router: FleetDispatcher, max_tokens: int | None, limit: TimeLimit | None = None) -> OpenSequence:
    return router.submit(
        SequenceRequest(prompt_token_ids=[1] * 10, sampling=SamplingParams(max_tokens=max_tokens), tenant="acme"),
        limit=limit,
    )


async def follow(sequence: OpenSequence) -> Outcome:
    now = asyncio.get_running_loop().time
    began_at = now()
    outcome = Outcome(was_refused_at_once=sequence.closed)
    async with asyncio.timeout(PATIENCE_S):
        async for update in sequence:
            if update.token_ids and outcome.first_token_s is None:
                outcome.first_token_s = now() - began_at
            outcome.error = update.error
    outcome.whole_s = now() - began_at
    return outcome


@dataclass
class Offered:
    outcomes: list[Outcome]
    longest_queue: int
    seconds: float


async def offer(router: FleetDispatcher, num_steps: int, limit: TimeLimit | None = None) -> Offered:
    """Sends twice the requests that the gang can serve in so many steps. Returns what became of them."""
    now, readers, longest_queue = asyncio.get_running_loop().time, list[asyncio.Task[Outcome]](), 0
    began_at = now()
    while (seconds := now() - began_at) < num_steps * SIMULATED_STEP_S:
        for _ in range(int(2 * seconds * PER_S) - len(readers)):
            sequence = router.submit(requested(len(readers), NUM_TOKENS), limit=limit)
            readers.append(asyncio.create_task(follow(sequence)))
        load = router.load()
        longest_queue = max(longest_queue, 0 if load is None else load.gauges.num_waiting)
        await asyncio.sleep(SIMULATED_STEP_S)
    return Offered(await asyncio.gather(*readers), longest_queue, seconds)


@asynccontextmanager
async def router_of_one_gang() -> AsyncIterator[FleetDispatcher]:
    """In simulated time: a machine that stands still for a moment would keep no objective."""
    async with simulated_fleet() as fleet:
        await fleet.add_gang()
        (router,) = fleet.routers
        router.change_admission(admission_config(max_queue_wait_s=OBJECTIVE_S))
        await asyncio.sleep(1.0)  # it connects
        yield router


def test_twice_the_load_with_an_objective() -> None:
    async def main() -> None:
        async with router_of_one_gang() as router:
            offered = await offer(router, NUM_STEPS)
        outcomes = offered.outcomes
        waits_s = sorted(one.first_token_s for one in outcomes if one.first_token_s is not None)
        refused = [one for one in outcomes if one.error is not None]
        assert len(waits_s) + len(refused) == len(outcomes)
        assert len(waits_s) > len(outcomes) / 5
        assert len(refused) > len(outcomes) / 5
        assert {one.error.reason for one in refused if one.error} <= {"wait", "waited"}
        assert sum(one.was_refused_at_once for one in refused) > 0.8 * len(refused)
        assert offered.longest_queue < 2.5 * PER_S * SLACK * OBJECTIVE_S
        assert waits_s[len(waits_s) // 2] < SLACK * OBJECTIVE_S
        assert waits_s[-1] < offered.seconds

    run_simulated(main())


def test_twice_the_load_with_timeouts() -> None:
    async def main() -> None:
        async with router_of_one_gang() as router:
            await offer(router, NUM_STEPS // 2)  # it learns what a token of the queue takes there
            outcomes = (await offer(router, NUM_STEPS // 2, TimeLimit(OBJECTIVE_S))).outcomes
        admitted = [one for one in outcomes if not one.was_refused_at_once]
        in_time = [one for one in admitted if one.error is None]
        assert len(outcomes) / 5 < len(admitted) < 0.9 * len(outcomes)
        assert len(in_time) > 0.6 * len(admitted)
        assert {one.error.reason for one in outcomes if one.was_refused_at_once and one.error} <= {"timeout", "wait"}

    run_simulated(main())


async def fill(rig: Rig, router: FleetDispatcher) -> list[OpenSequence]:
    """Fills the gang with sequences of another router, and one that waits; `router` knows of it when this returns."""
    patient = await rig.router(admission_config(max_queue_wait_s=0))
    sequences = [submit(patient, None) for _ in range(NUM_PLACES + 1)]
    await eventually(lambda: (load := router.load()) is not None and load.gauges.num_waiting == 1)
    return sequences


async def test_what_waited_for_a_gang_is_not_refused_by_it(rig: Rig) -> None:
    strict = admission_config(max_queue_wait_s=1e-9)
    router = await rig.router(strict)
    running = await fill(rig, router)
    refused = submit(router, 1)
    assert refused.closed
    late = FleetDispatcher(TOKEN, PATIENCE_S, adapter_pages=adapter_pages, admission=strict)
    rig.routers.append(late)
    parked = asyncio.create_task(follow(submit(late, 1)))
    await asyncio.sleep(0)
    assert late.num_waiting == 1
    late.update({"a": rig.address})
    await eventually(lambda: len(rig.engine.submitted) == NUM_PLACES + 2)
    assert rig.engine.submitted[-1].wait_s is None
    for sequence in running:
        sequence.cancel()
    assert (await parked).error is None


async def test_an_objective_refuses_its_own_tenant_alone(rig: Rig, tmp_path: Path) -> None:
    router = await rig.router(admission_config(latency_objectives_s=(("acme", 1e-9), ("other", 1e-9))))
    app = create_app(
        config=CurrentConfig(router_config("base", tmp_path)),
        dispatcher=router,
        view=cast(RegistryView, FakeView()),
        uploads=cast(UploadService, FakeUploads(FakeView())),
        text=text_service(),
        operator_key=OPERATOR_KEY,
    )
    body = {"model": "base", "prompt": [1] * 10, "max_tokens": 1}
    zenith = {"Authorization": "Bearer key-of-zenith"}
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://router", headers=HEADERS) as http:
        assert (await http.post("/v1/completions", json=body)).status_code == 200  # no request waits
        running = await fill(rig, router)
        refused = await http.post("/v1/completions", json=body)
        assert (refused.status_code, refused.headers["Retry-After"]) == (429, "1")
        error = refused.json()["error"]
        assert error["code"] == "overloaded"
        assert re.fullmatch(
            r"the first token needs up to [\d.]+ ms, as [\d.]+ ms are expected in the queue, "
            r"and the tenant's latency objective is 1e-09 s",
            error["message"],
        )
        admitted = asyncio.create_task(http.post("/v1/completions", json=body, headers=zenith))
        await eventually(lambda: len(rig.engine.submitted) == NUM_PLACES + 3)
        for sequence in running:
            sequence.cancel()
        assert (await admitted).status_code == 200
        reported = (await http.get("/metrics", headers=OPERATORS)).text.splitlines()
    assert 'motet_refused_requests_total{reason="objective"} 1.0' in reported
    assert 'motet_refused_requests_total{reason="wait"} 0.0' in reported


async def test_a_beam_search_that_was_admitted_is_not_refused_half_way(rig: Rig) -> None:
    router = await rig.router(admission_config(max_queue_wait_s=1e-9, latency_objectives_s=(("acme", 1e-9),)))
    running = await fill(rig, router)
    assert submit(router, 1).closed
    later = submit(router, 1, TimeLimit(has_begun=True))
    assert not later.closed
    reader = asyncio.create_task(follow(later))
    await eventually(lambda: len(rig.engine.submitted) == NUM_PLACES + 2)
    assert rig.engine.submitted[-1].has_begun
    for sequence in running:
        sequence.cancel()
    assert (await reader).error is None


async def test_a_resumed_stream_is_not_refused(rig: Rig) -> None:
    router = await rig.router(admission_config(max_queue_wait_s=1e-9))
    running = await fill(rig, router)
    resumed = router.submit(
        SequenceRequest(prompt_token_ids=[1] * 10, sampling=SamplingParams(max_tokens=1), tenant="acme", key="lost"),
        is_resumed=True,
        limit=TimeLimit(1e6, has_begun=True),
    )
    reader = asyncio.create_task(follow(resumed))
    await eventually(lambda: len(rig.engine.submitted) == NUM_PLACES + 2)
    sent = rig.engine.submitted[-1]
    assert (sent.has_begun, sent.wait_s) == (True, None)
    assert sent.timeout_s is not None
    assert sent.timeout_s < 1e6
    for sequence in running:
        sequence.cancel()
    assert (await reader).error is None


async def test_a_timeout_ends_what_runs_and_what_waits_for_a_gang(rig: Rig) -> None:
    router = await rig.router(admission_config())
    outcome = await follow(submit(router, None, TimeLimit(2.0)))
    assert outcome.error is not None
    assert outcome.error.kind == "timeout"
    assert outcome.first_token_s is not None
    await eventually(lambda: rig.engine.num_running == 0)
    lonely = FleetDispatcher(TOKEN, PATIENCE_S, adapter_pages=adapter_pages, admission=admission_config())
    outcome = await follow(submit(lonely, None, TimeLimit(0.05)))
    assert outcome.error is not None
    assert outcome.error.kind == "timeout"
    assert lonely.num_waiting == 0
    assert (await follow(submit(router, 1, TimeLimit(0.0)))).error is not None
    assert (await follow(submit(router, 3, TimeLimit(60.0)))).error is None
    await lonely.close()


async def test_the_oldest_wait_of_all_gangs_is_reported_not_their_sum(rig: Rig) -> None:
    router = await rig.router(admission_config())
    other = FrameServer(StandInEngine(STEP_S, NUM_PLACES), INFO, TOKEN, leader_config())
    router.update({"a": rig.address, "b": await other.start("127.0.0.1")})
    await eventually(lambda: len(router.gangs()) == 2)
    sequences = [submit(router, None) for _ in range(40)]
    await eventually(lambda: min(load.gauges.oldest_waiting_s for _, load in router.gangs()) > 0)
    reported = router.load()
    assert reported is not None
    assert reported.gauges.oldest_waiting_s == max(load.gauges.oldest_waiting_s for _, load in router.gangs())
    for sequence in sequences:
        sequence.cancel()
    await other.stop()
