"""Server-sent events with a name, as `/v1/messages` and `/v1/responses` send them."""

from __future__ import annotations

from typing import Final

import msgspec

_encode: Final = msgspec.json.Encoder().encode


def named_event(event: msgspec.Struct) -> bytes:
    """The event's name is the tag of its type."""
    return b"event: " + str(type(event).__struct_config__.tag).encode() + b"\ndata: " + _encode(event) + b"\n\n"
