"""Files of traces for tests of planning."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgspec

from motet.workers.costs.replay import TracedRequest


def write_trace(path: Path, requests: Iterable[TracedRequest]) -> None:
    path.write_bytes(b"".join(msgspec.json.encode(request) + b"\n" for request in requests))
