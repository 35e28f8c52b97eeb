"""What an answer is charged when it does not end well: all that its gang computed, by the gang's own count."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from motet.router.access.request_record import begin_record
from motet.router.accounts.account import Ending, Progress
from motet.router.answers.answer_shape import AnswerHead
from motet.router.answers.completion_answer import CompletionAnswer
from motet.router.answers.generation_response import GenerationResponse, StreamStyle
from motet.router.generation.beam_search import BeamRules
from motet.router.generation.generation import Generation, GenerationRequest, Prompt
from motet.router.metrics import Metrics
from motet.router.openai_api.stream_position import EventIds
from motet.router.text.stop_strings import StopStrings
from motet.tests.rigs.router_rig import text_service
from motet.tests.rigs.simulated_fleet import STEP_S, SimulatedFleet, simulated_fleet
from motet.tests.rigs.simulated_time import run_simulated
from motet.workers.wire.messages import SamplingParams

TEXT = text_service()
PROMPT = [*range(100, 600)]  # 500 tokens: eight steps of 64


@dataclass
class Book:
    """An account of one answer."""

    headers: Sequence[tuple[bytes, bytes]] = ()
    endings: list[Ending] = field(default_factory=list)

    def settle(self, ending: Ending) -> None:
        self.endings.append(ending)


async def charged(
    fleet: SimulatedFleet,
    *,
    n: int = 1,
    max_tokens: int = 20,
    num_beams: int = 0,
    leaves_after_s: float | None = None,
    timeout_s: float | None = None,
    seed: int = 7,
) -> Ending:
    """Asks for a stream; a client may leave before its end. Returns how its account was settled."""
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
        key="cmpl-1",
    )
    generation = Generation(request, fleet.routers[0], TEXT, Metrics(), time.perf_counter())
    shape = CompletionAnswer(
        AnswerHead("cmpl-1", 0, "base"),
        TEXT.token_bytes,
        echoes=[""] * len(generation.choices),
        prompts=[PROMPT] * len(generation.choices),
        with_logprobs=False,
        with_token_ids=False,
    )
    book = Book()
    style = StreamStyle(EventIds("cmpl-1", "acme", b"k" * 32))
    response = GenerationResponse(generation, shape, style, Metrics(), book)

    async def receive() -> dict[str, Any]:
        await asyncio.sleep(1e6 if leaves_after_s is None else leaves_after_s)
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None: ...

    scope: dict[str, Any] = {"type": "http", "method": "POST", "headers": []}
    begin_record(scope, "/v1/completions")
    await response(scope, receive, send)
    (ending,) = book.endings
    return ending


def simulated(test: Coroutine[Any, Any, None]) -> None:
    run_simulated(test)


def computed(fleet: SimulatedFleet) -> tuple[int, int]:
    """Positions of the prompt, and tokens, that the gangs have computed for the sequence with the seed 7."""
    positions = set[int]().union(*(gang.engine.computed.get(7, set()) for gang in fleet.gangs))
    tokens = set[int]().union(*(gang.engine.generated.get(7, set()) for gang in fleet.gangs))
    return len([position for position in positions if position < len(PROMPT)]), len(tokens)


def charges(progress: Progress) -> tuple[int, int]:
    return progress.num_prompt_tokens - progress.num_cached_tokens, progress.num_completion_tokens


def test_a_client_that_leaves_before_the_first_token_is_charged_the_prompt_so_far() -> None:
    async def main() -> None:
        async with simulated_fleet() as fleet:
            await fleet.add_gang()
            await asyncio.sleep(1)
            ending = await charged(fleet, leaves_after_s=4.5 * STEP_S)
            assert ending.is_cancelled and ending.first_token_s is None
            assert charges(ending.progress) == computed(fleet)
            assert 0 < ending.progress.num_prompt_tokens < len(PROMPT)

    simulated(main())


def test_a_client_that_leaves_amid_its_stream_is_charged_all_tokens() -> None:
    async def main() -> None:
        async with simulated_fleet() as fleet:
            await fleet.add_gang()
            await asyncio.sleep(1)
            ending = await charged(fleet, max_tokens=300, leaves_after_s=50 * STEP_S)
            assert ending.is_cancelled
            assert charges(ending.progress) == computed(fleet)
            assert ending.progress.num_prompt_tokens == len(PROMPT) and ending.progress.num_completion_tokens > 30

    simulated(main())


def test_a_client_that_leaves_and_resumes_has_not_made_its_prompt_a_cached_one() -> None:
    """Entries of one id merge by the larger number of computed tokens: the first connection's."""

    async def main() -> None:
        async with simulated_fleet() as fleet:
            await fleet.add_gang()
            await asyncio.sleep(1)
            first = await charged(fleet, max_tokens=40, leaves_after_s=20 * STEP_S)
            second = await charged(fleet, max_tokens=40)
            assert charges(first.progress)[0] == len(PROMPT) > charges(second.progress)[0]
            both = [max(pair) for pair in zip(charges(first.progress), charges(second.progress), strict=True)]
            assert both == [len(PROMPT), 40]

    simulated(main())


def test_a_request_whose_timeout_passed_is_charged_what_was_computed() -> None:
    async def main() -> None:
        async with simulated_fleet() as fleet:
            await fleet.add_gang()
            await asyncio.sleep(1)
            ending = await charged(fleet, timeout_s=5.5 * STEP_S)
            assert ending.error == "timeout"
            assert charges(ending.progress) == computed(fleet)
            assert 0 < ending.progress.num_prompt_tokens < len(PROMPT)

    simulated(main())


def test_beams_whose_timeout_passed_are_charged() -> None:
    async def main() -> None:
        async with simulated_fleet() as fleet:
            gang = await fleet.add_gang()
            await asyncio.sleep(1)
            ending = await charged(fleet, num_beams=3, max_tokens=200, timeout_s=60 * STEP_S)
            assert ending.error == "timeout"
            num_computed, num_generated = charges(ending.progress)
            assert num_computed == gang.engine.num_computed > len(PROMPT)
            assert num_generated == gang.engine.scheduler.load().counters.num_generated_tokens > 3

    simulated(main())


def test_a_sequence_that_fails_is_charged_its_prompt() -> None:
    """As an adapter whose numbers overflow makes it fail, with its first token."""

    async def main() -> None:
        async with simulated_fleet() as fleet:
            gang = await fleet.add_gang()
            await asyncio.sleep(1)
            gang.engine.breaks = True
            ending = await charged(fleet)
            assert ending.error and ending.first_token_s is None
            assert charges(ending.progress) == (len(PROMPT), 0)

    simulated(main())


@pytest.mark.parametrize("n", [1, 4])
def test_a_whole_answer_is_charged_its_prompt_once(n: int) -> None:
    async def main() -> None:
        async with simulated_fleet() as fleet:
            gang = await fleet.add_gang()
            await asyncio.sleep(1)
            ending = await charged(fleet, n=n)
            assert not ending.error
            num_computed, num_generated = charges(ending.progress)
            assert (num_generated, ending.progress.num_cached_tokens) == (20 * n, 0)
            # The others compute what is not a whole page of eight tokens.
            assert num_computed == len(PROMPT) + (n - 1) * (len(PROMPT) % 8)
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
            ending = await answering
            assert not ending.error
            assert charges(ending.progress) == (len(PROMPT), 60) == computed(fleet)
            assert ending.progress.num_recomputed_tokens > len(PROMPT)

    simulated(main())


def test_a_gang_that_dies_with_an_answer_has_reported_most_of_its_prompt() -> None:
    async def main() -> None:
        async with simulated_fleet() as fleet:
            gang = await fleet.add_gang()
            await asyncio.sleep(1)
            answering = asyncio.create_task(charged(fleet, timeout_s=60 * STEP_S))
            await asyncio.sleep(6.5 * STEP_S)
            await gang.stop()
            ending = await answering
            assert ending.error
            num_computed, _ = computed(fleet)
            assert num_computed - 3 * 64 <= ending.progress.num_prompt_tokens <= num_computed

    simulated(main())
