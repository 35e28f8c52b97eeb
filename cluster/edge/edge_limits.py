"""What the edge lets in, as plain values that travel to where HAProxy is started."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass


@dataclass(frozen=True, kw_only=True)
class EdgeLimits:
    """Bounds of the front of one node. Defaults and bounds stand with motet's settings."""

    max_connections: int  # at once, however many sources there are
    max_connections_per_source: int  # 0: no bound; see `front_rules`
    max_requests_per_key: int  # under way at once; 0: no bound
    trusted_proxies: str  # networks whose X-Forwarded-For is believed, with commas between them

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> EdgeLimits:
        return cls(**json.loads(text))
