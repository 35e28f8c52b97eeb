"""/v1/load_lora_adapter and /v1/unload_lora_adapter, as vLLM has them: adapters of the server's own folders."""

from __future__ import annotations

import asyncio
import json
import os
import stat
import sys
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Annotated, Final, NamedTuple

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from ...adapters.errors import AdapterInvalid, NameTaken, UploadTooLarge
from ...adapters.format.folder import missing
from ...adapters.format.own_tokenizer import FAST_FILE, OwnTokenizer, own_tokenizer
from ...adapters.format.peft import CONFIG_FILE, TENSORS_FILE
from ...adapters.names import PRIVATE
from ..config import CurrentConfig
from ..http.auth import Identity
from ..http.errors import ApiError, invalid_value
from ..http.route import route
from ..text.answer_format import FORMATS
from .adapters_api import AdaptersApi
from .upload_form import (
    CHAT_TEMPLATE_FIELD,
    MAX_CHAT_TEMPLATE_BYTES,
    MAX_CONFIG_BYTES,
    TEMPLATE_FIELD,
    UploadForm,
    UploadRoom,
    too_large,
)

# Adapters in folders on the server's disks from which the operator lets tenants load.

TENANT: Final = "{tenant}"  # in a folder's name: replaced by the tenant's name
MAX_PATH_CHARS: Final = 4096
_PIECE_BYTES: Final = 1 << 20
_TOKENIZER_BYTES: Final = 2 << 20  # that are read of each file of a tokenizer: Gemma 3's thousands of added tokens
_MOST_FOLDERS: Final = 1000  # that are looked into, to say which holds the adapter
_ADDED_TOKENS: Final = b'"added_tokens":'  # near the begin of a tokenizer.json, before its vocabulary


class FolderLimits(NamedTuple):
    config_bytes: int
    tensors_bytes: int


def folder_below(path: str, folders: str, tenant: str) -> tuple[Path, Path]:
    """The allowed folder that `path` lies in, and the path from there, without symbolic links. Blocking.

    Raises 400, which reveals nothing about files outside the allowed folders. `folders`: with commas between them.

    >>> folder_below("/lora/acme/pirate", "/lora/{tenant},/shared", "acme")
    (PosixPath('/lora/acme'), PosixPath('pirate'))
    >>> folder_below("/lora/zoo/parrot", "/lora/{tenant}", "acme")
    Traceback (most recent call last):
        ...
    motet.router.http.errors.ApiError: Invalid value for 'lora_path': it is in no folder that this server's ...
    """
    if not folders:
        raise invalid_value("lora_path", "this server loads no folders: its operator has allowed none.")
    roots = [Path(folder.replace(TENANT, tenant)) for folder in folders.split(",")]
    try:
        requested = Path(os.path.normpath(path))
        for root in roots:
            if requested.is_relative_to(root) and ".." not in Path(path).parts:
                resolved, top = requested.resolve(), root.resolve()
                if resolved.is_relative_to(top):
                    return top, resolved.relative_to(top)
    except (OSError, ValueError, RuntimeError):  # a loop of links, a name that no file may have
        pass
    raise invalid_value("lora_path", "it is in no folder that this server's operator has allowed.")


def tensors_bytes(root: Path, folder: Path, limits: FolderLimits) -> int:
    """The size of the adapter's tensors. Blocking; raises AdapterInvalid, UploadTooLarge."""
    with ExitStack() as stack:
        return os.fstat(_opened(stack, root, folder, limits)[1]).st_size


def read_adapter(root: Path, folder: Path, tensors_path: Path, limits: FolderLimits) -> bytes:
    """Copies the adapter's tensors to an empty file, and returns its config. Blocking.

    Follows no link below `root`, even one that is created meanwhile. Raises AdapterInvalid, UploadTooLarge.
    """
    with ExitStack() as stack, tensors_path.open("r+b") as copy:
        config, tensors = _opened(stack, root, folder, limits)
        num_left = limits.tensors_bytes
        while piece := os.read(tensors, _PIECE_BYTES):
            num_left -= len(piece)
            if num_left < 0:
                raise UploadTooLarge(f"{TENSORS_FILE} grows while it is read: try again when it is written")
            copy.write(piece)
        return os.read(config, limits.config_bytes)


def read_tokenizer(root: Path, folder: Path) -> tuple[OwnTokenizer, str]:
    """What the folder's tokenizer adds, and its chat template; empty: it has none.

    Blocking; raises AdapterInvalid, UploadTooLarge.
    """
    with ExitStack() as stack:
        return own_tokenizer(partial(_tokenizer_file, _below(stack, root, folder)), "the folder")


def _tokenizer_file(folder: int, name: str) -> bytes | None:
    try:
        os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return None
    with ExitStack() as stack:
        limit = sys.maxsize if name == FAST_FILE else _TOKENIZER_BYTES
        begin = os.read(_file(stack, name, folder, limit), _TOKENIZER_BYTES)
    return _added_tokens(begin) if name == FAST_FILE else begin


def _added_tokens(begin: bytes) -> bytes:
    """A tokenizer.json's added tokens alone: to parse its vocabulary would hold the interpreter's lock for long."""
    _, _, tail = begin.partition(_ADDED_TOKENS)
    try:
        tokens, _ = json.JSONDecoder().raw_decode(tail.decode("utf-8", "ignore").lstrip())
    except (ValueError, RecursionError) as error:
        message = (
            f"{FAST_FILE} has no added_tokens in its first {_TOKENIZER_BYTES >> 20} MiB: save it again, or remove it"
        )
        raise AdapterInvalid(message) from error
    return json.dumps({"added_tokens": tokens}).encode()


def _opened(stack: ExitStack, root: Path, folder: Path, limits: FolderLimits) -> tuple[int, int]:
    """Its config and its tensors, open until the stack closes."""
    at = _below(stack, root, folder)
    for name in (CONFIG_FILE, TENSORS_FILE):
        if name not in (names := os.listdir(at)):
            raise AdapterInvalid(f"the folder is no adapter: {missing(name, names, _with_adapter(names, at))}")
    return _file(stack, CONFIG_FILE, at, limits.config_bytes), _file(stack, TENSORS_FILE, at, limits.tensors_bytes)


def _with_adapter(names: Sequence[str], folder: int) -> list[str]:
    """Which of the first of these folders in it hold a file of PEFT's config."""
    folders = []
    for name in names[:_MOST_FOLDERS]:
        with suppress(OSError):
            os.stat(f"{name}/{CONFIG_FILE}", dir_fd=folder, follow_symlinks=False)
            folders.append(name)
    return folders


def _below(stack: ExitStack, root: Path, folder: Path) -> int:
    at = _folder(stack, root, None)
    for part in folder.parts:
        at = _folder(stack, part, at)
    return at


def _folder(stack: ExitStack, name: str | Path, above: int | None) -> int:
    try:
        descriptor = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=above)
    except OSError as error:
        raise AdapterInvalid(f"lora_path has no folder {os.fspath(name)!r} that can be read") from error
    stack.callback(os.close, descriptor)
    return descriptor


def _file(stack: ExitStack, name: str, folder: int, limit: int) -> int:
    try:
        descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
    except OSError as error:
        raise AdapterInvalid(f"the folder has no readable file {name}, or it is a link") from error
    stack.callback(os.close, descriptor)
    facts = os.fstat(descriptor)
    if not stat.S_ISREG(facts.st_mode):
        raise AdapterInvalid(f"{name} is not a file")
    if facts.st_size > limit:
        raise UploadTooLarge(f"{name} has {facts.st_size} bytes: at most {limit} are accepted")
    return descriptor


def loaded_already(name: str) -> ApiError:
    message = f"The adapter `{name}` is loaded already: send load_inplace: true for another version of it."
    return ApiError(409, message, param="lora_name", code="version_refused")


_SENTENCE = {"text/plain": "A sentence."}
Name = Annotated[str, Meta(max_length=256, description="What requests call it in `model`.")]


class LoadBody(msgspec.Struct, frozen=True, kw_only=True):
    lora_name: Name
    lora_path: Annotated[str, Meta(max_length=MAX_PATH_CHARS, description="A folder of the server, as PEFT saves it.")]
    load_inplace: Annotated[bool | None, Meta(description="Another version of one that is there.")] = None
    response_template: Annotated[
        str | None, Meta(description=f"Of an upload, in which form it writes: {', '.join(FORMATS)}.")
    ] = None


class UnloadBody(msgspec.Struct, frozen=True, kw_only=True):
    lora_name: Name
    lora_int_id: Annotated[int | None, Meta(description="Makes no difference.")] = None


def _registered(name: str) -> str:
    """What is uploaded under a plain name is the tenant's, also where the caller has a private one of the name."""
    return name if name.startswith(PRIVATE) else f"{PRIVATE}/{name}"


class LoraAdaptersApi:
    def __init__(self, config: CurrentConfig, adapters: AdaptersApi) -> None:
        self._config, self._adapters = config, adapters

    @route(
        "POST",
        "/v1/load_lora_adapter",
        scope="upload",
        summary="Upload an adapter from a folder of the server.",
        texts=_SENTENCE,
        errors=AdaptersApi.UPLOAD_ERRORS,
    )
    async def load(self, request: Request, identity: Identity, body: LoadBody) -> Response:
        """Only from folders that the operator has allowed (`--adapter-folders`). It is checked as an upload is."""
        if body.response_template and body.response_template not in FORMATS:
            raise invalid_value(TEMPLATE_FIELD, f"it is none of {', '.join(FORMATS)}.")
        folders = self._config.now.adapter_folders
        root, folder = await asyncio.to_thread(folder_below, body.lora_path, folders, identity.name)
        if not body.load_inplace and await self._adapters.has(identity, _registered(body.lora_name)):
            raise loaded_already(body.lora_name)
        try:
            _, _, warnings = await self._adapters.take(request, identity, partial(self._read, body, root, folder))
        except NameTaken as error:  # by another upload meanwhile
            raise loaded_already(body.lora_name) from error
        said = "".join(f" Warning: {warning}." for warning in warnings)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.{said}")

    @route(
        "POST",
        "/v1/unload_lora_adapter",
        scope="upload",
        summary="Delete an adapter.",
        texts=_SENTENCE,
        errors=("adapter_not_found", "registry_unavailable"),
    )
    async def unload(self, request: Request, identity: Identity, body: UnloadBody) -> Response:
        """The folder that it came from stays."""
        await self._adapters.remove(request, identity, body.lora_name)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")

    async def _read(self, body: LoadBody, root: Path, folder: Path, tensors_path: Path, room: UploadRoom) -> UploadForm:
        limits = FolderLimits(MAX_CONFIG_BYTES, self._config.now.max_upload_bytes)
        num_bytes = await asyncio.to_thread(tensors_bytes, root, folder, limits)
        room.grow(num_bytes)
        limits = FolderLimits(MAX_CONFIG_BYTES, num_bytes)
        config = await asyncio.to_thread(read_adapter, root, folder, tensors_path, limits)
        room.wrote(num_bytes)
        tokenizer, template = await asyncio.to_thread(read_tokenizer, root, folder)
        if len(template.encode()) > MAX_CHAT_TEMPLATE_BYTES:
            raise too_large(CHAT_TEMPLATE_FIELD, MAX_CHAT_TEMPLATE_BYTES)
        return UploadForm(
            body.lora_name,
            config,
            must_be_new=not body.load_inplace,
            tokenizer=tokenizer,
            response_template=body.response_template or "",
            chat_template=template,
        )
