"""Strings that end a completion."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StopStrings:
    strings: tuple[str, ...] = ()

    def find(self, text: str) -> int | None:
        """Where the earliest of the strings starts in `text`."""
        starts = [start for string in self.strings if (start := text.find(string)) >= 0]
        return min(starts, default=None)

    def num_held(self, text: str) -> int:
        """Characters at the end of `text` that may be the start of a stop string, and must wait for what follows."""
        return max((_overlap(text, string) for string in self.strings), default=0)


def _overlap(text: str, string: str) -> int:
    """Length of the longest proper prefix of `string` that `text` ends with."""
    for length in range(min(len(string) - 1, len(text)), 0, -1):
        if text.endswith(string[:length]):
            return length
    return 0
