"""Ranges of a checkpoint's files, read into memory of the host."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from .stored_tensor import StoredTensor

# One thread reads neither a fast disk nor a network's storage at full speed, nor copies as fast as a GPU takes in.
_NUM_READERS = 4
_LEAST_BYTES = 4 << 20  # for which it is worth to wake another thread


class FileRanges:
    """Files stay open from their first read on, until `close`."""

    def __init__(self) -> None:
        self._descriptors: dict[Path, int] = {}
        self._readers = ThreadPoolExecutor(_NUM_READERS, thread_name_prefix="weight-reader")

    def read(self, tensor: StoredTensor, start: int, target: memoryview) -> None:
        """Fills `target` with the tensor's bytes from its byte `start` on; several threads read at once.

        Raises ValueError if the file ends before, or cannot be read.
        """
        num_bytes = len(target)
        part_bytes = max(-(-num_bytes // _NUM_READERS), _LEAST_BYTES)
        parts = [(start + at, target[at : at + part_bytes]) for at in range(0, num_bytes, part_bytes)]
        try:
            descriptor = self._descriptor(tensor.path)
            if len(parts) == 1:
                self._read_part(descriptor, tensor, *parts[0])
            else:
                under_way = [self._readers.submit(self._read_part, descriptor, tensor, *part) for part in parts]
                problems = [each.exception() for each in under_way]  # all have ended, whatever comes next
                for problem in problems:
                    if problem is not None:
                        raise problem
        except OSError as error:
            raise ValueError(f"{tensor.path}: tensor {tensor.name!r} cannot be read: {error}") from error

    def close(self) -> None:
        self._readers.shutdown()
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()

    def _descriptor(self, path: Path) -> int:
        if path not in self._descriptors:
            self._descriptors[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        return self._descriptors[path]

    @staticmethod
    def _read_part(descriptor: int, tensor: StoredTensor, start: int, target: memoryview) -> None:
        num_read = 0
        while num_read < len(target):
            at = tensor.start + start + num_read
            more = os.preadv(descriptor, [target[num_read:]], at)
            if more == 0:
                raise ValueError(
                    f"{tensor.path} ends at byte {at} or before, and tensor {tensor.name!r} lies at bytes "
                    f"{tensor.start} to {tensor.start + tensor.num_bytes}: the file was cut short while it was read"
                )
            num_read += more
