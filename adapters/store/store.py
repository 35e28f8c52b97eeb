"""Adapters on disk, by digest.

```
root/
├── lock                     held shared by writers, exclusively by the sweep
├── base                     fingerprint and name of the base that the whole store belongs to
├── id                       a word that names this store to others
├── tmp/                     unfinished files
├── layouts/                 a file for each layout that adapters are packed for: its time is when it was last used
└── ab/abcdef…/              first two digits of the digest, then the digest
    ├── adapter_model.safetensors   the tensors as uploaded, under PEFT's names; vectors of outputs, each with a CRC-32
    ├── manifest.json               scaling of each module of each layer, and of what it is a product; how many experts;
    │                               which tokens have rows of their own in the embedding and the head
    ├── score_head.safetensors      of a sequence classifier: its head, each tensor with a CRC-32
    ├── <layout key>.packed         pages, ready to be loaded; can be made again from the two above
    └── unreferenced                its time: when the sweep first found that no name points to the adapter
```
Writers need no lock against each other: files of equal digests are equal, and each is replaced as a whole.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from threading import Lock, Timer
from typing import Any
from zlib import crc32

import numpy as np

from ..adapter import END_MODULES, BaseIdentity, read_ranges, written_ranges
from ..errors import AdapterCorrupt, AdapterInvalid, StoreUnavailable
from ..format.content import AdapterContent, LoraMatrices, OutputVectors, TokenRows
from ..format.own_tokenizer import OwnText
from ..format.peft import TENSORS_FILE, parse_tensor_name, tensor_name
from ..format.products import ProductMatrices
from ..format.score_head import ScoreHead, stored_head, stored_tensors
from ..format.strict_json import parse_object
from ..format.tensor_file import Tensor, TensorFile, tensor_bytes, write_tensors
from ..packing.layout import AdapterLayout
from ..packing.packed_file import PackedFileDamaged, PagesPart, read_packed, read_packed_part, write_packed
from ..packing.packing import pack, packed_chunks
from .durable_file import make_folder, replacing, replacing_all, sync_folder

# Which layouts of packed files are still in use.

KEPT_S = 7 * 86_400.0


class KeptLayouts:
    """A file for each layout, whose time says when an application last used the layout.

    Applications with different layouts may share a store, as an old and a new one do during an upgrade. So a layout is
    given up only when no application has used it for `KEPT_S`. An unknown layout counts from when it is found, since an
    application of an older version records nothing.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._current_keys: set[str] = set()  # which stay, whatever clocks say

    def keep(self, keys: Iterable[str]) -> None:
        """These are in use now. To be called again long before `KEPT_S` have passed."""
        current_keys = set(keys)
        self._current_keys |= current_keys
        self._see(current_keys)

    def is_given_up(self, key: str) -> bool:
        if key in self._current_keys:
            return False
        try:
            return is_old(self._root / key)
        except FileNotFoundError:
            self._see({key})
            return False

    def _see(self, keys: Iterable[str]) -> None:
        make_folder(self._root)
        for key in keys:
            (self._root / key).touch()


def is_old(path: Path) -> bool:
    """Whether the file was last written more than `KEPT_S` ago. Raises FileNotFoundError."""
    return time.time() - path.stat().st_mtime >= KEPT_S


# Adapters that were packed again because there was no file for their layout.

LOG_AFTER_S = 300.0

_log = logging.getLogger(__name__)


class Repacked:
    """Logs one line for all of a while: after an upgrade to another layout every adapter is packed again."""

    def __init__(self, timer: Callable[[float, Callable[[], None]], Timer] = Timer) -> None:
        """`timer`: as `threading.Timer`."""
        self._timer = timer
        self._lock = Lock()  # adapters come in several threads
        self._num, self._first = 0, ""

    def add(self, digest: str, file_name: str) -> None:
        with self._lock:
            self._num += 1
            if self._num > 1:
                return
            self._first = f"{file_name} of {digest}"
        timer = self._timer(LOG_AFTER_S, self._log_all)
        timer.daemon = True  # it does not keep the process alive
        timer.start()

    def _log_all(self) -> None:
        with self._lock:
            num, first, self._num = self._num, self._first, 0
        _log.warning(
            "adapters that were packed again in %g s, because their packed files were missing, as after a start that "
            "cuts adapters in another way: %d, the first one for %s",
            *(LOG_AFTER_S, num, first),
        )


_LOG = logging.getLogger(__name__)
_DIGEST = re.compile(r"[0-9a-f]{64}")
_MANIFEST_FILE = "manifest.json"
_NUM_EXPERTS = "num_experts"  # in a manifest, if each expert is packed at its own rank
_INVOCATION = "invocation_token_ids"
_OUTPUTS, _NUM_OUTPUTS, _PRODUCTS = "outputs_source", "num_outputs", "products"
_TOKEN_ROWS = "token_rows"
# The vectors of a module's outputs. They follow from the upload and the base, by sums that machines order differently,
# so that no digest is of them.
_OUTPUTS_NAME = re.compile(r"(?P<layer>[0-9]+)\.(?P<module>[a-z0-9_.]+)\.outputs\.(?P<crc>[0-9a-f]{8})")
_MARK_FILE = "unreferenced"
_PACKED_SUFFIX = ".packed"
_OWN_TEXT_SUFFIX = ".jinja"
_HEAD_FILE = "score_head.safetensors"
_BASE_FILE = "base"
_ID_FILE = "id"
BEGINNINGS = tuple(f"{number:02x}" for number in range(256))  # of digests: the names of the store's folders


class AdapterStore:
    """Many processes may use one store at a time. All methods block: call them from a thread."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._temporary = root / "tmp"
        self._kept_layouts, self._repacked = KeptLayouts(root / "layouts"), Repacked()
        make_folder(self._temporary)

    def check_base(self, base: BaseIdentity, remedy: str) -> None:
        """Raises OtherBase, with `remedy` in its message, if the store has adapters of another base."""
        path = self.root / _BASE_FILE
        if path.exists() and self.digests():
            base.check(BaseIdentity.parse(path.read_text()), f"the data folder {self.root.parent}", remedy)

    def claim_base(self, base: BaseIdentity, remedy: str) -> None:
        """Records that the store belongs to `base`. Raises as `check_base` does."""
        self.check_base(base, remedy)
        with self._lock(fcntl.LOCK_SH), replacing(self.root / _BASE_FILE, self._temporary) as file:
            file.write(f"{base}\n".encode())

    def put(self, content: AdapterContent, layouts: Sequence[AdapterLayout]) -> AdapterContent:
        """Stores an adapter, packed for each layout. When it returns, the adapter survives a crash of the machine.

        Returns it with the ranks that it is packed at, which are those of an older put of the same digest, since
        records say how many pages there are. Raises AdapterInvalid, and stores nothing, if it cannot be packed.
        """
        folder = self._folder(content.digest)
        with self._lock(fcntl.LOCK_SH), replacing_all(folder, self._temporary) as files:
            if content.num_experts and not self._packs_by_expert(folder):
                content = replace(content, num_experts=0)
            tensors: dict[str, Tensor] = {}
            scalings: dict[str, str] = {}
            products: list[dict[str, Any]] = []
            names: dict[int, str] = {}  # of products' tensors, which several modules may have
            for (layer, module), lora in content.matrices.items():
                if isinstance(lora, ProductMatrices):
                    for tensor in lora.tensors.values():
                        name = names.setdefault(id(tensor), f"product.{len(names)}")
                        tensors[name] = tensor
                    products.append(_of_product(layer, module, lora, names))
                    continue
                tensors[tensor_name(layer, module, "A")] = lora.a
                tensors[tensor_name(layer, module, "B")] = lora.b
                scalings[tensor_name(layer, module, "B")] = lora.scaling.hex()
            for (layer, module), vectors in content.outputs.items():
                both = np.stack([vectors.gain, vectors.shift])
                tensors[f"{layer}.{module}.outputs.{crc32(tensor_bytes(both)):08x}"] = both
            token_rows: dict[int, dict[str, Any]] = {}  # what embedding and head share is stored once
            for end, rows in content.token_rows.items():
                name = f"rows.{len(token_rows)}"
                tokens = {"ends": list[str](), "tokens": written_ranges(rows.token_ids.tolist()), "tensor": name}
                token_rows.setdefault(id(rows), tokens)["ends"].append(end)
                tensors[token_rows[id(rows)]["tensor"]] = rows.rows
            with files.write(TENSORS_FILE) as file:
                write_tensors(file, tensors)
            manifest: dict[str, Any] = {"format": 1, "digest": content.digest, "scalings": scalings}
            if content.num_experts:
                manifest[_NUM_EXPERTS] = content.num_experts
            if products:
                manifest[_PRODUCTS] = products
            if token_rows:
                manifest[_TOKEN_ROWS] = [*token_rows.values()]
            if content.outputs:
                manifest |= {_OUTPUTS: content.outputs_source, _NUM_OUTPUTS: len(content.outputs)}
            if content.invocation_token_ids:
                manifest[_INVOCATION] = content.invocation_token_ids
            if content.head is not None:
                with files.write(_HEAD_FILE) as file:
                    write_tensors(file, stored_tensors(content.head))
            with files.write(_MANIFEST_FILE) as file:
                file.write(json.dumps(manifest, indent=1).encode())
            for layout in layouts:  # a packed file has a checksum, and is made again from the others if it is damaged
                with files.write(_packed_name(layout), durable=False) as file:
                    num_pages = layout.num_pages(content.module_ranks)
                    write_packed(file, content.digest, layout, num_pages, packed_chunks(content, layout))
            (folder / _MARK_FILE).unlink(missing_ok=True)
        return content

    def put_own_text(self, digest: str, own_text: OwnText) -> str:
        """Keeps it with an adapter that is stored. Returns its digest."""
        own_digest = own_text.digest
        with self._lock(fcntl.LOCK_SH), replacing(self._own_text_path(digest, own_digest), self._temporary) as file:
            file.write(own_text.encode())
        return own_digest

    def load_own_text(self, digest: str, own_digest: str) -> OwnText:
        """What has this digest of an adapter's. Raises AdapterCorrupt or StoreUnavailable."""
        try:
            return OwnText.decode(self._own_text_path(digest, own_digest).read_bytes(), own_digest)
        except (FileNotFoundError, ValueError) as error:
            if not self._is_there():
                raise StoreUnavailable("the store of adapters is not there; try again later") from error
            message = f"the chat template or the tokens of adapter {digest} are missing or damaged: upload it again"
            raise AdapterCorrupt(message) from error
        except OSError as error:
            raise _unavailable(error) from error

    def load_head(self, digest: str) -> ScoreHead:
        """The score head that an adapter has, in float32. Raises AdapterCorrupt or StoreUnavailable."""
        try:
            head = self._head(self._folder(digest), mapped=False)
        except (AdapterInvalid, ValueError) as error:
            raise AdapterCorrupt(f"the score head of adapter {digest} is damaged: {error}; upload it again") from error
        except OSError as error:
            raise _unavailable(error) from error
        if head is not None:
            return head.in_float32()
        if not self._is_there():
            raise StoreUnavailable("the store of adapters is not there; try again later")
        raise AdapterCorrupt(f"the score head of adapter {digest} is missing: upload it again")

    def load_packed(self, digest: str, layout: AdapterLayout) -> Tensor:
        """The adapter's pages `[num_pages, num_layers, slab]`, verified.

        Packs the adapter again if its packed file is missing or damaged. Raises AdapterCorrupt if that fails, too, and
        StoreUnavailable if the store cannot be read now, because the disk or the way to it fails.
        """
        path = self._packed_path(digest, layout)
        try:
            return read_packed(path, digest, layout)
        except (PackedFileDamaged, OSError) as error:
            is_missing = self._is_missing(digest, path, error)
        try:
            pages = pack(self.load_content(digest), layout)
        except AdapterInvalid as error:
            raise AdapterCorrupt(f"adapter {digest} does not fit: {error}") from error
        if is_missing:
            self._repacked.add(digest, path.name)
        try:
            with self._lock(fcntl.LOCK_SH), replacing(path, self._temporary) as file:
                write_packed(file, digest, layout, len(pages), [pages])
        except OSError as error:  # the pages are right nevertheless
            _LOG.warning("adapter %s could not be written again: %s", digest, error)
        return pages

    def load_part(self, digest: str, layout: AdapterLayout, part: PagesPart) -> Tensor:
        """Some of the pages, in as little memory. Parts are loaded in order: the first one verifies all pages.

        Packs the adapter again and raises as `load_packed`; if the adapter cannot be written, it raises
        StoreUnavailable.
        """
        path = self._packed_path(digest, layout)
        try:
            return read_packed_part(path, digest, layout, part)
        except (PackedFileDamaged, OSError) as error:
            is_missing = self._is_missing(digest, path, error)
        content = self.load_content(digest)
        try:
            with self._lock(fcntl.LOCK_SH), replacing(path, self._temporary) as file:
                num_pages = layout.num_pages(content.module_ranks)
                write_packed(file, digest, layout, num_pages, packed_chunks(content, layout))
            if is_missing:
                self._repacked.add(digest, path.name)
            return read_packed_part(path, digest, layout, part)
        except (AdapterInvalid, PackedFileDamaged) as error:
            raise AdapterCorrupt(f"adapter {digest} does not fit: {error}") from error
        except OSError as error:
            raise _unavailable(error) from error

    def packed_bytes(self, digest: str, layout: AdapterLayout) -> int:
        """The approximate bytes of the adapter's pages; 0: it is not packed, or they cannot be read now."""
        try:
            return self._packed_path(digest, layout).stat().st_size
        except OSError:
            return 0

    def load_content(self, digest: str, mapped: bool = False) -> AdapterContent:
        """The adapter as uploaded, verified by its digest. Raises AdapterCorrupt, or StoreUnavailable as above.

        `mapped`: as for `TensorFile`.
        """
        folder = self._folder(digest)
        try:
            manifest = parse_object((folder / _MANIFEST_FILE).read_bytes(), _MANIFEST_FILE)
            content = _content(TensorFile(folder / TENSORS_FILE, TENSORS_FILE, mapped), manifest)
            content = replace(content, head=self._head(folder, mapped=mapped))
            actual_digest = content.digest
        except FileNotFoundError as error:
            if not self._is_there():
                raise StoreUnavailable("the store of adapters is not there; try again later") from error
            raise AdapterCorrupt(f"adapter {digest} is not in the store: upload it again") from error
        except OSError as error:
            raise _unavailable(error) from error
        except (AdapterInvalid, KeyError, TypeError, ValueError) as error:
            raise AdapterCorrupt(f"adapter {digest} is damaged in the store: {error}; upload it again") from error
        if actual_digest != digest:
            raise AdapterCorrupt(
                f"adapter {digest} is damaged in the store: its digest is {actual_digest}; upload it again"
            )
        return content

    def digests(self) -> list[str]:
        """The digests of all adapters in the store, complete or not."""
        return sorted(digest for beginning in BEGINNINGS for digest in self._digests(beginning))

    def has(self, digest: str) -> bool:
        """Whether any of the adapter is on the disk."""
        return self._folder(digest).is_dir()

    def store_id(self) -> str:
        """A word that names this store, made by the first call."""
        path = self.root / _ID_FILE
        if not path.exists():
            with self._lock(fcntl.LOCK_EX):
                if not path.exists():
                    with replacing(path, self._temporary) as file:
                        file.write(secrets.token_hex(16).encode())
        return path.read_text()

    def sweep_some(self, beginning: str, referenced: Container[str], older_than_s: float) -> list[str]:
        """Removes adapters that no sweep has seen referenced for `older_than_s`, and returns their digests.

        Only of digests that begin so, which is one of BEGINNINGS. The first sweep that finds an adapter unreferenced
        only marks it, so that sequences still running on it, and uploads that are stored and not yet registered, have
        that long. A put takes the mark away.
        """
        removed = []
        for digest in self._digests(beginning):
            folder = self._folder(digest)
            mark = folder / _MARK_FILE
            is_referenced = digest in referenced
            if is_referenced and not mark.exists():
                continue  # nothing to change, and so no lock: it stops all uploads
            with self._lock(fcntl.LOCK_EX):
                if is_referenced:
                    mark.unlink(missing_ok=True)
                elif not mark.exists():
                    mark.touch()
                elif time.time() - mark.stat().st_mtime >= older_than_s:
                    shutil.rmtree(folder)
                    sync_folder(folder.parent)
                    removed.append(digest)
        return removed

    def keep_layouts(self, layouts: Sequence[AdapterLayout]) -> int:
        """Running gangs use these layouts: their files stay. To be called at least every few hours.

        Returns how many there are.
        """
        self._kept_layouts.keep([layout.key for layout in layouts])
        return len(layouts)

    def sweep_packed(self, beginning: str) -> int:
        """Removes packed files of layouts that are given up, see `KeptLayouts`, and returns how many.

        Of digests that begin so, as `sweep_some`. A file that was written lately stays: an application that records no
        layouts may use it. No lock: what is removed can be made again.
        """
        num_removed = 0
        given_up: dict[str, bool] = {}
        for digest in self._digests(beginning):
            for path in self._packed_files(digest):
                key = path.name.removesuffix(_PACKED_SUFFIX)
                if key not in given_up:
                    given_up[key] = self._kept_layouts.is_given_up(key)
                with suppress(FileNotFoundError):  # another sweep was faster
                    if given_up[key] and is_old(path):
                        path.unlink()
                        num_removed += 1
        return num_removed

    def sweep_unfinished(self) -> None:
        """Removes files that processes left unfinished when they died."""
        with self._lock(fcntl.LOCK_EX):  # no process writes now
            for path in self._temporary.iterdir():
                path.unlink()

    def _digests(self, beginning: str) -> list[str]:
        try:
            names = os.listdir(self.root / beginning)
        except FileNotFoundError:
            return []
        return sorted(name for name in names if _DIGEST.fullmatch(name))

    def _packed_files(self, digest: str) -> list[Path]:
        folder = self._folder(digest)
        with suppress(FileNotFoundError):
            return [folder / name for name in os.listdir(folder) if name.endswith(_PACKED_SUFFIX)]
        return []

    @staticmethod
    def _is_missing(digest: str, path: Path, error: PackedFileDamaged | OSError) -> bool:
        """Why a packed file has to be made again: it is missing, or damaged, which is logged.

        Raises StoreUnavailable for other errors.
        """
        if isinstance(error, FileNotFoundError):
            return True
        if isinstance(error, OSError) and not _is_damage(error):
            raise _unavailable(error) from error
        _LOG.warning("packing adapter %s again, because of its packed file %s: %s", digest, path.name, error)
        return False

    @staticmethod
    def _packs_by_expert(folder: Path) -> bool:
        """False: the adapter in the folder was stored when all experts were packed at one rank."""
        with suppress(FileNotFoundError, AdapterInvalid):  # there is none, or its manifest is damaged
            return _NUM_EXPERTS in parse_object((folder / _MANIFEST_FILE).read_bytes(), _MANIFEST_FILE)
        return True

    def _is_there(self) -> bool:
        """Whether this is the store, and not an empty folder where its file system is not mounted now."""
        try:
            return self._temporary.is_dir()
        except OSError as error:
            raise _unavailable(error) from error

    def _folder(self, digest: str) -> Path:
        if not _DIGEST.fullmatch(digest):
            raise AdapterCorrupt(f"{digest!r} is not a digest of 64 hexadecimal digits")
        return self.root / digest[:2] / digest

    @staticmethod
    def _head(folder: Path, *, mapped: bool) -> ScoreHead | None:
        """None: there is no such file. Raises AdapterInvalid, ValueError and OSError."""
        try:
            return stored_head(TensorFile(folder / _HEAD_FILE, _HEAD_FILE, mapped))
        except FileNotFoundError:
            return None

    def _own_text_path(self, digest: str, own_digest: str) -> Path:
        return self._folder(digest) / f"{own_digest}{_OWN_TEXT_SUFFIX}"

    def _packed_path(self, digest: str, layout: AdapterLayout) -> Path:
        return self._folder(digest) / _packed_name(layout)

    @contextmanager
    def _lock(self, kind: int) -> Iterator[None]:
        handle = os.open(self.root / "lock", os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(handle, kind)
            yield
        finally:
            os.close(handle)


def _packed_name(layout: AdapterLayout) -> str:
    return f"{layout.key}{_PACKED_SUFFIX}"


def _is_damage(error: OSError) -> bool:
    """Whether it is of this file: a bad sector gives EIO, and the source lies on others."""
    return isinstance(error, (IsADirectoryError, NotADirectoryError)) or error.errno == errno.EIO


def _unavailable(error: OSError) -> StoreUnavailable:
    """Names the problem and no path, since clients may read it."""
    return StoreUnavailable(f"the store of adapters cannot be read: {error.strerror or 'I/O error'}; try again later")


def _of_product(layer: int, module: str, product: ProductMatrices, names: Mapping[int, str]) -> dict[str, Any]:
    """What a manifest says of it. `names`: of its tensors in the file, by their `id`."""
    return {
        "layer": layer,
        "module": module,
        "kind": product.kind,
        "tensors": {key: names[id(tensor)] for key, tensor in product.tensors.items()},
        "sides": product.sides,
        "first_output": product.first_output,
        "scaling": product.scaling.hex(),
    }


def _content(file: TensorFile, manifest: dict[str, Any]) -> AdapterContent:
    matrices: dict[tuple[int, str], LoraMatrices | ProductMatrices] = {}
    shared = {name: file.tensor(name) for name in file.entries if name.startswith("product.")}
    for facts in manifest.get(_PRODUCTS, ()):
        matrices[facts["layer"], facts["module"]] = ProductMatrices(
            facts["kind"],
            {key: shared[name] for key, name in facts["tensors"].items()},
            num_in=facts["sides"][0],
            num_out=facts["sides"][1],
            scaling=float.fromhex(facts["scaling"]),
            first_output=facts["first_output"],
        )
    for name, scaling in manifest["scalings"].items():
        key = parse_tensor_name(name)
        if key is None:
            raise ValueError(f"{_MANIFEST_FILE} names {name!r}")
        layer, module, _ = key
        matrices[layer, module] = LoraMatrices(
            file.tensor(tensor_name(layer, module, "A")),
            file.tensor(tensor_name(layer, module, "B")),
            float.fromhex(scaling),
        )
    num_experts, invocation = int(manifest.get(_NUM_EXPERTS, 0)), tuple(manifest.get(_INVOCATION, ()))
    source, outputs = manifest.get(_OUTPUTS, ""), dict[tuple[int, str], OutputVectors]()
    for name in file.entries:
        match = _OUTPUTS_NAME.fullmatch(name)
        if match is not None:
            vectors = file.tensor(name)
            if f"{crc32(tensor_bytes(vectors)):08x}" != match["crc"]:
                raise ValueError(f"the checksum of {name!r} does not match")
            outputs[int(match["layer"]), match["module"]] = OutputVectors(*vectors)
    if len(outputs) != manifest.get(_NUM_OUTPUTS, 0):
        raise ValueError(f"{len(outputs)} modules have vectors of outputs, not {manifest.get(_NUM_OUTPUTS, 0)}")
    token_rows: dict[str, TokenRows] = {}
    for facts in manifest.get(_TOKEN_ROWS, ()):
        rows = TokenRows(np.array(read_ranges(facts["tokens"]), np.int64), file.tensor(facts["tensor"]))
        if len(rows.token_ids) != len(rows.rows) or not {*facts["ends"]} <= {*END_MODULES}:
            raise ValueError(f"{_MANIFEST_FILE} has other tokens than {facts['tensor']!r} has rows")
        token_rows |= dict.fromkeys(facts["ends"], rows)
    return AdapterContent(
        matrices,
        num_experts,
        invocation_token_ids=invocation,
        outputs=outputs,
        outputs_source=source,
        token_rows=token_rows,
    )
