"""The pages of several processes as one page in Prometheus' text format."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

_HELP: Final = b"# HELP "


def merged_pages(pages: Iterable[bytes]) -> bytes:
    """Every series of the pages, those of one metric together, as the format wants it.

    Help and type are those of the first page that has the metric. `pages`: as prometheus_client writes them, and no two
    have a series in common.
    """
    heads: dict[bytes, list[bytes]] = {}
    samples: dict[bytes, list[bytes]] = {}
    for page in pages:
        into: list[bytes] = []
        for line in page.splitlines(keepends=True):
            if line.startswith(_HELP):
                name = line.split(b" ", 3)[2]
                into = samples.setdefault(name, [])
                head = [] if name in heads else heads.setdefault(name, [])
                head.append(line)
            elif line.startswith(b"#"):
                head.append(line)
            else:
                into.append(line)
    return b"".join(line for name, head in heads.items() for line in (*head, *samples[name]))
