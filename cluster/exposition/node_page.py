"""One port for each node, whose page combines the pages of all processes on the node.

Each process has its own page behind a Unix socket in a folder of the node, which is private to the user. The first
process listens at the port, and passes its listening socket to later ones: they all accept from one queue, so any
living process answers, and one that dies or hangs does not take the port with it.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import os
import socket
import tempfile
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Final, Literal

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, ProcessCollector
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from ...adapters.ended_tasks import end_tasks
from ...router.exposition.families import MetricsTarget, text_of
from ...router.http.auth import OperatorKey
from ..launch_secrets import operator_key_in

# Settings of what each process shows to Prometheus.

Access = Literal["operators", "all"]


@dataclass(frozen=True, kw_only=True)
class ExpositionConfig:
    """For both routers and gangs. Defaults and bounds are in `cluster/settings/`."""

    name: str  # the base's, a label of everything
    data_dir: Path  # has the operators' key if none was given
    metrics_port: int  # of each node; 0: there is no page
    metrics_access: Access  # holders of the operators' key, or every client that reaches the port


# The pages of several processes as one page in Prometheus' text format.

_HELP: Final = b"# HELP "


def merged_pages(pages: Iterable[bytes]) -> bytes:
    """Every series of the pages, those of one metric together, as the format wants it.

    Help and type are those of the first page that has the metric. `pages`: as prometheus_client writes them, and no two
    have a series in common.
    """
    heads: dict[bytes, list[bytes]] = {}
    samples: dict[bytes, list[bytes]] = {}
    for page in pages:
        into: list[bytes] = []
        for line in page.splitlines(keepends=True):
            if line.startswith(_HELP):
                name = line.split(b" ", 3)[2]
                into = samples.setdefault(name, [])
                head = [] if name in heads else heads.setdefault(name, [])
                head.append(line)
            elif line.startswith(b"#"):
                head.append(line)
            else:
                into.append(line)
    return b"".join(line for name, head in heads.items() for line in (*head, *samples[name]))


# Answers `GET /metrics` on a listening socket.
#
# Prometheus scrapes every few seconds, so each scrape has its own connection, and no state is kept between them.

MAX_CONNECTIONS: Final = 16
DEADLINE_S: Final = 10.0  # for a whole scrape, as long as Prometheus waits
MAX_HEAD_BYTES: Final = 16 << 10
METRICS: Final = b"/metrics"
HEAD_END: Final = b"\r\n\r\n"

_log = logging.getLogger(__name__)


class MetricsServer:
    """Belongs to one event loop."""

    def __init__(
        self, page: Callable[[bytes], Awaitable[bytes | None]], *, max_connections: int = MAX_CONNECTIONS
    ) -> None:
        """`page` returns the text for a bearer token (empty: none was sent); None: the token is not accepted.

        Connections beyond `max_connections` at once are closed.
        """
        self._page, self._max_connections = page, max_connections
        self._server: asyncio.Server | None = None
        self._num_open = 0

    async def start(self, listener: socket.socket) -> None:
        """`listener` is closed with the server."""
        if listener.family == socket.AF_UNIX:
            self._server = await asyncio.start_unix_server(self._serve, sock=listener, limit=MAX_HEAD_BYTES)
        else:
            self._server = await asyncio.start_server(self._serve, sock=listener, limit=MAX_HEAD_BYTES)

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._num_open += 1
        try:
            if self._num_open <= self._max_connections:
                async with asyncio.timeout(DEADLINE_S):
                    head = await reader.readuntil(HEAD_END)
                    writer.write(await self._answer(head))
                    await writer.drain()
        except (TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, OSError):
            pass  # the client is gone
        finally:
            self._num_open -= 1
            writer.close()

    async def _answer(self, head: bytes) -> bytes:
        request, *headers = head.split(b"\r\n")
        method, _, target = request.partition(b" ")
        if target.partition(b" ")[0].partition(b"?")[0] != METRICS:
            return _response("404 Not Found", b"only /metrics is here\n")
        if method != b"GET":
            return _response("405 Method Not Allowed", b"only GET is answered\n", "Allow: GET")
        try:
            text = await self._page(_bearer(headers))
        except Exception:
            _log.exception("the page of metrics could not be rendered")
            return _response("500 Internal Server Error", b"the cause is in the log\n")
        if text is None:
            refusal = b"the operators' key is needed: Authorization: Bearer KEY\n"
            return _response("401 Unauthorized", refusal, "WWW-Authenticate: Bearer")
        return _response("200 OK", text, content_type=CONTENT_TYPE_LATEST)


def _bearer(headers: list[bytes]) -> bytes:
    """The token in the header; empty if there is none."""
    for header in headers:
        name, _, value = header.partition(b":")
        if name.strip().lower() == b"authorization":
            scheme, _, key = value.strip().partition(b" ")
            return key.strip() if scheme.lower() == b"bearer" else b""
    return b""


def _response(status: str, body: bytes, *headers: str, content_type: str = "text/plain; charset=utf-8") -> bytes:
    lines = (
        f"HTTP/1.1 {status}",
        f"Content-Type: {content_type}",
        f"Content-Length: {len(body)}",
        "Connection: close",
        *headers,
    )
    return "\r\n".join(lines).encode() + HEAD_END + body


FOLDER: Final = "motet-metrics-{}"  # by user, in the folder of temporary files
SHORT_PARENT: Final = Path("/tmp")  # for paths that would be too long there
READ_S: Final = 4.0  # for all pages: less than Prometheus waits
MAX_READERS: Final = 256  # of one process's page at once: every process of a node may answer several scrapes
MAX_PAGE_BYTES: Final = 8 << 20
_MAX_SOCKET_BYTES: Final = 100  # the kernel's limit is 104 on macOS and 108 on Linux
_CONNECT_S: Final = 1.0  # for another process to hand its listening socket over
RETRY_S: Final = 1.0
_BACKLOG: Final = 64
_PAGE, _LISTENER = ".page", ".listener"  # suffixes of sockets
UP: Final = "motet_process_up"
_UP_TEXT: Final = "1 if the process's metrics could be read; 0: it did not answer in time, and its series are missing."


class _RefusedError(Exception):
    """The key is not accepted by this process."""


class NodePage:
    """One process' part of its node's page. Belongs to one event loop."""

    def __init__(self, process: str, name: str, page: Callable[[bytes], Awaitable[bytes | None]]) -> None:
        """`process`: router or gang, and `name` is its label of that name.

        `page`: the process's own, for a key; None: the key is not accepted.
        """
        self._process_server, self._name = MetricsServer(page, max_connections=MAX_READERS), f"{process}_{name}"
        self._shared = MetricsServer(self.text)
        self._folder = Path()
        self._prefix = ""  # of all sockets of one port
        self._hand_over: socket.socket | None = None
        self._task: asyncio.Task[None] | None = None

    async def start(self, host: str, port: int) -> None:
        """Raises OSError if this process's own page cannot be served. Retries the port until it is free."""
        self._prefix = f"{host}_{port}_"
        self._folder = await asyncio.to_thread(node_folder, len(self._path(_LISTENER).name))
        page_socket = await asyncio.to_thread(_listening, self._path(_PAGE))
        await self._process_server.start(page_socket)
        if not await self._share(host, port):
            self._task = asyncio.create_task(self._share_in_the_end(host, port), name="metrics port")

    async def stop(self) -> None:
        await end_tasks(self._task)
        if self._hand_over is not None:
            asyncio.get_running_loop().remove_reader(self._hand_over)
            self._hand_over.close()
            self._hand_over = None
        await self._shared.stop()
        await self._process_server.stop()
        if self._prefix:
            for suffix in (_LISTENER, _PAGE):
                self._path(suffix).unlink(missing_ok=True)

    async def text(self, key: bytes) -> bytes | None:
        """The pages of all processes that accept the key; None: none does."""
        processes = self._processes(_PAGE)
        pages = await asyncio.gather(*(_read(path, key) for path in processes), return_exceptions=True)
        texts, is_up = [], {}
        for (path, process), page in zip(processes.items(), pages, strict=True):
            if isinstance(page, bytes):
                texts.append(page)
                is_up[process] = True
            elif isinstance(page, ConnectionRefusedError):
                path.unlink(missing_ok=True)  # its process has died
            elif not isinstance(page, _RefusedError | FileNotFoundError):
                is_up[process] = False
        return await asyncio.to_thread(_whole, texts, is_up) if texts else None

    async def _share_in_the_end(self, host: str, port: int) -> None:
        num_tries = 0
        while not await self._share(host, port):
            num_tries += 1
            if num_tries == 10:
                _log.warning(
                    "no metrics at %s:%d: it is in use by another program; trying again until it is free", host, port
                )
            await asyncio.sleep(RETRY_S)

    async def _share(self, host: str, port: int) -> bool:
        """Whether this process listens at the port now."""
        listener_paths = self._processes(_LISTENER)
        if (listener := await asyncio.to_thread(_found_listener, host, port, listener_paths)) is None:
            return False
        hand_over = self._hand_over = await asyncio.to_thread(_listening, self._path(_LISTENER))
        asyncio.get_running_loop().add_reader(hand_over, _hand_to_next, hand_over, listener)
        await self._shared.start(listener)
        return True

    def _path(self, suffix: str) -> Path:
        return self._folder / f"{self._prefix}{self._name}{suffix}"

    def _processes(self, suffix: str) -> dict[Path, tuple[str, str]]:
        """The sockets of all processes of this port, this one included, with each one's kind and name."""
        names = sorted(os.listdir(self._folder))
        return {
            self._folder / name: (process, process_name)
            for name in names
            if name.startswith(self._prefix) and name.endswith(suffix)
            for process, _, process_name in [name.removeprefix(self._prefix).removesuffix(suffix).partition("_")]
        }


def node_folder(name_bytes: int) -> Path:
    """The folder for sockets of this user's processes. Raises OSError, also if it is another user's.

    `name_bytes`: of the longest name in it.
    """
    for parent in (Path(tempfile.gettempdir()), SHORT_PARENT):
        folder = parent / FOLDER.format(os.getuid())
        if len(os.fsencode(folder)) + 1 + name_bytes <= _MAX_SOCKET_BYTES:
            break
    folder.mkdir(mode=0o700, exist_ok=True)
    facts = folder.lstat()
    if folder.is_symlink() or facts.st_uid != os.getuid() or facts.st_mode & 0o077:
        raise PermissionError(f"{folder} is open to other users")
    return folder


def _listening(path: Path) -> socket.socket:
    """A listening Unix socket. Its path appears once it listens, so a socket that refuses belongs to a dead process."""
    unready = path.with_suffix(".new")
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind(str(unready))
        listener.listen(MAX_READERS)
        unready.rename(path)
    except OSError:
        listener.close()
        raise
    listener.setblocking(False)
    return listener


def _found_listener(host: str, port: int, paths: Iterable[Path]) -> socket.socket | None:
    """The port's listening socket, of another process or a new one; None: a program that is not in `paths` has it."""
    for path in paths:
        try:
            with socket.socket(socket.AF_UNIX) as asking:
                asking.settimeout(_CONNECT_S)
                asking.connect(str(path))
                _, files, _, _ = socket.recv_fds(asking, 1, 1)
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)  # its process has died
        except OSError:
            continue  # it hangs, or has just ended
        else:
            for file in files:
                os.set_inheritable(file, False)
                listener = socket.socket(fileno=file)
                listener.setblocking(False)
                return listener
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except OSError:
        return None


def _hand_to_next(hand_over: socket.socket, listener: socket.socket) -> None:
    """Gives the listening socket to a process that asks for it."""
    try:
        asking, _ = hand_over.accept()
        with asking:
            socket.send_fds(asking, [b"1"], [listener.fileno()])
    except OSError as error:
        _log.debug("a process has not taken the metrics port: %s", error)


async def _read(path: Path, key: bytes) -> bytes:
    """A process's page. Raises _RefusedError, or another exception if it cannot be read now."""
    async with asyncio.timeout(READ_S):
        reader, writer = await asyncio.open_unix_connection(path)
        try:
            authorization = b"Authorization: Bearer " + key + b"\r\n" if key else b""
            writer.write(b"GET " + METRICS + b" HTTP/1.1\r\n" + authorization + b"\r\n")
            status, *headers = (await reader.readuntil(HEAD_END)).split(b"\r\n")
            if status.startswith(b"HTTP/1.1 401 "):
                raise _RefusedError
            (length,) = (int(header.split(b":")[1]) for header in headers if header.startswith(b"Content-Length:"))
            if not status.startswith(b"HTTP/1.1 200 ") or length > MAX_PAGE_BYTES:
                raise ValueError(f"{path} answered {status!r}, {length} bytes")
            return await reader.readexactly(length)
        finally:
            writer.close()


def _whole(texts: Iterable[bytes], is_up: Mapping[tuple[str, str], bool]) -> bytes:
    family = GaugeMetricFamily(UP, _UP_TEXT)
    for (process, name), up in is_up.items():
        family.add_sample(UP, {"process": process, process: name}, float(up))
    return merged_pages([text_of([family]), *texts])


# A process's own page of metrics, as a part of its node's page, and where that is.

METRICS_ADDRESS: Final = "metrics_address"  # a key in a replica's metadata, from which others know it


class ProcessPage:
    """The page of one router or gang. Belongs to one event loop."""

    def __init__(
        self,
        config: ExpositionConfig,
        process: Literal["router", "gang", "start"],
        name: str,
        operator_key: str | OperatorKey | None,
        metrics: Callable[[], Iterable[Metric]],
    ) -> None:
        """`name`: of the router, gang or start. `operator_key`: None: the one in the data folder.

        `metrics` is called on the loop; what it returns is read in a thread.
        """
        self._config, self._metrics = config, metrics
        self._process = _ProcessMetrics({process: name, "base": config.name})
        self._operator_key = operator_key
        self._key: OperatorKey | None = None  # what a scrape must present; None: nothing
        self._node_page = NodePage(process, name, self._text)
        self._address: str | None = None

    async def start(self, node_address: str) -> None:
        """`node_address`: the address of this machine for others; on loopback there are no others."""
        if not (port := self._config.metrics_port):
            return
        if self._config.metrics_access == "operators":
            self._key = OperatorKey.of(self._operator_key or await self._key_of_folder())
        try:
            await self._node_page.start(_listen_host(node_address), port)
        except OSError as error:
            _log.warning("no metrics of this process: %s", error)
            return
        host = f"[{node_address}]" if ":" in node_address else node_address
        self._address = f"{host}:{port}"
        _log.info("metrics at http://%s/metrics", self._address)

    async def stop(self) -> None:
        await self._node_page.stop()

    @property
    def metadata(self) -> dict[str, str]:
        """What a replica adds to its metadata; empty: there is no page."""
        return {} if self._address is None else {METRICS_ADDRESS: self._address}

    async def _key_of_folder(self) -> str:
        await asyncio.to_thread(self._config.data_dir.mkdir, parents=True, exist_ok=True)
        return await asyncio.to_thread(operator_key_in, self._config.data_dir)

    async def _text(self, key: bytes) -> bytes | None:
        if self._key is not None and not hmac.compare_digest(key, self._key.now.encode()):
            return None
        return await asyncio.to_thread(text_of, self._metrics(), self._process)


class _ProcessMetrics(Collector):
    """CPU seconds, memory, files and the time of the start of this process."""

    def __init__(self, labels: Mapping[str, str]) -> None:
        self._labels = labels
        self._collector = ProcessCollector(registry=CollectorRegistry())

    def collect(self) -> Iterator[Metric]:
        for metric in self._collector.collect():
            metric.samples = [sample._replace(labels={**self._labels, **sample.labels}) for sample in metric.samples]
            yield metric


def targets_of(config: ExpositionConfig, replicas: Iterable[Mapping[str, str]]) -> list[MetricsTarget]:
    """The nodes that have a page, from the metadata of all replicas."""
    addresses = {metadata[METRICS_ADDRESS] for metadata in replicas if METRICS_ADDRESS in metadata}
    return [MetricsTarget(address=address, base=config.name) for address in sorted(addresses)]


def _listen_host(node_address: str) -> str:
    """All addresses of a machine that others reach; loopback otherwise."""
    address = ip_address(node_address)
    if address.is_loopback:
        return node_address
    return "0.0.0.0" if address.version == 4 else "::"
