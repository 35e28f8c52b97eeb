"""Clients that close their side of a connection once they have sent their request, and wait for the answer.

To HAProxy they look like clients that have left, until something is written to them. `option abortonclose` takes both
for gone, so that a client that leaves costs nothing; without it both are waited for. Clients that half-close speak
HTTP/1.0, where a connection has one request; so HTTP/1.0 goes to a second backend without the option. Who has left
there is noticed when the next part of the answer is written. (Of `Connection: close` in HTTP/1.1 HAProxy's rules do not
see anything.)
"""

from __future__ import annotations

import re
from collections.abc import Sequence

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
    kept = [line for line in body if not re.match(checks, line)]
    tracking = [re.sub(r"^( *server (\S+) \S+) check\b.*?( backup)?$", rf"\1 track {name}/\2\3", line) for line in kept]
    return [f"backend {name}{SUFFIX}", f"    no {ABORT}", *tracking]


def with_second_backends(front: Sequence[str], names: Sequence[str]) -> list[str]:
    """The front's lines, where requests in HTTP/1.0 go to the second ones of these backends."""
    lines: list[str] = []
    for line in front:
        found = re.match(r"( *)use_backend (\S+) if (.*)$", line)
        if found and found[2] in names:
            lines.append(f"{found[1]}use_backend {found[2]}{SUFFIX} if {IF_LAST} {found[3]}")
        lines.append(line)
    return lines
