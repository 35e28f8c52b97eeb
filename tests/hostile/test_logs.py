"""Logs of a motet that says all it can: a request is found in them by its id, and nothing of its content, nor a key."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from motet.tests.hostile.test_edge import port_of
from motet.tests.rigs.edge_front import raw_answer
from motet.tests.rigs.patience import eventually
from motet.tests.rigs.running_motet import BASE, KEYS, RunningMotet

MARK = "xMARKx"
ID = "all-of-one-request-17"


@pytest.fixture
def session(motet: RunningMotet) -> Path:
    environ = next(p.environ() for p in motet.processes() if "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC" in p.environ())
    return Path(environ["RAY_SERVE_HAPROXY_CONFIG_FILE_LOC"]).parent.parent


def lines(session: Path, kind: str) -> list[dict[str, Any]]:
    files = (session / "ray" / "session_latest" / "logs" / "motet").glob(f"{kind}-*.log")
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def test_a_request_is_found_by_its_id_in_router_and_gang(motet: RunningMotet, session: Path) -> None:
    body = {"model": BASE, "prompt": "capital", "max_tokens": 2, "ignore_eos": True}
    with motet.http() as http:
        answer = http.post("/v1/completions", json=body, headers={"x-request-id": ID})
    assert answer.headers.get_list("x-request-id") == [ID]

    def found(kind: str) -> list[dict[str, Any]]:
        return [line for line in lines(session, kind) if line.get("request_id") == ID]

    eventually(lambda: found("router") and len(found("gang")) == 2)
    (access,) = found("router")
    assert access.items() >= {"tenant": "acme", "status": 200, "completion_tokens": 2, "process": "router"}.items()
    assert [line["message"] for line in found("gang")] == ["a sequence arrived", "a sequence ended"]
    (gang,) = motet.status()["gangs"]
    assert all((line["tenant"], line["gang"]) == ("acme", gang["gang_id"]) for line in found("gang"))
    assert all(line["replica"] and line["node"] for kind in ("router", "gang") for line in found(kind))


def test_no_log_has_content_or_keys(motet: RunningMotet, session: Path) -> None:
    prompts: list[dict[str, Any]] = [
        {"model": BASE, "prompt": MARK, "max_tokens": 2},
        {
            "model": BASE,
            "prompt": MARK,
            "max_tokens": 2,
            "stream": True,
            "user": MARK,
            "stop": MARK,
            "cache_salt": MARK,
        },
        {"model": BASE, "prompt": MARK, "n": MARK},
        {"model": BASE, "prompt": [MARK, {"a": MARK}]},
        {"model": BASE, "prompt": MARK * 20_000, "max_tokens": 2},
        {"model": MARK, "prompt": MARK},
    ]
    chats: list[dict[str, Any]] = [
        {
            "model": BASE,
            "messages": [{"role": "user", "content": MARK}],
            "max_tokens": 2,
            "response_format": {"type": MARK},
        },
        {"model": BASE, "messages": [{"role": MARK, "content": MARK, "name": MARK}]},
        {"model": BASE, "messages": [{"role": "user", "content": MARK}], "max_tokens": 2, "stream": True},
    ]
    with motet.http() as http:
        for path, bodies in (("/v1/completions", prompts), ("/v1/chat/completions", chats)):
            for body in bodies:
                http.post(path, json=body, headers={"user-agent": MARK, "x-request-id": f"{MARK} {MARK}"})
            http.post(path, content=f'{{"model": "{BASE}", "prompt": "{MARK}\\ud800", '.encode())
            http.post(path, content=f'{{"model": "{MARK}'.encode() + b"\xff")
        for path in (f"/{MARK}", f"/v1/models/{MARK}", f"/v1/adapters/{MARK}", f"/v1/models?after={MARK}"):
            for method in ("GET", "DELETE", "POST"):
                http.request(method, path, headers={"last-event-id": MARK})
        http.post("/v1/adapters", data={"name": MARK}, files={"adapter_config.json": MARK.encode()})
    for header in (f"Bearer {MARK}", MARK, f"Basic {MARK}"):
        httpx.get(f"{motet.url}/v1/models", headers={"Authorization": header}, trust_env=False)
        httpx.get(f"{motet.url}/metrics", headers={"Authorization": header}, trust_env=False)
    raw_answer(port_of(motet), f"GET /{MARK}\x01 HTTP/1.1\r\nHost: {MARK}\r\n\r\n".encode())
    with motet.http() as http:
        http.get("/health", headers={"x-request-id": "the-last-of-them"})
    eventually(lambda: any(line.get("request_id") == "the-last-of-them" for line in lines(session, "router")))
    secrets = [MARK.encode(), *(key.encode() for key in KEYS.values()), motet.operator_key().encode()]
    files = [path for path in session.rglob("*") if path.is_file() and not path.is_symlink()]
    assert any(path.parent.name == "motet" for path in files)
    assert [path for path in files if any(secret in path.read_bytes() for secret in secrets)] == []
    assert {line["status"] for line in lines(session, "router") if "status" in line} >= {200, 400, 401, 404, 405}
