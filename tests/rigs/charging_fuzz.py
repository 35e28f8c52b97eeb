"""One run of the fuzz of what answers are charged: clients, routers with ledger and quotas, gangs and Redis, by a seed.

Answers of one or several sequences, of beams, with stop strings and with scores of their prompts, and embeddings end,
fail, time out and are left and resumed, while gangs die, drain and fail, routers die with their spools, and Redis does
not answer or loses answers. What must hold:

- The ledger has of each answer no more than gangs computed for it, each position once; and no less than they had
  reported before they, or the answer's router, died.
- New answers are never more, nor longer, than the quotas allow.
- An embedding is of all of its input, and scores are of each token of the prompt, once.
- In the end all that routers held of quotas is back, and nothing of an answer is left in a router.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast
from unittest import mock

import redis
from msgspec.structs import replace
from starlette.responses import Response

from motet.adapters.registry.ledger.archive import LedgerArchive
from motet.adapters.registry.ledger.entry import Entry, Stage
from motet.adapters.registry.ledger.ledger import Ledger
from motet.adapters.registry.tenants.records import KeyRecord, Quota, TenantRecord
from motet.router.fleet.dispatch import FleetDispatcher
from motet.router.generation.choice import Delta
from motet.router.generation.generation import Generation, GenerationRequest, Prompt
from motet.router.generation.usage import Usage
from motet.router.http.access_log import begin_record
from motet.router.http.auth import Identity
from motet.router.http.errors import ApiError
from motet.router.http.stream_position import EventIds, fingerprint_of, new_response_id
from motet.router.metrics import Metrics
from motet.router.openai.answer_form import AnswerForm
from motet.router.openai.chat_answer import AnswerHead, ChunkForm, CompletionAnswer, StreamStyle
from motet.router.openai.generation_response import GenerationResponse
from motet.router.tenancy.account import Account, Accounts, AnswerRequest, Ending
from motet.router.tenancy.grant_sender import RedisAway
from motet.router.tenancy.grants import PERIOD_US, limits_of
from motet.router.tenancy.metering import Metering
from motet.router.tenancy.quotas import Quotas, redis_key
from motet.router.tenancy.spool import Spool
from motet.router.text.stop_strings import StopStrings
from motet.router.text.text import TextService
from motet.router.usage.usage import ADOPT_INTERVAL_S, PROGRESS_INTERVAL_S, LedgerKeeper
from motet.tests.rigs.inline_redis import InlineRedis
from motet.tests.rigs.part_configs import admission_config
from motet.tests.rigs.simulated_gang import TOKEN, SimulatedGang
from motet.tests.rigs.simulated_network import SimulatedNetwork
from motet.workers.window_pages import GangLimits
from motet.workers.wire.beams import BeamRules
from motet.workers.wire.messages import AdapterRef, SamplingParams
from motet.workers.wire.prompt_scores import unpacked_vector

TROUBLE_S = 12.0  # for so long things go wrong
NETWORK_S = 0.5  # a report that is older has come to its router
UNREPORTED_S = PROGRESS_INTERVAL_S + NETWORK_S  # what a router has known for longer is in its spool
ORPHAN_S = 5.0
LIMITS = GangLimits(
    max_model_len=400, vocab_size=1000, block_size=8, num_pages=160, max_tokens_per_step=48, max_num_sequences=6
)
REFUSALS = ("rate_limit_exceeded", "registry_unavailable", "overloaded")


class Recorder:
    """An accountant that sees the answers of one router, and how they end."""

    headers = ()

    def __init__(self, world: World, router: Router) -> None:
        self._world, self._router = world, router

    async def open(self, request: AnswerRequest) -> Account:
        return self._world.admit(request, self._router)


@dataclass(eq=False)
class Admitted:
    """An account of one connection."""

    world: World
    router: Router
    request: AnswerRequest
    at_s: float
    headers: Any = ()
    ending: Ending | None = None

    def settle(self, ending: Ending) -> None:
        assert self.ending is None, "settled twice"
        self.ending = ending


class CheckedForm:
    """An `AnswerForm` of scores or embeddings, which writes down what is wrong with them."""

    is_stream = False

    def __init__(self, request: GenerationRequest, problems: list[str]) -> None:
        self._prompts = [prompt.token_ids for prompt in request.prompts]
        self._is_pooled = request.prompts[0].sampling.pooling is not None
        self._problems = problems
        self._embeddings: dict[int, bytes | None] = {}
        self._scores: list[float] = []

    def take(self, index: int, delta: Delta) -> None:
        if delta.prompt_scores is not None:
            self._scores += delta.prompt_scores.rows()["logprob"].tolist()
        if self._is_pooled:
            if index in self._embeddings:
                self._problems.append(f"input {index} has two embeddings")
            self._embeddings[index] = delta.embedding

    def document(self, usage: Usage) -> Iterator[bytes]:
        if not self._is_pooled and self._scores != [-1.0 * k for k in range(1, len(self._prompts[0]))]:
            self._problems.append(f"scores {self._scores} of {len(self._prompts[0])} tokens")
        for index, token_ids in enumerate(self._prompts if self._is_pooled else ()):
            found = self._embeddings.get(index)
            numbers = None if found is None else unpacked_vector(found).tolist()
            if numbers != [(len(token_ids) - 1) / 2, 1.0]:
                self._problems.append(f"embedding {numbers} of {len(token_ids)} tokens")
        yield b"{}"

    def refusal(self, error: ApiError) -> Response:
        return error.response()

    opening = delta = ending = failure = None  # it is never streamed


class Router:
    def __init__(self, number: int, world: World) -> None:
        rng, folder = world.rng, world.folder / "ledger"
        self.number, self.redis = number, InlineRedis(world.client, rng)
        client = cast(Any, self.redis)
        self.dispatcher = FleetDispatcher(TOKEN, 60.0, adapter_pages=lambda ref: 2, admission=admission_config())
        self.quotas = Quotas(client, lambda: 2)
        self.spool = Spool(folder, 1 << 24, 0, 1 << 16)
        self.metering = Metering(self.spool)
        ledger = Ledger(client, 3, timeout_s=1.0)
        archive = LedgerArchive(ledger, world.folder / "archive")
        self.keeper = LedgerKeeper(self.spool, self.metering, ledger, archive, folder)
        self.accounts = Accounts([self.quotas, Recorder(world, self), self.metering])
        self.died_at_s = float("inf")

    async def start(self) -> None:
        await self.spool.start()
        self.keeper.start()
        self.quotas.start()

    async def die(self) -> None:
        """As its process: nothing is written, sent or given back any more."""
        self.died_at_s = asyncio.get_running_loop().time()
        self.redis.is_dead = True
        os.close(self.spool._lock)
        cast(Any, self.spool).append = cast(Any, self.spool).append_if_room = lambda kind, payload: True
        tasks = [*self.keeper._tasks, self.quotas._keeper, self.quotas._sender._task]
        for task in tasks:
            if task is not None:
                task.cancel()
        await asyncio.gather(*(task for task in tasks if task is not None), return_exceptions=True)
        for grant in self.quotas._grants.values():
            grant.fail(RedisAway())  # clients whose requests wait for one see their connection end
        await self.dispatcher.close()

    async def stop(self) -> None:
        await self.quotas.stop()
        await self.keeper.stop()
        await self.dispatcher.close()


@dataclass
class Answer:
    """What a client asks for, and all of its connections."""

    number: int
    id: str
    request: GenerationRequest
    is_stream: bool
    connections: list[Admitted] = field(default_factory=list)
    num_seen: list[int] = field(default_factory=list)

    @property
    def name(self) -> str:
        return str(self.number)

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(prompt.token_ids) for prompt in self.request.prompts)


class World:
    """A run. `num_events` says what happened, so that a test can see that enough does."""

    def __init__(
        self, seed: int, client: redis.Redis, folder: Path, text: TextService, *, is_quiet: bool, quota: Quota
    ) -> None:
        """`is_quiet`: clients alone do what they like."""
        self.rng = random.Random(seed)
        self.client, self.folder, self._text, self.is_quiet = client, folder, text, is_quiet
        self.quota = quota
        self.identity = Identity(TenantRecord(name="acme", quota=quota), KeyRecord(key_id="k", tenant="acme"))
        self.resumes = self.rng.random() < 0.6
        self.network = SimulatedNetwork(self.rng)
        self.routers: list[Router] = []  # those that live
        self.all_routers: list[Router] = []
        self.gangs: dict[str, SimulatedGang] = {}  # by key
        self.all_gangs: list[SimulatedGang] = []
        self.ended_at_s: dict[SimulatedGang, float] = {}  # gangs that died, or were about to go
        self.answers: dict[str, Answer] = {}  # by id
        self.admitted: list[Admitted] = []
        self.num_events: Counter[str] = Counter()
        self._shared = [[self.rng.randrange(1000) for _ in range(40)] for _ in range(2)]
        self._over_at_s = float("inf")
        self.problems: list[str] = []  # of scores and embeddings

    async def run(self) -> None:
        with (
            self.network.in_place_of_grpc(),
            mock.patch("secrets.token_hex", lambda num_bytes: random.randbytes(num_bytes).hex()),
            mock.patch("secrets.token_bytes", random.randbytes),
            mock.patch("secrets.randbits", random.getrandbits),
        ):
            for _ in range(2):
                await self._add_router()
            for _ in range(self.rng.choice([1, 2])):
                await self._add_gang()
            await asyncio.sleep(1)
            clients = [asyncio.create_task(self._client(number)) for number in range(self.rng.randint(15, 40))]
            trouble = asyncio.create_task(self._trouble())
            async with asyncio.timeout(400):
                await asyncio.gather(trouble, *clients)
            await asyncio.sleep(ORPHAN_S + 2 * ADOPT_INTERVAL_S + 2)
            assert self.problems == []
            self._check_ends()
            await asyncio.sleep(2 * PERIOD_US / 1e6)
            await self._check_quotas_are_back()
            for router in self.routers:
                await router.stop()
            for gang in self.gangs.values():
                gang.check_idle()
                await gang.stop()
            await self.network.close()
        assert not [*(self.folder / "ledger").iterdir()], "a spool is left"

    async def _add_router(self) -> None:
        router = Router(len(self.all_routers), self)
        await router.start()
        self.routers.append(router)
        self.all_routers.append(router)
        self._announce()

    async def _add_gang(self) -> None:
        key = str(len(self.all_gangs))
        gang = SimulatedGang(f"gang{key}:1", LIMITS, self.rng.choice([0.02, 0.05]), ORPHAN_S)
        await gang.start()
        self.gangs[key] = gang
        self.all_gangs.append(gang)
        self._announce()

    def _announce(self) -> None:
        for router in self.routers:
            router.dispatcher.update({k: f"router{router.number}@{gang.address}" for k, gang in self.gangs.items()})

    async def _trouble(self) -> None:
        loop = asyncio.get_running_loop()
        kinds = {"kill": 2, "drain": 1, "fail": 1, "router": 2, "redis": 3, "overflow": 2}
        if self.is_quiet:
            kinds = {"overflow": 1}
        elif self.rng.random() < 0.4:
            del kinds["router"]  # then Redis must know exactly what was used
        while (now := loop.time()) < TROUBLE_S:
            await asyncio.sleep(min(TROUBLE_S - now, self.rng.expovariate(1 / 1.5)))
            kind = self.rng.choices([*kinds], [*kinds.values()])[0]
            self.num_events[kind] += 1
            if kind == "router":
                router = self.routers.pop(self.rng.randrange(len(self.routers)))
                await router.die()
                await asyncio.sleep(self.rng.uniform(0, 1))
                await self._add_router()
            elif kind == "redis":
                self._set_away(True)
                await asyncio.sleep(self.rng.choice([0.05, 0.3, 3.0]))
                self._set_away(False)
            elif kind == "overflow":
                gang = self.rng.choice([*self.gangs.values()])
                gang.engine.breaks = True
                loop.call_later(0.1, setattr, gang.engine, "breaks", False)
            else:
                await self._end_gang(kind)

    def _set_away(self, is_away: bool) -> None:
        for router in self.all_routers:
            router.redis.is_away = is_away

    async def _end_gang(self, how: str) -> None:
        key = self.rng.choice([*self.gangs])
        gang = self.gangs.pop(key)
        self.ended_at_s[gang] = asyncio.get_running_loop().time()
        if how == "kill":
            await gang.stop()
        elif how == "fail":
            gang.engine.fail()
            await asyncio.sleep(self.rng.uniform(0, 0.5))
        self._announce()
        if how == "drain":
            await gang.server.drain(0.5)
        if how != "kill":
            await gang.stop()
        await self._add_gang()

    def _answer(self, number: int) -> Answer:
        rng = self.rng
        length = rng.choice([rng.randint(1, 10), rng.randint(10, 150)])
        prompt = [*rng.choice(self._shared), *(rng.randrange(1000) for _ in range(length))][-length:]
        if rng.random() < 0.4:
            prompt = [*rng.choice(self._shared), *prompt[:100]]
        n, num_best, beams, num_logprobs = rng.choice([1, 1, 1, 2, 3]), None, [], None
        max_tokens = rng.choice([rng.randint(1, 8), rng.randint(8, 120)])
        kind = rng.random()
        if kind < 0.15:
            n = rng.choice([2, 3])
            beams = [BeamRules(n, max_tokens, frozenset())]
        elif kind < 0.25:
            n, num_best, num_logprobs = 3, 1, 0
        stop = StopStrings(("e", " a")) if not beams and rng.random() < 0.15 else StopStrings(())
        sampling = SamplingParams(max_tokens=max_tokens, seed=number * 10, ignore_eos=True, num_logprobs=num_logprobs)
        is_stream = rng.random() < 0.7 and num_best is None and not beams
        if n == 1 and rng.random() < 0.25:
            sampling, is_stream = replace(sampling, num_prompt_logprobs=rng.choice([0, 3])), False
            if rng.random() < 0.5:
                sampling = replace(sampling, max_tokens=0)
            self.num_events["scores"] += 1
        prompts = [Prompt(prompt, sampling)]
        if n == 1 and rng.random() < 0.25:
            sampling, is_stream = SamplingParams(max_tokens=0, pooling="mean"), False
            inputs = [prompt[k * 7 :] for k in range(rng.randint(1, 6)) if prompt[k * 7 :]]
            prompts = [Prompt(ids, replace(sampling, seed=number * 10 + k)) for k, ids in enumerate(inputs)]
            self.num_events["embeddings"] += 1
        response_id = str(new_response_id("cmpl-", int(time.time()), fingerprint_of(number)))
        request = GenerationRequest(
            prompts=prompts,
            most_at_once=rng.choice([None, 1, 2]) if len(prompts) > 1 else None,
            n=n,
            tenant="acme",
            adapter=rng.choice([None, AdapterRef("digest1", {}), AdapterRef("digest2", {})]),
            stop=stop,
            keep_token_ids=False,
            keep_logprobs=num_logprobs is not None,
            num_best=num_best,
            beams=beams,
            request_id=str(number),
            key=response_id if is_stream else "",
            timeout_s=rng.uniform(0.02, 1.5) if rng.random() < 0.25 else None,
        )
        answer = Answer(number, response_id, request, is_stream)
        self.answers[response_id] = answer
        return answer

    async def _client(self, number: int) -> None:
        rng = self.rng
        answer = self._answer(number)
        await asyncio.sleep(rng.uniform(0, TROUBLE_S) if rng.random() < 0.8 else rng.uniform(25, 30))
        while True:
            leaves_after_s = rng.expovariate(1 / 1.0) if rng.random() < 0.35 else None
            router = rng.choice(self.routers)
            is_complete = await self._connect(answer, router, leaves_after_s)
            may_resume = answer.is_stream and self.resumes and len(answer.connections) < 4
            if is_complete or not may_resume or rng.random() < 0.3:
                return
            self.num_events["resumed"] += 1
            await asyncio.sleep(rng.choice([0.0, 0.2, 3.0]))

    async def _connect(self, answer: Answer, router: Router, leaves_after_s: float | None) -> bool:
        """Whether the client got the end, or a refusal."""
        request, text = answer.request, self._text
        is_resumed = bool(answer.num_seen)
        if is_resumed:
            request = GenerationRequest(**{**vars(request), "num_seen": answer.num_seen})
        started_at = asyncio.get_running_loop().time()
        generation = Generation(request, router.dispatcher, text, Metrics(), started_at)
        shape = CompletionAnswer(
            AnswerHead(answer.id, 0, "base"),
            text.token_bytes,
            echoes=[""] * len(generation.choices),
            prompts=[request.prompts[0].token_ids] * len(generation.choices),
            with_logprobs=request.keep_logprobs,
            with_token_ids=False,
        )
        sampling = request.prompts[0].sampling
        is_checked = sampling.num_prompt_logprobs is not None or sampling.pooling is not None
        requested = AnswerRequest(
            identity=self.identity,
            response_id=answer.id,
            model="base",
            version=None,
            user="",
            num_prompt_tokens=answer.num_prompt_tokens,
            num_new_tokens=request.n * (sampling.max_tokens or 0),
            num_sequences=request.n * len(request.prompts),
            is_resumed=is_resumed,
            is_stream=answer.is_stream,
            progress=generation.progress,
        )
        try:
            account = await router.accounts.open(requested)
        except ApiError as error:
            refusal = error.detail.code
        else:
            refusal = None
        if refusal is not None:
            assert refusal in REFUSALS or router.redis.is_dead
            self.num_events["refused"] += 1
            return not router.redis.is_dead
        if router.redis.is_dead:  # it died while the request waited for Redis, and its death ends the answer
            died_with = generation.progress()
            account.settle(Ending(progress=died_with, error="", is_cancelled=True, first_token_s=None, duration_s=0.0))
            return False
        style = StreamStyle(EventIds(answer.id, "acme", b"k" * 32)) if answer.is_stream else None
        form = (
            cast(AnswerForm, CheckedForm(request, self.problems)) if is_checked else ChunkForm(shape, style, generation)
        )
        response = GenerationResponse(generation, form, Metrics(), account)

        async def receive() -> dict[str, Any]:
            await asyncio.sleep(1e6 if leaves_after_s is None else leaves_after_s)
            return {"type": "http.disconnect"}

        is_slow = leaves_after_s is None and self.rng.random() < 0.1
        pauses_s = [2.0, 5.0] if is_slow else [0.0, 0.0, 0.001]

        async def send(message: Any) -> None:
            await asyncio.sleep(self.rng.choice(pauses_s))

        scope: dict[str, Any] = {"type": "http", "method": "POST", "headers": []}
        begin_record(scope, "/v1/completions")
        await response(scope, receive, send)
        if generation.first_token_at is not None:
            answer.num_seen = generation.num_tokens
        assert answer.connections[-1].ending is not None
        return all(choice.finish_reason is not None for choice in generation.choices)

    def admit(self, request: AnswerRequest, router: Router) -> Admitted:
        now_s = asyncio.get_running_loop().time()
        account = Admitted(self, router, request, now_s)
        self.admitted.append(account)
        self.answers[request.response_id].connections.append(account)
        if self.quota.concurrent_streams is not None and not request.is_resumed:
            # A stream that is resumed may have taken a place of a router that still has all of its answers.
            more = sum(one.request.is_resumed for one in self.admitted)
            running = [one for one in self.admitted if one.ending is None and one.router in self.routers]
            new = [one for one in running if not one.request.is_resumed]
            assert len(new) <= self.quota.concurrent_streams + more, "too many answers at once"
        return account

    def _check_ends(self) -> None:
        for account in self.admitted:
            assert account.ending is not None, "an answer's account is still open"
        for router in self.routers:
            assert not router.metering.num_open and not router.quotas._accounts
            for connection in router.dispatcher._fleet._connections.values():
                assert not (connection._sequences or connection._cancelled), "a connection keeps a sequence"
        self._check_rates()
        self._check_used()

    def _check_used(self) -> None:
        """Where no router has died Redis has counted all that was reserved, and what was used beyond, once."""
        is_certain = not any(one.ending is None or one.ending.error == "taken_over" for one in self.admitted)
        if len(self.all_routers) > len(self.routers) or not is_certain:
            return
        for limit in limits_of(self.identity):
            if not limit.is_rate:
                continue
            used = 0
            for one in self.admitted:
                requested, progress = one.request, one.ending.progress if one.ending is not None else None
                assert progress is not None
                cost = 1 if limit.kind == "requests" else requested.num_prompt_tokens + requested.num_new_tokens
                num_tokens = progress.num_prompt_tokens + progress.num_completion_tokens
                reserved = 0 if requested.is_resumed else limit.reserved(cost)
                used += reserved if limit.kind == "requests" else max(reserved, num_tokens)
            tail: Any = self.client.hget(redis_key(self.identity.tenant.tenant_id, limit), "tail")
            assert abs(float(tail or 0) / limit.unit_us - used) < 0.01, f"{limit.name}: {used} were used"

    def _check_rates(self) -> None:
        """New answers within the quotas, as they were admitted; of a dead router's what it used may be lost with it."""
        for kind, limit in (("requests", self.quota.requests_per_minute), ("tokens", self.quota.tokens_per_minute)):
            backlog_us, at_s = 0.0, 0.0
            for one in self.admitted if limit is not None else ():
                ending = one.ending
                assert limit is not None and ending is not None
                if one.request.is_resumed or (kind == "tokens" and one.router not in self.routers):
                    continue
                progress, reserved = ending.progress, one.request.num_prompt_tokens + one.request.num_new_tokens
                used = min(limit, reserved, progress.num_prompt_tokens + progress.num_completion_tokens)
                if kind == "requests":
                    used = 1
                backlog_us = max(0.0, backlog_us - (one.at_s - at_s) * 1e6) + used * PERIOD_US / limit
                at_s = one.at_s
                assert backlog_us <= PERIOD_US * (1 + 1e-6) + 1e4, f"more {kind} than the quota"

    async def _check_quotas_are_back(self) -> None:
        for router in self.routers:
            levels, is_fleet_wide = await router.quotas.look(self.identity)
            while not is_fleet_wide:
                await asyncio.sleep(1)
                levels, is_fleet_wide = await router.quotas.look(self.identity)
            lacking = [level for level in levels if level.num_left != level.limit.limit]
            assert not lacking, f"not all of a quota came back: {lacking}"

    def check_ledger(self, entries: Mapping[str, Entry]) -> None:
        """Raises AssertionError unless the ledger has what gangs computed for each answer."""
        works, reports = self._works(), self._reports()
        for answer in self.answers.values():
            work, entry = works[answer.name], entries.get(answer.id)
            ended = [one for one in answer.connections if one.router.died_at_s == float("inf")]
            least = self._least(answer, reports[answer.name])
            if entry is None:
                assert not any(least), f"computed, reported and not charged: {least}"
                assert not any(_is_complete(one) for one in ended), "a complete answer is not in the ledger"
                continue
            num_computed, num_generated = entry.prompt_tokens - entry.cached_tokens, entry.output_tokens
            num_prompt_tokens = answer.num_prompt_tokens
            most = work.num_prompt_positions, work.num_tokens
            assert num_computed <= most[0] and num_generated <= most[1], f"charged and not computed: {entry} {most}"
            assert entry.prompt_tokens <= max(num_prompt_tokens, num_computed), "a cached prompt is charged twice"
            assert num_computed >= least[0] and num_generated >= least[1], f"computed, not charged: {entry} {least}"
            # What was found in a cache, and is computed at another gang, is computed again too.
            most_again = work.num_again + most[0] - num_computed
            assert entry.recomputed_tokens <= most_again, f"{entry}: recomputed {most_again}, {answer}"
            assert entry.requests == 1
            attempts = [one for id_text, one in entries.items() if id_text.startswith(f"{answer.id}~")]
            num_in_all = entry.computed_tokens + sum(one.computed_tokens for one in attempts)
            assert num_in_all <= work.num_in_all, f"{entry} {attempts}: {work.num_in_all} computed in all"
            is_one_answer = all(one.request.is_resumed for one in answer.connections[1:])  # else it would have two ids
            if self.is_quiet and is_one_answer and not answer.request.stop.strings:
                assert num_in_all >= work.num_in_all - work.num_broken, f"{entry} {attempts}: {work.num_in_all}"
            for one in ended:
                progress = one.ending.progress if one.ending is not None else None
                assert progress is not None
                own = progress.num_prompt_tokens - progress.num_cached_tokens, progress.num_completion_tokens
                assert num_computed >= own[0] and num_generated >= own[1], f"settled, not charged: {entry} {progress}"
            if any(_is_complete(one) for one in ended):
                assert entry.stage is Stage.COMPLETE and entry.prompt_tokens >= num_prompt_tokens
            if self.is_quiet and len(answer.connections) == 1 and not answer.request.stop.strings:
                assert num_computed == most[0], f"{entry}: computed {most}"
                assert num_generated >= most[1] - work.num_broken, f"{entry}: generated {most}"
                assert entry.recomputed_tokens == work.num_again, f"{entry}: recomputed {work.num_again}"

    def _least(self, answer: Answer, reports: list[_Report]) -> tuple[int, int]:
        """Prompt and new tokens that must be charged: what was reported in time."""
        if len(answer.connections) != 1:
            return 0, 0  # of several connections the one that cost most is charged
        (connection,) = answer.connections
        if answer.request.stop.strings:
            return 0, 0
        counted: dict[int, tuple[int, int]] = defaultdict(lambda: (0, 0))  # by sequence
        for one in reports:
            last_s = min(
                self.ended_at_s.get(one.gang, float("inf")) - NETWORK_S, connection.router.died_at_s - UNREPORTED_S
            )
            if one.at_s <= last_s:
                before = counted[one.seed]
                counted[one.seed] = max(before[0], one.num_computed), max(before[1], one.num_generated)
        return sum(one[0] for one in counted.values()), sum(one[1] for one in counted.values())

    def _works(self) -> dict[str, _Work]:
        works: dict[str, _Work] = defaultdict(_Work)
        for gang in self.all_gangs:
            failed: set[int] = set()
            for request, part, is_broken, beam in gang.engine.parts:
                if part.sequence_id in failed:
                    continue  # the step was planned before that was known, at the operator's cost
                if is_broken and (part.scores is not None or part.pool is not None):
                    failed.add(part.sequence_id)
                work, seed = works[request.request_id], request.sampling.seed or 0
                work.num_rows += len(part.token_ids)
                num_prompt_tokens = len(request.prompt_token_ids)
                for position in range(part.start, part.start + len(part.token_ids)):
                    num_new_tokens = max(0, position + 1 - num_prompt_tokens)
                    place = seed, beam[:num_new_tokens] or position
                    work.num_again += place in work.positions
                    work.positions.add(place)
                    if position < num_prompt_tokens:
                        work.prompt_positions.add(place)
                if part.sample is not None and request.sampling.max_tokens != 0:  # whatever came of it
                    token = seed, beam or part.sample.index
                    work.num_again += token in work.tokens
                    work.tokens.add(token)
                    work.with_tokens.add((seed, request.attempt))
                    work.num_broken += is_broken
        return works

    def _reports(self) -> dict[str, list[_Report]]:
        found: dict[str, list[_Report]] = defaultdict(list)
        for gang in self.all_gangs:
            for at_s, request, usage in gang.engine.reports:
                found[request.request_id].append(
                    _Report(
                        gang,
                        at_s,
                        request.sampling.seed or 0,
                        usage.num_computed_prompt_tokens,
                        usage.num_generated_tokens,
                    )
                )
        return found


@dataclass(frozen=True)
class _Report:
    gang: SimulatedGang
    at_s: float
    seed: int
    num_computed: int
    num_generated: int


_Place = tuple[int, int | tuple[int, ...]]


@dataclass
class _Work:
    """What gangs computed for one answer. Places are of a sequence, by its seed; in a beam by its tokens."""

    positions: set[_Place] = field(default_factory=set)
    prompt_positions: set[_Place] = field(default_factory=set)
    tokens: set[_Place] = field(default_factory=set)
    num_again: int = 0  # positions and tokens that had been computed before
    num_broken: int = 0  # tokens whose numbers overflowed
    num_rows: int = 0  # positions that were computed, each time
    with_tokens: set[tuple[int, int]] = field(default_factory=set)  # sequences that got a token, by seed and attempt

    @property
    def num_prompt_positions(self) -> int:
        return len(self.prompt_positions)

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def num_in_all(self) -> int:
        """As the ledger counts: the newest token of a sequence is charged, and not computed."""
        return self.num_rows + len(self.with_tokens)


def _is_complete(account: Admitted) -> bool:
    ending = account.ending
    return ending is not None and not ending.error and not ending.is_cancelled
