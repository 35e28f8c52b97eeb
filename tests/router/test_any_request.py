"""Requests of all kinds that the OpenAPI document allows, and of many that it does not, against a real registry.

None is a server error, each answer is as the document says, and a request that is refused stores nothing.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
import threading
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any, Final, TypeVar
from urllib.parse import unquote

import httpx
import hypothesis
import jsonschema
import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.specs.openapi import checks

from motet.adapters.format.peft import CONFIG_FILE, TENSORS_FILE
from motet.router.text.text import TextService
from motet.tests.rigs.batch_client import COMPLETIONS, BatchClient
from motet.tests.rigs.lora_files import lora_files
from motet.tests.rigs.real_front import (
    ASKER_KEY,
    ASKERS_ADAPTER,
    OPERATOR_KEY,
    OWNERS_ADAPTER,
    RealFront,
    but_for_ended_users,
    real_front,
)
from motet.tests.rigs.router_rig import BASE, text_service

T = TypeVar("T")
# Of each operation; of requests that the document does not allow half of it, unless thorough.
NUM_EXAMPLES: Final = 10
NUM_OF_COMPLEX: Final = 40  # likewise, of those in which many fields must fit together
COMPLEX: Final = (
    "POST /v1/completions",
    "POST /v1/chat/completions",
    "POST /v1/responses",
    "POST /v1/messages",
    "POST /v1/embeddings",
    "POST /tokenize",
    "POST /v1/adapters",
)
REQUIRED: Final = frozenset({"prompt", "messages", "input", "max_tokens", "tokens"})
MADE: Final = "made when it is requested"  # an id
SPENT: Final = ("DELETE /v1/files/{file_id}", "POST /v1/batches/{batch_id}/cancel")  # need a new one each time
HI: Final = [{"role": "user", "content": "hi"}]
# Requests that are surely answered, as arguments of a case; drawn ones are likely to be. Uploads have files beside.
VALID: Final[dict[str, dict[str, Any]]] = {
    "POST /v1/completions": {"body": {"model": ASKERS_ADAPTER, "prompt": "hi"}},
    "POST /v1/chat/completions": {"body": {"model": ASKERS_ADAPTER, "messages": HI}},
    "POST /v1/responses": {"body": {"model": ASKERS_ADAPTER, "input": "hi"}},
    "POST /v1/messages": {"body": {"model": ASKERS_ADAPTER, "messages": HI, "max_tokens": 3}},
    "POST /v1/embeddings": {"body": {"model": BASE, "input": "hi"}},
    "POST /tokenize": {"body": {"model": BASE, "prompt": "hi"}},
    "POST /detokenize": {"body": {"model": BASE, "tokens": [1, 2]}},
    "POST /v1/adapters": {"body": {}},
    "GET /v1/adapters/{name}": {"path_parameters": {"name": ASKERS_ADAPTER}},
    "POST /v1/files": {"body": {"file": b"{}\n", "purpose": "batch"}},
    "GET /v1/files/{file_id}": {"path_parameters": {"file_id": MADE}},
    "GET /v1/files/{file_id}/content": {"path_parameters": {"file_id": MADE}},
    "DELETE /v1/files/{file_id}": {"path_parameters": {"file_id": MADE}},
    "POST /v1/batches": {"body": {"endpoint": COMPLETIONS, "input_file_id": MADE, "completion_window": "24h"}},
    "GET /v1/batches/{batch_id}": {"path_parameters": {"batch_id": MADE}},
    "POST /v1/batches/{batch_id}/cancel": {"path_parameters": {"batch_id": MADE}},
    "GET /status": {},
    "GET /version": {},
}
REFUSED: Final[dict[str, dict[str, Any]]] = {  # likewise, with 400
    "POST /v1/completions": {"body": {"model": BASE, "prompt": "hi", "n": 0}},
    "POST /v1/adapters": {"body": {TENSORS_FILE: b""}},
    "POST /v1/files": {"body": {"file": b"{}\n", "purpose": "fine-tune"}},
    "POST /v1/batches": {"body": {"endpoint": COMPLETIONS, "input_file_id": MADE, "completion_window": "1h"}},
}
NAMES: Final = (BASE, ASKERS_ADAPTER, OWNERS_ADAPTER, "unknown")
CHECKS = [
    schemathesis.checks.not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_headers_conformance,
    checks.response_schema_conformance,
]


class Runner:
    """An event loop on a thread of its own: the registry's view goes on while requests are drawn."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


@pytest.fixture(scope="module")
def runner() -> Iterator[Runner]:
    runner = Runner()
    yield runner
    runner.stop()


@pytest.fixture(scope="module")
def text() -> TextService:
    return text_service()


@pytest.fixture
def front(runner: Runner, redis_url: str, tmp_path: Path, text: TextService) -> Iterator[RealFront]:
    context = real_front(redis_url, tmp_path, text)
    yield runner.run(context.__aenter__())
    runner.run(context.__aexit__(None, None, None))


def operations(front: RealFront, runner: Runner) -> list[Any]:
    async def document() -> Any:
        async with front.client() as client:
            return (await client.get("/openapi.json")).json()

    schema = schemathesis.openapi.from_dict(runner.run(document()))
    found: list[Any] = [operation.ok() for operation in list[Any](schema.get_all_operations())]
    return sorted(found, key=lambda operation: operation.method == "delete")  # last, so that others find something


def sent(case: Any, key: str) -> httpx.Request:
    """As schemathesis would send it."""
    reported: Any = requests.Request(**case.as_transport_kwargs(base_url="http://router")).prepare()
    headers = {name: value for name, value in reported.headers.items() if name.lower() != "authorization"}
    request = httpx.Request(reported.method or "", reported.url or "", content=reported.body or b"")
    request.headers.update({"Content-Type": "application/json"} if case.media_type == "application/json" else {})
    request.headers.update(headers)
    request.headers["Authorization"] = f"Bearer {key}"
    return request


class Work:
    """The asker's files and batches, whose ids cannot be drawn."""

    def __init__(self, front: RealFront, runner: Runner) -> None:
        self._asker, self._runner = BatchClient(front, ASKER_KEY), runner
        self._ids: dict[str, str] = {}

    def id_for(self, label: str, field: str) -> str:
        """`label`: of the operation whose field it is."""
        if label in SPENT or field not in self._ids:
            self._ids[field] = self._runner.run(self._made(field))
        return self._ids[field]

    async def _made(self, field: str) -> str:
        file_id = await self._asker.upload([{}])
        return await self._asker.create(file_id) if field == "batch_id" else file_id


WORK_IDS: Final = frozenset({"file_id", "batch_id", "input_file_id"})


def furnish(case: Any, data: st.DataObject, work: Work) -> None:
    """Names of things that there are, valid files, and few of the optional fields, most of the time.

    What has an unknown name is not looked at any further, and of very many fields some never fit together.
    """
    name = data.draw(st.sampled_from((*NAMES, BASE, None)))
    if name is None:
        return
    for parameter in {"name", "model"} & (case.path_parameters or {}).keys():
        case.path_parameters[parameter] = name
    for fields in (case.path_parameters, case.body):
        for field in WORK_IDS & fields.keys() if isinstance(fields, dict) else ():
            fields[field] = work.id_for(case.operation.label, field)
    if not isinstance(case.body, dict):
        return
    if case.body.keys() >= {"name", CONFIG_FILE, TENSORS_FILE}:
        case.body = upload(case.body["name"], seed=data.draw(st.integers(1, 3)))
    elif "model" in case.body:
        kept = data.draw(st.sets(st.sampled_from(sorted(case.body)), max_size=data.draw(st.integers(0, 4)))) | REQUIRED
        case.body = {field: value for field, value in case.body.items() if field in kept} | {"model": name}
        if "messages" in case.body and data.draw(st.booleans()):
            case.body["messages"] = HI
        if "input" in case.body and data.draw(st.booleans()):
            case.body["input"] = "hi"
        if case.operation.label == "POST /tokenize" and data.draw(st.booleans()):
            case.body = {"model": name, "prompt": "hi"}
        if "tokens" in case.body and data.draw(st.booleans()):
            case.body["tokens"] = [1, 2]
        if data.draw(st.booleans()):
            case.headers.pop("Last-Event-ID", None)
            case.body["stream"] = data.draw(st.booleans())


def upload(name: str, seed: int) -> dict[str, Any]:
    files = lora_files(seed=seed)
    with tempfile.TemporaryDirectory() as folder:
        tensors = files.write(Path(folder)).read_bytes()
    return {"name": name, CONFIG_FILE: files.config_bytes, TENSORS_FILE: tensors}


def certain_case(operation: Any, mode: GenerationMode, work: Work) -> Any | None:
    """A case that does not depend on what is drawn; None if the operation has none."""
    found = (VALID if mode is GenerationMode.POSITIVE else REFUSED).get(operation.label)
    if found is None:
        return None
    fields = {
        part: {name: work.id_for(operation.label, name) if value is MADE else value for name, value in some.items()}
        for part, some in found.items()
    }
    if "body" not in fields:
        return operation.Case(**fields)
    if operation.label == "POST /v1/adapters":
        return operation.Case(body={**upload("new", seed=4), **fields["body"]}, media_type="multipart/form-data")
    media_type = "multipart/form-data" if operation.label == "POST /v1/files" else "application/json"
    return operation.Case(**fields, media_type=media_type)


async def check(front: RealFront, case: Any, key: str) -> int:
    """The status, once all that must hold has been found to."""
    before = await front.stored()
    request = sent(case, key)
    async with front.client() as client:
        response = await client.send(request)
    case.validate_response(response, checks=CHECKS)
    assert response.headers["x-request-id"]
    if response.status_code >= 400:
        after = await front.stored()
        if case.method == "DELETE" and "/users/" in request.url.path:
            before, after = but_for_ended_users(before), but_for_ended_users(after)
        assert after == before
    if response.headers.get("content-type", "").startswith("text/event-stream"):
        check_events(case, response.content)
    return response.status_code


def check_events(case: Any, body: bytes) -> None:
    """Each event is as the document says."""
    content = case.operation.definition.raw["responses"]["200"]["content"]["text/event-stream"]
    schema = {**content["x-event-schema"], "components": case.operation.schema.raw_schema["components"]}
    for line in body.decode().splitlines():
        if line.startswith("data: ") and line != "data: [DONE]":
            event = json.loads(line.removeprefix("data: "))
            if "error" not in event:
                jsonschema.validate(event, schema)


def statuses_of(
    front: RealFront, runner: Runner, operation: Any, mode: GenerationMode, seed: int, *, draws_all: bool
) -> set[int]:
    """The statuses of the answers to an operation's requests."""
    tenants = {f"{route.method} {route.path}" for route in front.app.state.routes if route.needs_tenant}
    is_tenants = operation.label in {label.replace(":path}", "}") for label in tenants}
    key, seen = ASKER_KEY if is_tenants else OPERATOR_KEY, set[int]()
    work = Work(front, runner)
    if (certain := certain_case(operation, mode, work)) is not None:
        seen.add(runner.run(check(front, certain, key)))

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=(NUM_OF_COMPLEX if operation.label in COMPLEX else NUM_EXAMPLES) // (1 if draws_all else 2),
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
        database=None,
        deadline=None,
    )
    @hypothesis.given(case=operation.as_strategy(generation_mode=mode), data=st.data())
    def ask(case: Any, data: st.DataObject) -> None:
        furnish(case, data, work)
        # A user's part of a path takes the next part as the adapter's name: another route, or none.
        hypothesis.assume(not unquote(str((case.path_parameters or {}).get("name", ""))).startswith("~"))
        seen.add(runner.run(check(front, case, key)))

    ask()
    return seen


# The loop on the other thread draws how long to wait, at the same time.
@pytest.mark.filterwarnings("ignore:Do not use the `random` module inside strategies")
@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE], ids=["valid", "otherwise"])
def test_no_request_is_a_server_error_or_stores_what_it_was_refused(
    front: RealFront, runner: Runner, mode: GenerationMode, pytestconfig: pytest.Config
) -> None:
    """Others at each commit; `--first-seed` draws the same ones again."""
    is_as_reported = mode is GenerationMode.POSITIVE
    draws_all = is_as_reported or pytestconfig.getoption("thorough")
    seed = pytestconfig.getoption("first_seed")
    statuses: dict[str, set[int]] = {}
    for operation in operations(front, runner):
        if (
            is_as_reported or operation.body or operation.query or operation.path_parameters
        ):  # else nothing can be wrong
            statuses[operation.label] = statuses_of(front, runner, operation, mode, seed, draws_all=draws_all)
    assert [*(front.folder / "spool").iterdir()] == []
    print(statuses)
    if is_as_reported:
        assert [label for label in VALID if not statuses[label] & {200, 201}] == []
        assert 201 in statuses["POST /v1/adapters"]
    else:
        assert [label for label in REFUSED if 400 not in statuses[label]] == []
