"""What an answer is charged when it does not end well: all that its gang computed, by the gang's own count."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest

from motet.adapters.registry.ledger.entry import Entry, merged
from motet.adapters.registry.tenants.records import KeyRecord, TenantRecord
from motet.router.fleet import open_sequence
from motet.router.generation import generation as generation_module
from motet.router.generation.generation import Generation, GenerationRequest, Prompt
from motet.router.http.access_log import begin_record
from motet.router.http.auth import Identity
from motet.router.http.stream_position import EventIds, fingerprint_of, new_response_id
from motet.router.metrics import Metrics
from motet.router.openai import generation_response
from motet.router.openai.chat_answer import AnswerHead, ChunkForm, CompletionAnswer, StreamStyle
from motet.router.openai.generation_response import GenerationResponse
from motet.router.tenancy.account import Account, Accounts, AnswerRequest, Ending
from motet.router.tenancy.metering import Metering
from motet.router.text.stop_strings import StopStrings
from motet.tests.rigs.router_rig import text_service
from motet.tests.rigs.simulated_fleet import STEP_S, SimulatedFleet, simulated_fleet
from motet.tests.rigs.simulated_time import run_simulated
from motet.workers.wire.beams import BeamRules
from motet.workers.wire.messages import SamplingParams

TEXT = text_service()
ANSWER_ID = str(new_response_id("cmpl-", 1_700_000_000, fingerprint_of("one")))
PROMPT = [*range(100, 600)]  # 500 tokens: eight steps of 64


@pytest.fixture(autouse=True)
def simulated_clocks(monkeypatch: pytest.MonkeyPatch) -> None:
    class Clock:
        @staticmethod
        def perf_counter() -> float:
            return asyncio.get_running_loop().time()

    for module in (generation_module, generation_response, open_sequence):
        monkeypatch.setattr(module, "time", Clock)


class MemorySpool:
    """A ledger's spool without a disk."""

    current_number = 1

    def __init__(self) -> None:
        self.entries: list[Entry] = []

    def reserve(self, num_bytes: int) -> bool:
        return True

    def release(self, num_bytes: int) -> None: ...

    def append(self, kind: object, payload: bytes) -> None:
        self.entries.append(msgspec.json.decode(payload, type=Entry))


@dataclass
class Book:
    """An accountant of one answer, and its account."""

    headers: Sequence[tuple[bytes, bytes]] = ()
    endings: list[Ending] = field(default_factory=list)

    async def open(self, request: AnswerRequest) -> Account:
        return self

    def settle(self, ending: Ending) -> None:
        self.endings.append(ending)


@dataclass(frozen=True)
class Charged:
    ending: Ending
    entry: Entry  # of the ledger
    attempts: list[Entry]  # to resume it
    num_seen: list[int]  # tokens of each choice that the client has had

    @property
    def computed(self) -> tuple[int, int]:
        """Tokens of the prompt, and tokens that were generated."""
        return self.entry.prompt_tokens - self.entry.cached_tokens, self.entry.output_tokens


async def charged(
    fleet: SimulatedFleet,
    *,
    n: int = 1,
    max_tokens: int = 20,
    num_beams: int = 0,
    leaves_after_s: float | None = None,
    timeout_s: float | None = None,
    seed: int = 7,
    num_seen: Sequence[int] = (),
) -> Charged:
    """Asks for a stream; a client may leave before its end. `num_seen`: it resumes the stream."""
    sampling = SamplingParams(max_tokens=max_tokens, seed=seed, ignore_eos=True)
    beams = [BeamRules(num_beams, max_tokens, frozenset())] if num_beams else []
    request = GenerationRequest(
        prompts=[Prompt(PROMPT, sampling)],
        n=num_beams or n,
        tenant="acme",
        adapter=None,
        stop=StopStrings(()),
        keep_token_ids=False,
        keep_logprobs=False,
        beams=beams,
        timeout_s=timeout_s,
        key=ANSWER_ID,
        num_seen=num_seen,
    )
    generation = Generation(request, fleet.routers[0], TEXT, Metrics(), asyncio.get_running_loop().time())
    shape = CompletionAnswer(
        AnswerHead(ANSWER_ID, 0, "base"),
        TEXT.token_bytes,
        echoes=[""] * len(generation.choices),
        prompts=[PROMPT] * len(generation.choices),
        with_logprobs=False,
        with_token_ids=False,
    )
    book, spool = Book(), MemorySpool()
    account = await Accounts([book, Metering(spool)]).open(  # type: ignore[arg-type]
        AnswerRequest(
            identity=Identity(TenantRecord(name="acme"), KeyRecord(key_id="k", tenant="acme")),
            response_id=ANSWER_ID,
            model="base",
            version=None,
            user="",
            num_prompt_tokens=len(PROMPT),
            num_new_tokens=n * max_tokens,
            num_sequences=n,
            is_resumed=bool(num_seen),
            progress=generation.progress,
        )
    )
    style = StreamStyle(EventIds(ANSWER_ID, "acme", b"k" * 32))
    response = GenerationResponse(generation, ChunkForm(shape, style, generation), Metrics(), account)

    async def receive() -> dict[str, Any]:
        await asyncio.sleep(1e6 if leaves_after_s is None else leaves_after_s)
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None: ...

    scope: dict[str, Any] = {"type": "http", "method": "POST", "headers": []}
    begin_record(scope, "/v1/completions")
    await response(scope, receive, send)
    (ending,), (entry, *attempts) = book.endings, spool.entries
    return Charged(ending, entry, attempts, generation.num_tokens)


def simulated(test: Coroutine[Any, Any, None]) -> None:
    run_simulated(test)


def computed(fleet: SimulatedFleet) -> tuple[int, int]:
    """Positions of the prompt, and tokens, that the gangs have computed for the sequence with the seed 7."""
    positions = set[int]().union(*(gang.engine.computed.get(7, set()) for gang in fleet.gangs))
    tokens = set[int]().union(*(gang.engine.generated.get(7, set()) for gang in fleet.gangs))
    return len([position for position in positions if position < len(PROMPT)]), len(tokens)


def test_a_client_that_leaves_before_the_first_token_is_charged_the_prompt_so_far() -> None:
    async def main() -> None:
        async with simulated_fleet() as fleet:
            await fleet.add_gang()
            await asyncio.sleep(1)
            answer = await charged(fleet, leaves_after_s=4.5 * STEP_S)
            assert answer.ending.is_cancelled and answer.ending.first_token_s is None
            assert answer.computed == computed(fleet)
            assert 0 < answer.entry.prompt_tokens < len(PROMPT)

    simulated(main())


def test_a_client_that_leaves_amid_its_stream_is_charged_all_tokens() -> None:
    async def main() -> None:
        async with simulated_fleet() as fleet:
            await fleet.add_gang()
            await asyncio.sleep(1)
            answer = await charged(fleet, max_tokens=300, leaves_after_s=50 * STEP_S)
            assert answer.ending.is_cancelled
            assert answer.computed == computed(fleet)
            assert answer.entry.prompt_tokens == len(PROMPT) and answer.entry.output_tokens > 30

    simulated(main())


def test_a_client_that_leaves_and_resumes_has_not_made_its_prompt_a_cached_one() -> None:
    async def main() -> None:
        async with simulated_fleet() as fleet:
            await fleet.add_gang()
            await asyncio.sleep(1)
            first = await charged(fleet, max_tokens=40, leaves_after_s=20 * STEP_S)
            second = await charged(fleet, max_tokens=40)
            assert first.computed[0] == len(PROMPT) > second.computed[0]
            both = merged(first.entry, second.entry)
            assert (both.prompt_tokens, both.cached_tokens, both.output_tokens) == (len(PROMPT), 0, 40)

    simulated(main())


@pytest.mark.parametrize("n", [1, 4])
def test_what_a_stream_that_is_resumed_makes_gangs_compute_again_stands_in_the_ledger(n: int) -> None:
    async def main() -> None:
        async with simulated_fleet() as fleet:
            gang = await fleet.add_gang()
            await asyncio.sleep(1)
            answers, num_seen = list[Charged](), list[int]()
            for leaves_after_s in (25 * STEP_S, 35 * STEP_S, 45 * STEP_S, None):
                answers.append(
                    await charged(fleet, n=n, max_tokens=60, leaves_after_s=leaves_after_s, num_seen=num_seen)
                )
                num_seen = answers[-1].num_seen
            answer = answers[0].entry
            for one in answers[1:]:
                answer = merged(answer, one.entry)
            attempts = {one.id: one for each in answers for one in each.attempts}
            assert len(attempts) == 3 and not any(one.requests or one.output_tokens for one in attempts.values())
            assert answer.output_tokens == 60 * n
            num_in_all = answer.computed_tokens + sum(one.computed_tokens for one in attempts.values())
            assert num_in_all == gang.engine.num_computed + 4 * n  # the newest token of a sequence is not computed
            num_charged = answer.prompt_tokens - answer.cached_tokens + answer.output_tokens
            assert num_in_all - num_charged > 30 * n

    simulated(main())


def test_a_stream_that_is_resumed_and_then_loses_its_gang_has_what_was_computed_once_in_the_ledger() -> None:
    """The sequence that the first connection began goes on for the second, and then at another gang."""

    async def main() -> None:
        async with simulated_fleet() as fleet:
            lost = await fleet.add_gang()
            await asyncio.sleep(1)
            beginning = asyncio.create_task(charged(fleet, max_tokens=60))
            await asyncio.sleep(25 * STEP_S)
            resuming = asyncio.create_task(charged(fleet, max_tokens=60, num_seen=[5]))
            await asyncio.sleep(20 * STEP_S)
            await fleet.add_gang()
            await lost.stop()
            first, second = await beginning, await resuming
            assert first.ending.error == "taken_over" and not second.ending.error
            assert not (first.attempts or second.attempts)  # none of them began a sequence again
            answer = merged(first.entry, second.entry)
            assert answer.output_tokens == 60 and answer.recomputed_tokens > len(PROMPT)
            num_computed = sum(gang.engine.num_computed for gang in fleet.gangs)
            assert answer.computed_tokens <= num_computed + len(fleet.gangs)  # the newest token is not computed

    simulated(main())


def test_a_request_whose_timeout_passed_is_charged_what_was_computed() -> None:
    async def main() -> None:
        async with simulated_fleet() as fleet:
            await fleet.add_gang()
            await asyncio.sleep(1)
            answer = await charged(fleet, timeout_s=5.5 * STEP_S)
            assert answer.ending.error == "timeout"
            assert answer.computed == computed(fleet)
            assert 0 < answer.entry.prompt_tokens < len(PROMPT)

    simulated(main())


def test_beams_whose_timeout_passed_are_charged() -> None:
    async def main() -> None:
        async with simulated_fleet() as fleet:
            gang = await fleet.add_gang()
            await asyncio.sleep(1)
            answer = await charged(fleet, num_beams=3, max_tokens=200, timeout_s=60 * STEP_S)
            assert answer.ending.error == "timeout"
            num_computed, num_generated = answer.computed
            assert num_computed == len(PROMPT)
            assert num_generated == sum(part.sample is not None for _, part, _, _ in gang.engine.parts) > 3
            assert gang.engine.num_computed == num_computed + num_generated - 1

    simulated(main())


def test_a_sequence_that_fails_is_charged_its_prompt() -> None:
    """As an adapter whose numbers overflow makes it fail, with its first token."""

    async def main() -> None:
        async with simulated_fleet() as fleet:
            gang = await fleet.add_gang()
            await asyncio.sleep(1)
            gang.engine.breaks = True
            answer = await charged(fleet)
            assert answer.ending.error and answer.ending.first_token_s is None
            assert answer.computed == (len(PROMPT), 0)

    simulated(main())


@pytest.mark.parametrize("n", [1, 4])
def test_a_whole_answer_is_charged_its_prompt_once(n: int) -> None:
    async def main() -> None:
        async with simulated_fleet() as fleet:
            gang = await fleet.add_gang()
            await asyncio.sleep(1)
            answer = await charged(fleet, n=n)
            assert not answer.ending.error
            num_computed, num_generated = answer.computed
            assert (num_generated, answer.entry.cached_tokens) == (20 * n, 0)
            assert num_computed == len(PROMPT) + (n - 1)  # the last token of each
            assert gang.engine.num_computed == num_computed + 19 * n

    simulated(main())


def test_a_lost_gang_costs_the_operator_what_it_had_not_reported_and_the_tenant_nothing_twice() -> None:
    async def main() -> None:
        async with simulated_fleet() as fleet:
            lost = await fleet.add_gang()
            await asyncio.sleep(1)
            answering = asyncio.create_task(charged(fleet, max_tokens=60))
            await asyncio.sleep(25 * STEP_S)
            await fleet.add_gang()
            await lost.stop()
            answer = await answering
            assert not answer.ending.error
            assert answer.computed == (len(PROMPT), 60) == computed(fleet)
            assert answer.entry.recomputed_tokens > len(PROMPT)

    simulated(main())


def test_a_gang_that_dies_with_an_answer_has_reported_most_of_its_prompt() -> None:
    async def main() -> None:
        async with simulated_fleet() as fleet:
            gang = await fleet.add_gang()
            await asyncio.sleep(1)
            answering = asyncio.create_task(charged(fleet, timeout_s=60 * STEP_S))
            await asyncio.sleep(6.5 * STEP_S)
            await gang.stop()
            answer = await answering
            assert answer.ending.error
            num_computed, _ = computed(fleet)
            assert num_computed - 3 * 64 <= answer.entry.prompt_tokens <= num_computed

    simulated(main())
