"""While gangs, a router and Redis are killed: what is scraped, and what is metered, is what clients received, once."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import httpx
import psutil
import pytest

from motet.cluster.launch.local_serve import free_ports
from motet.examples.resuming_client import resume_stream
from motet.tests.rigs.patience import PATIENCE_S, eventually
from motet.tests.rigs.running_motet import BASE, DEMO, RunningMotet, running_motet, slowed
from motet.tests.rigs.scraping import Prometheus, scraping
from motet.tests.rigs.token_streams import Job, Meter, ReceivedStream, read_stream, stream_all

pytestmark = pytest.mark.cluster

NAME: Final = "desk"
NUM_STREAMS: Final = 16
NUM_TOKENS: Final = 350
# Gangs are ahead of what clients read: with so small steps, and slowed, they are not through before the last kill, and
# most of what is scraped is yet to come when the first token arrives.
OPTIONS: Final = ("--gangs", "2", "--routers", "2", "--dtype", "float32", "--max-tokens-per-step", "4")
# Of all tokens, when Redis, a gang and a router are killed.
MOMENTS: Final = (0.02, 0.05, 0.1)
# Twice what the streams need: a router that dies takes its reserve with it.
QUOTA: Final = {
    "requests_per_minute": 2 * NUM_STREAMS,
    "tokens_per_minute": 2 * NUM_STREAMS * (NUM_TOKENS + 50),
    "concurrent_streams": 2 * NUM_STREAMS,
}
# Once all have begun, nothing is left for another one: what comes back at another router must not be charged again.
# What it uses there beside the reserve that died is debt, which may be as large as a minute's quota (docs/quotas.md).
BEGUN_QUOTA: Final = {
    "requests_per_minute": 1,
    "tokens_per_minute": NUM_STREAMS * (NUM_TOKENS + 50),
    "concurrent_streams": NUM_STREAMS,
}
JOBS: Final = [
    Job(
        "acme",
        {
            "model": NAME if number % 2 else BASE,
            "prompt": f"{number} capital",
            "max_tokens": NUM_TOKENS,
            "ignore_eos": True,
            "temperature": 0,
            "user": f"user {number}",
        },
    )
    for number in range(NUM_STREAMS)
]
# Of another tenant, whose use is not that of the one above.
SCRAPED_JOBS: Final = [
    Job("globex", {"model": BASE, "prompt": f"{number} capital", "max_tokens": NUM_TOKENS, "ignore_eos": True})
    for number in range(NUM_STREAMS)
]
MADE_TOKENS: Final = "motet_engine_generated_tokens_total"


class Kills:
    """Reads streams, and calls a function once when all of them have begun and so many tokens have come.

    `num_returns`: of clients whose connections broke.
    """

    def __init__(self, kills: Mapping[int, Callable[[], object]]) -> None:
        self._kills = dict(kills)
        self.num_returns = 0
        self._num_begun = self._num_tokens = 0
        self._lock = threading.Lock()

    @property
    def num_left(self) -> int:
        return len(self._kills)

    def read(self, http: httpx.Client, path: str, body: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
        http.event_hooks = {**http.event_hooks, "request": [*http.event_hooks["request"], self._note_request]}
        for number, chunk in enumerate(resume_stream(http, path, dict(body), give_up_s=PATIENCE_S)):
            yield chunk
            num_tokens = sum(len(choice.get("token_ids") or []) for choice in chunk["choices"])
            self._note_chunk(is_first=number == 0, num_tokens=num_tokens)

    def _note_request(self, request: httpx.Request) -> None:
        with self._lock:
            self.num_returns += "Last-Event-ID" in request.headers

    def _note_chunk(self, *, is_first: bool, num_tokens: int) -> None:
        with self._lock:
            self._num_begun += is_first
            self._num_tokens += num_tokens
            is_time = [at for at in self._kills if self._num_begun == NUM_STREAMS and at <= self._num_tokens]
            for at in is_time:  # one after the other, while all streams wait
                self._kills.pop(at)()


@pytest.fixture(scope="module")
def motet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningMotet]:
    with running_motet(tmp_path_factory.mktemp("metering") / "data", free_ports(1)[0], *OPTIONS) as motet:
        yield motet


def killing_the_busier(gangs: Sequence[psutil.Process]) -> Callable[[], None]:
    """Kills the gang that has computed most since: another one may have few streams, or none, and be through."""
    began_s = {gang: sum(gang.cpu_times()[:2]) for gang in gangs}

    def kill() -> None:
        used_s: dict[psutil.Process, float] = {}

        def is_found() -> bool:  # from one that only says that it lives
            used_s.update({gang: sum(gang.cpu_times()[:2]) - began_s[gang] for gang in gangs})
            return max(used_s.values()) > 0.1

        eventually(is_found)
        max(used_s, key=lambda gang: used_s[gang]).kill()

    return kill


def test_sums_over_what_was_scraped_are_what_clients_received(motet: RunningMotet, tmp_path: Path) -> None:
    """The first test: its routers and gangs have counted nothing yet."""
    with scraping(motet, tmp_path) as prometheus:
        check_sums(motet, prometheus)


def check_sums(motet: RunningMotet, prometheus: Prometheus) -> None:
    for process in ("router", "gang"):
        prometheus.reaches(f'count(motet_process_up{{process="{process}"}} == 1)', lambda number: number == 2)
    assert len(prometheus.query("up")) == 1  # all four are on one page
    both_answer(motet, prometheus)
    # A scrape that comes too late on a busy machine takes all series of its process away until the next one.
    eventually(lambda: len(prometheus.gangs(MADE_TOKENS)) == 2)
    gangs = prometheus.gangs(f"max_over_time({MADE_TOKENS}[10m])")
    assert len(gangs) == 2
    running = motet.gang_processes()
    meter = Meter(1, killing_the_busier(running))
    with slowed(running, lambda: meter.count > 0):
        received = stream_all(motet, SCRAPED_JOBS, meter, read_stream)
    assert [len(one.token_ids) for one in received] == [NUM_TOKENS] * NUM_STREAMS

    # Each router has counted what it sent, and together they have sent what clients received: once.
    num_received = NUM_STREAMS * NUM_TOKENS
    prometheus.reaches("sum(motet_completion_tokens_total)", lambda number: number == num_received)
    prometheus.reaches("count(motet_completion_tokens_total > 0)", lambda number: number == 2)  # each had some streams
    answered = 'motet_requests_total{route="POST /v1/completions", status="200"}'
    prometheus.reaches(f"sum({answered})", lambda number: number == NUM_STREAMS)
    finished = 'motet_finished_sequences_total{reason="length"}'
    prometheus.reaches(f"sum({finished})", lambda number: number == NUM_STREAMS)
    prometheus.reaches("sum(motet_resumed_sequences_total)", lambda number: number > 0)

    # What the dead gang had reported still counts, and its replacement is found without help.
    prometheus.reaches("count(motet_connected_gangs == 2)", lambda number: number == 2)
    prometheus.reaches('count(motet_process_up{process="gang"} == 1)', lambda number: number == 2)
    eventually(lambda: len(prometheus.gangs(MADE_TOKENS)) == 2 and len(prometheus.gangs(MADE_TOKENS) & gangs) == 1)
    assert prometheus.gangs(f"max_over_time({MADE_TOKENS}[10m])") > gangs
    for counter in (MADE_TOKENS, "motet_completion_tokens_total"):
        assert prometheus.query(f"resets({counter}[10m])")
        assert prometheus.number(f"resets({counter}[10m])") == 0


def both_answer(motet: RunningMotet, prometheus: Prometheus) -> None:
    """Waits until both routers get requests."""
    with motet.http() as http:

        def have_both() -> bool:
            http.get("/v1/models").raise_for_status()
            return prometheus.number('count(motet_requests_total{route="GET /v1/models"} > 0)') == 2

        eventually(have_both)


def test_streams_under_kills_are_metered_once(motet: RunningMotet) -> None:
    for style in ("pirate", "spanish"):
        assert motet.upload(NAME, DEMO / "adapters" / style).status_code == 201
    with motet.http() as http:
        http.put(f"/v1/adapters/{NAME}/canary", json={"version": 1, "share": 0.5}).raise_for_status()
        set_quota(motet, QUOTA)
        eventually(lambda: all(is_left(http, name) for name in QUOTA), lambda: f"{limits(http)}")

        at = [int(moment * NUM_STREAMS * NUM_TOKENS) for moment in MOMENTS]

        def kill_router() -> None:  # the one with the most streams: the other may not have been there when they began
            max(motet.router_processes(), key=lambda router: len(router.net_connections())).kill()

        gangs = motet.gang_processes()
        deeds: list[Callable[[], object]] = [
            partial(set_quota, motet, BEGUN_QUOTA),
            motet.redis_process().kill,
            killing_the_busier(gangs),
            kill_router,
        ]
        kills = Kills(dict(zip([0, *at], deeds, strict=True)))
        with slowed(gangs, lambda: not kills.num_left):
            received = stream_all(motet, JOBS, Meter(), kills.read)
        assert [len(one.token_ids) for one in received] == [NUM_TOKENS] * NUM_STREAMS
        assert kills.num_left == 0
        assert kills.num_returns > 0, "no stream was at the router that died"

        expected = expected_usage(received)
        eventually(lambda: usage(http) == expected, lambda: f"{usage(http)} and not {expected}")
        # Places of answers come back, and nothing that still comes, as from the spool of the dead router, is new.
        eventually(lambda: is_left(http, "concurrent_streams"), lambda: f"{limits(http)}")
        eventually(lambda: len(motet.router_processes()) == 2 == len(motet.gang_processes()))
        assert usage(http) == expected
        trial = http.get(f"/v1/adapters/{NAME}/canary").raise_for_status().json()
        assert trial["state"] == "running"  # as was acknowledged
        counted = trial["stable"]["answers"] + trial["canary"]["answers"]
        # The dead router had reported all but its last 0.2 s.
        assert 0 < counted <= sum(job.body["model"] == NAME for job in JOBS)


def set_quota(motet: RunningMotet, quota: Mapping[str, int]) -> None:
    operators = {"Authorization": f"Bearer {motet.operator_key()}"}
    with motet.http() as http:

        def is_set() -> bool:
            answer = http.patch("/v1/admin/tenants/acme", json={"quota": quota}, headers=operators)
            return answer.status_code != 503 and bool(answer.raise_for_status())  # its copy of the registry was behind

        eventually(is_set)


def expected_usage(received: Sequence[ReceivedStream]) -> Counter[str]:
    return Counter(
        requests=len(received),
        prompt_tokens=sum(one.usage["prompt_tokens"] for one in received),
        output_tokens=sum(one.usage["completion_tokens"] for one in received),
    )


def usage(http: httpx.Client) -> Counter[str]:
    """What the ledger says of the tenant, once a router and Redis are there to say so."""
    answers: list[httpx.Response] = []

    def is_reported() -> bool:
        answers[:] = [http.get("/v1/usage", params={"by": "adapter"})]
        return answers[0].status_code not in (502, 503, 504)

    eventually(is_reported)
    total = answers[0].raise_for_status().json()["total"]
    return +Counter({name: total[name] for name in ("requests", "cut_off", "prompt_tokens", "output_tokens")})


def limits(http: httpx.Client) -> dict[str, Any]:
    answer = http.get("/v1/limits")
    found: dict[str, Any] = answer.json()["tenant"] if answer.status_code == 200 else {}
    return found


def is_left(http: httpx.Client, name: str) -> bool:
    """Whether all of a quota is."""
    found = limits(http)
    return bool(found) and found[name]["remaining"] == found[name]["limit"]
