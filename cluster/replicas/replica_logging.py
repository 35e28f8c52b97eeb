"""Logs of a Serve replica's process."""

from __future__ import annotations

import logging
import sys


def configure_replica_logging() -> None:
    """Sends motet's own log lines to the worker's stderr, which Ray keeps in a file of its session.

    Past `sys.stderr`, which Serve replaces by a log of its own that leaves out what is less than a warning.
    """
    logger = logging.getLogger("motet")
    if not logger.handlers:
        handler = logging.StreamHandler(sys.__stderr__)
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
