"""The log of one process: its lines go to a file of Ray's session, and to stderr where that is a container's log."""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

# How the processes of a motet log.

LogFormat = Literal["text", "json"]
LogLevel = Literal["debug", "info", "warning", "error"]


@dataclass(frozen=True, kw_only=True)
class LogConfig:
    """What routers, gangs and workers need to know of it. Whether there is an access log is the routers' business."""

    log_format: LogFormat
    log_level: LogLevel


# A file of lines that never grows beyond a bound: when it is full it becomes the older half, and a new one begins.

MAX_FILE_BYTES: Final = 16 << 20
SUFFIX: Final = ".log"
OLDER: Final = ".1"  # a shipper that watches *.log has read it, and one that watches *.log* knows it by its inode


class LogFile:
    """One writer. At most twice `max_bytes` and one batch of lines are on the disk."""

    def __init__(self, path: Path, *, max_bytes: int = MAX_FILE_BYTES) -> None:
        self._path = path
        self._max_bytes = max_bytes
        self._descriptor: int | None = None
        self._num_bytes = 0
        self._is_torn = False

    def write(self, data: bytes) -> None:
        """Appends lines. Raises OSError if they cannot be written; the next lines are tried again."""
        if self._descriptor is not None and self._num_bytes + len(data) > self._max_bytes:
            self.close()
            self._path.replace(self._path.with_name(self._path.name + OLDER))
        if self._descriptor is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o640)
            self._num_bytes = os.fstat(self._descriptor).st_size
        remainder = memoryview(b"\n" + data if self._is_torn else data)
        while remainder:
            self._is_torn = True  # until all of it is there: the last line may be half a one
            written = os.write(self._descriptor, remainder)
            self._num_bytes += written
            remainder = remainder[written:]
        self._is_torn = False

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def forget_old_files(folder: Path, keep: int) -> None:
    """Removes the files of processes that are gone, except the newest. `keep`: the most files.

    A file's name is KIND-PID-TIME of its process.
    """
    with suppress(OSError):  # others of this machine do the same
        files = sorted(folder.glob(f"*{SUFFIX}*"), key=lambda file: file.stat().st_mtime)
        for file in files[: max(0, len(files) - keep)]:
            if not Path("/proc", file.name.split("-")[1]).exists():
                file.unlink(missing_ok=True)


# Log records as lines: JSON for machines, text for people.
#
# A record is one line that its content cannot forge: JSON is plain ASCII in which line ends are escaped; in text
# values are quoted where they need it, and the lines of a traceback are indented.
#
# What a client sent is never in a line. The code does not log it; and since exceptions may quote the values that they
# are about, those that meet requests are logged as type and stack, without their messages: all of `motet.router`, and
# of other people's libraries. Of these only a message's first line is taken, as asyncio shows objects in the others.

OWN: Final = ("motet.workers.", "motet.cluster.", "motet.adapters.", "motet.kernels.")  # whose errors are about motet
MAX_CHARS: Final = 8192  # of a message, or of a field; the rest is cut off
MAX_FRAMES: Final = 32
_DELETE: Final = 0x7F  # the one control character that JSON lets stand
_quick: Final = msgspec.json.Encoder(enc_hook=str).encode
_thorough: Final = json.JSONEncoder(ensure_ascii=True, separators=(",", ":"), default=str).encode


class JsonLines(logging.Formatter):
    """`origin`: fields of every line that say which process it is."""

    def __init__(self, origin: Mapping[str, Any]) -> None:
        super().__init__()
        self._origin = origin

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": time_of(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": _message(record),
            **self._origin,
        }
        for name, value in fields_of(record).items():
            line.setdefault(name, _cut(value) if isinstance(value, str) else value)
        if record.exc_info and record.exc_info[1] is not None:
            error = record.exc_info[1]
            line |= {"exception": summary_of(error, record.name), "stack": stack_of(error, record.name)}
        return _encode(line)


class TextLines(logging.Formatter):
    """The same for people: time, level, logger, message, then the fields as name=value."""

    def format(self, record: logging.LogRecord) -> str:
        parts = [time_of(record), record.levelname, f"{record.name}:", _printable(_message(record))]
        parts += [f"{name}={_word(value)}" for name, value in fields_of(record).items()]
        lines = [" ".join(parts)]
        if record.exc_info and record.exc_info[1] is not None:
            error = record.exc_info[1]
            stack = [*stack_of(error, record.name), summary_of(error, record.name)]
            lines += [f"    | {_printable(line)}" for line in stack]
        return "\n".join(lines)


def fields_of(record: logging.LogRecord) -> Mapping[str, Any]:
    """What the record's `extra={"fields": …}` gave."""
    fields: Mapping[str, Any] = getattr(record, "fields", {})
    return fields


def time_of(record: logging.LogRecord) -> str:
    """UTC, to the millisecond, as RFC 3339 writes it."""
    second, fraction = divmod(record.created, 1)
    return f"{_second(int(second))}.{int(fraction * 1000):03d}Z"


def summary_of(error: BaseException, logger: str) -> str:
    """The error's type, and its message where that is about motet."""
    name = type(error).__name__
    return f"{name}: {_cut(str(error))}" if _may_quote(logger) and str(error) else name


def stack_of(error: BaseException, logger: str) -> list[str]:
    """Where the error was raised, innermost last, and what it came from before it. No values, and no source lines."""
    chain: list[BaseException] = []
    exception: BaseException | None = error
    while exception is not None and exception not in chain:
        chain.append(exception)
        exception = exception.__cause__ or (None if exception.__suppress_context__ else exception.__context__)
    lines: list[str] = []
    for cause in reversed(chain):
        frames = traceback.extract_tb(cause.__traceback__, limit=-MAX_FRAMES)
        lines += [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in frames]
        if cause is not error:
            lines.append(f"{summary_of(cause, logger)}, which led to")
    return lines


def _message(record: logging.LogRecord) -> str:
    message = record.getMessage()
    return _cut(message if record.name.startswith("motet.") else message.partition("\n")[0])


@lru_cache(maxsize=2)
def _second(seconds: int) -> str:
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%dT%H:%M:%S}"


def _encode(value: Any) -> str:
    """JSON of ASCII characters that all can be seen."""
    try:
        data = _quick(value)
    except UnicodeEncodeError:  # half of a pair of surrogates
        data = b"\xff"
    if data.isascii() and _DELETE not in data:
        return data.decode("ascii")
    return _thorough(value).replace(chr(_DELETE), "\\u007f")


def _may_quote(logger: str) -> bool:
    return logger.startswith(OWN)


def _cut(text: str) -> str:
    return text if len(text) <= MAX_CHARS else f"{text[:MAX_CHARS]}…"


def _printable(text: str) -> str:
    """The text with characters that are not printable, line breaks above all, escaped as in a Python string."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode("ascii") for char in text)


def _word(value: Any) -> str:
    text = str(value)
    is_plain = text.isascii() and text.isprintable() and not set(text) & {" ", '"', "=", "\\"}
    return text if is_plain and text else _encode(_cut(text))


# Writes log lines in a thread, so that no caller waits for a disk or a pipe.
#
# What is not written waits in memory, up to a bound. Beyond that lines are dropped and counted: a full disk, or a pipe
# that is not read, costs lines of the log and nothing else.

MAX_WAITING_BYTES: Final = 4 << 20
PAUSE_S: Final = 0.02  # between two writes, so that a busy process writes several lines at once
CLOSE_S: Final = 1.0  # after which what cannot be written is given up

Write = Callable[[bytes], None]  # writes all of it, however long that takes; raises OSError


class LogWriter:
    """Any thread may call `put`."""

    def __init__(self, write: Write, name: str, *, max_waiting_bytes: int = MAX_WAITING_BYTES) -> None:
        self._write = write
        self._max_waiting_bytes = max_waiting_bytes
        self._lines: list[bytes] = []
        self._num_waiting_bytes = 0
        self._num_unreported = 0  # dropped lines that no line has reported yet
        self.num_dropped = 0
        # Reentrant: a finalizer may run at any line of the thread that holds it, and may log.
        self._lock = threading.RLock()
        self._some = threading.Event()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._write_forever, name=f"log to {name}", daemon=True)
        self._thread.start()

    def put(self, line: bytes) -> None:
        """Returns at once. `line`: with its newline."""
        with self._lock:
            if self._num_waiting_bytes + len(line) > self._max_waiting_bytes:
                self.num_dropped += 1
                self._num_unreported += 1
                return
            self._lines.append(line)
            self._num_waiting_bytes += len(line)
        if not self._some.is_set():
            self._some.set()

    def take_unreported_drops(self) -> int:
        """How many lines were dropped since the last call; 0 until there is room for a line that reports it."""
        with self._lock:
            if self._num_waiting_bytes > self._max_waiting_bytes // 2:
                return 0
            unreported, self._num_unreported = self._num_unreported, 0
            return unreported

    def close(self) -> None:
        """Returns when all is written, or cannot be."""
        self._closing.set()
        self._some.set()
        self._thread.join(CLOSE_S)

    def _write_forever(self) -> None:
        while True:
            self._some.wait()
            self._some.clear()
            with self._lock:
                lines, self._lines = self._lines, []
            if lines:
                data = b"".join(lines)
                try:
                    self._write(data)
                except OSError:
                    self._count_dropped(len(lines))
                with self._lock:
                    self._num_waiting_bytes -= len(data)
            elif self._closing.is_set():
                return
            if self._closing.is_set():
                self._some.set()
            else:
                self._closing.wait(PAUSE_S)

    def _count_dropped(self, num_lines: int) -> None:
        with self._lock:
            self.num_dropped += num_lines
            self._num_unreported += num_lines


def to_descriptor(descriptor: int) -> Write:
    """Writes to a file descriptor of this process, whether or not it blocks."""

    def write(data: bytes) -> None:
        remainder = memoryview(data)
        while remainder:
            try:
                remainder = remainder[os.write(descriptor, remainder) :]
            except BlockingIOError:
                with contextlib.suppress(InterruptedError):
                    threading.Event().wait(PAUSE_S)

    return write


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
    motet_logger, root = logging.getLogger("motet"), logging.getLogger()
    motet_logger.addHandler(handler)
    motet_logger.setLevel(config.log_level.upper())
    motet_logger.propagate = False
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
