"""Lines of a process's log: what they say, that they cannot be forged, and that no caller waits for them."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from motet.cluster import process_log
from motet.cluster.process_log import (
    FOLDER,
    MAX_CHARS,
    TO_STDERR,
    JsonLines,
    LogConfig,
    LogFile,
    LogFormat,
    LogWriter,
    TextLines,
    forget_old_files,
    start_process_log,
    to_descriptor,
)
from motet.tests.rigs.patience import PATIENCE_S, eventually

ORIGIN = {"process": "router", "node": "10.0.0.1", "replica": "r1"}
ANYTHING = st.text() | st.sampled_from(
    ["\n", "\r\n", "\x7f", "\x1b[2J", "\x85", "\u2028", "\ud800", '"', "a=b", "", "\x00"]
)


@pytest.fixture(autouse=True)
def patient_close(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_log, "CLOSE_S", PATIENCE_S)  # what is written is looked at, on a busy machine too


def record(message: str, *args: Any, logger: str = "motet.router.x", **fields: Any) -> logging.LogRecord:
    made = logging.LogRecord(logger, logging.WARNING, __file__, 1, message, args, None)
    made.fields = fields
    return made


@given(ANYTHING, ANYTHING, ANYTHING)
def test_whatever_is_logged_is_one_line_of_json(message: str, argument: str, value: str) -> None:
    line = JsonLines(ORIGIN).format(record("%s %s", message, argument, tenant=value))
    assert line.isascii() and line.isprintable()
    reported = json.loads(line)
    assert reported["message"] == f"{message} {argument}" and reported["tenant"] == value
    assert reported.items() >= ORIGIN.items() and reported["level"] == "warning"


@given(ANYTHING, ANYTHING, ANYTHING)
def test_whatever_is_logged_is_one_line_of_text(message: str, argument: str, value: str) -> None:
    line = TextLines().format(record("%s %s", message, argument, tenant=value))
    assert len(line.splitlines()) == 1 and line.isprintable()
    name, _, reported = line.rpartition(" tenant=")[2].partition("\n")
    assert reported == "" and (name == value or json.loads(name) == value)


def test_a_field_does_not_take_the_place_of_what_the_process_is() -> None:
    reported = json.loads(JsonLines(ORIGIN).format(record("a", process="gang", level="error", request_id="i")))
    assert (reported["process"], reported["level"], reported["request_id"]) == ("router", "warning", "i")


def test_time_is_utc_with_milliseconds() -> None:
    made = record("a")
    made.created = 1795380067.0129
    for line in (JsonLines({}).format(made), TextLines().format(made)):
        assert "2026-11-22T20:41:07.012Z" in line


def raised(logger: str) -> logging.LogRecord:
    made = record("it failed", logger=logger)
    try:
        try:
            raise KeyError("what a client\nsent")
        except KeyError as cause:
            raise ValueError("what a client\nsent") from cause
    except ValueError:
        made.exc_info = sys.exc_info()
    return made


@pytest.mark.parametrize("logger", ["motet.router.endpoint", "asyncio", "uvicorn.error", "motet.workersx"])
def test_errors_that_meet_requests_are_reported_without_what_they_say(logger: str) -> None:
    for form in (JsonLines({}), TextLines()):
        line = form.format(raised(logger))
        assert "sent" not in line
        assert all(
            word in line for word in ("ValueError", "KeyError, which led to", "test_replica_logging.py", "raised")
        )


def test_errors_of_gangs_are_reported_with_what_they_say() -> None:
    reported = json.loads(JsonLines({}).format(raised("motet.workers.loop")))
    assert reported["exception"] == "ValueError: what a client\nsent"
    lines = TextLines().format(raised("motet.workers.loop")).splitlines()
    assert all(line.startswith("    | ") for line in lines[1:])
    assert lines[-1] == r"    | ValueError: what a client\nsent"


def test_of_a_librarys_message_only_the_first_line_is_reported() -> None:
    line = JsonLines({}).format(record("never retrieved\nfuture: <ValueError('sent')>", logger="asyncio"))
    assert json.loads(line)["message"] == "never retrieved"


def test_long_texts_are_cut() -> None:
    reported = json.loads(JsonLines({}).format(record("a" * 100_000, tenant="b" * 100_000)))
    assert len(reported["message"]) == len(reported["tenant"]) == MAX_CHARS + 1


def test_a_pipe_that_is_not_read_makes_no_thread_wait() -> None:
    reader, pipe = os.pipe()
    writer = LogWriter(to_descriptor(pipe), "a full pipe", max_waiting_bytes=1 << 20)
    line = b"x" * 999 + b"\n"
    longest_s = 0.0
    for _ in range(5000):
        began = time.thread_time()
        writer.put(line)
        longest_s = max(longest_s, time.thread_time() - began)
    assert writer.num_dropped >= 3000 and longest_s < 0.1
    assert writer.take_unreported_drops() == 0  # there is no room to report it
    with os.fdopen(reader, "rb") as end:
        os.set_blocking(reader, False)

        def is_read() -> bool:
            with suppress(BlockingIOError):
                os.read(reader, 1 << 16)
            return writer._num_waiting_bytes == 0

        eventually(is_read)
        os.set_blocking(reader, True)
        assert writer.take_unreported_drops() == writer.num_dropped
        writer.put(b"last\n")
        writer.close()
        os.close(pipe)
        assert end.read().endswith(b"last\n")


def test_a_process_ends_though_its_log_cannot_be_written(tmp_path: Path) -> None:
    code = f"""
import logging, sys
from pathlib import Path
from motet.cluster.process_log import LogConfig
from motet.cluster.process_log import start_process_log
log = start_process_log(LogConfig(log_format="json", log_level="info"), "router", {{}}, Path({str(tmp_path)!r}))
for _ in range(20000):
    logging.getLogger("motet.a").info("x" * 1000)
print("done", log.num_dropped > 0, flush=True)
"""
    reader, pipe = os.pipe()  # it has no reader
    environ = os.environ | {TO_STDERR: "1"}
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=pipe, env=environ, check=True)
    os.close(reader)
    os.close(pipe)
    assert done.stdout == b"done True\n"


def test_a_full_disk_costs_lines_and_nothing_else() -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    writer = LogWriter(to_descriptor(full), "a full disk")
    writer.put(b"a\n")
    eventually(lambda: writer.num_dropped == 1)
    assert writer.take_unreported_drops() == 1
    writer.close()
    os.close(full)


def test_a_file_never_grows_beyond_its_bound(tmp_path: Path) -> None:
    file = LogFile(tmp_path / "logs" / "a.log", max_bytes=1000)
    for number in range(1000):
        file.write(b"%d\n" % number)
    file.close()
    older, newer = (tmp_path / "logs" / name for name in ("a.log.1", "a.log"))
    assert sorted((tmp_path / "logs").iterdir()) == [newer, older]
    assert 0 < newer.stat().st_size <= 1000 and older.stat().st_size <= 1000
    kept = (older.read_bytes() + newer.read_bytes()).split()
    assert kept == [b"%d" % number for number in range(1000)][-len(kept) :]


def test_files_of_processes_that_are_gone_are_forgotten(tmp_path: Path) -> None:
    gone = 2**22 + 1  # beyond any process id
    files = [tmp_path / f"gang-{gone}-{age}.log" for age in range(5)] + [tmp_path / f"gang-{os.getpid()}-0.log"]
    for age, file in enumerate(reversed(files)):
        file.touch()
        os.utime(file, (age, age))
    forget_old_files(tmp_path, 2)
    assert sorted(tmp_path.iterdir()) == sorted([files[0], files[1], files[-1]])


@pytest.fixture
def loggers() -> Iterator[None]:
    """Puts motet's loggers back."""
    own, root = logging.getLogger("motet"), logging.getLogger()
    before = own.handlers[:], own.level, own.propagate, root.handlers[:]
    yield
    own.handlers, own.level, own.propagate, root.handlers = before[0], before[1], before[2], before[3]


@pytest.mark.parametrize("log_format", ["json", "text"])
def test_a_process_writes_its_lines_to_a_file(
    tmp_path: Path, loggers: None, monkeypatch: pytest.MonkeyPatch, log_format: LogFormat
) -> None:
    monkeypatch.delenv(TO_STDERR, raising=False)
    log = start_process_log(
        LogConfig(log_format=log_format, log_level="info"), "gang", {"node": "n1", "gang": "g1"}, tmp_path
    )
    logging.getLogger("motet.workers.x").debug("too low")
    logging.getLogger("motet.workers.x").info("written", extra={"fields": {"request_id": "i", "tenant": "acme"}})
    logging.getLogger("some.library").info("too low")
    logging.getLogger("some.library").warning("written too")
    logging.getLogger("motet.workers.x").info("%d", "no number")  # must not raise
    log.close()
    (file,) = (tmp_path / FOLDER).iterdir()
    assert file.name.startswith(f"gang-{os.getpid()}-")
    lines = file.read_text().splitlines()
    assert len(lines) == 3
    if log_format == "json":
        first, second, _ = (json.loads(line) if line.startswith("{") else {} for line in lines)
        assert first.items() >= {"process": "gang", "node": "n1", "gang": "g1", "request_id": "i"}.items()
        assert (second["logger"], second["level"]) == ("some.library", "warning")
    else:
        assert lines[0].endswith("INFO motet.workers.x: written request_id=i tenant=acme")
