"""The machines of a test: network namespaces of this machine, connected by a switch in a namespace of its own.

A cable can be pulled: the machine's interface loses its carrier and keeps its address, as a real one does. Nothing of
it is seen by other programs on this machine, except processes and folders.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil

PREFIX = "motet-test"  # then the process that made it, and a random part
CLONE_NEWNET = 0x40000000


def why_not() -> str | None:
    """Why there can be no namespaces here; None if there can."""
    if shutil.which("ip") is None:
        return "the program ip (iproute2) is missing"
    if os.geteuid() != 0:
        return "network namespaces need root"
    name = f"{PREFIX}-{os.getpid()}-probe"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    try:
        if made.returncode == 0:
            link = ["ip", "-n", name, "link", "add", "left", "type", "veth", "peer", "name", "right"]
            bridge = ["ip", "-n", name, "link", "add", "switch", "type", "bridge"]
            for command in (link, bridge):
                made = subprocess.run(command, capture_output=True, text=True, check=False)
                if made.returncode != 0:
                    break
    finally:
        subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
    return None if made.returncode == 0 else f"network namespaces cannot be made: {made.stderr.strip()}"


class Network:
    """A context manager: this number of machines, the first with the address 10.77.0.1."""

    def __init__(self, num_machines: int) -> None:
        remove_leftovers()
        session = f"{PREFIX}-{os.getpid()}-{uuid.uuid4().hex[:6]}"
        self.addresses = [f"10.77.0.{number}" for number in range(1, num_machines + 1)]
        self._machines = [f"{session}-{number}" for number in range(1, num_machines + 1)]
        self._switch = f"{session}-switch"

    def __enter__(self) -> Network:
        try:
            for name in (self._switch, *self._machines):
                _ip("netns", "add", name)
                _ip("-n", name, "link", "set", "lo", "up")
            _ip("-n", self._switch, "link", "add", "bridge", "type", "bridge")
            _ip("-n", self._switch, "link", "set", "bridge", "up")
            for number, (name, address) in enumerate(zip(self._machines, self.addresses, strict=True)):
                port = f"port{number}"
                peer = ["peer", "name", "eth0", "netns", name]
                _ip("-n", self._switch, "link", "add", port, "type", "veth", *peer)
                _ip("-n", self._switch, "link", "set", port, "master", "bridge", "up")
                _ip("-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
                _ip("-n", name, "link", "set", "eth0", "up")
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Kills what is left on the machines, and removes them."""
        for name in (*self._machines, self._switch):
            _remove(name)

    def command(self, machine: int, command: Sequence[str]) -> list[str]:
        """The command line that runs a command on a machine."""
        return ["ip", "netns", "exec", self._machines[machine], *command]

    def processes(self, machine: int) -> list[psutil.Process]:
        return _processes(self._machines[machine])

    def pull_cable(self, machine: int) -> None:
        _ip("-n", self._switch, "link", "set", f"port{machine}", "down")

    def plug_cable(self, machine: int) -> None:
        _ip("-n", self._switch, "link", "set", f"port{machine}", "up")

    def threads(self, machine: int, num_threads: int) -> ThreadPoolExecutor:
        """Threads of this process whose connections begin on the machine."""

        def enter() -> None:
            with Path(f"/run/netns/{self._machines[machine]}").open() as namespace:
                if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), CLONE_NEWNET) != 0:
                    raise OSError(ctypes.get_errno(), "setns")

        return ThreadPoolExecutor(num_threads, initializer=enter)


def remove_leftovers() -> None:
    """Removes the namespaces of tests that were killed."""
    for name in _ip("netns", "list").split():
        parts = name.split("-")
        if name.startswith(f"{PREFIX}-") and parts[2].isdecimal() and not psutil.pid_exists(int(parts[2])):
            _remove(name)


def _remove(name: str) -> None:
    for _ in range(3):  # what is killed may have started something meanwhile
        left = _processes(name)
        for process in left:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                pass
        psutil.wait_procs(left, timeout=5)
    subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def _processes(name: str) -> list[psutil.Process]:
    listed = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, check=False)
    found: list[Any] = []
    for pid in listed.stdout.split():
        try:
            found.append(psutil.Process(int(pid)))
        except psutil.NoSuchProcess:
            continue
    return found


def _ip(*arguments: str) -> str:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"ip {' '.join(arguments)}: {done.stderr}"
    return done.stdout
