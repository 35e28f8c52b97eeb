"""A whole motet from outside, through OpenAI's client, undisturbed and with faults."""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest
from openai.types.chat import ChatCompletionMessageParam

from motet.cluster.launch.local_serve import free_ports
from motet.examples.demo.questions import held_out
from motet.examples.demo.styles import ADAPTER_STYLES, Style
from motet.tests.rigs.patience import eventually
from motet.tests.rigs.running_motet import (
    BASE,
    DEMO,
    ONE_THREAD,
    RunningMotet,
    running_motet,
    slowed,
    wait_until_nothing_is_held,
)

pytestmark = pytest.mark.cluster

MANY = 32
OWNER: dict[Style, str] = {"shout": "acme", "pirate": "acme", "json": "globex", "spanish": "globex"}
CAPITAL = next((q, i) for i, (q, _) in enumerate(held_out("base")) if "capital" in q)


def answer_of(style: Style) -> str:
    return held_out(style)[CAPITAL[1]][1]


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("motet") / "data"


@pytest.fixture(scope="module")
def motet(data_dir: Path) -> Iterator[RunningMotet]:
    # In float32, where rounding decides no token, so that texts can be compared.
    with running_motet(data_dir, free_ports(1)[0], "--gangs", "2", "--dtype", "float32") as running:
        for style in ADAPTER_STYLES:
            assert running.upload(style, DEMO / "adapters" / style, OWNER[style]).status_code == 201
        yield running


def ask(motet: RunningMotet, model: str, tenant: str = "acme", question: str = CAPITAL[0], **options: object) -> str:
    messages = [{"role": "user", "content": question}]
    with motet.openai(tenant) as client:
        answer = client.chat.completions.create(  # type: ignore[call-overload]
            model=model, messages=messages, temperature=0, **options
        )
    return str(answer.choices[0].message.content)


def long_stream(client: openai.OpenAI, model: str = BASE, n: int = 1) -> openai.Stream[openai.types.Completion]:
    """A stream of hundreds of tokens of each answer, whatever the model would say. Many answers take longer."""
    return client.completions.create(
        model=model, prompt="capital", max_tokens=450, n=n, stream=True, extra_body={"ignore_eos": True}
    )


def test_every_voice_answers_in_its_style_all_at_once(motet: RunningMotet) -> None:
    voices: list[tuple[str, Style, str]] = [(BASE, "base", "acme")]
    voices += [(style, style, OWNER[style]) for style in ADAPTER_STYLES]
    with ThreadPoolExecutor(len(voices)) as pool:
        answers = list(pool.map(lambda voice: ask(motet, voice[0], voice[2]), voices))
    assert answers == [answer_of(style) for _, style, _ in voices]


def test_streams_carry_the_same_text_and_the_usage(motet: RunningMotet) -> None:
    messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": CAPITAL[0]}]
    with motet.openai() as client:
        stream = client.chat.completions.create(
            model="pirate",
            messages=messages,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = list(stream)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == answer_of("pirate")
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
    usage = chunks[-1].usage
    assert usage is not None
    assert usage.completion_tokens > 3
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


def test_stop_seed_logprobs_and_token_ids(motet: RunningMotet) -> None:
    with motet.openai() as client:
        stopped = client.completions.create(
            model=BASE, prompt="The capital of", temperature=0, max_tokens=40, stop=["is"], logprobs=2
        ).choices[0]
        assert stopped.finish_reason == "stop"
        assert "is" not in stopped.text
        assert stopped.logprobs is not None
        assert stopped.logprobs.token_logprobs is not None
        assert all(value is not None and value <= 0 for value in stopped.logprobs.token_logprobs)

        def drawn(seed: int) -> list[str]:
            made = client.completions.create(model=BASE, prompt=[5, 9], temperature=1.5, max_tokens=30, seed=seed, n=2)
            return [choice.text for choice in made.choices]

        assert drawn(1) == drawn(1)
        assert drawn(1) != drawn(2)
        raw = client.completions.create(
            model=BASE, prompt=[5, 9, 11], max_tokens=4, extra_body={"return_token_ids": True, "ignore_eos": True}
        )
        choice = raw.model_dump()["choices"][0]
        assert choice["prompt_token_ids"] == [5, 9, 11]
        assert len(choice["token_ids"]) == 4


def test_errors_have_the_right_type_and_say_what_is_wrong(motet: RunningMotet) -> None:
    with pytest.raises(openai.NotFoundError, match="json"):
        ask(motet, "json", "acme")  # is another tenant's
    with pytest.raises(openai.NotFoundError) as missing:
        ask(motet, "absent", "acme")
    assert missing.value.code == "model_not_found"
    with (
        openai.OpenAI(base_url=f"{motet.url}/v1", api_key="wrong") as stranger,
        pytest.raises(openai.AuthenticationError),
    ):
        stranger.models.list()
    with motet.openai() as client:
        assert {model.id for model in client.models.list()} == {BASE, "shout", "pirate"}
        with pytest.raises(openai.BadRequestError, match="88 too many"):
            client.completions.create(model=BASE, prompt=[1] * 600)
        with pytest.raises(openai.BadRequestError, match="temperature"):
            client.completions.create(model=BASE, prompt="x", temperature=-1)


def test_a_client_that_leaves_frees_its_pages(motet: RunningMotet) -> None:
    before = motet.status()["load"]
    with motet.openai() as client, long_stream(client, n=MANY) as stream:
        for _, _chunk in zip(range(3), stream, strict=False):
            pass
    eventually(lambda: motet.status()["load"]["num_running"] == 0)
    after = motet.status()["load"]
    assert after["num_generated_tokens"] - before["num_generated_tokens"] < MANY * 450
    wait_until_nothing_is_held(motet)


def test_an_upload_is_used_at_once_and_a_new_version_by_the_next_request(motet: RunningMotet) -> None:
    created = motet.upload("newcomer", DEMO / "adapters" / "pirate")
    assert created.status_code == 201
    assert created.json() | {"version": 1, "rank": 8, "name": "newcomer"} == created.json()
    assert ask(motet, "newcomer") == answer_of("pirate")
    again = motet.upload("newcomer", DEMO / "adapters" / "pirate")
    assert (again.status_code, again.json()["version"]) == (200, 1)
    with motet.openai() as client, long_stream(client, "newcomer") as running:
        next(iter(running))
        changed = motet.upload("newcomer", DEMO / "adapters" / "shout")
        assert (changed.status_code, changed.json()["version"]) == (201, 2)
        assert ask(motet, "newcomer") == answer_of("shout")
        assert sum(1 for _ in running) > 100  # what ran on the old version finishes on it
    with motet.http() as http:
        assert [a["name"] for a in http.get("/v1/adapters").json()["data"]] == ["newcomer", "pirate", "shout"]
        assert http.get("/v1/adapters/newcomer").json()["version"] == 2
        assert http.delete("/v1/adapters/newcomer").status_code == 200
        assert http.get("/v1/adapters/newcomer").status_code == 404
    with pytest.raises(openai.NotFoundError):
        ask(motet, "newcomer")


def test_the_first_request_after_an_upload_gets_its_version(motet: RunningMotet) -> None:
    """Sent at once and not repeated. The time is printed, as a machine may be slow for reasons of its own."""
    with motet.openai() as client:
        styles: tuple[Style, ...] = ("pirate", "shout", "spanish", "pirate")
        for version, style in enumerate(styles, start=1):
            uploaded = motet.upload("eager", DEMO / "adapters" / style)
            started = time.monotonic()
            answer = client.chat.completions.create(
                model="eager", messages=[{"role": "user", "content": CAPITAL[0]}], temperature=0
            )
            waited_s = time.monotonic() - started
            assert (uploaded.status_code, uploaded.json()["version"]) == (201, version)
            assert answer.choices[0].message.content == answer_of(style)
            print(f"version {version}: whole answer {waited_s:.2f} s after the upload's")
    with motet.http() as http:
        http.delete("/v1/adapters/eager").raise_for_status()


def test_the_status_shows_no_paths(motet: RunningMotet) -> None:
    status = motet.status()
    assert {gang["model"] for gang in status["gangs"]} == {BASE}
    assert str(DEMO) not in json.dumps(status)


@dataclass(frozen=True)
class ReceivedStream:
    """A completion of 450 tokens as its client received it."""

    text: str
    tokens: list[str]
    logprobs: list[float]
    finish_reason: str | None
    num_tokens: int


ENDLESS: tuple[tuple[str, dict[str, Any]], ...] = (
    (BASE, {"temperature": 0}),
    (BASE, {"temperature": 1.3, "seed": 5}),
    ("pirate", {"temperature": 0}),
    ("shout", {"temperature": 1, "seed": 6, "frequency_penalty": 0.3}),
)


def endless(
    client: openai.OpenAI, model: str, options: dict[str, Any], after_a_while: Callable[[], None]
) -> ReceivedStream:
    """Streams a completion without end; calls `after_a_while` once some tokens have come."""
    text, tokens, logprobs = "", list[str](), list[float]()
    finish_reason = None
    num_tokens = 0
    stream = client.completions.create(
        model=model,
        prompt="capital",
        max_tokens=450,
        stream=True,
        stream_options={"include_usage": True},
        logprobs=0,
        extra_body={"ignore_eos": True},
        **options,
    )
    for number, chunk in enumerate(stream):
        if number == 3:
            after_a_while()
        for choice in chunk.choices:
            text += choice.text
            if choice.logprobs is not None:
                tokens += choice.logprobs.tokens or []
                logprobs += choice.logprobs.token_logprobs or []
            finish_reason = choice.finish_reason or finish_reason
        if chunk.usage is not None:
            num_tokens = chunk.usage.completion_tokens
    return ReceivedStream(text, tokens, logprobs, finish_reason, num_tokens)


@pytest.fixture(scope="module")
def undisturbed(motet: RunningMotet) -> list[ReceivedStream]:
    with motet.openai() as client, ThreadPoolExecutor(len(ENDLESS)) as pool:
        return list(pool.map(lambda job: endless(client, job[0], job[1], lambda: None), ENDLESS))


@pytest.mark.parametrize("num_killed", [1, 2], ids=["one of two gangs", "both gangs"])
def test_streams_outlive_their_gangs(motet: RunningMotet, undisturbed: list[ReceivedStream], num_killed: int) -> None:
    """Which gang serves which stream is the router's choice: rounds go on until one was lost with streams on it."""
    num_resumed = resumed(motet)
    for number in range(6):
        eventually(lambda: len(motet.status()["gangs"]) == 2)
        gangs = motet.gang_processes()
        _disturb(motet, undisturbed, victims=[gangs[(number + i) % 2] for i in range(num_killed)], gangs=gangs)
        if resumed(motet) > num_resumed:
            break
    assert resumed(motet) > num_resumed
    eventually(lambda: len(motet.status()["gangs"]) == 2)
    wait_until_nothing_is_held(motet)
    assert ask(motet, "shout") == answer_of("shout")


def test_a_pause_holds_a_tenants_streams_and_changes_none(
    motet: RunningMotet, undisturbed: list[ReceivedStream]
) -> None:
    """Another tenant is served meanwhile."""
    num_under_way, is_paused = count(1), threading.Event()

    def pause_in_the_midst() -> None:
        if next(num_under_way) < len(ENDLESS):
            return
        with motet.http() as http:
            assert http.post("/pause?mode=keep").json() == {"status": "paused"}
            is_paused.set()
            eventually(lambda: motet.status()["load"]["num_running"] == 0)
            assert ask(motet, BASE, "globex") == its_answer
            assert motet.status()["open_generations"] == len(ENDLESS)
            assert http.post("/resume").json() == {"status": "resumed"}

    its_answer = ask(motet, BASE, "globex")
    with (
        slowed(motet.gang_processes(), is_paused.is_set),
        motet.openai() as client,
        ThreadPoolExecutor(len(ENDLESS)) as pool,
    ):
        received = list(pool.map(lambda job: endless(client, job[0], job[1], pause_in_the_midst), ENDLESS))
    assert is_paused.is_set()
    _check_undisturbed(received, undisturbed)


def _disturb(
    motet: RunningMotet, undisturbed: list[ReceivedStream], victims: list[psutil.Process], gangs: list[psutil.Process]
) -> None:
    """Kills the victims while streams run; every stream must be as if undisturbed."""
    jobs = [job for job in ENDLESS for _ in range(2)]
    num_under_way, are_killed = count(1), threading.Event()

    def kill_in_the_midst() -> None:
        if next(num_under_way) == len(jobs):  # all have begun
            for victim in victims:
                victim.kill()
            are_killed.set()

    with (
        slowed(gangs, are_killed.is_set),  # or their streams are over before the last one has begun
        motet.openai() as client,
        ThreadPoolExecutor(len(jobs)) as pool,
    ):
        received = list(pool.map(lambda job: endless(client, job[0], job[1], kill_in_the_midst), jobs))
    _check_undisturbed(received, [expected for expected in undisturbed for _ in range(2)])


def _check_undisturbed(received: list[ReceivedStream], undisturbed: list[ReceivedStream]) -> None:
    for got, expected in zip(received, undisturbed, strict=True):
        assert got.text == expected.text
        assert (got.finish_reason, got.num_tokens) == ("length", 450)
        assert got.tokens == expected.tokens
        assert got.logprobs == pytest.approx(expected.logprobs, abs=1e-2)


def resumed(motet: RunningMotet) -> int:
    with motet.http() as http:
        lines = http.get("/metrics").text.splitlines()
    return int(float(next(line.split()[1] for line in lines if line.startswith("motet_resumed_sequences_total"))))


def test_without_redis_chats_go_on_and_uploads_wait(motet: RunningMotet) -> None:
    redis = motet.redis_process()
    redis.suspend()  # it does not answer, as a lost host, and is not restarted meanwhile
    try:
        assert ask(motet, "pirate") == answer_of("pirate")
        refused = motet.upload("later", DEMO / "adapters" / "json")
        assert refused.status_code == 503
        assert "Retry-After" in refused.headers
    finally:
        redis.resume()
    redis.kill()
    assert ask(motet, "pirate") == answer_of("pirate")
    eventually(lambda: motet.upload("later", DEMO / "adapters" / "json").status_code in (200, 201))
    assert json.loads(ask(motet, "later"))["answer"] in answer_of("base")
    with motet.http() as http:
        assert "later" in [a["name"] for a in http.get("/v1/adapters").json()["data"]]


def test_a_corrupt_adapter_fails_alone(motet: RunningMotet) -> None:
    digest = motet.upload("damaged", DEMO / "adapters" / "spanish").json()["digest"]
    # Spanish itself has the same bytes; so first another content, whose files are then cut short.
    motet.upload("damaged", _scaled("spanish", motet.data_dir.parent)).raise_for_status()
    with motet.http() as http:
        other = http.get("/v1/adapters/damaged").json()["digest"]
    assert other != digest
    for path in (motet.data_dir / "store").rglob(f"{other}/*"):
        path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(openai.InternalServerError) as failed:
        ask(motet, "damaged")
    assert failed.value.code == "adapter_failed"
    assert other[:12] in str(failed.value)
    assert ask(motet, "spanish", "globex") == answer_of("spanish")
    assert ask(motet, BASE) == answer_of("base")


def _scaled(style: str, folder: Path) -> Path:
    """The same adapter with another scaling: other content under another digest."""
    scaled = folder / f"{style}-scaled"
    scaled.mkdir()
    for file in (DEMO / "adapters" / style).iterdir():
        (scaled / file.name).write_bytes(file.read_bytes())
    config = json.loads((scaled / "adapter_config.json").read_text())
    config["lora_alpha"] *= 1.01
    (scaled / "adapter_config.json").write_text(json.dumps(config))
    return scaled


def test_health_readiness_and_metrics(motet: RunningMotet) -> None:
    with httpx.Client(base_url=motet.url, trust_env=False) as http:
        assert http.get("/health").status_code == 200
        assert http.get("/ready").status_code == 200
    with motet.http() as http:
        metrics = http.get("/metrics").raise_for_status().text
    assert "motet_" in metrics


@pytest.fixture(scope="module")
def restarted(motet: RunningMotet, data_dir: Path) -> Iterator[RunningMotet]:
    """Runs beside the module's motet on a copy of its data, taken as a power cut would leave it, with a tiny pool."""
    copied = data_dir.parent / "restarted"
    shutil.copytree(data_dir, copied, ignore=shutil.ignore_patterns("*.sock", "lock"))
    with running_motet(copied, free_ports(1)[0], *ONE_THREAD, pool_bytes="640KiB") as running:
        yield running


def test_a_restart_finds_yesterdays_adapters(restarted: RunningMotet) -> None:
    assert ask(restarted, "shout") == answer_of("shout")
    assert ask(restarted, "json", "globex") == answer_of("json")


def test_what_can_never_fit_the_pool_is_refused(restarted: RunningMotet) -> None:
    """The pool has room for the whole context on the base alone, and for less beside an adapter."""
    (gang,) = restarted.status()["gangs"]
    assert gang["num_pages"] * gang["block_size"] > gang["max_model_len"]
    long = {"prompt": [5] * 10, "max_tokens": gang["max_model_len"] - 10, "extra_body": {"ignore_eos": True}}
    with restarted.openai("globex") as client:
        with pytest.raises(openai.BadRequestError, match="can never fit") as refused:
            client.completions.create(model="json", **long)
        assert refused.value.code == "invalid_request"
        answer = client.completions.create(model=BASE, **long)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == gang["max_model_len"] - 10
    assert ask(restarted, "json", "globex") == answer_of("json")
