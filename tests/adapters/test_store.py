from __future__ import annotations

import errno
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from motet.adapters.adapter import EXPERT_MODULES, BaseIdentity, BaseShape, ExpertShape
from motet.adapters.errors import AdapterCorrupt, AdapterInvalid, OtherBase, StoreUnavailable
from motet.adapters.format.content import AdapterContent, LoraMatrices
from motet.adapters.format.own_tokenizer import OwnText, OwnToken, template_digest
from motet.adapters.format.validation import validate
from motet.adapters.packing.layout import AdapterLayout
from motet.adapters.packing.packing import pack, packed_chunks
from motet.adapters.store import store as store_module
from motet.adapters.store.store import BEGINNINGS, AdapterStore, Repacked
from motet.tests.rigs.lora_files import LAYOUT, SHAPE, lora_files, name_of
from motet.tests.rigs.tensor_twins import identical

BF16 = replace(LAYOUT, dtype="bfloat16")


@pytest.fixture
def content(tmp_path: Path) -> AdapterContent:
    files = lora_files(
        rank=2,
        ranks={(1, "q_proj"): 7},
        dtype=torch.bfloat16,
        rank_pattern={"layers.1.self_attn.q_proj": 7},
        alpha_pattern={"v_proj": 3},
    )
    return validate(files.config_bytes, files.write(tmp_path), SHAPE)


@pytest.fixture
def store(tmp_path: Path, content: AdapterContent) -> AdapterStore:
    """A store that holds `content`, packed for LAYOUT."""
    store = AdapterStore(tmp_path / "deep" / "store")
    store.put(content, [LAYOUT])
    return store


def file_of(tmp_path: Path, digest: str, name: str) -> Path:
    return tmp_path / "deep" / "store" / digest[:2] / digest / name


def test_gives_back_what_was_put(store: AdapterStore, content: AdapterContent, tmp_path: Path) -> None:
    assert identical(store.load_packed(content.digest, LAYOUT), pack(content, LAYOUT))
    again = AdapterStore(tmp_path / "deep" / "store").load_content(content.digest)
    assert again.digest == content.digest
    assert again.module_ranks == content.module_ranks
    assert store.digests() == [content.digest]
    assert list((tmp_path / "deep" / "store" / "tmp").iterdir()) == []


class Later:
    """In place of a timer: what it would call later."""

    def __init__(self, seconds: float, call: Callable[[], None]) -> None:
        self.call, self.daemon, self.is_started = call, False, False

    def start(self) -> None:
        assert self.daemon, "a process would not end before it"
        self.is_started = True


@pytest.fixture
def timers(store: AdapterStore) -> list[Later]:
    """Those that report what was packed again."""
    found: list[Later] = []

    def timer(seconds: float, call: Callable[[], None]) -> Any:
        found.append(Later(seconds, call))
        return found[-1]

    store._repacked = Repacked(timer)
    return found


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def test_chat_templates_stay_beside_an_adapter_and_a_damaged_one_is_noticed(
    store: AdapterStore, content: AdapterContent, tmp_path: Path
) -> None:
    first, second = "{{ messages }}\r\n", "é"
    tokens = OwnText(second, (OwnToken(7, "<tool>", ("special",)),), "<tool>")
    assert store.load_own_text(content.digest, store.put_own_text(content.digest, tokens)) == tokens
    digests = [store.put_own_text(content.digest, OwnText(template)) for template in (first, second, first)]
    assert digests == [template_digest(template) for template in (first, second, first)]
    store.put(content, [LAYOUT])
    assert [store.load_own_text(content.digest, digest) for digest in digests[:2]] == [OwnText(first), OwnText(second)]
    file_of(tmp_path, content.digest, f"{digests[1]}.jinja").write_bytes(b"\xff")
    for digest in (digests[1], "0" * 64):
        with pytest.raises(
            AdapterCorrupt, match=r"the chat template or the tokens of adapter .* are missing or damaged: upload"
        ):
            store.load_own_text(content.digest, digest)
    (tmp_path / "deep" / "store").rename(tmp_path / "away")
    with pytest.raises(StoreUnavailable):
        store.load_own_text(content.digest, digests[0])


def test_packs_for_a_new_layout_once(
    store: AdapterStore, content: AdapterContent, timers: list[Later], caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        assert identical(store.load_packed(content.digest, BF16), pack(content, BF16))
    (timer,) = timers
    timer.call()
    (reported,) = warnings_in(caplog)
    assert reported.endswith(f"another way: 1, the first one for {BF16.key}.packed of {content.digest}")


def test_all_that_an_upgrade_packs_again_is_one_line(
    store: AdapterStore, tmp_path: Path, timers: list[Later], caplog: pytest.LogCaptureFixture
) -> None:
    contents = []
    for seed in range(5):
        files = lora_files(seed=seed)
        contents.append(validate(files.config_bytes, files.write(tmp_path), SHAPE))
        store.put(contents[-1], [LAYOUT])
    for content in contents[:4]:
        store.load_packed(content.digest, BF16)
    assert [timer.is_started for timer in timers] == [True] and warnings_in(caplog) == []
    timers[0].call()
    assert f"another way: 4, the first one for {BF16.key}.packed of {contents[0].digest}" in warnings_in(caplog)[0]
    store.load_packed(contents[4].digest, BF16)
    timers[1].call()
    assert "another way: 1, the first" in warnings_in(caplog)[1]
    assert len(timers) == len(warnings_in(caplog)) == 2


def test_a_store_belongs_to_one_base(store: AdapterStore, tmp_path: Path) -> None:
    mine, other = BaseIdentity("a" * 64, "mine"), BaseIdentity("b" * 64, "other base")
    store.claim_base(mine, "go away")
    again = AdapterStore(tmp_path / "deep" / "store")
    again.claim_base(BaseIdentity("a" * 64, "renamed"), "go away")
    for refused in (again.check_base, again.claim_base):
        with pytest.raises(OtherBase, match=r"deep.*renamed.*other base.*trained again.*go away"):
            refused(other, "go away")


def test_an_empty_store_may_change_hands(tmp_path: Path) -> None:
    store = AdapterStore(tmp_path)
    for fingerprint in "abb":
        store.claim_base(BaseIdentity(fingerprint * 64, "a base"), "go away")
    assert (tmp_path / "base").read_text() == "b" * 64 + " a base\n"


def test_a_damaged_mark_is_reported(store: AdapterStore, tmp_path: Path) -> None:
    (tmp_path / "deep" / "store" / "base").write_text("")
    with pytest.raises(ValueError, match="names no base"):
        store.check_base(BaseIdentity("a" * 64, "mine"), "go away")


def spoil(path: Path, how: str) -> None:
    data = bytearray(path.read_bytes())
    if how == "missing":
        path.unlink()
        return
    if how == "truncated":
        del data[-5:]
    elif how == "empty":
        data.clear()
    elif how == "longer":
        data += b"x"
    elif how == "body":
        data[-9] ^= 1
    elif how == "header":
        data[20] ^= 1
    elif how == "length":
        data[8:12] = b"\xff" * 4
    path.write_bytes(data)


@pytest.mark.parametrize("how", ["missing", "truncated", "empty", "longer", "body", "header", "length"])
def test_a_damaged_packed_file_is_made_again(
    how: str,
    store: AdapterStore,
    content: AdapterContent,
    timers: list[Later],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    path = file_of(tmp_path, content.digest, f"{LAYOUT.key}.packed")
    good = path.read_bytes()
    spoil(path, how)
    assert identical(store.load_packed(content.digest, LAYOUT), pack(content, LAYOUT))
    assert path.read_bytes() == good
    assert len(timers) == (how == "missing"), "damage is reported at once"
    for timer in timers:
        timer.call()
    (reported,) = warnings_in(caplog)
    assert content.digest in reported


def test_every_single_damaged_byte_of_a_packed_file_is_noticed(
    store: AdapterStore, content: AdapterContent, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = file_of(tmp_path, content.digest, f"{LAYOUT.key}.packed")
    good = path.read_bytes()
    header_end = 12 + int.from_bytes(good[8:12], "little") + 32
    for position in [*range(0, header_end, 7), *range(header_end, len(good), 997)]:
        bad = bytearray(good)
        bad[position] ^= 0x10
        path.write_bytes(bad)
        caplog.clear()
        assert identical(store.load_packed(content.digest, LAYOUT), pack(content, LAYOUT))
        assert len(caplog.records) == 1, position


@pytest.mark.parametrize("how", ["missing", "truncated", "empty", "body"])
@pytest.mark.parametrize("which", ["adapter_model.safetensors", "manifest.json"])
def test_a_damaged_source_is_an_error_that_an_upload_heals(
    which: str, how: str, store: AdapterStore, content: AdapterContent, tmp_path: Path
) -> None:
    spoil(file_of(tmp_path, content.digest, which), how)
    assert identical(store.load_packed(content.digest, LAYOUT), pack(content, LAYOUT))  # the packed file is enough
    with pytest.raises(AdapterCorrupt, match=f"{content.digest}.*upload it again"):
        store.load_packed(content.digest, BF16)
    store.put(content, [LAYOUT])
    assert identical(store.load_packed(content.digest, BF16), pack(content, BF16))


def test_a_source_with_other_scalings_is_not_that_adapter(
    store: AdapterStore, content: AdapterContent, tmp_path: Path
) -> None:
    path = file_of(tmp_path, content.digest, "manifest.json")
    manifest = json.loads(path.read_text())
    manifest["scalings"][name_of(0, "q_proj", "B")] = (1.5).hex()
    path.write_text(json.dumps(manifest))
    with pytest.raises(AdapterCorrupt, match="its digest is"):
        store.load_content(content.digest)


@pytest.mark.parametrize("number", [errno.ESTALE, errno.EIO, errno.ETIMEDOUT, errno.EACCES])
def test_a_disk_that_fails_is_no_damage(
    store: AdapterStore, content: AdapterContent, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def fail(*args: object, **_: object) -> None:
        raise OSError(number, os.strerror(number), "/a/secret/place")

    with monkeypatch.context() as broken:
        broken.setattr(store_module, "read_packed", fail)
        broken.setattr(Path, "read_bytes", fail)
        with pytest.raises(StoreUnavailable, match=os.strerror(number)) as caught:
            store.load_packed(content.digest, LAYOUT)
        assert "secret" not in str(caught.value)
    assert identical(store.load_packed(content.digest, LAYOUT), pack(content, LAYOUT))
    with monkeypatch.context() as broken:  # a bad sector under the packed file only
        broken.setattr(store_module, "read_packed", fail)
        if number == errno.EIO:
            assert identical(store.load_packed(content.digest, LAYOUT), pack(content, LAYOUT))


def test_a_store_that_is_not_mounted_is_no_absence(
    store: AdapterStore, content: AdapterContent, tmp_path: Path
) -> None:
    (tmp_path / "deep").rename(tmp_path / "away")
    (tmp_path / "deep" / "store").mkdir(parents=True)
    with pytest.raises(StoreUnavailable, match="not there"):
        store.load_packed(content.digest, LAYOUT)
    (tmp_path / "deep" / "store" / "tmp").mkdir()
    with pytest.raises(AdapterCorrupt, match="upload it again"):
        store.load_packed(content.digest, LAYOUT)


def test_unknown_and_impossible_digests(store: AdapterStore) -> None:
    with pytest.raises(AdapterCorrupt, match="not in the store"):
        store.load_packed("0" * 64, LAYOUT)
    for digest in ("", "../../../etc/passwd", "G" * 64, "0" * 63):
        with pytest.raises(AdapterCorrupt, match="not a digest"):
            store.load_packed(digest, LAYOUT)


def test_an_adapter_of_another_base_is_refused(store: AdapterStore, content: AdapterContent) -> None:
    modules = {**SHAPE.modules, "q_proj": (16, 32)}
    with pytest.raises(AdapterCorrupt, match="does not fit"):
        store.load_packed(content.digest, replace(LAYOUT, shape=replace(SHAPE, modules=modules)))


def test_a_refused_put_leaves_nothing(tmp_path: Path, content: AdapterContent) -> None:
    store = AdapterStore(tmp_path / "store")
    with pytest.raises(AdapterInvalid):
        store.put(content, [replace(LAYOUT, shape=replace(SHAPE, num_layers=1))])
    assert store.digests() == []


def sweep(store: AdapterStore, referenced: list[str], older_than_s: float) -> list[str]:
    removed = [digest for start in BEGINNINGS for digest in store.sweep_some(start, referenced, older_than_s)]
    store.sweep_unfinished()
    return removed


def test_sweep_marks_first_and_removes_later(store: AdapterStore, content: AdapterContent, tmp_path: Path) -> None:
    mark = file_of(tmp_path, content.digest, "unreferenced")
    assert sweep(store, [content.digest], 0) == []
    assert not mark.exists()
    assert sweep(store, [], 3600) == []
    assert mark.exists()
    assert sweep(store, [], 3600) == []
    store.put(content, [LAYOUT])  # uploaded again
    assert not mark.exists()
    assert sweep(store, [], 3600) == []
    assert sweep(store, [content.digest], 3600) == []  # registered again
    assert not mark.exists()
    assert sweep(store, [], 3600) == []
    os.utime(mark, (time.time() - 3601,) * 2)
    (tmp_path / "deep" / "store" / "tmp" / "left").write_bytes(b"by the dead")
    assert sweep(store, [], 3600) == [content.digest]
    assert store.digests() == []
    assert list((tmp_path / "deep" / "store" / "tmp").iterdir()) == []
    with pytest.raises(AdapterCorrupt, match="not in the store"):
        store.load_packed(content.digest, LAYOUT)


def test_a_sweep_locks_only_for_what_it_changes(
    store: AdapterStore, content: AdapterContent, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds: list[int] = []
    lock = AdapterStore._lock

    def counted(self: AdapterStore, kind: int) -> Any:
        kinds.append(kind)
        return lock(self, kind)

    monkeypatch.setattr(AdapterStore, "_lock", counted)
    for _ in range(3):
        assert sweep(store, [content.digest], 0) == []
    assert len(kinds) == 3, "a lock stops all uploads: one sweep took one for each adapter"
    sweep(store, [], 3600)
    assert len(kinds) == 5


def test_a_store_has_a_name_of_its_own(store: AdapterStore, tmp_path: Path) -> None:
    assert store.store_id() == store.store_id() == AdapterStore(tmp_path / "deep" / "store").store_id()
    assert store.store_id() != AdapterStore(tmp_path / "another").store_id()


def test_writers_readers_and_the_sweep_at_once(store: AdapterStore, content: AdapterContent) -> None:
    """A process that has put the adapter can load it, whatever the other processes do."""
    failures: list[BaseException] = []
    expected = pack(content, LAYOUT)

    def work() -> None:
        try:
            for _ in range(8):
                store.put(content, [LAYOUT])
                assert identical(store.load_packed(content.digest, LAYOUT), expected)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        sweep(store, [], 3600)
    for thread in threads:
        thread.join()
    assert failures == []


_WRITER = """
import sys
from pathlib import Path
from typing import Any
from motet.adapters.format.validation import validate
from motet.adapters.store import store as store_module
from motet.adapters.store.store import Repacked
from motet.adapters.store.store import AdapterStore
from motet.tests.rigs.lora_files import LAYOUT, SHAPE, lora_files
folder = Path(sys.argv[1])
store = AdapterStore(folder / "store")
for seed in range(10_000):
    files = lora_files(seed=seed)
    content = validate(files.config_bytes, files.write(folder), SHAPE)
    store.put(content, [LAYOUT])
    print(content.digest, flush=True)
"""


def test_what_was_put_survives_kill_9(tmp_path: Path) -> None:
    writer = subprocess.Popen([sys.executable, "-c", _WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert writer.stdout is not None
    acknowledged = [writer.stdout.readline().strip() for _ in range(20)]
    writer.send_signal(signal.SIGKILL)
    acknowledged += writer.stdout.read().split()
    writer.wait()
    writer.stdout.close()
    assert all(len(digest) == 64 for digest in acknowledged[:20])
    store = AdapterStore(tmp_path / "store")
    whole = [digest for digest in acknowledged if len(digest) == 64]  # the last line may be cut
    assert len(whole) >= 20
    for digest in whole:
        assert store.load_content(digest).digest == digest
        store.load_packed(digest, LAYOUT)


EXPERTS = 4
EXPERT_LAYOUT = AdapterLayout(
    BaseShape(2, dict.fromkeys(EXPERT_MODULES, (16, 16)), ExpertShape(EXPERTS, (0, 1), "mlp", {})), 64, "float32"
)


def one_expert(num_experts: int) -> AdapterContent:
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal(shape, np.float32) for shape in ((3, 16), (16, 3)))
    return AdapterContent({(1, "experts.2.up_proj"): LoraMatrices(a, b, 2.0)}, num_experts)


def test_experts_without_lora_take_no_disk_and_an_older_adapter_stays_as_it_was_packed(tmp_path: Path) -> None:
    """Records say by the ranks how many pages there are, and those of a digest are to agree."""
    apart, padded = one_expert(EXPERTS), one_expert(0)
    assert apart.digest == padded.digest
    new, old = AdapterStore(tmp_path / "new"), AdapterStore(tmp_path / "old")
    assert new.put(apart, [EXPERT_LAYOUT]).module_ranks == {"experts.2.up_proj": 3}
    old.put(padded, [EXPERT_LAYOUT])  # as before experts had ranks of their own
    assert old.put(apart, [EXPERT_LAYOUT]).module_ranks == {"experts.up_proj": 3}
    sizes = []
    for store in (new, old):
        ranks = store.load_content(apart.digest).module_ranks
        pages = store.load_packed(apart.digest, EXPERT_LAYOUT)
        (file,) = (tmp_path / store.root.name).glob("*/*/*.packed")
        file.unlink()  # so that it is packed again
        assert identical(store.load_packed(apart.digest, EXPERT_LAYOUT), pages)
        assert len(pages) == EXPERT_LAYOUT.num_pages(ranks)
        sizes.append(len(pages))
    assert sizes == [2, 6]


def test_packing_holds_a_few_pages_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng, rank, width = np.random.default_rng(0), 256, 1024
    a, b = (rng.standard_normal(shape, np.float32) for shape in ((rank, width), (width, rank)))
    content = AdapterContent({(0, "q_proj"): LoraMatrices(a, b, 1.0)})
    layout = AdapterLayout(BaseShape(16, {"q_proj": (width, width)}), 4096, "float32")
    num_bytes = layout.num_pages(content.module_ranks) * layout.page_bytes
    assert num_bytes == 32 << 20
    assert content.digest
    chunk_bytes = 1 << 20
    monkeypatch.setattr(store_module, "packed_chunks", partial(packed_chunks, chunk_bytes=chunk_bytes))
    tracemalloc.start()
    AdapterStore(tmp_path).put(content, [layout])
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_bytes < 4 * chunk_bytes
