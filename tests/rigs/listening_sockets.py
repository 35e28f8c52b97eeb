"""Which processes of a motet listen where, and what the page says of it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path
from typing import Final

import psutil

PAGE = Path(__file__).resolve().parents[2] / "docs" / "security.md"
HEADING = "## Listening sockets"
# By a part of the command line; the first that fits.
NAMES: Final = {
    "ServeReplica:motet:router": "router",
    "ServeReplica:motet:gang": "gang",
    "WorkerActor": "worker",
    "ServeController": "Serve's controller",
    "ProxyActor": "Serve's proxy",
    "HAProxyManager": "Serve's proxy",
    "gcs_server": "Ray's GCS",
    "dashboard/agent.py": "Ray's agents",
    "runtime_env/agent": "Ray's agents",
    "raylet": "raylet",
    "dashboard.py": "Ray's dashboard",
    "haproxy": "HAProxy",
    "valkey-server": "Redis",
    "redis-server": "Redis",
    "ray::": "Ray's idle workers",
    "default_worker.py": "Ray's idle workers",
}


def listening(processes: Iterable[psutil.Process]) -> set[tuple[str, str]]:
    """Name and place of each socket that listens: "loopback", "all addresses", or an address."""
    found = set()
    for process in processes:
        with suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
            title = " ".join(process.cmdline())
            name = next((name for part, name in NAMES.items() if part in title), title)
            for socket in process.net_connections(kind="inet"):
                if socket.status == psutil.CONN_LISTEN:
                    found.add((name, _place(socket.laddr.ip)))
    return found


def listed() -> set[tuple[str, str]]:
    """The same, as the table of docs/security.md says it."""
    section = PAGE.read_text().partition(f"{HEADING}\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| ([^|]+) \| [^|]+ \| ([^|]+) \|", section, re.MULTILINE)
    return {(process, place) for process, place in rows if process not in ("process", "---")}


def _place(ip: str) -> str:
    address = ip_address(ip)
    return "all addresses" if address.is_unspecified else "loopback" if address.is_loopback else ip
