"""HAProxy's directives for connections and requests at the front, before a router sees them.

Limits apply to each source (an address, for IPv6 its /64) and to each key. A connection has `HEADERS_TIMEOUT_S` for its
headers, and again for its body or as much of it as fits into a buffer; the router measures longer bodies, since it
knows what they are for.

A source may exceed its limit of connections while half of the front's are free, so that many clients behind one address
are not refused without need; after that its new connections are closed at once. Running requests of a source or a key
beyond their limits are refused with 429.

A request without a key gets a 401 here, without a router, and does not count as a running request of its source. Three
rates of a source are limited separately, so that they do not affect clients with a key at the same address: of requests
without a key, of requests to open routes, and of requests whose key routers did not accept. Keys that routers have
accepted recently pass even if the last rate is exceeded.

Behind a proxy all clients have the same address. For trusted proxies the source is the last address of X-Forwarded-For,
which they have added, and their connections are not counted.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...router.http.access_log import ID_PATTERN, REQUEST_ID_HEADER
from .edge_limits import EdgeLimits
from .error_answers import HAPROXYS, refusal_lines, refusal_table_lines, rewritten_error_lines

HEADERS_TIMEOUT_S = 10
CONNECTIONS, SOURCES, KEYS = "motet_connections", "motet_sources", "motet_keys"
KEYLESS, OPEN = "motet_keyless", "motet_open"  # sources of requests without a key, and to open routes
TABLE_SIZE = "100k"  # more than there can be connections, so that no entry in use is evicted
RATE_S = 10  # over which rates of requests are measured
UNKNOWN_RATE_S = 1  # the same for unknown keys, which cost a router a lookup: bursts of them must be small
# Paths that routers answer without a key (a test compares them), with or without a slash at the end, and Serve's own.
OPEN_ROUTES = ("/health", "/ready", "/openapi.json")
OPEN_PATHS = (*OPEN_ROUTES, *(f"{path}/" for path in OPEN_ROUTES), "/-/healthz", "/-/routes")
# API keys and tokens of identity providers alike: printable ASCII without spaces.
CREDENTIAL = "^bearer +[!-~]+$"
NETWORK_OF_SOURCE = "ipmask(32,64)"
_WITH_PORT = r"(([0-9]+\.[0-9.]+):[0-9]+|\[([0-9a-fA-F:.]+)\](:[0-9]+)?) *"  # and the same in brackets without one

# Headers that control Serve, and those by which a proxy gives its HTTP server the client's address. Serve treats
# "-" and "_" in their names alike.
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
TEXT_HEADERS = ("authorization", "x-api-key", "traceparent", "tracestate")  # read as text by Serve or a router
MAX_HEADERS_BYTES = 16 << 10
# How much HAProxy reads of a request before it applies rules. Larger than the limit of headers, because headers that do
# not fit are only reported as an invalid request.
BUFFER_BYTES = 32 << 10


def table_lines() -> list[str]:
    """Sections that hold the counts."""
    tables = {
        CONNECTIONS: "type ipv6 size {} expire 60s store conn_cur",
        SOURCES: f"type ipv6 size {{}} expire 60s store conn_cur,gpc(1),gpc_rate(1,{UNKNOWN_RATE_S}s)",
        KEYLESS: f"type ipv6 size {{}} expire 60s store http_req_rate({RATE_S}s)",
        OPEN: f"type ipv6 size {{}} expire 60s store http_req_rate({RATE_S}s)",
        KEYS: "type binary len 32 size {} expire 1h store conn_cur,gpt0",  # gpt0: 1 once a router has accepted it
    }
    lines = [
        line
        for name, kind in tables.items()
        for line in (f"backend {name}", f"    stick-table {kind.format(TABLE_SIZE)}")
    ]
    return [*lines, *refusal_table_lines()]


def front_lines(limits: EdgeLimits, max_connections: int, other_prefixes: Sequence[str] | None = None) -> list[str]:
    """Directives of the front, in the order in which they apply. `max_connections`: of the whole front.

    `other_prefixes`: of paths of Serve's other applications, whose keys are unknown; None: motet is not deployed.
    """
    lines = ["option disable-h2-upgrade"]  # HTTP/2 without TLS is not needed and would need limits of its own
    lines += _request_id_lines()
    proxies = limits.trusted_proxies.replace(",", " ")
    lines.append(f"acl motet_trusted {f'src {proxies}' if proxies else 'always_false'}")
    lines.append(f"acl motet_open path {' '.join(OPEN_PATHS)}")
    # A browser's preflight request has no key; a router answers it, since it knows the allowed origins.
    preflight = "METH_OPTIONS { req.hdr(origin) -m found } { req.hdr(access-control-request-method) -m found }"
    lines.append(f"http-request set-var(txn.motet_preflight) bool(true) if {preflight}")
    lines.append("acl motet_open var(txn.motet_preflight) -m bool")
    lines.append(f"acl motet_credential req.fhdr(authorization) -m reg -i '{CREDENTIAL}'")
    lines += [f"acl motet_elsewhere path_beg {prefix}/" for prefix in other_prefixes or ()]
    lines += [f"acl motet_elsewhere path {prefix}" for prefix in other_prefixes or ()]
    lines.append(f"acl motet_elsewhere {'always_true' if other_prefixes is None else 'always_false'}")
    lines += [*_source_lines(), *_connection_lines(limits, max_connections), *_header_lines(), *_api_key_lines()]
    # OPTIONS * asks for the methods of the server, not of a route.
    methods = "hdr Allow 'GET, POST, PUT, PATCH, DELETE'"
    lines.append(f"http-request return status 204 {methods} if METH_OPTIONS {{ url -m str * }}")
    lines += [*_count_lines(), *_rate_lines(limits), *_keyless_lines(), *_bound_lines(limits)]
    lines.append(f"http-request del-header '^({'|'.join(CONTROL_HEADERS)})$' -m reg")
    has_body = "METH_POST || METH_PUT || METH_DELETE || { method PATCH }"
    lines.append(f"http-request wait-for-body time {HEADERS_TIMEOUT_S}s if {has_body}")
    return [*lines, *_verdict_lines(), *rewritten_error_lines()]


def _source_lines() -> list[str]:
    forwarded = f"req.hdr_ip(x-forwarded-for,-1),{NETWORK_OF_SOURCE}"
    # Some proxies add the client's port: 1.2.3.4:5678, [fd00::1]:5678, which must be removed.
    return [
        f"http-request set-var(txn.motet_source) src,{NETWORK_OF_SOURCE} if !motet_trusted",
        f"http-request replace-header x-forwarded-for '^(.*[, ])?{_WITH_PORT}$' '\\1\\3\\4' if motet_trusted",
        f"http-request set-var(txn.motet_source) {forwarded} if motet_trusted",
    ]


def _connection_lines(limits: EdgeLimits, max_connections: int) -> list[str]:
    limit = limits.max_connections_per_source
    if not limit:
        return []
    return [
        f"tcp-request connection track-sc0 src,{NETWORK_OF_SOURCE} table {CONNECTIONS} unless motet_trusted",
        f"tcp-request connection reject if {{ sc0_conn_cur gt {limit} }} {{ fe_conn gt {max_connections // 2} }}",
    ]


def _request_id_lines() -> list[str]:
    """Every request has one id, which is also in its answer: the client's own if that is valid in headers and logs.

    Only answers to invalid HTTP have none, since there is no request.
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
    """Refuses headers that Serve cannot read, or would take for its own."""
    refused = "Headers that are read as text must be printable ASCII, and given only once."
    too_long = f"The headers have more than {MAX_HEADERS_BYTES >> 10} KiB together."
    lines = [f"acl motet_long req.hdrs,length gt {MAX_HEADERS_BYTES}"]
    for name in TEXT_HEADERS:
        lines.append(f"acl motet_odd req.fhdr({name}) -m reg '[^\\x20-\\x7e]'")
        lines.append(f"acl motet_odd req.fhdr_cnt({name}) gt 1")
    lines += refusal_lines("headers", 431, "headers_too_large", too_long, "motet_long")
    return [*lines, *refusal_lines("headers", 400, "invalid_header", refused, "motet_odd")]


def _api_key_lines() -> list[str]:
    """Copies the key from the header of Anthropic's clients to the Authorization header, which all other rules read."""
    condition = "!{ req.fhdr(authorization) -m found } { req.fhdr(x-api-key) -m reg '^[!-~]+$' } !motet_elsewhere"
    return [
        f"http-request set-header Authorization 'Bearer %[req.fhdr(x-api-key)]' if {condition}",
        "http-request del-header x-api-key if !motet_elsewhere",
    ]


def _count_lines() -> list[str]:
    """Each request counts in one of three tables, so that requests without a key do not limit those with one."""
    key = "req.fhdr(authorization),regsub('^.* ',''),sha2(256)"  # as a router reads it
    return [
        f"http-request set-var(txn.motet_key) {key} if motet_credential !motet_open",
        f"http-request track-sc1 var(txn.motet_source) table {OPEN} if motet_open",
        f"http-request track-sc1 var(txn.motet_source) table {KEYLESS} "
        "if !motet_credential !motet_elsewhere !motet_open",
        f"http-request track-sc1 var(txn.motet_source) table {SOURCES} if motet_credential !motet_open",
        f"http-request track-sc1 var(txn.motet_source) table {SOURCES} if motet_elsewhere !motet_open",
    ]


def _rate_lines(limits: EdgeLimits) -> list[str]:
    limit = limits.max_keyless_per_second
    if not limit:
        return []
    message = f"More than {limit} requests a second without a known key come from your address; send it again later."
    over = (
        f"{{ sc_http_req_rate(1) gt {limit * RATE_S} }}",
        f"{{ sc_gpc_rate(0,1) gt {limit * UNKNOWN_RATE_S} }} !{{ var(txn.motet_key),table_gpt0({KEYS}) gt 0 }}",
    )
    return [line for condition in over for line in refusal_lines("rate", 429, "too_many_requests", message, condition)]


def _keyless_lines() -> list[str]:
    return refusal_lines("keyless", 401, *HAPROXYS[401], "!motet_credential !motet_elsewhere !motet_open")


def _bound_lines(limits: EdgeLimits) -> list[str]:
    """Limits of running requests."""
    lines = []
    if limits.max_connections_per_source:
        limit = limits.max_connections_per_source
        message = f"More than {limit} requests from your address are running; send it again in a moment."
        lines += refusal_lines("source", 429, "too_many_requests", message, f"{{ sc_conn_cur(1) gt {limit} }}")
    lines.append(f"http-request track-sc2 var(txn.motet_key) table {KEYS} if {{ var(txn.motet_key) -m found }}")
    if limits.max_requests_per_key:
        limit = limits.max_requests_per_key
        message = f"More than {limit} requests with your key are running; send it again in a moment."
        lines += refusal_lines("key", 429, "too_many_requests", message, f"{{ sc_conn_cur(2) gt {limit} }}")
    return lines


def _verdict_lines() -> list[str]:
    """Notes from a router's answer whether the key is known."""
    return [
        "http-response sc-set-gpt0(2) 1 if { status 200:399 403 429 }",
        "http-response sc-set-gpt0(2) 0 if { status 401 }",  # it was deleted, or has expired
        "http-response sc-inc-gpc(0,1) if { status 401 404 405 } !{ sc_get_gpt0(2) gt 0 }",
    ]
