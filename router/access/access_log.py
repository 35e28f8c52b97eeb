"""The access log: one line for each request, written when its answer has ended or its client has left."""

from __future__ import annotations

import logging
import time
from typing import Any, Final

from ..config import CurrentConfig
from .request_record import RequestRecord

LOGGER: Final = "motet.router.access"
METHODS: Final = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})  # others are free text

_log = logging.getLogger(LOGGER)


class AccessLog:
    def __init__(self, config: CurrentConfig) -> None:
        """`config`: whether there is one, which may change at any time."""
        self._config = config

    def write(self, record: RequestRecord, status_code: int) -> None:
        """`status_code`: that was sent; 499: the client had left before anything was."""
        if self._config.now.access_log:
            fields = fields_of(record, status_code, time.perf_counter() - record.started_at)
            _log.info("request", extra={"fields": fields})


def fields_of(record: RequestRecord, status_code: int, duration_s: float) -> dict[str, Any]:
    """The fields of the line without empty ones."""
    fields = {
        "request_id": record.request_id,
        "tenant": record.tenant,
        "method": record.method if record.method in METHODS else "other",
        "route": record.route,
        "status": status_code,
        "error": record.error,
        "model": record.model,
        "answer": record.answer,
        "stream": record.is_stream or None,
        "cancelled": record.is_cancelled or None,
        "duration_s": round(duration_s, 6),
        "first_token_s": None if record.first_token_s is None else round(record.first_token_s, 6),
        "prompt_tokens": record.num_prompt_tokens,
        "completion_tokens": record.num_completion_tokens,
        "cached_tokens": record.num_cached_tokens,
        "finish": record.finish,
        "sent_bytes": record.num_sent_bytes,
    }
    return {name: value for name, value in fields.items() if value is not None and value != ""}
