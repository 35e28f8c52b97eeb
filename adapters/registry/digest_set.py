"""A set of digests that takes eight bytes for each, so that a sweep can hold those of a million adapters."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

DIGITS = 16  # hexadecimal, of each digest; two adapters that share them are taken for one


class DigestSet:
    """`digest in set` is never wrong about a member; two of a million others are mixed up once in 10^7 such sets."""

    def __init__(self, pages: Iterable[str]) -> None:
        """Each page: the first DIGITS digits of some digests, joined."""
        beginnings = np.frombuffer(b"".join(bytes.fromhex(page) for page in pages), ">u8")
        self._beginnings = np.unique(beginnings.astype(np.uint64))

    def __contains__(self, digest: object) -> bool:
        assert isinstance(digest, str)
        beginning = np.uint64(int(digest[:DIGITS], 16))
        place = int(np.searchsorted(self._beginnings, beginning))
        return place < len(self._beginnings) and self._beginnings[place] == beginning

    def __len__(self) -> int:
        return len(self._beginnings)
