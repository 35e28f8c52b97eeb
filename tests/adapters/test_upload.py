from __future__ import annotations

import asyncio
import errno
import json
import logging
import os
import signal
import socket
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from redis.asyncio import Redis

from motet.adapters.adapter import EXPERT_MODULES, MODULES, BaseShape, ExpertShape
from motet.adapters.errors import (
    AdapterError,
    AdapterInvalid,
    QuotaExceeded,
    RegistryUnavailable,
    UploadTooLarge,
    UploadUnchecked,
    VersionRefused,
)
from motet.adapters.format.validation import validate
from motet.adapters.packing.layout import AdapterLayout
from motet.adapters.packing.packing import pack
from motet.adapters.processes.child_processes import ChildEnded, ChildProcess
from motet.adapters.registry.registry import DigestSet, Registry, connect
from motet.adapters.registry.registry_keys import SWEEP
from motet.adapters.registry.registry_view import RegistryView
from motet.adapters.registry.tenants.records import StorageBound
from motet.adapters.registry.versions.rollout import versions_of
from motet.adapters.store.store import AdapterStore
from motet.adapters.upload import CheckedUpload, UploadLimits, UploadService
from motet.adapters.upload_process import CHECK, FORGET
from motet.cluster.launch.redis_server import RedisServer
from motet.tests.rigs.lora_files import LAYOUT, SHAPE, LoraFiles, lora_files, name_of
from motet.tests.rigs.patience import PATIENCE_S
from motet.tests.rigs.tensor_twins import identical

LIMITS = UploadLimits(max_config_bytes=10_000, max_tensors_bytes=20_000)
MANY_EXPERTS = BaseShape(  # of a base whose adapters may have 37,000 tensors
    48,
    {module: SHAPE.modules[module] for module in MODULES[:4]} | dict.fromkeys(EXPERT_MODULES, (16, 16)),
    ExpertShape(128, tuple(range(48)), "mlp", {module: module.partition(".")[2] for module in EXPERT_MODULES}),
)
MANY_EXPERTS_LAYOUT = replace(LAYOUT, shape=MANY_EXPERTS)


@dataclass
class Parts:
    uploads: UploadService
    store: AdapterStore
    registry: Registry
    view: RegistryView
    folder: Path

    async def upload(self, name: str, files: LoraFiles, tenant: str = "acme") -> tuple[int, bool, str]:
        adapter, created = await self.uploads.upload(tenant, name, files.config_bytes, files.write(self.folder))
        return adapter.version, created, adapter.digest


def parts_of(client: Redis, folder: Path, layout: AdapterLayout = LAYOUT) -> Parts:
    store, registry = AdapterStore(folder / "store"), Registry(client)
    view = RegistryView(registry)
    uploads = UploadService(store, registry, view, [layout], reserved={"the-base"}, limits=LIMITS)
    return Parts(uploads, store, registry, view, folder)


@pytest.fixture
async def parts(redis_client: Redis, tmp_path: Path) -> AsyncIterator[Parts]:
    parts = parts_of(redis_client, tmp_path)
    await parts.view.start()
    yield parts
    await parts.view.stop()


async def test_an_upload_can_be_loaded_and_is_seen_at_once(parts: Parts) -> None:
    files = lora_files()
    config = parts.folder / "config.json"
    config.write_bytes(files.config_bytes)
    tensors = files.write(parts.folder)
    adapter, created = await parts.uploads.upload("acme", "pirate", config, tensors)
    tensors.unlink()
    assert created
    assert (adapter.version, adapter.rank, adapter.targets) == (1, 4, ("q_proj", "v_proj", "down_proj"))
    assert adapter.num_bytes == sum(tensor.nbytes for tensor in files.tensors.values())
    assert await parts.view.resolve("acme", "pirate") == adapter
    assert await parts.uploads.get("acme", "pirate") == adapter
    assert await parts.uploads.list_page("acme", "", 100) == [adapter]
    assert await parts.uploads.list_page("other", "", 100) == []
    pages = parts.store.load_packed(adapter.digest, LAYOUT)
    assert identical(pages, pack(parts.store.load_content(adapter.digest), LAYOUT))


async def test_the_same_bytes_are_the_same_version_and_new_bytes_a_new_one(parts: Parts) -> None:
    version, created, digest = await parts.upload("x", lora_files(seed=1))
    assert (version, created) == (1, True)
    assert await parts.upload("x", lora_files(seed=1)) == (1, False, digest)
    assert (await parts.upload("x", lora_files(seed=2)))[:2] == (2, True)
    assert await parts.upload("y", lora_files(seed=1)) == (1, True, digest)
    assert len(parts.store.digests()) == 2


async def test_delete(parts: Parts) -> None:
    await parts.upload("x", lora_files())
    assert not await parts.uploads.delete("other", "x")
    assert await parts.uploads.delete("acme", "x")
    assert await parts.view.resolve("acme", "x") is None
    assert not await parts.uploads.delete("acme", "x")
    assert (await parts.upload("x", lora_files()))[:2] == (2, True)


async def test_sweep_spares_what_is_referenced(parts: Parts) -> None:
    _, _, old = await parts.upload("gone", lora_files(seed=1))
    _, _, before = await parts.upload("x", lora_files(seed=2))
    _, _, kept = await parts.upload("x", lora_files(seed=3))
    await parts.uploads.delete("acme", "gone")
    assert await parts.uploads.sweep(older_than_s=0) == 0  # marked
    assert await parts.uploads.sweep(older_than_s=0) == 1
    assert sorted(parts.store.digests()) == sorted([before, kept])
    assert old not in (before, kept)


async def test_a_full_disk_does_not_keep_what_is_to_go(parts: Parts, monkeypatch: pytest.MonkeyPatch) -> None:
    """To note which layouts are in use takes room, and what goes gives it."""

    def fail(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    for work in ("keep_layouts", "sweep_packed"):
        with monkeypatch.context() as patch:
            patch.setattr(parts.store, work, fail)
            await parts.upload("gone", lora_files(seed=1))
            await parts.uploads.delete("acme", "gone")
            assert await parts.uploads.sweep(older_than_s=0) == 0  # marked
            assert await parts.uploads.sweep(older_than_s=0) == 1


async def test_one_router_sweeps_at_a_time_and_the_next_one_after_a_rest(parts: Parts) -> None:
    other = parts_of(parts.registry._client, parts.folder).uploads
    _, _, old = await parts.upload("gone", lora_files(seed=1))
    await parts.upload("x", lora_files(seed=2))
    await parts.uploads.delete("acme", "gone")
    first, second = await asyncio.gather(parts.uploads.sweep(), other.sweep())
    assert sorted([first is None, second is None]) == [False, True]
    assert await other.sweep(older_than_s=0, rest_s=60) == 1
    assert old not in parts.store.digests()
    assert await parts.uploads.sweep() is None
    assert await other.sweep() is None


async def test_each_router_keeps_its_own_layouts_whichever_sweeps(
    parts: Parts, caplog: pytest.LogCaptureFixture
) -> None:
    """As those of two clusters that share a store while clients move: the old one's files stay until it is gone."""
    caplog.set_level(logging.INFO)
    other = parts_of(parts.registry._client, parts.folder, replace(LAYOUT, dtype="bfloat16"))
    _, _, digest = await parts.upload("x", lora_files())
    await other.upload("x", lora_files())
    records, files = parts.folder / "store" / "layouts", parts.folder / "store" / digest[:2] / digest

    def packed() -> int:
        return len(list(files.glob("*.packed")))

    def pass_time() -> None:
        for record in records.iterdir():
            os.utime(record, (0, 0))

    for path in files.glob("*.packed"):
        os.utime(path, (0, 0))
    assert await parts.uploads.sweep(rest_s=60) == 0 and packed() == 2
    pass_time()
    assert await other.uploads.sweep() is None, "another one sweeps, and this one's layouts are kept all the same"
    await parts.registry._client.delete(SWEEP + parts.store.store_id())
    assert await parts.uploads.sweep() == 0 and packed() == 2
    pass_time()
    assert await parts.uploads.sweep() == 0 and packed() == 1
    assert "removed 1 packed files of layouts that are no longer used" in caplog.text


async def test_a_sweep_that_died_is_taken_over(parts: Parts) -> None:
    store_id = parts.store.store_id()
    assert await parts.registry.hold_sweep(store_id, "of a router", 3600)
    assert await parts.uploads.sweep() is None
    assert await parts.registry.hold_sweep(store_id, "of a router", 0.3)  # and dies
    async with asyncio.timeout(PATIENCE_S):
        while (num_removed := await parts.uploads.sweep()) is None:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    assert num_removed == 0


@pytest.mark.parametrize("case", ["name", "reserved", "tenant", "config", "tensors", "large config", "large tensors"])
async def test_what_is_refused_leaves_nothing(case: str, parts: Parts) -> None:
    files, tenant, name = lora_files(), "acme", "x"
    expected: type[AdapterError] = AdapterInvalid
    if case == "name":
        name = "../x"
    elif case == "reserved":
        name = "the-base"
    elif case == "tenant":
        tenant = "a/b"
    elif case == "config":
        files.config["use_dora"] = True
    elif case == "tensors":
        files.tensors[name_of(2, "down_proj", "B")][3, 1] = float("nan")
    else:
        expected = UploadTooLarge
        if case == "large config":
            files.config["base_model_name_or_path"] = "x" * 20_000
        else:
            files = lora_files(rank=128)
    with pytest.raises(expected):
        await parts.upload(name, files, tenant)
    assert parts.store.digests() == []
    assert len(await parts.registry.digests()) == 0
    assert [path for path in (parts.folder / "store").rglob("*") if path.is_file()] == []


async def test_many_uploads_at_once(parts: Parts) -> None:
    path = lora_files().write(parts.folder)
    config = lora_files().config_bytes
    answers = await asyncio.gather(
        *(parts.uploads.upload("acme", name, config, path) for name in ("x", "y") for _ in range(6))
    )
    assert {(adapter.name, adapter.version) for adapter, _ in answers} == {("x", 1), ("y", 1)}
    assert sum(created for _, created in answers) == 2
    assert len(parts.store.digests()) == 1


async def test_without_redis_uploads_are_unavailable_until_it_is_back(tmp_path: Path) -> None:
    server = RedisServer(tmp_path / "redis")
    client = connect(server.start(), timeout_s=5.0)
    parts = parts_of(client, tmp_path)
    await parts.view.start()
    await parts.upload("x", lora_files(seed=1))
    await asyncio.to_thread(server.stop)
    with pytest.raises(RegistryUnavailable):
        await parts.upload("y", lora_files(seed=2))
    with pytest.raises(RegistryUnavailable):
        await parts.uploads.delete("acme", "x")
    assert await parts.view.resolve("acme", "x") is not None
    assert len(parts.store.digests()) == 1  # nothing was done for an upload that could not be registered

    server = RedisServer(tmp_path / "redis")
    await asyncio.to_thread(server.start)
    assert (await parts.upload("y", lora_files(seed=2)))[:2] == (1, True)
    assert (await parts.upload("x", lora_files(seed=1)))[:2] == (1, False)

    assert server.pid is not None
    os.kill(server.pid, signal.SIGSTOP)  # alive, and says nothing
    with pytest.raises(RegistryUnavailable):
        await parts.upload("z", lora_files(seed=3))
    os.kill(server.pid, signal.SIGCONT)
    assert (await parts.upload("z", lora_files(seed=3)))[:2] == (1, True)

    os.kill(server.pid, signal.SIGKILL)
    async with asyncio.timeout(PATIENCE_S):
        while True:  # its supervisor starts it again
            try:
                answer = await parts.upload("w", lora_files(seed=4))
                break
            except RegistryUnavailable:
                await asyncio.sleep(0.05)
    assert answer[0] == 1
    await parts.view.stop()
    await client.aclose()
    await asyncio.to_thread(server.stop)


async def test_an_upload_whose_answer_got_lost_can_be_repeated(parts: Parts, redis_url: str) -> None:
    """The script runs in Redis, but the connection ends before its answer arrives."""

    async def drop_the_answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        to_redis_reader, to_redis = await asyncio.open_unix_connection(redis_url.removeprefix("unix://"))
        while data := await reader.read(1 << 16):
            to_redis.write(data)
            answer = await to_redis_reader.read(1 << 16)
            if b"EVAL" in data and b'{"' in data and b"NOSCRIPT" not in answer:  # the change, which has facts as JSON
                break
            writer.write(answer)
        to_redis.close()
        writer.close()

    proxy = await asyncio.start_server(drop_the_answer, "127.0.0.1", 0, family=socket.AF_INET)
    port = proxy.sockets[0].getsockname()[1]
    client = connect(f"redis://127.0.0.1:{port}", PATIENCE_S)
    unlucky = UploadService(parts.store, Registry(client), parts.view, [LAYOUT], LIMITS)
    files = lora_files()
    with pytest.raises(RegistryUnavailable):
        await unlucky.upload("acme", "x", files.config_bytes, files.write(parts.folder))
    assert await parts.registry.get("acme", "x") is not None
    version, created, digest = await parts.upload("x", files)
    assert (version, created) == (1, False)
    assert parts.store.load_content(digest).digest == digest
    await client.aclose()
    proxy.close()


async def test_layouts_must_agree(parts: Parts) -> None:
    with pytest.raises(ValueError, match="layouts"):
        UploadService(parts.store, parts.registry, parts.view, [], LIMITS)
    assert LAYOUT.shape == SHAPE


async def test_an_upload_over_the_quota_takes_no_disk(parts: Parts) -> None:
    _, _, digest = await parts.upload("x", lora_files(seed=1))
    full = (StorageBound("", 1, None), StorageBound("k1", None, 10))
    files = lora_files(seed=2)
    for name, bounds in (("y", full[:1]), ("x", full[1:])):
        with pytest.raises(QuotaExceeded):
            await parts.uploads.upload("acme", name, files.config_bytes, files.write(parts.folder), bounds=bounds)
    assert parts.store.digests() == [digest]
    files = lora_files(seed=1)
    again = await parts.uploads.upload("acme", "x", files.config_bytes, files.write(parts.folder), bounds=full)
    assert not again[1]
    assert (await parts.uploads.stored("acme", ""))[0].adapters == 1


async def test_an_adapter_whose_pages_are_too_many_is_refused_before_it_is_read(parts: Parts) -> None:
    """A rank in one layer is that of all layers. Only config and header are looked at."""
    files = lora_files(
        modules=("q_proj",), rank=1, ranks={(0, "q_proj"): 60}, rank_pattern={"layers.0.self_attn.q_proj": 60}
    )
    num_bytes = LAYOUT.num_pages({"q_proj": 60}) * LAYOUT.page_bytes
    limits = replace(LIMITS, max_packed_bytes=num_bytes)
    uploads = UploadService(parts.store, parts.registry, parts.view, [LAYOUT], limits)
    adapter, _ = await uploads.upload("acme", "x", files.config_bytes, files.write(parts.folder))
    assert adapter.packed_bytes == parts.store.load_packed(adapter.digest, LAYOUT).nbytes == num_bytes
    assert (await uploads.stored("acme", ""))[0].stored_bytes == adapter.num_bytes + num_bytes

    def no_room(num_bytes: int) -> None:
        assert num_bytes == adapter.packed_bytes
        raise OSError(errno.ENOSPC, "No space left on device")

    files = replace(files, tensors={name: tensor + 1 for name, tensor in files.tensors.items()})
    with pytest.raises(OSError, match="No space left"):
        await uploads.upload("acme", "y", files.config_bytes, files.write(parts.folder), take_room=no_room)
    bounded = UploadService(
        *(parts.store, parts.registry, parts.view, [LAYOUT], replace(limits, max_packed_bytes=num_bytes - 1))
    )
    files.tensors[name_of(0, "q_proj", "A")][0, 0] = float("nan")  # which is found where tensors are read
    with pytest.raises(UploadTooLarge, match=f"takes {num_bytes} bytes .* at most {num_bytes - 1} are accepted"):
        await bounded.upload("acme", "y", files.config_bytes, files.write(parts.folder))
    assert parts.store.digests() == [adapter.digest]


async def test_an_adapter_may_take_twice_the_largest_upload_unless_it_is_said(parts: Parts) -> None:
    assert LIMITS.max_packed_bytes is None
    wide = lora_files(
        modules=("q_proj",), rank=1, ranks={(0, "q_proj"): 110}, rank_pattern={"layers.0.self_attn.q_proj": 110}
    )
    assert sum(tensor.nbytes for tensor in wide.tensors.values()) < LIMITS.max_tensors_bytes
    with pytest.raises(UploadTooLarge, match="at most 40000 are accepted"):
        await parts.uploads.upload("acme", "x", wide.config_bytes, wide.write(parts.folder))


async def test_what_is_deleted_counts_until_it_is_swept(parts: Parts) -> None:
    """Else a tenant could fill the disk by uploading and deleting, within any quota."""
    first, second = lora_files(seed=1), lora_files(seed=2)
    adapter, _ = await parts.uploads.upload("acme", "x", first.config_bytes, first.write(parts.folder))
    bounds = (StorageBound("", None, adapter.stored_bytes),)

    async def upload(name: str, files: LoraFiles) -> None:
        await parts.uploads.upload("acme", name, files.config_bytes, files.write(parts.folder), bounds=bounds)

    async def stored_bytes() -> int:
        return (await parts.uploads.stored("acme", ""))[0].stored_bytes

    await parts.uploads.delete("acme", "x")
    assert await stored_bytes() == adapter.stored_bytes
    with pytest.raises(QuotaExceeded, match="until they have left the disk"):
        await upload("y", second)
    assert parts.store.digests() == [adapter.digest]
    await upload("y", first)  # adds nothing to what is on the disk
    assert await stored_bytes() == adapter.stored_bytes
    await parts.uploads.delete("acme", "y")
    assert await parts.uploads.sweep(older_than_s=0) == 0  # marked
    assert await stored_bytes() == adapter.stored_bytes
    assert await parts.uploads.sweep(older_than_s=0) == 1
    assert await stored_bytes() == 0
    await upload("y", second)


async def test_what_another_name_has_counts_for_the_one_that_lost_it_until_the_next_sweep(
    parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, _, digest = await parts.upload("x", lora_files(), tenant="zenith")
    num_bytes = (await parts.uploads.stored("zenith", ""))[0].stored_bytes
    await parts.upload("x", lora_files())

    read_digests = parts.registry.digests

    async def digests() -> DigestSet:
        found = await read_digests()
        await parts.uploads.delete("acme", "x")  # after the sweep has seen that it has the content
        return found

    with monkeypatch.context() as patch:
        patch.setattr(parts.registry, "digests", digests)
        await parts.uploads.sweep(older_than_s=0)
    assert (await parts.uploads.stored("acme", ""))[0].stored_bytes == num_bytes
    await parts.uploads.sweep(older_than_s=0)
    assert (await parts.uploads.stored("acme", ""))[0].stored_bytes == 0
    assert (await parts.uploads.stored("zenith", ""))[0].stored_bytes == num_bytes
    assert parts.store.digests() == [digest]


async def test_a_first_version_that_is_not_to_be_current_takes_no_disk(parts: Parts) -> None:
    files = lora_files()
    with pytest.raises(VersionRefused, match="no version yet"):
        await parts.uploads.upload("acme", "x", files.config_bytes, files.write(parts.folder), activate=False)
    assert parts.store.digests() == []


async def test_uploads_of_a_tenant_at_once_are_within_its_quota_before_they_take_disk(parts: Parts) -> None:
    adapter, _ = await parts.uploads.upload("acme", "x", lora_files().config_bytes, lora_files().write(parts.folder))
    bounds = (StorageBound("", None, 3 * adapter.stored_bytes),)
    paths = []
    for seed in range(1, 7):
        folder = parts.folder / str(seed)
        folder.mkdir()
        paths.append(lora_files(seed=seed).write(folder))
    config = lora_files().config_bytes
    results = await asyncio.gather(
        *(parts.uploads.upload("acme", f"y{n}", config, path, bounds=bounds) for n, path in enumerate(paths)),
        return_exceptions=True,
    )
    assert sum(isinstance(result, QuotaExceeded) for result in results) == 4
    assert len(parts.store.digests()) == 3


HEADER_BYTES = 2 << 20


def write_large_header(folder: Path) -> Path:
    """A file whose header takes long to parse, and is refused then."""
    facts = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
    names: dict[str, object] = {}
    size = 0
    while size < HEADER_BYTES:
        name = f"tensor-{len(names)}"
        names[name], size = facts, size + len(name) + 60
    text = json.dumps(names).encode()
    path = folder / "large.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    return path


async def test_an_upload_is_parsed_in_no_routers_process(tmp_path: Path, redis_client: Redis) -> None:
    """What holds the interpreter's lock holds every stream of the router."""
    parts = parts_of(redis_client, tmp_path, MANY_EXPERTS_LAYOUT)
    limits = UploadLimits(max_tensors_bytes=64 << 20)
    uploads = UploadService(parts.store, parts.registry, parts.view, [MANY_EXPERTS_LAYOUT], limits)
    tensors, config = write_large_header(tmp_path), lora_files(modules=("q_proj",)).config_bytes
    began_s = time.process_time()
    with pytest.raises(AdapterInvalid) as here:
        validate(config, tensors, MANY_EXPERTS)
    here_s = time.process_time() - began_s
    with pytest.raises(AdapterInvalid):
        await uploads.upload("acme", "x", config, tensors)  # which starts the process
    began_s = time.process_time()
    with pytest.raises(AdapterInvalid) as there:
        await uploads.upload("acme", "x", config, tensors)
    assert time.process_time() - began_s < here_s / 4
    assert str(there.value) == str(here.value)


async def test_an_upload_that_is_over_leaves_no_file_open(parts: Parts) -> None:
    files = lora_files()
    tensors = files.write(parts.folder)
    with pytest.raises(QuotaExceeded):
        await parts.uploads.upload("acme", "x", files.config_bytes, tensors, bounds=(StorageBound("", 0, 0),))
    await parts.uploads.upload("acme", "x", files.config_bytes, tensors)
    processes = [psutil.Process(process.pid) for process in parts.uploads._processes._processes._idle]
    mapped = [mapping.path for process in processes for mapping in process.memory_maps()]
    assert mapped
    assert str(tensors) not in mapped


async def test_the_base_that_a_config_names_is_kept_with_its_version(parts: Parts) -> None:
    def refuse(upload: CheckedUpload) -> None:
        raise AdapterInvalid(f"not {upload.base}")

    first, second = lora_files(seed=1), lora_files(seed=2)
    first.config["base_model_name_or_path"] = "Qwen/Qwen3-8B"
    with pytest.raises(AdapterInvalid, match="not Qwen/Qwen3-8B"):
        await parts.uploads.upload("acme", "x", first.config_bytes, first.write(parts.folder), check=refuse)
    assert parts.store.digests() == []
    for files in (first, second):
        await parts.upload("x", files)
    current = await parts.registry.get("acme", "x")
    assert current is not None
    assert [(one.version, one.base) for one in versions_of(current)] == [(2, ""), (1, "Qwen/Qwen3-8B")]


async def test_a_process_that_ended_is_replaced(parts: Parts) -> None:
    await parts.upload("x", lora_files(seed=1))
    for process in parts.uploads._processes._processes._idle:
        process.kill()
        await asyncio.to_thread(process.wait)
    assert (await parts.upload("x", lora_files(seed=2)))[:2] == (2, True)


async def test_one_that_dies_of_an_upload_is_distinguished_from_one_that_takes_too_long(
    parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    for status, expected in ((-signal.SIGPROF, AdapterInvalid), (-signal.SIGKILL, UploadUnchecked)):

        async def ended(*_: object, status: int = status) -> None:
            raise ChildEnded(status)

        with monkeypatch.context() as patch:
            patch.setattr(ChildProcess, "ask", ended)
            with pytest.raises(expected):
                await parts.upload("x", lora_files())
    assert parts.store.digests() == []


async def test_a_refusal_is_reported_though_the_process_has_died(parts: Parts, monkeypatch: pytest.MonkeyPatch) -> None:
    requested, answered = list[bytes](), ChildProcess.ask

    async def ask(process: ChildProcess, frames: Sequence[bytes], read: Any) -> Any:
        requested.append(frames[0])
        if frames[0] == FORGET:
            raise ChildEnded(-signal.SIGKILL)
        return await answered(process, frames, read)

    monkeypatch.setattr(ChildProcess, "ask", ask)
    files, bounds = lora_files(), (StorageBound("", None, 10),)
    with pytest.raises(QuotaExceeded):
        await parts.uploads.upload("acme", "x", files.config_bytes, files.write(parts.folder), bounds=bounds)
    assert requested == [CHECK, FORGET]
