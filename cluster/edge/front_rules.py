"""What the front does with a connection and a request before a router sees them, as HAProxy's directives.

Each client that can be identified is bounded: a source (an address, for IPv6 its /64) and a key. A connection has
`HEADERS_TIMEOUT_S` for its headers and again for its body, or as much of that as fits into a buffer: what is longer is
the router's to measure, who knows what it is for.

A source may hold more than its share of connections as long as half of the front is free, so that many clients behind
one address are not refused for nothing; then its next ones are closed at once. Requests under way, of a source or a
key, are refused with 429 beyond their bound. The routes of liveness are never refused.

Behind a proxy all sources look alike. Of those that are trusted the last address of X-Forwarded-For, which they have
added, is the source, and their connections are not counted.
"""

from __future__ import annotations

from ...router.access.request_id import ID_PATTERN, REQUEST_ID_HEADER
from .edge_limits import EdgeLimits
from .error_answers import returned, rewritten_error_lines

HEADERS_TIMEOUT_S = 10
CONNECTIONS, SOURCES, KEYS = "motet_connections", "motet_sources", "motet_keys"
TABLE_SIZE = "100k"  # more than there can be connections, so that none that is counted makes way for another
OPEN_PATHS = ("/health", "/ready", "/-/healthz")
NETWORK_OF_SOURCE = "ipmask(32,64)"

# Headers by which Serve lets a caller steer it, and those by which its HTTP server learns from a proxy who the client
# is. In their names Serve takes "-" for "_".
CONTROL_HEADERS = (
    "serve[-_]multiplexed[-_]model[-_]id",
    "x[-_]session[-_]id",
    "x-serve-.*",
    "x-request-timeout-seconds",
    "x-request-disconnect-disabled",
    "x-forwarded-.*",
    "forwarded",
    "proxy",
)
TEXT_HEADERS = ("authorization", "traceparent", "tracestate")  # read as text by Serve or a router
MAX_HEADERS_BYTES = 16 << 10
# What HAProxy reads of a request before it looks at it. It is more than headers may have, because of what does not fit
# it says no more than that it is not valid.
BUFFER_BYTES = 32 << 10


def table_lines() -> list[str]:
    """Sections that hold the counts."""
    return [
        line
        for name, kind in ((CONNECTIONS, "ipv6"), (SOURCES, "ipv6"), (KEYS, "binary len 32"))
        for line in (f"backend {name}", f"    stick-table type {kind} size {TABLE_SIZE} expire 60s store conn_cur")
    ]


def front_lines(limits: EdgeLimits, max_connections: int) -> list[str]:
    """Directives of the front, in the order in which they act. `max_connections`: what the machine lets it have."""
    lines = ["option disable-h2-upgrade"]  # HTTP/2 without TLS is not needed and would need limits of its own
    lines += _request_id_lines()
    proxies = limits.trusted_proxies.replace(",", " ")
    lines.append(f"acl motet_trusted {f'src {proxies}' if proxies else 'always_false'}")
    lines.append(f"acl motet_open path {' '.join(OPEN_PATHS)}")
    lines += [*_connection_lines(limits, max_connections), *_header_lines(), *_request_lines(limits)]
    has_body = "METH_POST || METH_PUT || METH_DELETE || { method PATCH }"
    lines.append(f"http-request wait-for-body time {HEADERS_TIMEOUT_S}s if {has_body}")
    return [*lines, *rewritten_error_lines()]


def _connection_lines(limits: EdgeLimits, max_connections: int) -> list[str]:
    most = limits.max_connections_per_source
    if not most:
        return []
    return [
        f"tcp-request connection track-sc0 src,{NETWORK_OF_SOURCE} table {CONNECTIONS} unless motet_trusted",
        f"tcp-request connection reject if {{ sc0_conn_cur gt {most} }} {{ fe_conn gt {max_connections // 2} }}",
    ]


def _request_id_lines() -> list[str]:
    """Every request has one id, which is also in its answer: the client's own if that is valid in headers and logs.

    Only to what is no HTTP, for which there is no request yet, HAProxy's answer has none.
    """
    request_id = "var(txn.motet_id)"
    return [
        f"acl motet_id_given req.fhdr_cnt({REQUEST_ID_HEADER}) eq 1",
        f"acl motet_id_good req.fhdr({REQUEST_ID_HEADER}) -m reg '^{ID_PATTERN}$'",
        "http-request set-var(txn.motet_id) uuid",
        f"http-request set-var(txn.motet_id) req.fhdr({REQUEST_ID_HEADER}) if motet_id_given motet_id_good",
        f"http-request set-header {REQUEST_ID_HEADER} %[{request_id}]",
        f"http-after-response set-header {REQUEST_ID_HEADER} %[{request_id}] if {{ {request_id} -m found }}",
    ]


def _header_lines() -> list[str]:
    """Nothing gets in that Serve would stumble over or take for its own."""
    refused = returned(400, "invalid_header", "Headers that are read as text are printable ASCII, each given once.")
    too_long = f"The headers have more than {MAX_HEADERS_BYTES >> 10} KiB together."
    lines = [
        f"http-request return {returned(431, 'headers_too_large', too_long)} "
        f"if {{ req.hdrs,length gt {MAX_HEADERS_BYTES} }}"
    ]
    for name in TEXT_HEADERS:
        lines.append(f"acl motet_odd req.fhdr({name}) -m reg '[^\\x20-\\x7e]'")
        lines.append(f"acl motet_odd req.fhdr_cnt({name}) gt 1")
    return [*lines, f"http-request return {refused} if motet_odd"]


def _request_lines(limits: EdgeLimits) -> list[str]:
    lines = []
    if limits.max_connections_per_source:
        most = limits.max_connections_per_source
        message = f"More than {most} requests of your address are under way; send it again in a moment."
        forwarded = f"req.hdr_ip(x-forwarded-for,-1),{NETWORK_OF_SOURCE}"
        lines += [
            f"http-request track-sc1 src,{NETWORK_OF_SOURCE} table {SOURCES} if !motet_open !motet_trusted",
            f"http-request track-sc1 {forwarded} table {SOURCES} if !motet_open motet_trusted",
            f"http-request return {returned(429, 'too_many_requests', message)} if {{ sc1_conn_cur gt {most} }}",
        ]
    if limits.max_requests_per_key:
        most = limits.max_requests_per_key
        message = f"More than {most} requests of your key are under way; send it again in a moment."
        key = "req.fhdr(authorization),regsub('^.* ',''),sha2(256)"  # what a router takes for it
        lines += [
            f"http-request track-sc2 {key} table {KEYS} if !motet_open {{ req.fhdr(authorization) -m found }}",
            f"http-request return {returned(429, 'too_many_requests', message)} if {{ sc2_conn_cur gt {most} }}",
        ]
    return [*lines, f"http-request del-header '^({'|'.join(CONTROL_HEADERS)})$' -m reg"]
