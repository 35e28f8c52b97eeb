"""One run of the network's fuzz: clients, two routers and two gangs, while links break and gangs die, by a seed.

What must hold: each token comes once and is the right one; 2 s after the network is whole again no sequence is in two
gangs, and none without a client is in any; and in the end nothing is left anywhere.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from dataclasses import dataclass, field, replace
from unittest import mock

from motet.router.fleet.admission import TimeLimit
from motet.router.fleet.dispatch import FleetDispatcher
from motet.router.fleet.open_sequence import OpenSequence
from motet.tests.rigs.part_configs import admission_config
from motet.tests.rigs.simulated_gang import TOKEN, SimulatedGang, token_of
from motet.tests.rigs.simulated_network import Link, SimulatedNetwork
from motet.workers.window_pages import GangLimits
from motet.workers.wire.messages import AdapterRef, SamplingParams, SequenceRequest, TokenLogprobs

TROUBLE_S = 6.0  # for so long the network is not whole
SETTLE_S = (
    4.0  # after which no sequence may be in two gangs; routers connect again within it, after pauses of up to 1 s
)
ORPHAN_S = 40.0  # longer than a run, so that no orphan ends by itself
LIMITS = GangLimits(
    max_model_len=400, vocab_size=1000, block_size=8, num_pages=100, max_tokens_per_step=24, max_num_sequences=4
)


@dataclass(eq=False)
class Client:
    """One request, and what its client has had of it. It may go away, or come back to another router."""

    request: SequenceRequest
    limit: TimeLimit | None
    token_ids: list[int] = field(default_factory=list)
    stream: OpenSequence | None = None
    streams: list[OpenSequence] = field(default_factory=list)  # of all its connections
    has_finished: bool = False
    ended_at: float | None = None
    problem: str | None = None  # an error that it got

    @property
    def seed(self) -> int:
        assert self.request.sampling.seed is not None
        return self.request.sampling.seed

    async def read(self, dispatcher: FleetDispatcher, *, is_resumed: bool = False) -> None:
        """Reads to the end, over any number of connections. Raises AssertionError for a token that is not right."""
        num_read = 0  # over this connection; one that resumes gets all tokens again
        self.stream = dispatcher.submit(self.request, is_resumed=is_resumed, limit=self.limit)
        self.streams.append(self.stream)
        reason = None
        async for update in self.stream:
            assert reason is None and self.problem is None, "an update after the last one"
            for place, token_id in enumerate(update.token_ids, start=num_read):
                assert token_id == token_of(self.seed, place), f"token {place} is not the right one"
                if place == len(self.token_ids):
                    self.token_ids.append(token_id)
            if self.request.sampling.num_logprobs is not None:
                places = range(num_read, num_read + len(update.token_ids))
                assert (update.logprobs or []) == [TokenLogprobs(-float(place), [], []) for place in places]
            num_read += len(update.token_ids)
            reason = update.finish_reason
            if update.error is not None:
                self.problem = f"{update.error.kind}: {update.error.message}"
        if reason is not None:
            assert num_read == self.request.sampling.max_tokens, "it ended before its end"
            self.has_finished = True

    async def live(self, dispatchers: list[FleetDispatcher], rng: random.Random) -> None:
        await asyncio.sleep(rng.uniform(0, TROUBLE_S))
        first = rng.choice(dispatchers)
        reading = asyncio.create_task(self.read(first))
        whim = rng.random()
        if whim < 0.4:
            await asyncio.wait([reading], timeout=rng.expovariate(1 / 2))
        if whim < 0.4 and not reading.done():
            assert self.stream is not None
            self.stream.cancel()
            await reading
            if whim < 0.2 and self.request.key:
                await asyncio.sleep(rng.choice([0, rng.uniform(0, 1.0)]))
                reading = asyncio.create_task(self.read(rng.choice(dispatchers), is_resumed=True))
        await reading
        self.ended_at = asyncio.get_running_loop().time()


class Run:
    """One seed's run. `num_faults` counts what happened, so that a test can see that enough does."""

    def __init__(self, seed: int, is_quiet: bool = False) -> None:
        """`is_quiet`: the network stays whole, and pages are plenty."""
        self.is_quiet = is_quiet
        self.seed, self.rng = seed, random.Random(seed)
        self.network = SimulatedNetwork(self.rng)
        self.gangs: dict[str, SimulatedGang] = {}  # by key
        self._all_gangs: list[SimulatedGang] = []  # those that have ended, too
        self.num_gangs_ever = 0
        self.num_events: Counter[str] = Counter()
        self.whole_at = float("inf")
        self.clients = [
            self._client(seed * 1000 + number)
            for number in range(self.rng.choice([self.rng.randint(8, 24)] * 3 + [50]))
        ]
        self._dispatchers: list[FleetDispatcher] = []

    async def run(self) -> None:
        random.seed(self.seed)
        with (
            self.network.in_place_of_grpc(),
            mock.patch("secrets.token_hex", lambda num_bytes: random.randbytes(num_bytes).hex()),
        ):
            self._dispatchers = [
                FleetDispatcher(TOKEN, 60.0, adapter_pages=lambda ref: 2, admission=admission_config())
                for _ in range(2)
            ]
            await self._add_gang()
            tasks = [asyncio.create_task(client.live(self._dispatchers, self.rng)) for client in self.clients]
            tasks.append(asyncio.create_task(self._trouble()))
            tasks.append(asyncio.create_task(self._add_gang(self.rng.choice([0.0, self.rng.uniform(0, 4)]))))
            watch = asyncio.create_task(self._watch())
            ended: asyncio.Future[list[None]] = asyncio.gather(*tasks)
            waited: list[asyncio.Future[None] | asyncio.Future[list[None]]] = [watch, ended]
            async with asyncio.timeout(200):
                await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
                if watch.done():
                    await watch
                await ended
            await asyncio.sleep(SETTLE_S + 1)
            watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)
            self._check_end()
            for client in self.clients:
                self._check_usage(client)
            self.num_events["move"] = sum(dispatcher._fleet.num_moved for dispatcher in self._dispatchers)
            for dispatcher in self._dispatchers:
                await dispatcher.close()
            for gang in self.gangs.values():
                await gang.stop()
            await self.network.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        assert not others, f"tasks are left: {others}"

    async def _trouble(self) -> None:
        await asyncio.sleep(self.rng.uniform(0, 1))
        while not self.is_quiet and (now := asyncio.get_running_loop().time()) < TROUBLE_S:
            kind = self.rng.choices(
                ["cut", "blip", "stall", "silence", "refuse", "slow", "kill", "drain", "fail"],
                [4, 5, 2, 3, 4, 2, 1, 1, 1],
            )[0]
            self.num_events[kind] += 1
            link = self.rng.choice([*self.network.links.values()])
            if kind == "cut":
                link.cut()
            elif kind == "silence":
                link.silence()
            elif kind == "slow":
                link.delay_s, link.bytes_per_s, link.connect_s = self.rng.choice([0.02, 0.2]), 2e4, 3.0
            elif kind in ("kill", "drain", "fail"):
                await self._end_gang(kind)
            else:
                link.refuses = kind == "refuse"
                if kind != "stall":
                    link.cut()
                if kind != "refuse":
                    link.stall()
                asyncio.get_running_loop().call_later(self.rng.expovariate(1 / 1.5), self._mend, link)
            await asyncio.sleep(min(TROUBLE_S - now, self.rng.expovariate(1 / 0.8)))
        for link in self.network.links.values():
            link.mend()
        self.whole_at = asyncio.get_running_loop().time()

    def _mend(self, link: Link) -> None:
        link.refuses = False
        link.whole.set()

    async def _add_gang(self, after_s: float = 0.0) -> None:
        await asyncio.sleep(after_s)
        key = str(self.num_gangs_ever)
        self.num_gangs_ever += 1
        limits = replace(LIMITS, num_pages=5000) if self.is_quiet else LIMITS
        gang = SimulatedGang(f"gang{key}:1", limits, self.rng.choice([0.02, 0.05]), ORPHAN_S)
        await gang.start()
        self.gangs[key] = gang
        self._all_gangs.append(gang)
        self._notify()

    def _notify(self) -> None:
        for number, dispatcher in enumerate(self._dispatchers):
            addresses = {key: f"router{number}@{gang.address}" for key, gang in self.gangs.items()}
            dispatcher.update(addresses)
            for address in addresses.values():
                self.network.link(address)

    async def _end_gang(self, how: str) -> None:
        """A gang dies, breaks or is drained, and another one takes its place."""
        if not self.gangs:
            return
        key = self.rng.choice([*self.gangs])
        gang = self.gangs.pop(key)
        if how == "kill":
            await gang.stop()
        elif how == "fail":
            gang.engine.fail()
            await asyncio.sleep(self.rng.uniform(0, 1))
        self._notify()
        if how == "drain":
            await gang.server.drain(0.5)
        if how != "kill":
            await gang.stop()
        for number in range(len(self._dispatchers)):
            self.network.forget(f"router{number}@{gang.address}")
        await asyncio.sleep(self.rng.uniform(0, 1))
        await self._add_gang()

    async def _watch(self) -> None:
        """Looks into the gangs from the time on when all must have come right."""
        while True:
            await asyncio.sleep(0.1)
            now = asyncio.get_running_loop().time()
            if now < self.whole_at + SETTLE_S:
                continue
            where: dict[int | None, list[str]] = {}
            for key, gang in self.gangs.items():
                for request in gang.engine.requests.values():
                    where.setdefault(request.sampling.seed, []).append(key)
            twice = {seed: keys for seed, keys in where.items() if len(keys) > 1}
            assert not twice, f"sequences are in two gangs at {now:.2f} s: {twice}"
            gone = {c.seed for c in self.clients if c.ended_at is not None and c.ended_at + SETTLE_S < now}
            assert not gone & where.keys(), f"what no client wants is computed at {now:.2f} s: {gone & where.keys()}"

    def _check_end(self) -> None:
        for gang in self.gangs.values():
            gang.check_idle()
        for client in self.clients:
            # A gang that is cut off from its router looks as if it had died: what met that too often is given up.
            is_allowed = client.problem is None or "gangs were lost" in client.problem or "timeout" in client.problem
            assert is_allowed, client.problem
        for dispatcher in self._dispatchers:
            assert not len(dispatcher._awaiting_gang) and not len(dispatcher._awaiting_news)
            for connection in dispatcher._fleet._connections.values():
                assert connection.info is not None, "a gang was not found again"
                kept = (connection._sequences, connection._ids, connection._unbegun, connection._cancelled)
                assert not any(kept), "a connection keeps a sequence"
                assert not connection._awaiting_reconnect._waiting and not connection._outbox._messages

    def _check_usage(self, client: Client) -> None:
        """What a ledger has of the answer, from all of the client's connections, is what gangs computed for it once."""
        usages = [stream.usage for stream in client.streams]
        num_prompt_tokens = len(client.request.prompt_token_ids)
        computed: set[int] = set()
        generated: set[int] = set()
        for gang in self._all_gangs:
            computed |= gang.engine.computed.get(client.seed, set())
            generated |= gang.engine.generated.get(client.seed, set())
        num_computed = len([position for position in computed if position < num_prompt_tokens])
        for stream, one in zip(client.streams, usages, strict=True):
            assert stream.is_reported, "a report is still awaited"
            assert one.num_computed_prompt_tokens + one.num_cached_prompt_tokens <= num_prompt_tokens, "charged twice"
        assert max(one.num_computed_prompt_tokens for one in usages) <= num_computed, "charged and not computed"
        assert max(one.num_generated_tokens for one in usages) <= len(generated), "charged and not generated"
        if client.has_finished:
            last = usages[-1]
            assert last.num_computed_prompt_tokens + last.num_cached_prompt_tokens == num_prompt_tokens, last
            assert last.num_generated_tokens == client.request.sampling.max_tokens == len(generated), last
        if self.is_quiet and len(usages) == 1:
            (only,) = usages
            num_charged = (only.num_computed_prompt_tokens, only.num_generated_tokens)
            assert num_charged == (num_computed, len(generated)), "computed and not charged"
            assert not only.num_recomputed_tokens

    def _client(self, seed: int) -> Client:
        rng = self.rng
        prompt = [rng.randrange(1000) for _ in range(rng.choice([rng.randint(1, 8), rng.randint(8, 40)]))]
        sampling = SamplingParams(
            max_tokens=rng.choice([rng.randint(1, 30), rng.randint(30, 300)]),
            seed=seed,
            num_logprobs=rng.choice([None, 0]),
            ignore_eos=True,
        )
        adapter = rng.choice([None, None, AdapterRef("digest1", {}), AdapterRef("digest2", {})])
        key = f"response-{seed}" if rng.random() < 0.7 else ""
        limit = TimeLimit(timeout_s=rng.uniform(1, 20)) if rng.random() < 0.1 else None
        request = SequenceRequest(prompt_token_ids=prompt, sampling=sampling, tenant="acme", adapter=adapter, key=key)
        return Client(request, limit)
