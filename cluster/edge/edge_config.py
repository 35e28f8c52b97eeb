"""Serve's configuration of HAProxy, with motet's edge put in.

Serve writes that configuration from a template and offers no other place to change it. Each edit finds its place by the
section and the directive, and one that does not find it is an error: HAProxy then does not start, rather than start
without what guards it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

from .edge_limits import EdgeLimits
from .error_answers import COUNTER, error_file_lines, returned
from .front_rules import BUFFER_BYTES, HEADERS_TIMEOUT_S, front_lines, table_lines

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
