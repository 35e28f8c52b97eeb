"""A gang's log lines on single sequences: failures, and at level debug arrivals and ends.

The request's id links them to the router's lines.
"""

from __future__ import annotations

import logging
from typing import Any, Final

from ..wire.messages import SequenceRequest, SequenceUpdate

FAULTS: Final = frozenset({"adapter_failed", "store_unavailable", "gang_lost", "internal"})  # not the client's doing

_log = logging.getLogger(__name__)


def log_arrival(request: SequenceRequest) -> None:
    """A router has submitted it, or requested it again."""
    if _log.isEnabledFor(logging.DEBUG):
        adapter = "" if request.adapter is None else request.adapter.digest
        counts = {"prompt_tokens": len(request.prompt_token_ids), "had_tokens": len(request.generated_token_ids)}
        _log.debug("a sequence arrived", extra=_fields(request.request_id, request.tenant, adapter=adapter, **counts))


def log_end(request_id: str, tenant: str, update: SequenceUpdate) -> None:
    """Its last update is on its way to the router."""
    kind = "" if update.error is None else update.error.kind
    if kind in FAULTS:
        _log.warning("a sequence failed", extra=_fields(request_id, tenant, error=kind))
    elif _log.isEnabledFor(logging.DEBUG):
        _log.debug("a sequence ended", extra=_fields(request_id, tenant, finish=update.finish_reason, error=kind))


def _fields(request_id: str, tenant: str, **others: Any) -> dict[str, Any]:
    fields = {"request_id": request_id, "tenant": tenant, **others}
    return {"fields": {name: value for name, value in fields.items() if value not in (None, "")}}
