"""What a reader must know of the product may only become less: each figure of `tests/house.json` is a bound.

A landing lowers a bound when it can; one that raises a bound says why in CHANGELOG.md.
"""

from __future__ import annotations

import ast
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from motet.router.text.text import TextService
from motet.tests.rigs.engine_dispatcher import EngineDispatcher, client_of
from motet.tests.rigs.engine_rig import Stock
from motet.tests.rigs.house_figures import (
    Trace,
    defined_names,
    file_cycle,
    forbidden_names,
    repeated_class_names,
    short_parts,
    source_figures,
    traced,
)
from motet.tests.rigs.imports import ROOT
from motet.tests.rigs.lora_files import lora_files
from motet.tests.rigs.real_front import OPERATOR_KEY, OWNER, OWNER_KEY, OWNERS_ADAPTER, RealFront, real_front
from motet.tests.rigs.router_rig import text_service
from motet.workers.engine import Engine

BOUNDS: dict[str, int] = json.loads((ROOT / "tests" / "house.json").read_text())
DEMO = ROOT / "examples" / "demo"
CHAT = {"model": "pirate", "messages": [{"role": "user", "content": "What is the capital of Peru?"}], "max_tokens": 8}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


def assert_within(figures: dict[str, int]) -> None:
    raised = {name: f"{figure}, bound {BOUNDS[name]}" for name, figure in figures.items() if figure > BOUNDS[name]}
    assert raised == {}


def of(trace: Trace, request: str) -> dict[str, int]:
    return {f"{request}_files": len(trace.files), f"{request}_functions": len(trace.functions)}


def test_the_source_does_not_grow_past_its_bounds() -> None:
    print(forbidden_names().most_common(8), repeated_class_names(), short_parts(), sep="\n")
    assert_within(source_figures())


def test_files_are_loaded_without_rings() -> None:
    assert file_cycle() == ()


def test_names_are_counted_where_they_get_a_value() -> None:
    tree = ast.parse("class C:\n def found(self, held):\n  self.kept = given = held\n  return found(kept=given)")
    assert sorted(defined_names(tree)) == ["C", "found", "given", "held", "kept", "self"]


async def test_what_a_chat_runs_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Engine, "check_integrity", lambda engine: None)  # it is the rig that calls it
    stock = Stock.make(DEMO / "base", {"pirate": DEMO / "adapters" / "pirate"}, tmp_path / "store", block_size=16)
    text = TextService(AutoTokenizer.from_pretrained(DEMO / "base"))
    with stock.engine(500) as rig:
        async with client_of(EngineDispatcher(rig), stock, "pirate", text=text) as client:

            async def ask(**fields: Any) -> None:
                answer = await client.post("/v1/chat/completions", json={**CHAT, "temperature": 0, **fields})
                assert answer.status_code == 200, answer.text

            form = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
            await ask(stream=True)  # what is made at the first request is not of each
            with traced() as chat:
                await ask(stream=True)
            with traced() as with_schema:
                await ask(response_format=form)
    assert_within({**of(chat, "chat"), **of(with_schema, "schema")})


@pytest.fixture
async def front(redis_url: str, tmp_path: Path) -> AsyncIterator[RealFront]:
    async with real_front(redis_url, tmp_path, text_service()) as front:
        await front.furnish()
        yield front


async def test_what_an_upload_and_a_quota_run_through(front: RealFront) -> None:
    own, operators = ({"Authorization": f"Bearer {key}"} for key in (OWNER_KEY, OPERATOR_KEY))
    async with front.client() as client:
        uploads = list[dict[str, int]]()
        for seed in range(5):
            files = lora_files(seed=seed)
            sent = {
                "adapter_config.json": files.config_bytes,
                "adapter_model.safetensors": files.write(front.folder).read_bytes(),
            }
            with traced() as upload:
                answer = await client.post("/v1/adapters", data={"name": OWNERS_ADAPTER}, files=sent, headers=own)
            assert answer.is_success, answer.text
            uploads.append(of(upload, "upload"))
        quota = {"quota": {"requests_per_minute": 600}}
        changed = await client.patch(f"/v1/admin/tenants/{OWNER}", json=quota, headers=operators)
        assert changed.is_success, changed.text
        await front.view.catch_up()
        body = {"model": OWNERS_ADAPTER, "prompt": "hi"}
        with traced() as limited:
            answer = await client.post("/v1/completions", json=body, headers=own)
        assert answer.is_success, answer.text
        assert "x-ratelimit-limit-requests" in answer.headers
    # Of several, as what a router does beside them is traced too.
    least = {name: min(figures[name] for figures in uploads) for name in uploads[0]}
    assert_within({**least, **of(limited, "quota")})
