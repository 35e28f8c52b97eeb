"""The id of a request: its client's own if that is harmless, else a new one. It is in the answer and in the logs."""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterable
from typing import Final

REQUEST_ID_HEADER: Final = "x-request-id"
# What UUIDs, ULIDs, base64 and the trace ids of clouds consist of: nothing that ends a line, a header or a quoted text.
ID_PATTERN: Final = "[A-Za-z0-9._:=+/@~-]{1,128}"
_GOOD: Final = re.compile(ID_PATTERN)
_RAW_HEADER: Final = REQUEST_ID_HEADER.encode()


def request_id_of(headers: Iterable[tuple[bytes, bytes]]) -> str:
    """The id in the headers of an ASGI scope. A new one if there is none, more than one, or one with odd characters."""
    request_ids = [value for name, value in headers if name == _RAW_HEADER]
    if len(request_ids) == 1:
        text = request_ids[0].decode("latin-1")
        if _GOOD.fullmatch(text):
            return text
    return str(uuid.uuid4())
