"""Logs of a Serve replica's process."""

from __future__ import annotations

import logging
import sys


def configure_replica_logging() -> None:
    """Sends motet's own log lines to the worker's stderr, which Ray keeps in a file of its session."""
    logger = logging.getLogger("motet")
    if not logger.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
