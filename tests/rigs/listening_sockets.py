"""Which processes of a motet listen where, and what docs/security.md says of it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from ipaddress import IPv6Address, ip_address
from pathlib import Path
from typing import Final

import psutil

PAGE = Path(__file__).resolve().parents[2] / "docs" / "security.md"
HEADING = "## Listening sockets"
RAYS: Final = "Ray's processes"  # those that do not run motet's code, but not Serve's
# By a part of the command line; the first that fits.
NAMES: Final = {
    "ServeReplica:motet:router": "router",
    "ServeReplica:motet:gang": "leader",
    "WorkerActor": "worker",
    "ProxyActor": "Serve's proxy",
    "/haproxy/": "HAProxy",
    "valkey-server": "Redis",
    "motet serve": "`motet serve`",
    "/bin/motet": "`motet serve`",
    "ray::": RAYS,
    "/ray/": RAYS,
    "default_worker.py": RAYS,
}
Sockets = Counter[str]  # how many there are at each place: "loopback", "all addresses", or an address


def listening(processes: Iterable[psutil.Process]) -> dict[str, list[Sockets]]:
    """Those of each process that listens, by its name; a process without a name in NAMES has its command line's."""
    found: dict[str, list[Sockets]] = {}
    for process in processes:
        try:
            title = " ".join(process.cmdline())
            sockets = process.net_connections(kind="inet")
        except (psutil.NoSuchProcess, psutil.ZombieProcess):
            continue
        places = Counter(place_of(socket.laddr.ip) for socket in sockets if socket.status == psutil.CONN_LISTEN)
        if places:
            name = next((name for part, name in NAMES.items() if part in title), title)
            found.setdefault(name, []).append(places)
    return found


def listed() -> dict[str, Sockets]:
    """What a process of each name may have by the table of docs/security.md: a row is one socket."""
    section = PAGE.read_text().partition(f"{HEADING}\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| ([^|]+) \| [^|]+ \| ([^|]+) \|", section, re.MULTILINE)
    found: dict[str, Sockets] = {}
    for name, place in rows:
        if name not in ("process", "---"):
            found.setdefault(name, Counter())[place] += 1
    return found


def differences(processes: Iterable[psutil.Process]) -> list[str]:
    """What listens and is not listed, and what is listed and does not listen.

    Of Ray's own processes only the places count: how many there are, and how many ports they have, is Ray's business.
    """
    there, page = listening(processes), listed()
    found = [f"{name} is listed, and no such process listens" for name in page.keys() - there.keys()]
    for name, sockets in there.items():
        may = page.get(name, Counter())
        for one in sockets:
            if (name == RAYS and not one.keys() <= may.keys()) or (name != RAYS and one != may):
                found.append(f"{name} listens on {dict(one)}, and {dict(may)} is listed")
    return found


def place_of(ip: str) -> str:
    address = ip_address(ip)
    if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    return "all addresses" if address.is_unspecified else "loopback" if address.is_loopback else ip
