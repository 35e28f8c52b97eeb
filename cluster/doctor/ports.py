"""Checks that motet's port is free, or finds the process that listens there."""

from __future__ import annotations

import socket
from dataclasses import dataclass

import httpx
import psutil

from .finding import Finding, error, ok

CHECK = "ports"
TIMEOUT_S = 2.0


@dataclass(frozen=True, kw_only=True)
class PortFacts:
    port: int
    is_taken: bool
    is_motet: bool = False  # it answers as motet does
    owner: str = ""  # name and id of the process; empty: not visible to this user


def gather_port(port: int) -> PortFacts:
    """Checks the port on all addresses of this machine."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
            return PortFacts(port=port, is_taken=False)
        except OSError:
            pass
    return PortFacts(port=port, is_taken=True, is_motet=_is_motet(port), owner=_owner(port))


def _is_motet(port: int) -> bool:
    """Whether the server answers /health, and asks for a key with an error of OpenAI's shape."""
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=TIMEOUT_S, trust_env=False) as client:
            refused = client.get("/v1/models")
            return client.get("/health").is_success and refused.json()["error"]["code"] == "invalid_api_key"
    except (httpx.HTTPError, ValueError, KeyError, TypeError):
        return False


def _owner(port: int) -> str:
    try:
        listening = [one for one in psutil.net_connections("tcp") if one.status == psutil.CONN_LISTEN]
        pid = next((one.pid for one in listening if one.laddr and one.laddr.port == port and one.pid), None)
        return f"{psutil.Process(pid).name()}, process {pid}" if pid else ""
    except (psutil.Error, OSError):
        return ""


def check_port(facts: PortFacts) -> list[Finding]:
    owner = f" ({facts.owner})" if facts.owner else ""
    if not facts.is_taken:
        return [ok(CHECK, f"port {facts.port} is free")]
    if facts.is_motet:
        return [ok(CHECK, f"a motet serves at port {facts.port}{owner}")]
    return [
        error(
            CHECK,
            f"port {facts.port} is taken by another server{owner}",
            why="motet cannot listen there",
            do=f"stop it (ss -ltnp 'sport = :{facts.port}' shows its process), or choose another port with --port",
        )
    ]
