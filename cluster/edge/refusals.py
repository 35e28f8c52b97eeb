"""Why the edge refuses what no router sees, and how HAProxy counts it.

The counts are in a table of HAProxy with an entry for each reason; a variable of its process holds the last refusal.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from .error_answers import returned

TABLE: Final = "motet_refused"
LAST: Final = "proc.motet_refused"  # reason, source and request id
COUNTER: Final = 3  # of HAProxy's stick counters: the ones before count connections, sources and keys
REASONS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "keyless": "without a key, or with one of an invalid form",
        "rate": "more a second without a known key from one address than --max-keyless-per-second",
        "source": "more under way from one address than --max-connections-per-source",
        "key": "more under way with one key than --max-requests-per-key",
        "headers": "headers that are too long, or odd",
        "http": "no HTTP, or cut off or too slow before it was a request",
        "connection": "connections of one address that were closed at once",
    }
)


def refusal_lines(reason: str, status: int, code: str, message: str, condition: str) -> list[str]:
    """Directives that answer a request with this error, and count it, if the condition holds."""
    assert reason in REASONS, reason
    return [
        f"http-request track-sc{COUNTER} str({reason}) table {TABLE} if {condition}",
        f'http-request set-var-fmt({LAST}) "{reason} %[var(txn.motet_source)] %[var(txn.motet_id)]" if {condition}',
        f"http-request set-log-level silent if {condition}",  # a flood would be a flood of HAProxy's own log, too
        f"http-request return {returned(status, code, message)} if {condition}",
    ]


def refusal_table_lines() -> list[str]:
    return [f"backend {TABLE}", "    stick-table type string len 16 size 100 expire 20d store http_req_cnt"]
