from __future__ import annotations

import asyncio
import errno
import hashlib
import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from motet.adapters.errors import AdapterInvalid, RegistryUnavailable, UploadTooLarge
from motet.adapters.format.own_tokenizer import OwnText, OwnToken, template_digest
from motet.router.text.text import TextService
from motet.router.uploads import adapters_api
from motet.router.uploads.upload_form import UploadSpool
from motet.tests.rigs.patience import PATIENCE_S, eventually, eventually_in_loop
from motet.tests.rigs.router_rig import CHAT_TEMPLATE, HEADERS, RouterRig, serving, text_service

CONFIG = b'{"peft_type": "LORA"}'
TENSORS = bytes(range(256)) * 10_000  # larger than what is flushed at once
LIMIT = len(TENSORS) + 1
BOUNDARY = "a-boundary"


@pytest.fixture(scope="module")
def text() -> TextService:
    return text_service()


@pytest.fixture
def rig(tmp_path: Path, text: TextService) -> RouterRig:
    return RouterRig(tmp_path / "spool", text, max_upload_bytes=LIMIT)


def part(name: str, data: bytes, filename: str | None = None) -> bytes:
    disposition = f'form-data; name="{name}"' + (f'; filename="{filename}"' if filename else "")
    return f"--{BOUNDARY}\r\nContent-Disposition: {disposition}\r\n\r\n".encode() + data + b"\r\n"


CLOSING = f"--{BOUNDARY}--\r\n".encode()
NAME_PART = part("name", b"pirate")
CONFIG_PART = part("adapter_config.json", CONFIG, "adapter_config.json")
TENSORS_PART = part("adapter_model.safetensors", TENSORS, "adapter_model.safetensors")


async def send(rig: RouterRig, *parts: bytes, closing: bytes = CLOSING, content_type: str | None = None) -> Any:
    headers = {"Content-Type": content_type or f"multipart/form-data; boundary={BOUNDARY}"}
    async with rig.client() as client:
        return await client.post("/v1/adapters", content=b"".join(parts) + closing, headers=headers)


async def upload(rig: RouterRig, tensors: bytes = TENSORS, name: str = "pirate") -> Any:
    """Uploads an adapter as clients do."""
    files = {"adapter_config.json": ("c", CONFIG), "adapter_model.safetensors": ("t", tensors)}
    async with rig.client() as client:
        return await client.post("/v1/adapters", data={"name": name}, files=files)


def spooled(rig: RouterRig) -> list[Path]:
    return list(rig.spool_path.iterdir())


async def test_upload_again_and_anew(rig: RouterRig) -> None:
    first, again, anew = await upload(rig), await upload(rig), await upload(rig, TENSORS[1:])
    assert [response.status_code for response in (first, again, anew)] == [201, 200, 201]
    digest = hashlib.sha256(TENSORS).hexdigest()
    assert first.json() == {
        "name": "pirate",
        "version": 1,
        "digest": digest,
        "rank": 8,
        "targets": ["q_proj", "v_proj"],
        "bytes": 1234,
        "packed_bytes": 0,
        "created_at": 1700000000,
        "response_template": "",
        "own_text": "",
        "invocation_token_ids": [],
        "num_labels": 0,
        "warnings": [],
        "object": "adapter",
    }
    assert again.json() == first.json()
    assert anew.json()["version"] == 2
    assert rig.registry.uploaded[0] == ("acme", "pirate", CONFIG, digest)
    assert spooled(rig) == []


async def test_lora_of_vision_is_refused_or_left_out_with_a_warning(rig: RouterRig) -> None:
    rig.registry.left_out = "it holds LoRA of vision"
    parts = (NAME_PART, CONFIG_PART, TENSORS_PART)
    refused = await send(rig, *parts)
    assert (refused.status_code, refused.json()["error"]["message"]) == (400, "it holds LoRA of vision")
    assert rig.registry.uploaded == []
    rig.config.now = replace(rig.config.now, vision_lora="leave-out")
    assert (await send(rig, *parts)).json()["warnings"] == ["left out: it holds LoRA of vision"]


async def test_an_unknown_field_is_refused_or_taken_with_a_warning(rig: RouterRig) -> None:
    rig.registry.unknown_field, rig.registry.warnings = "it has 'trick' = 1", ("it has 'note' = 'a'",)
    parts = (NAME_PART, CONFIG_PART, TENSORS_PART)
    refused = await send(rig, *parts)
    assert refused.status_code == 400
    assert refused.json()["error"]["message"] == (
        "it has 'trick' = 1. An operator lets such fields pass: --unknown-adapter-fields warn"
    )
    assert rig.registry.uploaded == []
    rig.config.now = replace(rig.config.now, unknown_adapter_fields="warn")
    assert (await send(rig, *parts)).json()["warnings"] == ["it has 'trick' = 1", "it has 'note' = 'a'"]


async def test_an_invocation_that_no_text_has_is_warned_of(rig: RouterRig, text: TextService) -> None:
    last = max(token_id for token_id in range(1 << 16) if text.token_str(token_id))
    parts = (NAME_PART, CONFIG_PART, TENSORS_PART)
    rig.registry.invocation_token_ids = (last,)
    assert (await send(rig, *parts)).json()["warnings"] == []
    rig.registry.invocation_token_ids = (last, last + 1)
    own = await send(
        rig, tokenizer_part(added_tokens={"<go>": last + 1}), *parts[:2], part("adapter_model.safetensors", b"1", "t")
    )
    assert "alora_invocation_tokens" not in own.text
    (warning,) = (await send(rig, *parts)).json()["warnings"]
    assert warning.startswith(f"alora_invocation_tokens has {last + 1}, which are not tokens of its tokenizer")


async def test_an_adapter_of_another_base_is_warned_of_or_refused(tmp_path: Path, text: TextService) -> None:
    config = part("adapter_config.json", b'{"base_model_name_or_path": "Qwen/Qwen3-8B"}', "c")
    parts = (NAME_PART, config, TENSORS_PART)
    rig = RouterRig(tmp_path / "spool", text, max_upload_bytes=LIMIT, adapter_base="match", base_aliases="other")
    refused = await send(rig, *parts)
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "invalid_adapter")
    assert "was trained on 'Qwen/Qwen3-8B'" in refused.text
    assert rig.registry.uploaded == []
    rig.config.now = replace(rig.config.now, base_aliases="other, qwen3-8b")
    assert (await send(rig, *parts)).json()["warnings"] == []
    rig.config.now = replace(rig.config.now, base_aliases="other", adapter_base="any")
    assert (await send(rig, *parts)).json()["warnings"] == []
    rig.config.now = replace(rig.config.now, adapter_base="warn")
    uploaded = await send(rig, *parts)
    (warning,) = uploaded.json()["warnings"]
    assert "was trained on 'Qwen/Qwen3-8B'" in warning
    async with rig.client() as client:
        shown = (await client.get("/v1/adapters/pirate")).json()
        (listed,) = (await client.get("/v1/adapters")).json()["data"]
    assert shown["warnings"] == listed["warnings"] == [warning]


def tokenizer_part(**own: Any) -> bytes:
    return part("tokenizer", json.dumps(own).encode())


@pytest.mark.parametrize(
    ("own", "problem"),
    [
        ({"added_tokens": {"<|end|>": 7}}, "has '<|end|>' under the id 7, and the base's under 1: train"),
        ({"added_tokens": {"<think>": 320}}, "adds '<think>' with the id 320, and the base's embedding has 320 rows"),
        ({"added_tokens": {"<think>": 319}}, "cannot be served beside the base's: '<think>' cannot have the id 319"),
        ({"added_tokens": {"a": 2}}, "has 'a' under the id 2"),
    ],
)
async def test_tokens_that_cannot_be_served_are_named(rig: RouterRig, own: dict[str, Any], problem: str) -> None:
    refused = await send(rig, tokenizer_part(**own), NAME_PART, CONFIG_PART, TENSORS_PART)
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "invalid_adapter")
    assert problem in refused.json()["error"]["message"]
    assert rig.registry.uploaded == []


async def test_tokens_of_its_own_are_kept(rig: RouterRig) -> None:
    """The base's are none of them, and a token that was never trained is warned of."""
    of_base = {token: rig.text.token_id(token) for token in ("<|start|>", "<|end|>")}
    parts = (NAME_PART, CONFIG_PART, TENSORS_PART)
    plain = await send(rig, tokenizer_part(added_tokens=of_base, end_token="<|end|>"), *parts)
    assert (plain.status_code, plain.json()["own_text"], plain.json()["warnings"]) == (201, "", [])
    first = rig.text._backend.get_vocab_size()
    added = {**of_base, "<think>": first, "</think>": first + 1}
    other_tensors = part("adapter_model.safetensors", b"other", "t")
    flags = {"<think>": ["special"]}
    own = tokenizer_part(added_tokens=added, flags=flags, end_token="</think>")
    taken = await send(rig, own, *parts[:2], other_tensors)
    (warning,) = taken.json()["warnings"]
    assert warning.startswith("the adapter's tokenizer adds <think>, </think>, and the adapter does not change their")
    tokens = (OwnToken(first, "<think>", ("special",)), OwnToken(first + 1, "</think>"))
    kept = rig.registry.own_texts[taken.json()["own_text"]]
    assert (taken.status_code, kept) == (201, OwnText("", tokens, "</think>"))


async def test_another_chat_template_is_warned_of(rig: RouterRig) -> None:
    parts = (NAME_PART, CONFIG_PART, TENSORS_PART)
    same = await send(rig, tokenizer_part(chat_template=template_digest(CHAT_TEMPLATE)), *parts)
    assert (same.status_code, same.json()["warnings"]) == (201, [])
    other = await send(rig, tokenizer_part(chat_template=template_digest("{{ messages }}")), *parts)
    assert other.status_code == 200
    (warning,) = other.json()["warnings"]
    assert warning.startswith("the adapter's chat template is not the base's")


async def test_a_chat_template_of_its_own_is_kept_and_tried(rig: RouterRig) -> None:
    parts = (NAME_PART, CONFIG_PART, TENSORS_PART)
    base = await send(rig, part("chat_template", CHAT_TEMPLATE.encode()), *parts)
    assert (base.status_code, base.json()["own_text"]) == (201, ""), "it is the base's"
    own = "{{ messages[0].content }}"
    digest = template_digest(own)
    other_tensors = part("adapter_model.safetensors", TENSORS[1:], "t")
    taken = await send(
        rig, part("chat_template", own.encode()), tokenizer_part(chat_template=digest), *parts[:2], other_tensors
    )
    assert (taken.status_code, taken.json()["own_text"], taken.json()["warnings"]) == (201, digest, [])
    for template, problem in ((b"{% for %}", "cannot be compiled"), (b"{{ 1 // 0 }}", "division")):
        refused = await send(rig, part("chat_template", template), *parts)
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "invalid_adapter")
        assert problem in refused.json()["error"]["message"]
    assert (await send(rig, part("chat_template", b"\xff"), *parts)).status_code == 400
    assert (await send(rig, part("chat_template", b"a" * ((1 << 16) + 1)), *parts)).status_code == 413
    assert spooled(rig) == []


async def test_the_form_of_its_answers_is_one_that_is_known(rig: RouterRig) -> None:
    parts = (NAME_PART, CONFIG_PART, TENSORS_PART)
    for name in (b"none", b"hermes2", b"\xff"):
        refused = await send(rig, part("response_template", name), *parts)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "response_template")
    assert (await send(rig, part("response_template", b"x" * 1000), *parts)).status_code == 413
    taken = await send(rig, part("response_template", b"gemma"), *parts)
    assert (taken.status_code, taken.json()["response_template"]) == (201, "gemma")


@pytest.mark.parametrize("own", [b"{", b"[]", b'{"tokens": {}}', b'{"added_tokens": {"a": "b"}}', b'"\xff"'])
async def test_a_malformed_tokenizer_part_is_refused(rig: RouterRig, own: bytes) -> None:
    refused = await send(rig, NAME_PART, CONFIG_PART, TENSORS_PART, part("tokenizer", own))
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tokenizer")
    assert rig.registry.uploaded == []


async def test_the_parts_may_come_in_any_order(rig: RouterRig) -> None:
    response = await send(rig, TENSORS_PART, NAME_PART, CONFIG_PART)
    assert response.status_code == 201
    assert rig.registry.uploaded == [("acme", "pirate", CONFIG, hashlib.sha256(TENSORS).hexdigest())]


@pytest.mark.parametrize(
    ("parts", "closing", "param"),
    [
        ((NAME_PART, CONFIG_PART), CLOSING, "adapter_model.safetensors"),
        ((CONFIG_PART, TENSORS_PART), CLOSING, "name"),
        ((NAME_PART, NAME_PART, CONFIG_PART, TENSORS_PART), CLOSING, "name"),
        ((part("name", b"\xff"), CONFIG_PART, TENSORS_PART), CLOSING, "name"),
        ((NAME_PART, CONFIG_PART, TENSORS_PART, part("weights.pt", b"")), CLOSING, None),
        ((NAME_PART, CONFIG_PART, TENSORS_PART), b"", None),
        ((NAME_PART, CONFIG_PART, TENSORS_PART[:5000]), b"", None),
        ((b"no multipart at all",), b"", None),
        ((), b"", None),
    ],
)
async def test_other_forms_are_refused(
    rig: RouterRig, parts: tuple[bytes, ...], closing: bytes, param: str | None
) -> None:
    response = await send(rig, *parts, closing=closing)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
    assert rig.registry.uploaded == []
    assert spooled(rig) == []


@pytest.mark.parametrize("content_type", ["application/json", "multipart/form-data", "multipart/mixed; boundary=x"])
async def test_other_content_types_are_refused(rig: RouterRig, content_type: str) -> None:
    response = await send(rig, NAME_PART, content_type=content_type)
    assert response.status_code == 400
    assert "multipart/form-data" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("parts", "limit"),
    [
        ((NAME_PART, CONFIG_PART, part("adapter_model.safetensors", TENSORS + b"12")), LIMIT),
        ((NAME_PART, part("adapter_config.json", b" " * (1 << 20) + b"{}"), TENSORS_PART), 1 << 20),
        ((part("name", b"a" * 1025), CONFIG_PART, TENSORS_PART), 1024),
    ],
)
async def test_limits(rig: RouterRig, parts: tuple[bytes, ...], limit: int) -> None:
    response = await send(rig, *parts)
    assert response.status_code == 413
    assert f"at most {limit} bytes" in response.json()["error"]["message"]
    assert rig.registry.uploaded == []
    assert spooled(rig) == []


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (AdapterInvalid("use_dora is not supported"), 400, "invalid_adapter"),
        (UploadTooLarge("at most 5 bytes"), 413, "too_large"),
        (RegistryUnavailable("redis does not answer"), 503, "registry_unavailable"),
    ],
)
async def test_errors_of_the_service(rig: RouterRig, error: Exception, status: int, code: str) -> None:
    rig.registry.error = error
    response = await upload(rig)
    assert response.status_code == status
    assert response.json()["error"]["code"] == code
    assert str(error) in response.json()["error"]["message"]
    assert ("retry-after" in response.headers) == (status == 503)
    assert spooled(rig) == []


async def test_list_show_delete(rig: RouterRig) -> None:
    rig.registry.add("acme", "pirate")
    rig.registry.add("acme", "json")
    rig.registry.add("zenith", "secret")
    async with rig.client() as client:
        listed = (await client.get("/v1/adapters")).json()
        shown = await client.get("/v1/adapters/pirate")
        deleted = await client.delete("/v1/adapters/pirate")
        gone = [await client.get("/v1/adapters/pirate"), await client.delete("/v1/adapters/pirate")]
        foreign = [await client.get("/v1/adapters/secret"), await client.delete("/v1/adapters/secret")]
    assert listed["object"] == "list"
    assert [adapter["name"] for adapter in listed["data"]] == ["json", "pirate"]
    assert shown.json()["name"] == "pirate"
    assert (deleted.status_code, deleted.json()["deleted"]) == (200, True)
    for response in gone + foreign:
        assert response.status_code == 404
        assert response.json()["error"]["code"] == "adapter_not_found"
    assert rig.registry.held("zenith", "secret") is not None


async def test_the_registry_away(rig: RouterRig) -> None:
    rig.registry.add("acme", "pirate")
    rig.registry.error = RegistryUnavailable("redis does not answer")
    async with rig.client() as client:
        responses = [
            await client.get("/v1/adapters"),
            await client.get("/v1/adapters/pirate"),
            await client.delete("/v1/adapters/pirate"),
        ]
        models = await client.get("/v1/models")
    assert [response.status_code for response in responses] == [503] * 3
    assert [model["id"] for model in models.json()["data"]] == ["tiny/base", "pirate"]


async def test_the_registry_away_and_an_adapter_that_this_router_does_not_keep(rig: RouterRig) -> None:
    rig.registry.add("acme", "kept")
    rig.registry.error = RegistryUnavailable("redis does not answer")
    rig.registry.is_whole = False
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    async with rig.client() as client:
        served = await client.post("/v1/chat/completions", json={**chat, "model": "kept"})
        others = [
            await client.post("/v1/chat/completions", json={**chat, "model": "other"}),
            await client.post("/v1/completions", json={"prompt": "hi", "model": "other"}),
            await client.get("/v1/models/other"),
            await client.get("/v1/models"),
        ]
    assert served.status_code == 200
    for response in others:
        assert response.status_code == 503
        assert response.json()["error"]["code"] == "registry_unavailable"
        assert "redis does not answer" in response.json()["error"]["message"]
        assert response.headers["retry-after"] == "1"


class FullSpool(UploadSpool):
    """A spool whose disk is full as soon as anything is written."""

    @contextmanager
    def file(self) -> Iterator[Path]:
        with super().file() as path:
            path.unlink()
            path.symlink_to("/dev/full")
            yield path


@pytest.mark.parametrize("when", ["before", "while it arrives", "while it is stored"])
async def test_a_full_disk_is_reported(
    tmp_path: Path, text: TextService, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    monkeypatch.setattr(adapters_api, "UploadSpool", FullSpool if when == "while it arrives" else UploadSpool)
    min_free_bytes = 1 << 60 if when == "before" else 1
    rig = RouterRig(tmp_path / "spool", text, max_upload_bytes=LIMIT, min_free_bytes=min_free_bytes)
    if when == "while it is stored":
        rig.registry.error = OSError(errno.ENOSPC, "No space left on device")
    response = await upload(rig)
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["type"]) == (507, "insufficient_storage", "server_error")
    assert "disk" in error["message"]
    assert spooled(rig) == []


async def test_another_failure_of_the_disk_is_no_lack_of_room(rig: RouterRig) -> None:
    rig.registry.error = OSError(errno.EIO, "Input/output error")
    assert (await upload(rig)).status_code == 500
    assert spooled(rig) == []


def test_uploads_wait_for_a_turn_and_lose_it_when_they_stall(tmp_path: Path, text: TextService) -> None:
    rig = RouterRig(tmp_path / "spool", text, max_upload_bytes=LIMIT, max_open_uploads=2, upload_idle_s=2.0)
    with serving(rig.app) as url:
        with begin_upload(url, len(TENSORS)) as first, begin_upload(url, len(TENSORS)) as second:
            eventually(lambda: len(spooled(rig)) == 2)
            rig.config.now = replace(rig.config.now, upload_idle_s=PATIENCE_S)  # only those two stall
            files = {"adapter_config.json": ("c", CONFIG), "adapter_model.safetensors": ("t", TENSORS)}
            third = httpx.post(
                f"{url}/v1/adapters", data={"name": "pirate"}, files=files, headers=HEADERS, timeout=PATIENCE_S
            )
            assert third.status_code == 201
            stalled = [connection.recv(100).split()[1] for connection in (first, second)]
        eventually(lambda: not spooled(rig))
    assert stalled == [b"408", b"408"]
    assert len(rig.registry.uploaded) == 1


async def test_no_more_uploads_than_their_turns_are_spooled(tmp_path: Path, text: TextService) -> None:
    rig = RouterRig(tmp_path / "spool", text, max_upload_bytes=LIMIT, max_open_uploads=2)
    most = 0

    async def body() -> Any:
        nonlocal most
        yield NAME_PART + CONFIG_PART + TENSORS_PART[:1000]
        await eventually_in_loop(lambda: len(spooled(rig)) >= 2 or most >= 2)
        for _ in range(10):
            most = max(most, len(spooled(rig)))
            await asyncio.sleep(0.001)
        yield TENSORS_PART[1000:] + CLOSING

    headers = {"Content-Type": f"multipart/form-data; boundary={BOUNDARY}"}
    async with rig.client() as client:
        responses = await asyncio.gather(
            *(client.post("/v1/adapters", content=body(), headers=headers) for _ in range(6))
        )
    assert {response.status_code for response in responses} <= {200, 201}
    assert most == 2


@pytest.mark.parametrize("how", ["one long line", "many lines"])
async def test_headers_of_a_part_are_bounded(rig: RouterRig, how: str) -> None:
    headers = b"X: " + b"x" * 100_000 + b"\r\n" if how == "one long line" else b"X: x\r\n" * 1000
    response = await send(rig, f"--{BOUNDARY}\r\n".encode(), headers, NAME_PART.partition(b"\r\n")[2])
    assert response.status_code == 400
    assert "header" in response.json()["error"]["message"]


def test_what_a_killed_router_left_is_removed(tmp_path: Path) -> None:
    old, new, other = (tmp_path / name for name in ("upload-old", "upload-new", "notes"))
    for path in (old, new, other):
        path.write_bytes(b"x")
    os.utime(old, (0, 0))
    os.utime(other, (0, 0))
    UploadSpool(tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted([other, new])


@pytest.fixture
def url(rig: RouterRig) -> Iterator[str]:
    with serving(rig.app) as url:
        yield url


def begin_upload(url: str, num_bytes: int) -> socket.socket:
    """A connection over which a part of an upload was sent."""
    address = httpx.URL(url)
    connection = socket.create_connection((address.host, address.port or 80), timeout=PATIENCE_S)
    connection.sendall(
        f"POST /v1/adapters HTTP/1.1\r\nHost: router\r\nAuthorization: {HEADERS['Authorization']}\r\n"
        f"Content-Type: multipart/form-data; boundary={BOUNDARY}\r\nContent-Length: {num_bytes}\r\n\r\n".encode()
        + NAME_PART
        + TENSORS_PART[:100_000]
    )
    return connection


def test_a_client_that_goes_away_leaves_nothing(rig: RouterRig, url: str) -> None:
    with begin_upload(url, len(TENSORS)):
        eventually(lambda: spooled(rig))
    eventually(lambda: not spooled(rig))
    assert rig.registry.uploaded == []


def test_a_declared_length_over_the_limit_is_refused_at_once(rig: RouterRig, url: str) -> None:
    with begin_upload(url, 1 << 40) as connection:
        assert connection.recv(100).startswith(b"HTTP/1.1 413")
    eventually(lambda: not spooled(rig))


async def test_a_huge_upload_costs_no_memory(tmp_path: Path, text: TextService) -> None:
    num_mib = 192
    rig = RouterRig(tmp_path / "spool", text, max_upload_bytes=num_mib << 20)
    block = bytes(1 << 20)
    process = psutil.Process()
    resident = [process.memory_info().rss]

    async def body() -> Any:
        yield NAME_PART + CONFIG_PART + part("adapter_model.safetensors", b"").removesuffix(b"\r\n")
        for _ in range(num_mib):
            yield block
            resident.append(process.memory_info().rss)
        yield b"\r\n" + CLOSING

    headers = HEADERS | {"Content-Type": f"multipart/form-data; boundary={BOUNDARY}"}
    with serving(rig.app) as url:
        async with httpx.AsyncClient(timeout=PATIENCE_S) as client:
            response = await client.post(f"{url}/v1/adapters", content=body(), headers=headers)
    assert response.status_code == 201
    assert max(resident) - resident[0] < 64 << 20
    assert spooled(rig) == []
