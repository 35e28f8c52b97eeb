"""Logs of a Serve replica's process, and of a worker's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ray

from ..logs.log_config import LogConfig
from ..logs.process_log import ProcessLog, start_process_log


def configure_replica_logging(config: LogConfig, kind: str, **origin: Any) -> ProcessLog:
    """Has this process's log lines written where Ray keeps its session's logs. `kind`: "router", "gang" or "worker".

    `origin`: what every line is to say of this process, beside its kind and its node.
    """
    node = ray._private.worker._global_node  # Serve finds its own log folder like this
    return start_process_log(
        config, kind, {"node": ray.util.get_node_ip_address(), **origin}, Path(node.get_logs_dir_path())
    )
