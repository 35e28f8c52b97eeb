"""Serve's configuration of HAProxy, with motet's edge put in.

Serve writes that configuration from a template and offers no other place to change it. Each edit finds its place by the
section and the directive, and one that does not find it is an error: HAProxy then does not start, rather than start
without what guards it.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from ...router.http.access_log import ID_PATTERN, REQUEST_ID_HEADER
from .error_answers import (
    COUNTER,
    HAPROXYS,
    error_file_lines,
    refusal_lines,
    refusal_table_lines,
    returned,
    rewritten_error_lines,
)

# What the edge lets in, as plain values that travel to where HAProxy is started.


@dataclass(frozen=True, kw_only=True)
class EdgeLimits:
    """Bounds of the front of one node. Defaults and bounds stand with motet's settings."""

    max_connections: int  # at once, however many sources there are
    max_connections_per_source: int  # 0: no bound; see `front_rules`
    max_requests_per_key: int  # under way at once; 0: no bound
    max_keyless_per_second: int  # requests of one source without a known key; 0: no bound
    trusted_proxies: str  # networks whose X-Forwarded-For is believed, with commas between them

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> EdgeLimits:
        return cls(**json.loads(text))


def limits_of_environment(environ: Mapping[str, str] = os.environ) -> EdgeLimits:
    """The limits that the variables of their settings say; the settings' defaults where they do not.

    Raises ConfigError for a value that the setting does not accept.
    """
    from ..settings.setting_field import fields_of  # not loaded where the limits are given
    from ..settings.settings import Settings

    names = {field.name for field in fields(EdgeLimits)}
    settings = [field for field in fields_of(Settings) if field.name in names]
    return EdgeLimits(
        **{
            setting.name: setting.converted(environ[setting.mark.env])
            if environ.get(setting.mark.env)
            else setting.default
            for setting in settings
        }
    )


# HAProxy's directives for connections and requests at the front, before a router sees them.
#
# Limits apply to each source (an address, for IPv6 its /64) and to each key. A connection has `HEADERS_TIMEOUT_S` for
# its headers, and again for its body or as much of it as fits into a buffer; the router measures longer bodies, since
# it knows what they are for.
#
# A source may exceed its limit of connections while half of the front's are free, so that many clients behind one
# address are not refused without need; after that its new connections are closed at once. Running requests of a source
# or a key beyond their limits are refused with 429.
#
# A request without a key gets a 401 here, without a router, and does not count as a running request of its source.
# Three rates of a source are limited separately, so that they do not affect clients with a key at the same address: of
# requests without a key, of requests to open routes, and of requests whose key routers did not accept. Keys that
# routers have accepted recently pass even if the last rate is exceeded.
#
# Behind a proxy all clients have the same address. For trusted proxies the source is the last address of X-Forwarded-
# For, which they have added, and their connections are not counted.

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
BASIC = "^basic +[!-~]+$"  # a key as the password of a URL
BROWSERS_HEADERS = ("origin", "sec-fetch-site")  # as a router has them (a test compares them)
NO_BROWSERS_PASSWORD = "A browser must send your API key in the header Authorization: Bearer YOUR_KEY."
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
    """Makes a bearer of the key in the header of Anthropic's clients, or in a password: all other rules read that."""
    condition = "!{ req.fhdr(authorization) -m found } { req.fhdr(x-api-key) -m reg '^[!-~]+$' } !motet_elsewhere"
    password = "motet_basic !motet_browser { http_auth_pass -m reg '^[!-~]+$' } !motet_elsewhere"
    return [
        f"acl motet_basic req.fhdr(authorization) -m reg -i '{BASIC}'",
        *(f"acl motet_browser req.hdr({name}) -m found" for name in BROWSERS_HEADERS),
        f"http-request set-header Authorization 'Bearer %[http_auth_pass]' if {password}",
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
    keyless = "!motet_credential !motet_elsewhere !motet_open"
    by_browser = refusal_lines(
        "keyless", 401, "invalid_api_key", NO_BROWSERS_PASSWORD, f"motet_basic motet_browser {keyless}"
    )
    return [*by_browser, *refusal_lines("keyless", 401, *HAPROXYS[401], keyless)]


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


# Clients that close their side of a connection once they have sent their request, and wait for the answer.
#
# To HAProxy they look like clients that have left, until something is written to them. `option abortonclose` takes
# both for gone, so that a client that leaves costs nothing; without it both are waited for. Clients that half-close
# speak HTTP/1.0, where a connection has one request; so HTTP/1.0 goes to a second backend without the option. Who has
# left there is noticed when the next part of the answer is written. (Of `Connection: close` in HTTP/1.1 HAProxy's
# rules do not see anything.)

ABORT = "option abortonclose"
IF_LAST = "{ req.ver 1.0 }"
# Of the second backend's name: the requests of backends that are named so count as Serve's in its own drains.
SUFFIX = "-via-ingress-request-router"


def second_backends(names: Sequence[str]) -> list[str]:
    """The backends that get a second one: those whose second name is free."""
    return [name for name in names if not name.endswith(SUFFIX) and f"{name}{SUFFIX}" not in names]


def second_backend(name: str, body: Sequence[str]) -> list[str]:
    """The section of a backend's second one. The first one checks the servers of both."""
    checks = r" *(option httpchk\b|http-check |default-server )"
    other_lines = [line for line in body if not re.match(checks, line)]
    tracking = [
        re.sub(r"^( *server (\S+) \S+) check\b.*?( backup)?$", rf"\1 track {name}/\2\3", line) for line in other_lines
    ]
    return [f"backend {name}{SUFFIX}", f"    no {ABORT}", *tracking]


def with_second_backends(front: Sequence[str], names: Sequence[str]) -> list[str]:
    """The front's lines, where requests in HTTP/1.0 go to the second ones of these backends."""
    lines: list[str] = []
    for line in front:
        match = re.match(r"( *)use_backend (\S+) if (.*)$", line)
        if match and match[2] in names:
            lines.append(f"{match[1]}use_backend {match[2]}{SUFFIX} if {IF_LAST} {match[3]}")
        lines.append(line)
    return lines


LOOPBACK = "127.0.0.1"
SECTION = re.compile(r"^(global|defaults|frontend|backend|listen)\b")
FRONT, STATISTICS, EXPORTER = "frontend http_frontend", "listen stats", "frontend prometheus"
# A client that does not go on sending its body, or does not read its answer. One that waits for an answer, or for more
# of a stream, does nothing wrong, and HAProxy does not count that time.
CLIENT_TIMEOUT_S = 60
NO_APPLICATION = (503, "no_router", "No router is there yet; send it again in a moment.")
ONLY_FALLBACK = (503, "not_ready", "No router can be reached now; send it again in a moment.")
# Paths that say how a motet is, which is answered at once: Serve's own proxy would hold them until there is a router.
NOT_WAITED_FOR = ("/ready", "/ready/", "/health", "/status", "/metrics", "/metrics/targets", "/v1/models")
MAX_FALLBACK_BYTES = 64 << 10  # of a body that Serve's own proxy may hold


class TemplateChanged(Exception):  # noqa: N818
    """Serve's configuration is not the one that the edits were made for; the message says what was not found."""


def edge_config(
    serves: str, limits: EdgeLimits, max_connections: int, *, error_files: Path, front_host: str | None
) -> str:
    """`serves`, changed for the reasons that stand beside each edit. Raises TemplateChanged.

    `max_connections`: that the machine has room for. `error_files`: the folder of `write_error_files`. `front_host`:
    where the front listens; None: where Serve says.
    """
    head, sections = _sections(serves)
    single_sections = {"global", "defaults", FRONT, STATISTICS, EXPORTER}
    names = [section[0].rstrip() for section in sections]
    for name in names:
        if name not in single_sections and not name.startswith("backend "):
            raise TemplateChanged(f"there is a section without limits: {name}")
    if missing := {name for name in single_sections if names.count(name) != 1}:
        raise TemplateChanged(f"these sections are not there once: {', '.join(sorted(missing))}")
    if "backend default_backend" not in names:
        raise TemplateChanged("there is no default_backend")
    applications = _applications(sections[names.index(FRONT)])
    prefixes = [prefix for prefix in applications if prefix != "/"] if "/" in applications else None
    front = front_lines(limits, max_connections, prefixes)
    edited = [_edited(section, front, max_connections, error_files, front_host) for section in sections]
    for section in edited:
        if section[0].rstrip() == f"backend {applications.get('/')}":
            section[1:1] = _indented(_without_router(applications["/"], section))
    routed = [name.removeprefix("backend ") for name in names if name.startswith("backend ")]
    doubled = second_backends([name for name in routed if name != "default_backend"])
    for section in [*edited]:
        header = section[0].rstrip()
        if header == FRONT:
            section[1:] = with_second_backends(section[1:], doubled)
        elif header.removeprefix("backend ") in doubled:
            edited.append(second_backend(header.removeprefix("backend "), section[1:]))
    return "\n".join([*head, *(line for section in edited for line in section), *table_lines()]) + "\n"


def _edited(
    section: list[str], front: list[str], max_connections: int, error_files: Path, front_host: str | None
) -> list[str]:
    name, *body = section
    match name.rstrip():
        case "global":
            # A process that may write to the socket may change everything.
            body = _replaced(name, body, r"( *stats socket .*) mode 666\b", lambda hit: f"{hit[1]} mode 600")
            body = _replaced(name, body, r"( *)tune.bufsize \d+$", lambda hit: f"{hit[1]}tune.bufsize {BUFFER_BYTES}")
            body = _replaced(name, body, r"( *)maxconn \d+$", lambda hit: f"{hit[1]}maxconn {max_connections}")
            body = [*_indented([f"tune.stick-counters {COUNTER + 1}"]), *body]
        case "defaults":
            # Spliced requests hide from HAProxy 2.8 that a client has left before its answer begins, when body and
            # headers came in two packets. Serve's error files turn 502 to 504 into 500, which clients do not take for
            # something that passes.
            body = [line for line in body if not re.match(r" *(option splice-|errorfile |timeout http-request )", line)]
            _expect_one(name, body, r" *mode http$")
            _expect_one(name, body, rf" *{ABORT}$")
            body = _replaced(
                name, body, r"( *)timeout client \d+s$", lambda hit: f"{hit[1]}timeout client {CLIENT_TIMEOUT_S}s"
            )
            # A router may close an idle connection at the moment in which HAProxy sends a request over it; clients do
            # not repeat a POST. So each request gets a connection of its own to its router.
            defaults = [
                "option http-server-close",
                f"timeout http-request {HEADERS_TIMEOUT_S}s",
                *error_file_lines(error_files),
            ]
            body = [*_indented(defaults), *body]
        case header if header == FRONT:
            if front_host is not None:  # Serve gives replicas and front one host
                host = "*" if front_host in ("0.0.0.0", "::") else front_host
                body = _replaced(name, body, r"( *)bind \S+:(\d+)$", lambda hit: f"{hit[1]}bind {host}:{hit[2]}")
            else:
                _expect_one(name, body, r" *bind \S+:\d+$")
            body = [*_indented(front), *body]
        case header if header in (STATISTICS, EXPORTER):  # Serve binds them to all addresses
            body = _replaced(name, body, r"( *)bind \S*:(\d+)$", lambda hit: f"{hit[1]}bind {LOOPBACK}:{hit[2]}")
        case "backend default_backend":
            other_lines = [line for line in body if not line.lstrip().startswith("http-request return ")]
            if len(other_lines) != len(body) - 1:
                raise TemplateChanged(f"{name} has not one answer")
            body = [*other_lines, *_indented([f"http-request return {returned(*NO_APPLICATION)}"])]
    return [name, *body]


def _without_router(backend: str, body: list[str]) -> list[str]:
    """What is answered while HAProxy reaches no router itself: /ready and its like say so, long bodies are refused.

    Other requests go through Serve's own proxy: slower, and their keys and texts are then in the memory of a process
    that is not motet's. It reads whole bodies before a router has checked their keys.
    """
    servers = [match[1] for line in body if (match := re.match(r" *server (\S+) (?!.* backup$)", line))]
    routers = [f"acl motet_router srv_is_up({backend}/{server})" for server in servers]
    unreached = "!motet_router" if routers else ""
    return [
        *routers,
        f"acl motet_no_fallback path {' '.join(NOT_WAITED_FOR)}",
        "acl motet_no_fallback path_beg /v1/models/",
        f"acl motet_no_fallback req.hdr_val(content-length) gt {MAX_FALLBACK_BYTES}",
        "acl motet_no_fallback req.hdr(transfer-encoding) -m found",
        f"http-request return {returned(*ONLY_FALLBACK)} if motet_no_fallback {unreached}".rstrip(),
    ]


def _applications(front: list[str]) -> dict[str, str]:
    """The backend of each application by the prefix of its paths. The one at "/" is motet."""
    matches = [re.match(r" *acl is_(\S+) path (\S+)$", line) for line in front]
    return {match[2]: match[1] for match in matches if match}


def _sections(text: str) -> tuple[list[str], list[list[str]]]:
    """Lines before the first section, and each section's lines, its header first."""
    head: list[str] = []
    sections: list[list[str]] = []
    for line in text.splitlines():
        if SECTION.match(line):
            sections.append([line])
        else:
            (sections[-1] if sections else head).append(line)
    return head, sections


def _replaced(name: str, body: list[str], pattern: str, replacement: Callable[[re.Match[str]], str]) -> list[str]:
    _expect_one(name, body, pattern)
    return [re.sub(f"^{pattern}", replacement, line) for line in body]


def _expect_one(name: str, body: list[str], pattern: str) -> None:
    if sum(re.match(pattern, line) is not None for line in body) != 1:
        raise TemplateChanged(f"{name} has not one line like {pattern!r}")


def _indented(lines: list[str]) -> list[str]:
    return [f"    {line}" for line in lines]
