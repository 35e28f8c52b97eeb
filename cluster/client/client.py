"""A small HTTP client of a running motet: adapters, streamed chat, status.

ClientError               an error for the user, shown without a traceback
├── ServerUnreachable     nothing answers at the address, or the connection broke
└── RequestRefused        the server answered with an error; `status_code` says which
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import quote

import httpx
import msgspec

from ...adapters.errors import AdapterInvalid
from ...adapters.format.folder import folders_with_adapter, missing
from ...adapters.format.own_tokenizer import NO_TOKENIZER, OwnTokenizer, read_own_tokenizer
from ...adapters.names import PRIVATE, check_name

ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
STATUS_TIMEOUT_S = 10.0
LOOPBACK_HOSTS = frozenset({"127.0.0.1", "localhost", "::1"})


class ClientError(Exception):
    """A request could not be answered; the message says why."""


class ServerUnreachable(ClientError):  # noqa: N818
    """No server answered."""


class RequestRefused(ClientError):  # noqa: N818
    """The server's own message. `status_code` is None where the error came in the middle of a stream."""

    def __init__(self, message: str, status_code: int | None) -> None:
        super().__init__(message)
        self.status_code = status_code


@dataclass(frozen=True)
class AdapterInfo:
    """An adapter's current version, as the server describes it."""

    name: str
    version: int
    digest: str
    rank: int
    targets: tuple[str, ...]
    num_bytes: int
    fields: Mapping[str, Any] = field(repr=False, compare=False)  # the server's whole JSON

    @property
    def warnings(self) -> tuple[str, ...]:
        """Why it may answer otherwise than where it was trained."""
        return tuple(self.fields.get("warnings", ()))

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> AdapterInfo:
        return cls(
            name=fields["name"],
            version=fields["version"],
            digest=fields["digest"],
            rank=fields["rank"],
            targets=tuple(fields["targets"]),
            num_bytes=fields["bytes"],
            fields=fields,
        )


@dataclass(frozen=True)
class ChatPiece:
    """What one event of a stream brought. The last one has the token count."""

    text: str = ""
    finish_reason: str | None = None
    completion_tokens: int | None = None


class MotetClient:
    """Speaks for one tenant's key. Safe to share between threads.

    >>> MotetClient("localhost:8000")
    Traceback (most recent call last):
        ...
    motet.cluster.client.client.ClientError: url 'localhost:8000' is none of a motet: one like http://127...
    >>> MotetClient("http://localhost:8000/v1", "secret").url
    'http://localhost:8000'
    """

    def __init__(self, url: str, key: str | None = None) -> None:
        self.url = url.strip().rstrip("/").removesuffix("/v1")  # where OpenAI's clients want the /v1
        try:
            parsed = httpx.URL(self.url)
            host = parsed.host
            self._http = httpx.Client(
                base_url=self.url,
                headers={"Authorization": f"Bearer {key}"} if key else {},
                timeout=httpx.Timeout(60.0, connect=5.0, read=600.0, pool=None),
                trust_env=host not in LOOPBACK_HOSTS,  # a proxy of the environment cannot reach this machine's loopback
            )
            if parsed.scheme not in ("http", "https") or not host:
                self._http.close()
                raise ClientError(f"url {url!r} is none of a motet: one like http://127.0.0.1:8000 is needed")
        except (httpx.InvalidURL, UnicodeEncodeError) as error:
            raise ClientError(f"url {url!r} or the key cannot be sent: {error}") from error

    def __enter__(self) -> MotetClient:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        self._http.close()

    def models(self) -> list[str]:
        """Names that `model` may be: the base first, then the tenant's adapters.

        >>> client.models()
        ['base-model']
        >>> client.upload_adapter("pirate", folder)[0].name in client.models()
        True
        """
        return [model["id"] for model in self._entries("/v1/models")]

    def adapters(self) -> list[AdapterInfo]:
        return [AdapterInfo.from_json(fields) for fields in self._entries("/v1/adapters")]

    def upload_adapter(
        self,
        name: str,
        folder: Path,
        on_progress: Callable[[int, int], None] | None = None,
        *,
        activate: bool = True,
        is_private: bool = False,
        note: str = "",
        response_template: str = "",
    ) -> tuple[AdapterInfo, bool]:
        """The registered version, and whether it is new. `on_progress(sent, total)` counts the tensors' bytes.

        The tensors are streamed from disk. Of its tokenizer the chat template is sent, by which its chats are rendered,
        and what the server compares with the base's: RequestRefused if the adapter needs tokens that the base lacks.

        `response_template`: name of the form in which it writes calls and thoughts; empty: in the base's.
        Without `activate` the current version stays the current one. `is_private`: it belongs to the key's user alone.

        >>> adapter, is_new = client.upload_adapter("pirate", folder)
        >>> adapter.version, adapter.rank, is_new
        (1, 8, True)
        >>> client.upload_adapter("pirate", folder)[1]  # the same content is no new version
        False
        """
        _check_name(name)
        config_path, tensors_path = (folder / file for file in ADAPTER_FILES)
        for path in (config_path, tensors_path):
            if not path.is_file():
                names = [entry.name for entry in folder.iterdir()]
                raise ClientError(f"{folder}: {missing(path.name, names, folders_with_adapter(folder))}")
        data = {"name": name, **({"note": note} if note else {})}
        data |= {} if activate else {"activate": "false"}
        data |= {"private": "true"} if is_private else {}
        data |= {"response_template": response_template} if response_template else {}
        tokenizer, template = _own_tokenizer(folder)
        data |= {"chat_template": template} if template else {}
        if tokenizer != NO_TOKENIZER:
            data["tokenizer"] = msgspec.json.encode(tokenizer).decode()
        with _MeteredFile(tensors_path, on_progress) as tensors:
            response = self._request(
                "POST",
                "/v1/adapters",
                data=data,
                files={
                    "adapter_config.json": (config_path.name, config_path.read_bytes(), "application/json"),
                    "adapter_model.safetensors": (tensors_path.name, tensors, "application/octet-stream"),
                },
            )
        return AdapterInfo.from_json(response.json()), response.status_code == 201

    def adapter(self, name: str) -> AdapterInfo:
        """The current version of an adapter. Raises RequestRefused, and ClientError for a name that none can have.

        >>> client.adapter("parrot")
        Traceback (most recent call last):
            ...
        motet.cluster.client.client.RequestRefused: there is no adapter 'parrot'
        >>> client.adapter("../pirate")
        Traceback (most recent call last):
            ...
        motet.cluster.client.client.ClientError: name '../pirate' is not accepted: 1 to 64 letters, ...
        """
        _check_name(name)
        return AdapterInfo.from_json(self._json("GET", f"/v1/adapters/{quote(name, safe='')}"))

    def delete_adapter(self, name: str) -> None:
        """Deletes all versions of an adapter.

        >>> _ = client.upload_adapter("pirate", folder)
        >>> client.delete_adapter("pirate")
        >>> client.adapters()
        []
        """
        _check_name(name)
        self._request("DELETE", f"/v1/adapters/{quote(name, safe='')}")

    def readiness_problem(self) -> str | None:
        """Why no token can be served now; None: one can."""
        try:
            self._request("GET", "/ready", timeout=STATUS_TIMEOUT_S)
        except RequestRefused as refusal:  # others come from a proxy that does not pass this path on
            return str(refusal) if refusal.status_code == HTTPStatus.SERVICE_UNAVAILABLE else None
        return None

    def status(self) -> dict[str, Any]:
        """Model, gangs and load: the JSON of /status. Not waited for as long as for an answer.

        >>> client.status()["model"]
        'base-model'
        """
        return dict(self._json("GET", "/status", timeout=STATUS_TIMEOUT_S))

    def call(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """What the server answers to a request whose body is JSON.

        >>> client.call("GET", "/v1/models")["object"]
        'list'
        >>> client.call("POST", "/v1/nothing", {})
        Traceback (most recent call last):
            ...
        motet.cluster.client.client.RequestRefused: there is no such route
        """
        return dict(self._json(method, path, **({} if body is None else {"json": dict(body)})))

    def listed(self, path: str) -> list[dict[str, Any]]:
        """All entries of a list of the server's.

        >>> [model["id"] for model in client.listed("/v1/models")]
        ['base-model']
        """
        return self._entries(path)

    def usage(self, query: Mapping[str, str], *, of_all: bool) -> str:
        """The answer to /v1/usage, as JSON or CSV. `of_all`: of all tenants, for the operators."""
        path = "/v1/admin/usage" if of_all else "/v1/usage"
        return self._request("GET", path, params=dict(query)).text

    def chat(
        self,
        model: str,
        messages: Sequence[Mapping[str, str]],
        *,
        max_tokens: int | None = None,
        temperature: float = 0.0,
    ) -> Generator[ChatPiece, None, None]:
        """The pieces of the answer as they come. Closing the generator early cancels the request at the server.

        Without `max_tokens` the answer may fill the model's context.

        >>> pieces = [*client.chat("base-model", [{"role": "user", "content": "hello there"}])]
        >>> "".join(piece.text for piece in pieces), pieces[-1].completion_tokens
        ('HELLO THERE ', 2)
        """
        request: dict[str, Any] = {
            "model": model,
            "messages": list(messages),
            "temperature": temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if max_tokens is not None:
            request["max_tokens"] = max_tokens
        with (
            self._transport_errors(),
            self._http.stream("POST", "/v1/chat/completions", json=request) as response,
        ):
            if response.is_error:
                response.read()
                raise _refusal(response)
            yield from _chat_pieces(response.iter_lines())

    def _entries(self, path: str) -> list[Any]:
        """All entries of a list, page by page."""
        page = self._json("GET", path)
        entries: list[Any] = page["data"]
        while page.get("has_more"):
            page = self._json("GET", f"{path}?after={quote(page['last_id'], safe='')}")
            entries += page["data"]
        return entries

    def _json(self, method: str, path: str, **options: Any) -> Any:
        response = self._request(method, path, **options)
        try:
            return response.json()
        except ValueError as error:
            raise ClientError(f"{self.url} answered something that is not JSON: is a motet there?") from error

    def _request(self, method: str, path: str, **options: Any) -> httpx.Response:
        with self._transport_errors():
            response = self._http.request(method, path, **options)
        if response.is_error:
            raise _refusal(response)
        return response

    @contextmanager
    def _transport_errors(self) -> Iterator[None]:
        try:
            yield
        except httpx.ConnectError as error:
            raise ServerUnreachable(f"nothing answers at {self.url}, is `motet serve` running? ({error})") from error
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise ServerUnreachable(f"the connection to {self.url} broke: {error or type(error).__name__}") from error


class _MeteredFile(io.FileIO):
    """A file that reports how much of it was read."""

    def __init__(self, path: Path, on_progress: Callable[[int, int], None] | None) -> None:
        super().__init__(path)
        self._num_bytes = path.stat().st_size
        self._on_progress = on_progress

    def read(self, size: int | None = -1, /) -> bytes:
        chunk = super().read(-1 if size is None else size)
        if self._on_progress is not None:
            self._on_progress(self.tell(), self._num_bytes)
        return chunk


def _check_name(name: str) -> None:
    try:
        check_name(name.removeprefix(f"{PRIVATE}/"))  # the tenant's adapter, even if the user has one of that name
    except AdapterInvalid as error:
        raise ClientError(str(error)) from error


def _own_tokenizer(folder: Path) -> tuple[OwnTokenizer, str]:
    try:
        return read_own_tokenizer(folder)
    except (AdapterInvalid, OSError) as error:
        raise ClientError(str(error)) from error


def _chat_pieces(lines: Iterator[str]) -> Iterator[ChatPiece]:
    """Pieces out of server-sent events. A stream that ends without [DONE] was cut off."""
    for line in lines:
        if not line.startswith("data:"):
            continue
        data = line.removeprefix("data:").strip()
        if data == "[DONE]":
            return
        event = json.loads(data)
        if "error" in event:
            raise RequestRefused(_message(event) or data, None)
        choice = event["choices"][0] if event["choices"] else {}
        usage = event.get("usage") or {}
        yield ChatPiece(
            text=choice.get("delta", {}).get("content") or "",
            finish_reason=choice.get("finish_reason"),
            completion_tokens=usage.get("completion_tokens"),
        )
    raise ServerUnreachable("the stream ended before the answer was complete")


def _refusal(response: httpx.Response) -> RequestRefused:
    try:
        message = _message(response.json())
    except ValueError:
        message = None
    return RequestRefused(message or f"HTTP {response.status_code}: {response.text[:200]}", response.status_code)


def _message(body: Any) -> str | None:
    """The message of an error in OpenAI's shape, None for anything else."""
    error = body.get("error") if isinstance(body, dict) else None
    message = error.get("message") if isinstance(error, dict) else None
    return message if isinstance(message, str) else None
