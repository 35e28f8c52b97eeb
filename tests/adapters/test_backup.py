"""A backup that is taken by docs/backup.md while adapters come and go is whole, and only in the order of that page."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from motet.adapters.errors import AdapterCorrupt
from motet.adapters.registry.registry import Registry, connect
from motet.adapters.registry.registry_view import RegistryView
from motet.adapters.store.store import AdapterStore
from motet.adapters.upload import UploadLimits, UploadService
from motet.cluster.launch.redis_server import RedisServer
from motet.tests.rigs.lora_files import LAYOUT, lora_files
from motet.tests.rigs.patience import PATIENCE_S, eventually_in_loop

PAGE = Path(__file__).resolve().parents[2] / "docs" / "backup.md"
COMMANDS = re.findall(r"^```sh\n(.*?)^```$", PAGE.read_text(), re.M | re.S)


async def run(commands: str, data: Path, backup: Path) -> None:
    environ = os.environ | {"DATA": str(data), "BACKUP": str(backup)}
    command = ["sh", "-euc", commands]
    done = await asyncio.to_thread(subprocess.run, command, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@asynccontextmanager
async def uploading(data: Path) -> AsyncIterator[tuple[UploadService, RedisServer]]:
    """Registry and store of a data folder, as a motet has them."""
    redis = RedisServer(data / "redis")
    client = connect(await asyncio.to_thread(redis.start), PATIENCE_S)
    registry = Registry(client, PATIENCE_S)
    view = RegistryView(registry)
    try:
        store = AdapterStore(data / "store")
        yield (
            UploadService(store, registry, view, [LAYOUT], reserved=[], limits=UploadLimits(max_tensors_bytes=1 << 20)),
            redis,
        )
    finally:
        await client.aclose()
        await asyncio.to_thread(redis.stop)


async def upload(uploads: UploadService, folder: Path, name: str, seed: int) -> None:
    files = lora_files(seed=seed)
    await asyncio.to_thread(folder.mkdir, exist_ok=True)
    await uploads.upload("acme", name, files.config_bytes, await asyncio.to_thread(files.write, folder))


async def unreadable(data: Path) -> tuple[list[str], list[str]]:
    """The names that a restored data folder has, and those of them whose adapter cannot be read."""
    store = AdapterStore(data / "store")
    async with uploading(data) as (uploads, _):
        names, broken = [], []
        for adapter in await uploads.list_page("acme", "", 100):
            names.append(adapter.name)
            try:
                store.load_packed(adapter.digest, LAYOUT)
                store.load_content(adapter.digest)
            except AdapterCorrupt:
                broken.append(adapter.name)
        return names, broken


async def test_a_backup_under_writes_is_whole(tmp_path: Path) -> None:
    data, backup = tmp_path / "data", tmp_path / "backup"
    num_written, is_enough = [0, 0], asyncio.Event()

    async def write(uploads: UploadService, writer: int) -> None:
        number = 0
        while not is_enough.is_set():
            await upload(uploads, tmp_path / f"spool{writer}", f"a-{writer}-{number}", 1000 * writer + number)
            if number % 3 == 0:  # goes again, as does the first version of the next
                await uploads.delete("acme", f"a-{writer}-{number}")
            await upload(uploads, tmp_path / f"spool{writer}", f"moving-{writer}", 1000 * writer + number)
            number += 1
            num_written[writer] = number
            await uploads.sweep()

    async with uploading(data) as (uploads, redis):
        writers = [asyncio.create_task(write(uploads, writer)) for writer in range(2)]
        await eventually_in_loop(lambda: min(num_written) > 3 or any(writer.done() for writer in writers))
        client = connect(redis.url, PATIENCE_S)
        assert await client.bgrewriteaof()
        await run(COMMANDS[0], data, backup)
        await client.aclose()
        num_at_end = min(num_written)
        await eventually_in_loop(lambda: min(num_written) > num_at_end or any(writer.done() for writer in writers))
        is_enough.set()
        await asyncio.gather(*writers)
    restored = tmp_path / "restored"
    await run(COMMANDS[1], restored, backup)
    names, broken = await unreadable(restored)
    assert {"moving-0", "moving-1", "a-0-1", "a-1-1"} <= set(names) and "a-0-0" not in names
    assert broken == []


CP_DURING_A_REWRITE = """#!/bin/sh
# The first copy of a folder lists its files; then a rewrite ends, and the manifest that is copied is the new one.
PATH=$REAL_PATH
if [ "$1" = -a ] && [ ! -e "$DATA/rewritten" ]; then
    touch "$DATA/rewritten"
    mkdir "$3/appendonlydir"
    cp -a "$2"/*.aof "$3/appendonlydir/"
    mv "$2/1.aof" "$2/2.aof"
    echo "file 2.aof seq 2 type b" > "$2/appendonly.aof.manifest"
    exec cp -a "$2/appendonly.aof.manifest" "$3/appendonlydir/"
fi
exec cp "$@"
"""


async def test_a_backup_has_the_files_that_its_manifest_names_when_a_rewrite_ends_in_between(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, backup, bin_folder = tmp_path / "data", tmp_path / "backup", tmp_path / "bin"
    (data / "redis" / "appendonlydir").mkdir(parents=True)
    (data / "redis" / "appendonlydir" / "1.aof").write_text("")
    (data / "redis" / "appendonlydir" / "appendonly.aof.manifest").write_text("file 1.aof seq 1 type b\n")
    (data / "store").mkdir()
    bin_folder.mkdir()
    (bin_folder / "cp").write_text(CP_DURING_A_REWRITE)
    (bin_folder / "cp").chmod(0o755)
    monkeypatch.setenv("REAL_PATH", os.environ["PATH"])
    monkeypatch.setenv("PATH", str(bin_folder), prepend=":")
    await run(COMMANDS[0], data, backup)
    assert (data / "rewritten").exists()
    assert {path.name for path in (backup / "appendonlydir").iterdir()} == {"2.aof", "appendonly.aof.manifest"}
    assert {path.name for path in backup.iterdir()} == {"appendonlydir", "store.tar"}


@pytest.mark.parametrize("order", ["redis first", "store first"])
async def test_the_order_is_what_saves_an_upload_in_between(tmp_path: Path, order: str) -> None:
    data, backup, restored = tmp_path / "data", tmp_path / "backup", tmp_path / "restored"
    of_redis, of_store = COMMANDS[0].split("# Files under tmp")
    head = "\n".join(of_redis.splitlines()[:2]) + "\n"
    halves = [of_redis, head + "#" + of_store]
    halves[0] = halves[0].replace("mkdir ", "mkdir -p ")
    async with uploading(data) as (uploads, _):
        await upload(uploads, tmp_path / "spool", "before", 1)
        backup.mkdir()
        first, second = halves if order == "redis first" else halves[::-1]
        await run(first, data, backup)
        await upload(uploads, tmp_path / "spool", "between", 2)
        await run(second, data, backup)
    await run(COMMANDS[1], restored, backup)
    expected = (["before"], []) if order == "redis first" else (["before", "between"], ["between"])
    assert await unreadable(restored) == expected


async def test_the_same_bytes_again_mend_a_store_that_is_older_than_redis(tmp_path: Path) -> None:
    async with uploading(tmp_path / "data") as (uploads, _):
        await upload(uploads, tmp_path / "spool", "lost", 1)
        (adapter,) = await uploads.list_page("acme", "", 100)
        store = AdapterStore(tmp_path / "data" / "store")
        folder = tmp_path / "data" / "store" / adapter.digest[:2] / adapter.digest
        await asyncio.to_thread(lambda: subprocess.run(["rm", "-r", folder], check=True))
        with pytest.raises(AdapterCorrupt, match="not in the store: upload it again"):
            store.load_packed(adapter.digest, LAYOUT)
        files = lora_files(seed=1)
        again = await uploads.upload("acme", "lost", files.config_bytes, files.write(tmp_path / "spool"))
        assert again == (adapter, False)
        store.load_packed(adapter.digest, LAYOUT)


async def test_what_a_restored_registry_does_not_name_goes_after_an_hour(tmp_path: Path) -> None:
    """Redis older than the store: there is time to copy the store aside, and no more than that."""
    async with uploading(tmp_path / "data") as (uploads, _):
        await upload(uploads, tmp_path / "spool", "known", 1)
    async with uploading(tmp_path / "older") as (uploads, _):
        (tmp_path / "older" / "store" / "tmp").rmdir()
        (tmp_path / "older" / "store").rmdir()
        (tmp_path / "data" / "store").rename(tmp_path / "older" / "store")
        assert await uploads.list_page("acme", "", 100) == []
        assert await uploads.sweep() == 0  # marked
        assert await uploads.sweep() == 0  # not an hour later
        assert await uploads.sweep(older_than_s=0) == 1
