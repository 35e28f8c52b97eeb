"""The number of cached prompt tokens: from the engine's counts to the usage of the answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from motet.router.fleet.open_sequence import OpenSequence
from motet.router.text.text import TextService
from motet.tests.rigs.engine_dispatcher import EngineDispatcher, client_of
from motet.tests.rigs.engine_rig import Stock
from motet.tests.rigs.oracle import write_model
from motet.tests.rigs.part_configs import leader_config
from motet.tests.rigs.router_rig import BASE, RouterRig, chunks_of, text_service
from motet.workers.leader.sequence_journal import SequenceJournal
from motet.workers.wire.messages import SamplingParams, SequenceRequest, SequenceUpdate

PROMPT = list(range(10, 31))  # 21 tokens: two full pages of 8
GREEDY = SamplingParams(max_tokens=3, temperature=0, ignore_eos=True)


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Stock:
    folder = tmp_path_factory.mktemp("cached")
    return Stock.make(write_model("llama", folder / "model"), {}, folder / "store")


@pytest.fixture(scope="module")
def text() -> TextService:
    return text_service()


def reported_by(stock: Stock, *submissions: dict[str, Any], **settings: Any) -> dict[int, list[int | None]]:
    """The cached tokens in the updates of each sequence, one sequence after the other."""
    found: dict[int, list[int | None]] = {}
    with stock.engine(num_pages=40, **settings) as rig:
        for sequence_id, submission in enumerate(submissions):
            rig.submit(sequence_id, **{"prompt": PROMPT, "adapter": None, "sampling": GREEDY} | submission)
            while rig.engine.has_work():
                for update in rig.step():
                    found.setdefault(update.sequence_id, []).append(update.num_cached_tokens)
    return found


def test_the_first_update_has_it(stock: Stock) -> None:
    reported = reported_by(stock, {}, {}, {"prompt": [*PROMPT[:8], *PROMPT]})
    assert reported == {0: [0, None, None], 1: [16, None, None], 2: [8, None, None]}


def test_without_a_cache_nothing_was_there(stock: Stock) -> None:
    assert reported_by(stock, {}, {}, prefix_cache=False)[1] == [0, None, None]


def test_one_that_goes_on_reports_no_more_than_its_prompt(stock: Stock) -> None:
    generated = list(range(50, 62))
    sampling = msgspec.structs.replace(GREEDY, max_tokens=14)
    first = {"prompt": [*PROMPT, *generated], "sampling": GREEDY}
    assert reported_by(stock, first, {"generated": generated, "sampling": sampling})[1] == [21, None]


async def usage_of(client: Any, **fields: Any) -> Any:
    body = {"model": BASE, "prompt": PROMPT, "max_tokens": 3, "ignore_eos": True, **fields}
    return (await client.post("/v1/completions", json=body)).json()["usage"]


async def test_the_usage_of_an_answer(stock: Stock) -> None:
    with stock.engine(num_pages=100) as rig:
        async with client_of(EngineDispatcher(rig), stock) as client:
            # All but one of eight wait for the first one's pages: the request had to compute all of its prompt.
            assert (await usage_of(client, n=8))["prompt_tokens_details"] == {"cached_tokens": 0}
            assert (await usage_of(client))["prompt_tokens_details"] == {"cached_tokens": 16}
            assert (await usage_of(client, prompt=[PROMPT, PROMPT]))["prompt_tokens_details"] == {"cached_tokens": 32}
            beams = await usage_of(client, prompt=[*PROMPT, 31, 32, 33], use_beam_search=True, n=2)
            assert beams["prompt_tokens_details"] == {"cached_tokens": 16}
            assert (await usage_of(client, cache_salt="own"))["prompt_tokens_details"] == {"cached_tokens": 0}


def scripted(rig: RouterRig, *num_cached: int | None) -> None:
    """A script: the update of each token reports one of these numbers."""
    updates = [
        SequenceUpdate(1, [5], None, "length" if number == len(num_cached) - 1 else None, None, reported)
        for number, reported in enumerate(num_cached)
    ]
    rig.dispatcher.script = lambda _: updates


async def test_what_the_first_gang_said_stays(tmp_path: Path, text: TextService) -> None:
    rig = RouterRig(tmp_path, text)
    async with rig.client() as client:
        scripted(rig, 7, None, 19)  # the last one of a gang that went on with it
        assert (await usage_of(client))["prompt_tokens_details"] == {"cached_tokens": 7}
        scripted(rig, 100)
        assert (await usage_of(client))["prompt_tokens_details"] == {"cached_tokens": len(PROMPT)}
        scripted(rig, None, None)
        assert "prompt_tokens_details" not in await usage_of(client)


async def test_streams_have_it_at_their_end(tmp_path: Path, text: TextService) -> None:
    rig = RouterRig(tmp_path, text)
    scripted(rig, 7, None)
    async with rig.client() as client:
        options = {"include_usage": True}
        body = {"model": BASE, "prompt": PROMPT, "stream": True, "stream_options": options}
        *_, last = chunks_of(await client.post("/v1/completions", json=body))
    assert last["usage"]["prompt_tokens_details"] == {"cached_tokens": 7}


def request() -> SequenceRequest:
    return SequenceRequest(sequence_id=3, prompt_token_ids=[1, 2], sampling=GREEDY, tenant="acme", key="k")


async def test_updates_that_pile_up_keep_it() -> None:
    for reported in ((4, None), (None, 4), (4, 9)):
        sequence = OpenSequence(request())
        for num_cached in reported:
            sequence.push(SequenceUpdate(3, [5], num_cached_tokens=num_cached))
        assert (await anext(sequence)).num_cached_tokens == 4


def test_a_journal_has_it_for_a_client_that_resumes() -> None:
    journal = SequenceJournal(leader_config())
    journal.begin(1, request(), 10)
    journal.record(SequenceUpdate(1, [5], num_cached_tokens=4), 0.0)
    journal.record(SequenceUpdate(1, [6]), 0.0)
    found = journal.attach(request(), 11, 0.0)
    assert found is not None
    assert found.unread.take_all() == SequenceUpdate(3, [5, 6], num_cached_tokens=4)


def test_it_costs_a_frame_a_byte_and_older_leaders_leave_it_out() -> None:
    encoded = msgspec.msgpack.encode(SequenceUpdate(3, [5]))
    reported = msgspec.msgpack.encode(SequenceUpdate(3, [5], num_cached_tokens=9))
    assert len(reported) == len(encoded)
    older = msgspec.msgpack.encode([3, [5], None, None, None])
    num_later = len(msgspec.structs.fields(SequenceUpdate)) - 5
    assert len(encoded) == len(older) + num_later
    assert msgspec.msgpack.decode(older, type=SequenceUpdate) == SequenceUpdate(3, [5])
