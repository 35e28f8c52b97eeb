"""What trainers ask of a server: pauses, which hold a tenant's requests at all routers, facts, keys in URLs."""

from __future__ import annotations

import asyncio
import time
from base64 import b64encode
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from motet.adapters.registry.administration.tenant_registry import TenantRegistry
from motet.adapters.registry.tenants.records import Admission
from motet.cluster.edge import edge_config
from motet.router import pauses
from motet.router.fleet import dispatch
from motet.router.fleet.admission import TimeLimit
from motet.router.fleet.dispatch import FleetDispatcher
from motet.router.fleet.open_sequence import OpenSequence
from motet.router.http.auth import BROWSERS_HEADERS
from motet.router.tenancy.account import Account, AnswerRequest, Ending
from motet.router.text.text import TextService
from motet.tests.rigs.lora_files import lora_files
from motet.tests.rigs.part_configs import admission_config, leader_config
from motet.tests.rigs.patience import PATIENCE_S
from motet.tests.rigs.patience import eventually_in_loop as eventually
from motet.tests.rigs.router_rig import BASE, KEYS, RouterRig, chunks_of, text_service
from motet.tests.rigs.stand_in_engine import INFO, StandInEngine, adapter_pages
from motet.tests.rigs.tenants_rig import TenantsRig
from motet.workers.leader.frame_server import FrameServer
from motet.workers.wire.messages import SamplingParams, SequenceRequest, SequenceUpdate

TOKEN = "a secret"
COMPLETION = {"model": BASE, "prompt": [5, 6], "max_tokens": 2}
PAUSE = "/pause?mode=keep"


class Gangs:
    """A dispatcher, and two gangs that it is connected to."""

    def __init__(self) -> None:
        self.engines = [StandInEngine(), StandInEngine()]
        self.servers = [FrameServer(engine, INFO, TOKEN, leader_config()) for engine in self.engines]
        self.dispatcher = FleetDispatcher(
            TOKEN, gang_wait_s=PATIENCE_S, adapter_pages=adapter_pages, admission=admission_config()
        )

    @property
    def num_running(self) -> int:
        return sum(engine.num_running for engine in self.engines)

    def submit(
        self, first: int, max_tokens: int | None, tenant: str = "acme", limit: TimeLimit | None = None, **given: Any
    ) -> OpenSequence:
        sampling = SamplingParams(max_tokens=max_tokens, num_logprobs=0)
        request = SequenceRequest(prompt_token_ids=[1, first], sampling=sampling, tenant=tenant, **given)
        return self.dispatcher.submit(request, limit=limit)


@pytest.fixture
async def gangs() -> AsyncIterator[Gangs]:
    gangs = Gangs()
    gangs.dispatcher.update({str(n): await server.start("127.0.0.1") for n, server in enumerate(gangs.servers)})
    await eventually(lambda: len(gangs.dispatcher.gangs()) == 2)
    yield gangs
    await gangs.dispatcher.close()
    for server in gangs.servers:
        await server.stop()


async def rest_of(sequence: OpenSequence) -> tuple[list[int], list[float], SequenceUpdate]:
    tokens, rows, last = [], [], None
    async with asyncio.timeout(PATIENCE_S):
        async for update in sequence:
            tokens += update.token_ids
            rows += [-row.chosen for row in update.logprobs or ()]
            last = update
    assert last is not None
    return tokens, rows, last


@pytest.mark.parametrize("key", ["", "k"])
async def test_a_held_tenants_sequences_leave_the_gangs_and_lose_no_token(gangs: Gangs, key: str) -> None:
    for engine in gangs.engines:
        engine.most_tokens = 300
    running = [gangs.submit(10 * n, 600, key=key and f"{key}{n}") for n in range(6)]
    other, flex = gangs.submit(500, None, "zoo"), gangs.submit(700, None, is_background=True)
    begun = [(await anext(sequence)).token_ids for sequence in running]
    gangs.dispatcher.hold("acme")
    gangs.dispatcher.hold("acme")  # changes nothing
    late = gangs.submit(90, 3)
    await eventually(lambda: gangs.num_running == 2)  # the other tenant's, and background work
    for engine in gangs.engines:
        engine.most_tokens = 10_000
    for sequence in (other, flex):
        await eventually(lambda sequence=sequence: len(sequence._token_ids) > 400)  # type: ignore[misc]
    assert gangs.num_running == 2 and len(gangs.dispatcher._awaiting_resume) == 7 and not late._token_ids
    assert gangs.dispatcher.num_resumed == 0
    gangs.dispatcher.release("zoo")  # changes nothing
    assert len(gangs.dispatcher._awaiting_resume) == 7
    gangs.dispatcher.release("acme")
    for n, sequence in enumerate(running):
        tokens, rows, last = await rest_of(sequence)
        assert begun[n] + tokens == [(10 * n + 1 + step) % INFO.vocab_size for step in range(600)]
        assert rows == [*map(float, range(len(begun[n]), 600))]
        assert last.finish_reason == "length"
    assert (await rest_of(late))[0] == [91, 92, 93]
    for sequence in (other, flex):
        sequence.cancel()
    await eventually(lambda: gangs.num_running == 0)


async def test_held_sequences_can_be_cancelled_and_time_out_and_are_bounded(
    gangs: Gangs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "MAX_AWAITING", 4)
    for engine in gangs.engines:
        engine.paused = True
    taken = [gangs.submit(10, None) for _ in range(3)]
    await eventually(lambda: gangs.num_running == 3)
    gangs.dispatcher.hold("acme")
    assert len(gangs.dispatcher._awaiting_resume) == 3  # what a gang has taken is not refused
    refused = await rest_of(gangs.submit(10, None))
    assert refused[2].error is not None and refused[2].error.reason == "tenant_full"
    gangs.dispatcher.hold("zoo")
    others = [gangs.submit(10, None, "zoo")]
    late = await rest_of(gangs.submit(10, None, "zoo", limit=TimeLimit(timeout_s=0.01)))
    assert late[2].error is not None and late[2].error.kind == "timeout"
    for sequence in (*taken, *others):
        sequence.cancel()
    assert len(gangs.dispatcher._awaiting_resume) == 0 and not gangs.dispatcher._awaiting_resume._uses
    await eventually(lambda: gangs.num_running == 0)


async def test_what_a_held_sequence_has_cost_is_known(gangs: Gangs) -> None:
    """The gang reports it after the sequence has left."""
    sequence = gangs.submit(10, None)
    await anext(sequence)
    gangs.dispatcher.hold("acme")
    (connection,) = [one for one in gangs.dispatcher.connected() if one._cancelled]
    await eventually(lambda: not connection._cancelled)
    assert sequence.usage.num_generated_tokens >= len(sequence._token_ids)
    sequence.cancel()


@pytest.fixture
async def routers(redis_client: Redis, tmp_path: Path) -> AsyncIterator[list[TenantsRig]]:
    """Two routers of one motet."""
    async with TenantsRig(redis_client, tmp_path / "a") as one, TenantsRig(redis_client, tmp_path / "b") as other:
        for name in ("acme", "zoo"):
            await one.done("POST", "/v1/admin/tenants", json={"name": name})
        yield [one, other]


async def test_a_pause_holds_the_tenants_requests_at_every_router_until_it_is_resumed(
    routers: list[TenantsRig],
) -> None:
    first, second = routers
    key, zoo = await first.make_key("acme"), await first.make_key("zoo")
    await second.view.catch_up()
    assert await first.done("POST", PAUSE, key) == {"status": "paused"}
    assert first.dispatcher.held == ["acme"]
    await eventually(lambda: second.dispatcher.held == ["acme"])
    assert await second.done("GET", "/is_paused", key) == {"is_paused": True}
    assert await second.done("GET", "/is_paused", zoo) == {"is_paused": False}
    chat = {"model": BASE, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}
    asked = {
        "/v1/completions": COMPLETION,
        "/v1/chat/completions": chat,
        "/v1/messages": chat,
        "/v1/responses": {"model": BASE, "input": "hello", "max_output_tokens": 2},
        "/v1/embeddings": {"model": BASE, "input": "hello"},
    }
    waiting = [asyncio.create_task(rig.done("POST", path, key, json=asked[path])) for rig in routers for path in asked]
    for rig in routers:
        await eventually(lambda rig=rig: rig.app.state.pauses.now["acme"].num_waiting == len(asked))  # type: ignore[misc]
        assert (await rig.ask("POST", "/v1/completions", zoo, json=COMPLETION)).status_code == 200
        assert (await rig.ask("POST", "/tokenize", key, json={"prompt": "hello"})).status_code == 200
        assert len(rig.dispatcher.submitted) == 1  # the other tenant's
    assert not any(one.done() for one in waiting)
    assert await second.done("POST", "/resume", key) == {"status": "resumed"}
    await asyncio.gather(*waiting)
    assert second.dispatcher.held == []
    await eventually(lambda: first.dispatcher.held == [])
    assert await first.done("POST", "/resume", key) == {"status": "resumed"}  # changes nothing
    assert (await first.done("GET", "/v1/admin/audit?tenant=acme"))["data"][0]["action"] == "key.create"


async def test_what_waited_sees_the_versions_that_were_uploaded_meanwhile(routers: list[TenantsRig]) -> None:
    first, second = routers
    key = await first.make_key("acme")
    await second.view.catch_up()
    for version in range(1, 4):
        await first.done("POST", PAUSE, key)
        await eventually(lambda: "acme" in second.app.state.pauses.now)
        sent = asyncio.create_task(second.ask("POST", "/v1/completions", key, json={**COMPLETION, "model": "policy"}))
        await eventually(lambda: second.app.state.pauses.now["acme"].num_waiting == 1)
        files = lora_files(seed=version)
        parts = {
            "adapter_config.json": files.config_bytes,
            "adapter_model.safetensors": files.write(first.config.now.spool_path.parent).read_bytes(),
        }
        await first.done("POST", "/v1/adapters", key, data={"name": "policy"}, files=parts)
        assert not sent.done()
        await first.done("POST", "/resume", key)
        answer = await sent
        assert (answer.status_code, answer.headers["x-motet-version"]) == (200, f"policy@{version}"), answer.text


async def test_a_pause_ends_by_itself(routers: list[TenantsRig], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pauses, "MAX_PAUSE_S", 0.2)
    first, key = routers[0], await routers[0].make_key("acme")
    for _ in range(2):  # a second one is as long
        await first.done("POST", PAUSE, key)
    for rig in routers:
        await eventually(lambda rig=rig: rig.dispatcher.held == [])  # type: ignore[misc]
        assert (await rig.ask("POST", "/v1/completions", key, json=COMPLETION)).status_code == 200


async def test_a_router_that_starts_while_a_tenant_is_paused_knows_it(
    routers: list[TenantsRig], redis_client: Redis, tmp_path: Path
) -> None:
    key = await routers[0].make_key("acme")
    await routers[0].done("POST", PAUSE, key)
    late = TenantsRig(redis_client, tmp_path / "late")
    async with late:
        assert late.dispatcher.held == ["acme"]
        await routers[0].done("POST", "/resume", key)
        await eventually(lambda: late.dispatcher.held == [])


async def test_so_many_wait_while_they_are_paused_and_no_more(
    routers: list[TenantsRig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pauses, "MAX_HELD", 2)
    rig, key = routers[0], await routers[0].make_key("acme")
    await rig.done("POST", PAUSE, key)
    waiting = [asyncio.create_task(rig.ask("POST", "/v1/completions", key, json=COMPLETION)) for _ in range(2)]
    await eventually(lambda: rig.app.state.pauses.now["acme"].num_waiting == 2)
    assert await rig.refused("POST", "/v1/completions", key, json=COMPLETION) == (429, "overloaded")
    waiting[0].cancel()  # a client that leaves
    await eventually(lambda: rig.app.state.pauses.now["acme"].num_waiting == 1)
    await rig.done("POST", "/resume", key)
    assert (await waiting[1]).status_code == 200


@pytest.mark.parametrize("change", ["key", "tenant", "suspension"])
async def test_what_waited_is_refused_if_its_caller_was_deleted_or_suspended_meanwhile(
    routers: list[TenantsRig], change: str
) -> None:
    first, second = routers
    made, other = await first.done("POST", "/v1/admin/tenants/acme/keys", json={}), await first.make_key("acme")
    key = made["key"]
    await second.view.catch_up()
    await first.done("POST", PAUSE, key)
    await eventually(lambda: "acme" in second.app.state.pauses.now)
    sent = asyncio.create_task(second.refused("POST", "/v1/completions", key, json=COMPLETION))
    await eventually(lambda: second.app.state.pauses.now["acme"].num_waiting == 1)
    if change == "key":
        await first.done("DELETE", f"/v1/admin/keys/{made['id']}")
        await first.done("POST", "/resume", other)
    elif change == "tenant":
        await first.done("DELETE", "/v1/admin/tenants/acme")
    else:
        await first.done("POST", "/v1/admin/tenants/acme/suspend")
    assert await sent == ((403, "tenant_suspended") if change == "suspension" else (401, "invalid_api_key"))
    assert second.dispatcher.submitted == []


async def test_a_pause_makes_no_tenant(routers: list[TenantsRig], redis_client: Redis) -> None:
    """One of a file of keys is there as long as its keys are."""
    rig, tenants = routers[0], TenantRegistry(redis_client)
    await tenants.pause("new", time.time() + 60, Admission(incarnation=0, last_event=0))
    await rig.view.catch_up()
    assert rig.dispatcher.held == ["new"]
    assert not rig.view.keys.has_tenant("new")
    await rig.done("POST", "/v1/admin/tenants", json={"name": "new"})
    assert rig.dispatcher.held == []


async def test_who_may_pause_and_how(routers: list[TenantsRig]) -> None:
    rig = routers[0]
    plain, reader = await rig.make_key("acme"), await rig.make_key("acme", "infer")
    ann = await rig.make_key("acme", user="ann")
    admin = await rig.make_key("acme", "admin", "upload", "infer", user="eve")
    for path in ("/pause", "/pause?mode=abort", "/pause?mode=wait", "/pause?mode="):
        answer = await rig.ask("POST", path, plain)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, "mode") and "`keep`" in error["message"]
    for path in (PAUSE, "/resume"):
        assert await rig.refused("POST", path, reader) == (403, "missing_scope")
        assert await rig.refused("POST", path, ann) == (403, "missing_scope")
        assert (await rig.ask("POST", path, admin)).status_code == 200
    assert await rig.done("GET", "/is_paused", ann) == {"is_paused": False}
    await rig.done("POST", PAUSE, plain)
    await rig.done("DELETE", "/v1/admin/tenants/acme")
    await eventually(lambda: rig.dispatcher.held == [])


async def test_answers_and_each_event_name_the_version(tmp_path: Path, text: TextService) -> None:
    rig = RouterRig(tmp_path / "spool", text)
    rig.registry.add("acme", "policy")
    rig.registry.add("acme", "policy")
    rig.dispatcher.answer = rig.ids("hello world")
    chat = {"messages": [{"role": "user", "content": "hello"}]}
    async with rig.client() as client:
        for path, fields in (("/v1/completions", {"prompt": "hello"}), ("/v1/chat/completions", chat)):
            for model, version in (("policy", "policy@2"), (BASE, None)):
                body = {"model": model, "max_tokens": 4, **fields}
                answer = await client.post(path, json=body)
                assert answer.json().get("system_fingerprint") == answer.headers.get("x-motet-version") == version
                options = {"stream": True, "stream_options": {"include_usage": True}}
                chunks = chunks_of(await client.post(path, json={**body, **options}))
                assert len(chunks) > 3 and {chunk.get("system_fingerprint") for chunk in chunks} == {version}


async def test_aliases_are_the_base_unless_the_tenant_has_an_adapter_of_that_name(
    tmp_path: Path, text: TextService
) -> None:
    accounts = Accounted()
    rig = RouterRig(tmp_path / "spool", text, base_aliases="org/model, /models/tiny", accountants=[accounts])
    rig.dispatcher.answer = rig.ids("hello")
    async with rig.client() as client:

        async def answered(model: str) -> tuple[int, str | None]:
            answer = await client.post("/v1/completions", json={**COMPLETION, "model": model})
            if answer.is_success:
                assert answer.json()["model"] == model
            return answer.status_code, answer.headers.get("x-motet-version")

        for alias in ("org/model", "/models/tiny"):
            assert await answered(alias) == (200, None)
            assert accounts.models[-1] == BASE  # it is the base's usage
        for other in ("", "org/other", "org/model@1", "org/model, /models/tiny", " org/model"):
            assert (await answered(other))[0] in (400, 404)
        shown = (await client.get("/v1/models/org/model")).json()
        assert (shown["id"], shown["root"], shown["parent"]) == ("org/model", BASE, None)
        rig.registry.add("acme", "org/model")
        assert await answered("org/model") == (200, "org/model@1")
        rig.config.now = replace(rig.config.now, base_aliases="other")
        assert await answered("/models/tiny") == (404, None)
        assert await answered("other") == (200, None)
        for none in ("", ",", "other,"):
            rig.config.now = replace(rig.config.now, base_aliases=none)
            assert (await answered(""))[0] in (400, 404) and (await answered(","))[0] == 404
        listed = (await client.get("/v1/models")).json()["data"]
        assert [model["id"] for model in listed] == [BASE, "org/model"]


class Accounted:
    """Keeps the models of answers."""

    headers = ()

    def __init__(self) -> None:
        self.models: list[str] = []

    async def open(self, request: AnswerRequest) -> Account:
        self.models.append(request.model)
        return self

    def settle(self, ending: Ending) -> None:
        pass


# Facts, and keys as passwords.


@pytest.fixture(scope="module")
def text() -> TextService:
    return text_service()


async def test_what_a_trainer_reads_of_the_server(tmp_path: Path, text: TextService) -> None:
    """As TRL 1.16 reads it: `select_adapter_sync` and `VLLMClient.get_dtype`."""
    rig = RouterRig(tmp_path / "spool", text)
    async with rig.client() as client:
        config = (await client.get("/server_info?config_format=json")).json()["vllm_config"]
        assert config["lora_config"] == {"max_loras": 64, "max_lora_rank": 1024}
        assert config["parallel_config"]["data_parallel_size"] == 1
        assert config["model_config"] == {"model": BASE, "dtype": "torch.float32", "max_model_len": 256}
        assert (await client.get("/v1/models")).json()["data"][0]["max_model_len"] == 256
        refused = await client.get("/server_info?config_format=text")
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "config_format")
        rig.dispatcher.is_connected = False


async def test_weights_of_the_base_are_refused_by_name(tmp_path: Path, text: TextService) -> None:
    rig = RouterRig(tmp_path / "spool", text)
    async with rig.client() as client:
        assert (await client.get("/get_world_size")).json() == {"world_size": 0}
        for path in ("init_weight_transfer_engine", "start_weight_update", "update_weights", "finish_weight_update"):
            refused = await client.post(f"/{path}", json={"init_info": {}})
            error = refused.json()["error"]
            assert (refused.status_code, error["code"]) == (400, "base_is_fixed") and "LoRA" in error["message"]


def basic(credentials: str) -> str:
    return f"Basic {b64encode(credentials.encode()).decode()}"


async def test_a_key_may_be_the_password_of_a_url(tmp_path: Path, text: TextService) -> None:
    rig = RouterRig(tmp_path / "spool", text)
    (key, *_) = KEYS
    async with rig.client() as client:
        for credentials in (f":{key}", f"trl:{key}"):
            assert (await client.get("/v1/models", headers={"Authorization": basic(credentials)})).status_code == 200
        for wrong in (basic(key), basic(f"{key}:"), basic(f"{key}:x"), f"Basic {key}", "Basic", "basic !!", basic(":")):
            refused = await client.get("/v1/models", headers={"Authorization": wrong})
            assert (refused.status_code, refused.headers["www-authenticate"]) == (401, "Bearer"), wrong


@pytest.mark.parametrize("header", ["Origin", "Sec-Fetch-Site"])
@pytest.mark.parametrize("value", ["https://evil.example", "null", "cross-site", "same-origin", ""])
async def test_a_browsers_password_is_not_accepted(tmp_path: Path, text: TextService, header: str, value: str) -> None:
    """It would be sent for every page that makes the browser ask. A key that a page itself sends is."""
    rig = RouterRig(tmp_path / "spool", text)
    (key, *_) = KEYS
    async with rig.client() as client:
        headers = {"Authorization": basic(f"me:{key}"), header: value}
        refused = await client.post("/v1/completions", json=COMPLETION, headers=headers)
        assert (refused.status_code, refused.headers["www-authenticate"]) == (401, "Bearer")
        assert "browser" in refused.json()["error"]["message"]
        headers["Authorization"] = f"Bearer {key}"
        assert (await client.post("/v1/completions", json=COMPLETION, headers=headers)).status_code == 200


def test_the_edge_knows_browsers_as_routers_do() -> None:
    assert edge_config.BROWSERS_HEADERS == BROWSERS_HEADERS
