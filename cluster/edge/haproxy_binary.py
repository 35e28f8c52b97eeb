"""HAProxy with JSON in place of the HTML that is built into it.

To invalid HTTP, or a request that arrives too slowly, HAProxy 2.8 answers with pages from its binary. No
directive replaces them: such errors arise before there is a stream, of which `errorfile`, `http-error` and
`http-errors` speak (only an empty error file matters: it silences them). Later versions ask the error files here as
well (HAProxy's issue 3032), but Ray brings 2.8. A test holds that, and fails when this file is needed no more. Until
then a copy of the binary gets other pages there, of the same length, so that nothing else moves.
"""

from __future__ import annotations

import os
import re
import subprocess
from contextlib import suppress
from pathlib import Path

from .error_answers import error_body

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
    found = original.stat()
    copy = folder / f"motet-{found.st_size:x}-{found.st_mtime_ns:x}" / "haproxy"
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
