"""The process that validates, packs and stores uploads: `python -m motet.adapters.upload_process`.

To parse a header or a config, to hash and to pack hold the interpreter's lock, in a thread too, and every stream of the
router with it. Here they delay no request: the process is niced, and bounded in memory and, for each upload, in CPU. It
answers one question after the other and ends with its standard input.
"""

from __future__ import annotations

import errno
import gc
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import IO, Final, Literal

import msgspec
from msgspec import structs

from .adapter import EMBEDDING, OUTER, BaseTensor
from .errors import AdapterCorrupt, AdapterInvalid, StoreUnavailable, UploadTooLarge
from .format.base_weights import BaseWeights
from .format.combination import Combination, combine
from .format.content import AdapterContent
from .format.peft import named_base
from .format.validation import validate
from .packing.layout import AdapterLayout, packed_bytes
from .processes.child_processes import (
    LAST,
    NOT_LAST,
    bound_cpu,
    bound_memory,
    extend_cpu,
    read_frames,
    resident_bytes,
    write_frames,
    yield_to_others,
)
from .store.store import AdapterStore

NICENESS: Final = 10  # uploads yield to all other work, large bodies included
MOST_BYTES: Final = 768 << 20  # of memory, beside the upload's own file, which is mapped
MOST_RESIDENT_BYTES: Final = 256 << 20  # a process that has grown beyond ends, and the router starts another

CPU_S_PER_BASE_GIB: Final = 15.0  # of the base's weights that an adapter depends on

CHECK: Final = b"check"  # the first frame of a question; then follow a `Check` and the config
COMBINE: Final = b"combine"  # stored adapters: then follow a `Check` and a `Combination`
STORE: Final = b"store"  # what was checked
FORGET: Final = b"forget"  # it: until then the process holds its file


class Check(msgspec.Struct, frozen=True, kw_only=True):
    tensors: str  # path of the file, or of an empty one for those of a combination
    store: str  # path of the folder
    layouts: tuple[AdapterLayout, ...]  # of one base
    max_packed_bytes: int
    cpu_s: float  # that the check and what follows may take
    base: dict[str, BaseTensor]  # see `BaseWeights`
    own_token_ids: tuple[int, ...] = ()  # of tokens that the base's tokenizer has not


class UploadFacts(msgspec.Struct, frozen=True, tag=True):
    """What was checked, or stored."""

    digest: str
    module_ranks: dict[str, int]
    num_bytes: int
    base: str = ""  # that the config names; not of what was stored
    # As in `AdapterContent`; not of what was stored.
    invocation_token_ids: tuple[int, ...] = ()
    num_labels: int = 0  # see `AdapterVersion`
    left_out: str = ""
    unknown_field: str = ""
    warnings: tuple[str, ...] = ()
    untrained_token_ids: tuple[int, ...] = ()  # of `Check.own_token_ids`: their embedding is the base's


class UploadRefused(msgspec.Struct, frozen=True, tag=True):
    kind: Literal["invalid", "too_large", "disk", "unavailable"]
    message: str
    errno: int = 0  # of "disk"


Answer = UploadFacts | UploadRefused | None


class Workbench:
    """Holds one upload from its check until it is stored or forgotten."""

    def __init__(self) -> None:
        self._upload: tuple[AdapterContent, Check] | None = None
        self.is_worn = False  # it has once lacked memory

    @property
    def is_empty(self) -> bool:
        return self._upload is None

    def answer(self, frames: list[bytes]) -> Answer:
        kind, *arguments = frames
        try:
            if kind == CHECK:
                return self._check(msgspec.msgpack.decode(arguments[0], type=Check), arguments[1])
            if kind == COMBINE:
                check, combination = arguments
                return self._combine(
                    msgspec.msgpack.decode(check, type=Check), msgspec.msgpack.decode(combination, type=Combination)
                )
            if kind == STORE:
                return self._store()
            self._upload = None
            return None
        except (AdapterInvalid, AdapterCorrupt) as error:
            return UploadRefused("invalid", str(error))
        except StoreUnavailable as error:
            return UploadRefused("unavailable", str(error))
        except UploadTooLarge as error:
            return UploadRefused("too_large", str(error))
        except OSError as error:
            return UploadRefused("disk", error.strerror or str(error), error.errno or errno.EIO)
        except MemoryError:
            self.is_worn = True
            return UploadRefused("too_large", f"this adapter takes more than {MOST_BYTES >> 20} MiB of memory to check")

    def _check(self, check: Check, config: bytes) -> UploadFacts:
        self._upload = None
        bound_cpu(check.cpu_s)
        # What of the base has to be read is as large as the base, whatever the upload.
        base = BaseWeights(check.base, lambda num_bytes: extend_cpu(CPU_S_PER_BASE_GIB * num_bytes / (1 << 30)))
        checked = partial(_check_ranks, check)
        shape, store = check.layouts[0].shape, Path(check.store)
        content = validate(config, Path(check.tensors), shape, checked, base, scratch=store)
        facts = structs.replace(
            _facts_of(content),
            base=named_base(config),
            invocation_token_ids=content.invocation_token_ids,
            num_labels=0 if content.head is None else content.head.num_labels,
            left_out=content.left_out,
            unknown_field=content.unknown_field,
            warnings=content.warnings,
            untrained_token_ids=_untrained(check.own_token_ids, content),
        )
        self._upload = content, check
        return facts

    def _combine(self, check: Check, combination: Combination) -> UploadFacts:
        self._upload = None
        bound_cpu(check.cpu_s)
        store = AdapterStore(Path(check.store))
        # Mapped, parts take no memory: a disk that fails ends this process, and no router.
        parts = [store.load_content(part.digest, mapped=True) for part in combination.parts]
        with open(check.tensors, "w+b") as file:
            content = combine(parts, combination, file, partial(_check_ranks, check))
        self._upload = content, check
        facts = _facts_of(content)
        return structs.replace(facts, base=combination.base, invocation_token_ids=content.invocation_token_ids)

    def _store(self) -> UploadFacts:
        assert self._upload is not None
        (content, check), self._upload = self._upload, None
        return _facts_of(AdapterStore(Path(check.store)).put(content, check.layouts))


def _check_ranks(check: Check, module_ranks: Mapping[str, int]) -> None:
    num_bytes = packed_bytes(check.layouts, module_ranks)
    if num_bytes > check.max_packed_bytes:
        raise UploadTooLarge(
            f"this adapter takes {num_bytes} bytes in memory ({check.layouts[0].num_pages(module_ranks)} pages), where "
            f"each module has its largest rank in all layers: at most {check.max_packed_bytes} are accepted"
        )


def _untrained(token_ids: Sequence[int], content: AdapterContent) -> tuple[int, ...]:
    """Those of the tokens whose embedding is the base's."""
    if (OUTER, EMBEDDING) in content.matrices:
        return ()
    rows = content.token_rows.get(EMBEDDING)
    trained = frozenset(() if rows is None else rows.token_ids.tolist())
    return tuple(token_id for token_id in token_ids if token_id not in trained)


def _facts_of(content: AdapterContent) -> UploadFacts:
    return UploadFacts(content.digest, content.module_ranks, content.num_bytes)


def main(source: IO[bytes], sink: IO[bytes]) -> None:
    yield_to_others(NICENESS)
    bound_memory(MOST_BYTES)
    gc.disable()  # an upload is mostly dictionaries, through which searches go again and again
    gc.freeze()  # what was imported
    bench = Workbench()
    while frames := read_frames(source):
        answer = bench.answer(frames)
        del frames
        if bench.is_empty:
            gc.collect()
        is_last = bench.is_empty and (bench.is_worn or resident_bytes() > MOST_RESIDENT_BYTES)
        write_frames(sink, [LAST if is_last else NOT_LAST, msgspec.msgpack.encode(answer)])
        if is_last:
            return


if __name__ == "__main__":
    main(sys.stdin.buffer, sys.stdout.buffer)
