"""Uploads beside each other: slots of tenants, their pace, and the room on the disk."""

from __future__ import annotations

import asyncio
import shutil
from collections import namedtuple
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from motet.router.text.text import TextService
from motet.router.uploads.adapters_api import MAX_WAITING_UPLOADS
from motet.router.uploads.upload_form import UploadSpool
from motet.tests.rigs.patience import PATIENCE_S, eventually_in_loop
from motet.tests.rigs.router_rig import RouterRig, text_service

BOUNDARY = "0123456789"
HEADERS = {"Content-Type": f"multipart/form-data; boundary={BOUNDARY}"}
ZENITH = {**HEADERS, "Authorization": "Bearer key-of-zenith"}
MIB = 1 << 20
DiskUsage = namedtuple("DiskUsage", "total used free")


def part(name: str, data: bytes) -> bytes:
    return f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n'.encode() + data + b"\r\n"


START = part("name", b"pirate") + part("adapter_config.json", b"{}")
CLOSING = f"--{BOUNDARY}--\r\n".encode()


def tensors(num_bytes: int) -> bytes:
    return part("adapter_model.safetensors", b"x" * num_bytes)


@pytest.fixture(scope="module")
def text() -> TextService:
    return text_service()


async def post(client: httpx.AsyncClient, body: bytes | AsyncIterator[bytes], **headers: str) -> httpx.Response:
    async with asyncio.timeout(PATIENCE_S):
        return await client.post("/v1/adapters", content=body, headers={**HEADERS, **headers})


async def test_a_tenant_whose_uploads_stall_holds_up_no_other(tmp_path: Path, text: TextService) -> None:
    rig = RouterRig(tmp_path / "spool", text, upload_idle_s=PATIENCE_S)
    ended = asyncio.Event()

    async def stalled() -> AsyncIterator[bytes]:
        yield START
        await ended.wait()

    async with rig.client() as client:
        tasks = [asyncio.create_task(post(client, stalled())) for _ in range(MAX_WAITING_UPLOADS)]
        await eventually_in_loop(lambda: len(list(rig.spool_path.iterdir())) == 2)
        other = await post(client, START + tensors(1000) + CLOSING, **ZENITH)
        assert other.status_code == 201
        one_more = await post(client, START + tensors(1000) + CLOSING)
        assert (one_more.status_code, one_more.json()["error"]["code"]) == (429, "uploads_full")
        ended.set()
        assert {response.status_code for response in await asyncio.gather(*tasks)} == {400}  # they are cut off
        assert (await post(client, START + tensors(1000) + CLOSING)).status_code == 201


async def test_a_trickle_gives_up_its_slot(tmp_path: Path, text: TextService) -> None:
    """A byte now and then is no idle upload, and would last for years."""
    rig = RouterRig(tmp_path / "spool", text, upload_idle_s=0.5)

    async def trickle() -> AsyncIterator[bytes]:
        yield START + tensors(1000)[:-500]
        for _ in range(10_000):
            await asyncio.sleep(0.02)
            yield b"x"

    async with rig.client() as client:
        response = await post(client, trickle())
    assert (response.status_code, response.json()["error"]["code"]) == (408, "upload_timeout")
    assert "too slowly" in response.json()["error"]["message"]


async def test_an_upload_has_a_deadline(tmp_path: Path, text: TextService) -> None:
    rig = RouterRig(tmp_path / "spool", text, upload_deadline_s=0.3)

    async def endless() -> AsyncIterator[bytes]:
        yield START + tensors(1000)[:-500]
        while True:
            await asyncio.sleep(0.001)
            yield b"x" * 10_000

    async with rig.client() as client:
        response = await post(client, endless())
    assert (response.status_code, response.json()["error"]["code"]) == (408, "upload_timeout")


async def test_what_declares_no_length_is_checked_while_it_arrives(
    tmp_path: Path, text: TextService, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = RouterRig(tmp_path / "spool", text, min_free_bytes=MIB)
    num_sent = 0

    def usage(path: Path) -> DiskUsage:
        written = sum(file.stat().st_size for file in rig.spool_path.iterdir())
        return DiskUsage(0, 0, 20 * MIB - written)

    async def endless() -> AsyncIterator[bytes]:
        nonlocal num_sent
        yield START + tensors(1000)[:-500]
        for _ in range(1000):
            num_sent += MIB
            yield b"x" * MIB

    monkeypatch.setattr(shutil, "disk_usage", usage)
    async with rig.client() as client:
        response = await post(client, endless())
    assert (response.status_code, response.json()["error"]["code"]) == (507, "insufficient_storage")
    assert num_sent <= 8 * MIB  # three copies of it must fit


def test_uploads_in_progress_are_counted_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free = 100
    monkeypatch.setattr(shutil, "disk_usage", lambda path: DiskUsage(0, 0, free))
    spool = UploadSpool(tmp_path / "spool", min_free_bytes=10)
    with spool.room(20) as first:
        with pytest.raises(OSError, match="no room"), spool.room(11):
            pass
        with spool.room(10) as second:
            first.wrote(20)
            free = 80
            second.grow(10)
            with pytest.raises(OSError, match="no room"):
                second.grow(11)
        with spool.room(10):
            pass
    free = 100
    with spool.room(30):
        pass


def test_pages_that_take_more_than_the_upload_need_room_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: DiskUsage(0, 0, 100))
    spool = UploadSpool(tmp_path / "spool", min_free_bytes=10)
    with spool.room(10) as room:
        room.pack(5)
        with spool.room(20):
            pass
        room.pack(70)  # beside the upload in the spool and in the store
        with pytest.raises(OSError, match="no room"):
            room.pack(71)
        with pytest.raises(OSError, match="no room"), spool.room(1):
            pass
    with spool.room(30):
        pass
