"""The log of one process: its lines go to a file of Ray's session, and to stderr where that is a container's log."""

from __future__ import annotations

import atexit
import logging
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from .log_config import LogConfig
from .log_file import SUFFIX, LogFile, forget_old_files
from .log_lines import JsonLines, TextLines
from .log_writer import LogWriter, to_descriptor

# Ray's own variable. With it the output of Ray's processes is the container's; without it Ray keeps it in files beside
# ours, where our lines would stand twice.
TO_STDERR: Final = "RAY_LOG_TO_STDERR"
FOLDER: Final = "motet"  # in the folder of the session's logs
STDERR: Final = 2
KEPT_FILES: Final = 64  # of a machine, those of processes that run not counted


class ProcessLog(logging.Handler):
    """Handler of `motet`'s loggers, and of warnings of all others."""

    def __init__(self, config: LogConfig, origin: Mapping[str, Any], writers: Sequence[LogWriter]) -> None:
        """`origin`: fields of every JSON line that say which process it is."""
        super().__init__()
        self._writers = writers
        self.setFormatter(JsonLines(origin) if config.log_format == "json" else TextLines())

    @property
    def num_dropped(self) -> int:
        """Lines that found no room, or could not be written."""
        return sum(writer.num_dropped for writer in self._writers)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self.format(record)
        except Exception:  # logging must never fail, for example by %-signs that do not fit the arguments
            line = f"a log line of {record.name} could not be written: {record.msg!a}"
        data = line.encode("utf-8", "backslashreplace") + b"\n"
        for writer in self._writers:
            if num_dropped := writer.take_unreported_drops():
                writer.put(self.format(_drop_record(num_dropped)).encode() + b"\n")
            writer.put(data)

    def close(self) -> None:
        for writer in self._writers:
            writer.close()
        super().close()


def start_process_log(config: LogConfig, kind: str, origin: Mapping[str, Any], logs_path: Path) -> ProcessLog:
    """Has all log lines of this process written from now on. `logs_path`: the folder of the session's logs.

    `kind`: "router", "gang" or "worker". To be called once a process.
    """
    name = f"{kind}-{os.getpid()}-{int(time.time())}{SUFFIX}"
    forget_old_files(logs_path / FOLDER, KEPT_FILES)
    writers = [LogWriter(LogFile(logs_path / FOLDER / name).write, "the session's file")]
    if os.environ.get(TO_STDERR) == "1":
        writers.append(LogWriter(to_descriptor(STDERR), "stderr"))
    handler = ProcessLog(config, {"process": kind, **origin}, writers)
    own, root = logging.getLogger("motet"), logging.getLogger()
    own.addHandler(handler)
    own.setLevel(config.log_level.upper())
    own.propagate = False
    handler_of_others = _OfOthers(handler)
    root.addHandler(handler_of_others)
    atexit.register(handler.close)
    return handler


class _OfOthers(logging.Handler):
    """Warnings of libraries in the same format. Lower levels may hold content of requests."""

    def __init__(self, log: ProcessLog) -> None:
        super().__init__(logging.WARNING)
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        self._log.emit(record)


def _drop_record(num_dropped: int) -> logging.LogRecord:
    record = logging.LogRecord(
        __name__, logging.WARNING, __file__, 0, "%d log lines were dropped", (num_dropped,), None
    )
    record.name = "motet.cluster.logs"
    return record
