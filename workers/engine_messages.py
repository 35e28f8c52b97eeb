"""What an engine takes: one entry (`receive`) for all that routers and the leader want of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

from .wire.engine_load import ServedElsewhere
from .wire.messages import Cancel, Outdated, SequenceError, Submit


class GiveUpWaiting(msgspec.Struct, frozen=True):
    """End a sequence with this error if it still waits. One that runs goes on; unknown ids are ignored."""

    sequence_id: int
    error: SequenceError


class End(msgspec.Struct, frozen=True):
    """End a sequence with this error, whether it waits or runs. Unknown ids are ignored."""

    sequence_id: int
    error: SequenceError


class PinChanges(msgspec.Struct, frozen=True):
    """Adapters that host memory must keep from now on (True), or need not keep any more."""

    changes: Mapping[str, bool]


class TokenInterval(msgspec.Struct, frozen=True):
    """The setting of this name has changed: steps planned from now on should take no longer while sequences decode."""

    token_interval_s: float | Literal["auto"]


EngineMessage = Submit | Cancel | End | GiveUpWaiting | Outdated | PinChanges | ServedElsewhere | TokenInterval
