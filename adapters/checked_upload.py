"""Uploads that are checked, and then stored, by a process beside this one."""

from __future__ import annotations

import logging
import signal
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Final

import msgspec

from .errors import AdapterInvalid, UploadTooLarge, UploadUnchecked
from .packing.layout import AdapterLayout
from .processes.child_processes import ChildEnded, ChildProcess, ChildProcesses
from .upload_process import CHECK, FORGET, STORE, Answer, Check, Found, Refused

_MODULE: Final = "motet.adapters.upload_process"
CPU_S: Final = 20.0  # for an upload of no size
CPU_S_PER_GIB: Final = 60.0  # of tensors
_DEADLINE_S: Final = 900.0  # to check or to store one: its process has the lowest priority
_log = logging.getLogger(__name__)


class UploadProcesses:
    """At most `most` uploads at once. Belongs to one event loop."""

    def __init__(self, most: int, store: Path, layouts: Sequence[AdapterLayout]) -> None:
        """`layouts`: for which adapters are packed."""
        self._processes = ChildProcesses(_MODULE, most, _DEADLINE_S)
        self._store, self._layouts = store, tuple(layouts)

    @asynccontextmanager
    async def checked(
        self, config: bytes, tensors: Path, num_bytes: int, max_packed_bytes: int
    ) -> AsyncIterator[CheckedUpload]:
        """The upload, if it is an adapter of the base. `num_bytes`: of the file `tensors`.

        Raises AdapterInvalid, UploadTooLarge, UploadUnchecked, and OSError if the disk fails.
        """
        cpu_s = CPU_S + CPU_S_PER_GIB * num_bytes / (1 << 30)
        check = Check(
            tensors=str(tensors),
            store=str(self._store),
            layouts=self._layouts,
            max_packed_bytes=max_packed_bytes,
            cpu_s=cpu_s,
        )
        async with self._processes.process() as process:
            found = await _ask(process, cpu_s, CHECK, msgspec.msgpack.encode(check), config)
            upload = CheckedUpload(process, cpu_s, found)
            try:
                yield upload
            finally:
                await upload.forget()


class CheckedUpload:
    """`module_ranks`, `base`: as in `AdapterVersion`. `num_bytes`: of its tensors."""

    def __init__(self, process: ChildProcess, cpu_s: float, found: Found) -> None:
        self.digest, self.num_bytes, self.base = found.digest, found.num_bytes, found.base
        self.module_ranks: Mapping[str, int] = found.module_ranks
        self._process, self._cpu_s = process, cpu_s
        self._is_held = True

    async def store(self) -> None:
        """Stores it, once. Its ranks are then those of an earlier upload of the same digest, if there was one.

        Raises as `UploadProcesses.checked`.
        """
        self._is_held = False
        self.module_ranks = (await _ask(self._process, self._cpu_s, STORE)).module_ranks

    async def forget(self) -> None:
        """Has the process close the upload's file, if that is still open."""
        if self._is_held and not self._process.is_last:
            self._is_held = False
            with suppress(ChildEnded, OSError, TimeoutError):  # then the process has ended, which closes it, too
                await self._process.ask([FORGET], lambda frames: None)


async def _ask(process: ChildProcess, cpu_s: float, *frames: bytes) -> Found:
    try:
        answer = await process.ask(frames, lambda found: msgspec.msgpack.decode(found[0], type=Answer))
    except ChildEnded as error:
        if error.status == -signal.SIGPROF:
            raise AdapterInvalid(f"this adapter takes more than {cpu_s:.0f} s of CPU to check or to pack") from error
        _log.warning("an upload could not be checked: %s", error)
        raise UploadUnchecked("the process that checks uploads has ended: try again") from error
    except TimeoutError as error:
        _log.warning("an upload could not be checked within %g s", _DEADLINE_S)
        raise UploadUnchecked("the machine is too busy to check this upload: try again later") from error
    if isinstance(answer, Found):
        return answer
    assert isinstance(answer, Refused)
    if answer.kind == "disk":
        raise OSError(answer.errno, answer.message)
    raise (AdapterInvalid if answer.kind == "invalid" else UploadTooLarge)(answer.message)
