"""/v1/load_lora_adapter and /v1/unload_lora_adapter: which folders are read, and as what."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import httpx
import pytest

from motet.adapters.errors import AdapterInvalid, UploadTooLarge
from motet.adapters.format.own_tokenizer import template_digest
from motet.router.http.errors import ApiError
from motet.router.text.text import TextService
from motet.router.uploads.lora_adapters_api import FolderLimits, folder_below, read_adapter, tensors_bytes
from motet.tests.rigs.router_rig import RouterRig, text_service

CONFIG = b'{"r": 4}'
LIMITS = FolderLimits(1000, 1000)


@pytest.fixture(scope="module")
def text() -> TextService:
    return text_service()


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """An allowed folder with an adapter, and beside it a secret one."""
    for name in ("shared/mine", "secret/theirs", "shared/tenants/acme/own"):
        folder = tmp_path / name
        folder.mkdir(parents=True)
        (folder / "adapter_config.json").write_bytes(CONFIG)
        (folder / "adapter_model.safetensors").write_bytes(b"tensors of " + name.encode())
    return tmp_path / "shared"


def rig_of(folder: Path, text: TextService, folders: str) -> RouterRig:
    return RouterRig(folder / "spool", text, adapter_folders=folders)


async def load(rig: RouterRig, path: Path | str, name: str = "pirate", **fields: Any) -> httpx.Response:
    async with rig.client() as client:
        body = {"lora_name": name, "lora_path": str(path), **fields}
        return await client.post("/v1/load_lora_adapter", json=body)


async def test_a_folder_is_an_upload_of_its_files(tmp_path: Path, shared: Path, text: TextService) -> None:
    rig = rig_of(tmp_path, text, str(shared))
    loaded = await load(rig, shared / "mine")
    assert (loaded.status_code, loaded.text) == (200, "Success: LoRA adapter 'pirate' added successfully.")
    async with rig.client() as client:
        assert (await client.get("/v1/adapters/pirate")).json()["version"] == 1
        again = await load(rig, shared / "mine")
        assert (again.status_code, again.json()["error"]["param"]) == (409, "lora_name")
        assert (await load(rig, shared / "mine", load_inplace=True)).status_code == 200
        for expected in (200, 404):
            response = await client.post("/v1/unload_lora_adapter", json={"lora_name": "pirate"})
            assert response.status_code == expected
        assert (await client.get("/v1/adapters/pirate")).status_code == 404
    assert (shared / "mine").is_dir()
    assert not [*(tmp_path / "spool").iterdir()]


async def test_of_two_at_once_with_one_name_one_is_loaded(tmp_path: Path, shared: Path, text: TextService) -> None:
    rig = rig_of(tmp_path, text, f"{shared}")
    folders = shared / "mine", shared / "tenants" / "acme" / "own"
    loaded = await asyncio.gather(*(load(rig, folder) for folder in folders))
    assert sorted(one.status_code for one in loaded) == [200, 409]
    refused = next(one for one in loaded if one.status_code == 409).json()["error"]
    assert "load_inplace" in refused["message"] and refused["param"] == "lora_name"
    replaced = await asyncio.gather(*(load(rig, folder, load_inplace=True) for folder in folders))
    assert [one.status_code for one in replaced] == [200, 200]


async def test_the_form_of_its_answers_is_that_of_an_upload(tmp_path: Path, shared: Path, text: TextService) -> None:
    rig = rig_of(tmp_path, text, str(shared))
    assert (await load(rig, shared / "mine", response_template="hermes")).status_code == 200
    async with rig.client() as client:
        assert (await client.get("/v1/adapters/pirate")).json()["response_template"] == "hermes"
    refused = await load(rig, shared / "mine", "other", response_template="greek")
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "response_template")
    assert "hermes" in refused.json()["error"]["message"]


TOKENS = {"<|im_end|>": 4096}
FILES_THAT_ADD: dict[str, Any] = {
    "added_tokens.json": TOKENS,
    "tokenizer_config.json": {"added_tokens_decoder": {"4096": {"content": "<|im_end|>"}}},
    "tokenizer.json": {
        "version": "1.0",
        "added_tokens": [{"id": 4096, "content": "<|im_end|>"}],
        "model": {"vocab": {}},
    },
}


@pytest.mark.parametrize("file", FILES_THAT_ADD)
async def test_a_folder_with_tokens_that_the_base_lacks_is_refused(
    tmp_path: Path, shared: Path, text: TextService, file: str
) -> None:
    rig = rig_of(tmp_path, text, str(shared))
    (shared / "mine" / file).write_text(json.dumps(FILES_THAT_ADD[file]))
    refused = await load(rig, shared / "mine")
    assert refused.status_code == 400 and "<|im_end|>" in refused.json()["error"]["message"]
    assert rig.registry.held("acme", "pirate") is None


async def test_chats_are_rendered_by_the_template_in_the_folder(
    tmp_path: Path, shared: Path, text: TextService
) -> None:
    rig = rig_of(tmp_path, text, str(shared))
    template = "{{ messages }} in another form"
    (shared / "mine" / "chat_template.jinja").write_text(template)
    (shared / "mine" / "tokenizer.json").write_text('{"added_tokens": [], "model": {"vocab": ' + "[1, " * 1_000_000)
    loaded = await load(rig, shared / "mine")
    assert loaded.status_code == 200 and "Warning" not in loaded.text
    assert rig.registry.adapters["acme", "pirate"].own_text == template_digest(template)
    (shared / "mine" / "chat_template.jinja").write_text("{% if %}")
    refused = await load(rig, shared / "mine", load_inplace=True)
    assert refused.status_code == 400 and "cannot be compiled" in refused.text
    (shared / "mine" / "chat_template.jinja").write_text("a" * ((1 << 16) + 1))
    assert (await load(rig, shared / "mine", load_inplace=True)).status_code == 413


@pytest.mark.parametrize("how", ["no list", "a link", "large", "no text"])
async def test_a_tokenizer_that_cannot_be_read_is_named(
    tmp_path: Path, shared: Path, text: TextService, how: str
) -> None:
    rig = rig_of(tmp_path, text, str(shared))
    folder = shared / "mine"
    match how:
        case "no list":
            (folder / "tokenizer.json").write_bytes(b'{"model": ' + b"[" * 100_000)
        case "a link":
            (folder / "added_tokens.json").symlink_to(tmp_path / "secret" / "theirs" / "adapter_config.json")
        case "large":
            (folder / "tokenizer_config.json").write_bytes(b" " * (3 << 20))
        case _:
            (folder / "chat_template.jinja").write_bytes(b"\xff")
    refused = await load(rig, folder)
    assert refused.status_code in (400, 413), refused.text
    assert any(name in refused.text for name in ("tokenizer", "added_tokens", "chat_template"))
    assert "theirs" not in refused.text


async def test_anothers_adapter_is_as_if_it_did_not_exist(tmp_path: Path, shared: Path, text: TextService) -> None:
    rig = rig_of(tmp_path, text, str(shared))
    rig.registry.add("zenith", "theirs")
    answers = []
    async with rig.client() as client:
        for name in ("theirs", "absent"):
            response = await client.post("/v1/unload_lora_adapter", json={"lora_name": name})
            answers.append((response.status_code, response.text.replace(name, "*")))
    assert answers[0] == answers[1] and answers[0][0] == 404
    assert rig.registry.held("zenith", "theirs") is not None
    assert (await load(rig, shared / "mine", "theirs")).status_code == 200  # each tenant has names of its own


async def test_without_allowed_folders_it_is_refused_with_a_sentence(
    tmp_path: Path, shared: Path, text: TextService
) -> None:
    refused = await load(rig_of(tmp_path, text, ""), shared / "mine")
    assert refused.status_code == 400
    assert "its operator has allowed none" in refused.json()["error"]["message"]


def test_what_is_outside_says_nothing_of_what_is_there(tmp_path: Path, shared: Path) -> None:
    (shared / "link").symlink_to(tmp_path / "secret" / "theirs")
    (shared / "dangling").symlink_to(tmp_path / "secret" / "nothing")
    (shared / "loop").symlink_to(shared / "loop")
    outside = [
        tmp_path / "secret" / "theirs",
        tmp_path / "secret" / "nothing",
        shared / ".." / "secret" / "theirs",
        shared / "mine" / ".." / "mine",
        shared / "link",
        shared / "dangling",
        shared / "loop",
        Path(f"{shared}-not/x"),
        Path("mine"),
        Path("/"),
        Path("/" + "x" * 4000),
    ]
    messages = set()
    for path in outside:
        with pytest.raises(ApiError) as refused:
            folder_below(str(path), str(shared), "acme")
        messages.add(refused.value.detail.message)
    with pytest.raises(ApiError):
        folder_below("\0", str(shared), "acme")
    assert len(messages) == 1


def test_a_link_inside_of_the_folders_leads_to_where_it_points(shared: Path) -> None:
    (shared / "newest").symlink_to(shared / "mine")
    assert folder_below(str(shared / "newest"), f"/nowhere,{shared}", "acme") == (shared.resolve(), Path("mine"))
    assert folder_below(str(shared / "mine"), str(shared / "mine"), "acme") == (shared.resolve() / "mine", Path())


def test_a_tenants_own_folder_is_no_other_tenants(shared: Path) -> None:
    folders = f"{shared}/tenants/{{tenant}}"
    path = str(shared / "tenants" / "acme" / "own")
    assert folder_below(path, folders, "acme")[1] == Path("own")
    with pytest.raises(ApiError):
        folder_below(path, folders, "zenith")


@pytest.mark.parametrize("what", ["link", "pipe", "folder", "missing", "large"])
@pytest.mark.parametrize("file", ["adapter_config.json", "adapter_model.safetensors"])
def test_only_plain_files_are_read(tmp_path: Path, shared: Path, what: str, file: str) -> None:
    path = shared / "mine" / file
    path.unlink()
    match what:
        case "link":
            path.symlink_to(tmp_path / "secret" / "theirs" / file)
        case "pipe":
            os.mkfifo(path)
        case "folder":
            path.mkdir()
        case "large":
            path.write_bytes(bytes(1001))
    copy = tmp_path / "copy"
    copy.touch()
    with pytest.raises(UploadTooLarge if what == "large" else AdapterInvalid):
        read_adapter(shared, Path("mine"), copy, LIMITS)
    with pytest.raises(UploadTooLarge if what == "large" else AdapterInvalid):
        tensors_bytes(shared, Path("mine"), LIMITS)
    assert copy.read_bytes() == b""


def test_a_folder_that_becomes_a_link_meanwhile_is_not_followed(tmp_path: Path, shared: Path) -> None:
    (shared / "mine").rename(shared / "moved")
    (shared / "mine").symlink_to(tmp_path / "secret" / "theirs")
    copy = tmp_path / "copy"
    copy.touch()
    with pytest.raises(AdapterInvalid):
        read_adapter(shared, Path("mine"), copy, LIMITS)


def test_tensors_that_grow_meanwhile_are_refused(tmp_path: Path, shared: Path) -> None:
    copy = tmp_path / "copy"
    copy.touch()
    num_bytes = tensors_bytes(shared, Path("mine"), LIMITS)
    assert read_adapter(shared, Path("mine"), copy, FolderLimits(1000, num_bytes)) == CONFIG
    assert copy.read_bytes() == b"tensors of shared/mine"
    with pytest.raises(UploadTooLarge):
        read_adapter(shared, Path("mine"), copy, FolderLimits(1000, num_bytes - 1))
