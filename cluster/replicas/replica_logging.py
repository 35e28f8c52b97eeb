"""Logs of a Serve replica's process."""

from __future__ import annotations

import logging
import sys


def configure_replica_logging() -> None:
    """Sends motet's own log lines to the worker's stderr, which Ray keeps in a file of its session.

    They do not go through `sys.stderr`: Serve replaces that by a log of its own, which has warnings and errors only.
    """
    logger = logging.getLogger("motet")
    if not logger.handlers:
        handler = logging.StreamHandler(sys.__stderr__)
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
