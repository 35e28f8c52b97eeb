"""Adapters in folders on the server's disks from which the operator lets tenants load."""

from __future__ import annotations

import json
import os
import stat
import sys
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

from ...adapters.errors import AdapterInvalid, UploadTooLarge
from ...adapters.format.own_tokenizer import FAST_FILE, OwnTokenizer, own_tokenizer
from ...adapters.format.peft import CONFIG_FILE, TENSORS_FILE
from ..openai_api.errors import ApiError, invalid_value

TENANT: Final = "{tenant}"  # in a folder's name: replaced by the tenant's name
MAX_PATH_CHARS: Final = 4096
_PIECE_BYTES: Final = 1 << 20
_TOKENIZER_BYTES: Final = 2 << 20  # that are read of each file of a tokenizer: Gemma 3's thousands of added tokens
_ADDED_TOKENS: Final = b'"added_tokens":'  # near the begin of a tokenizer.json, before its vocabulary


class Limits(NamedTuple):
    config_bytes: int
    tensors_bytes: int


def folder_below(path: str, folders: str, tenant: str) -> tuple[Path, Path]:
    """The allowed folder that `path` lies in, and the path from there, without symbolic links. Blocking.

    Raises 400, which reveals nothing about files outside the allowed folders. `folders`: with commas between them.
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


def tensors_bytes(root: Path, folder: Path, limits: Limits) -> int:
    """The size of the adapter's tensors. Blocking; raises AdapterInvalid, UploadTooLarge."""
    with ExitStack() as stack:
        return os.fstat(_opened(stack, root, folder, limits)[1]).st_size


def read_adapter(root: Path, folder: Path, tensors_path: Path, limits: Limits) -> bytes:
    """Copies the adapter's tensors to an empty file, and returns its config. Blocking.

    Follows no link below `root`, even one that is created meanwhile. Raises AdapterInvalid, UploadTooLarge.
    """
    with ExitStack() as stack, tensors_path.open("r+b") as copy:
        config, tensors = _opened(stack, root, folder, limits)
        left = limits.tensors_bytes
        while piece := os.read(tensors, _PIECE_BYTES):
            left -= len(piece)
            if left < 0:
                raise UploadTooLarge(f"{TENSORS_FILE} grows while it is read: try again when it is written")
            copy.write(piece)
        return os.read(config, limits.config_bytes)


def read_tokenizer(root: Path, folder: Path) -> OwnTokenizer:
    """What the folder's tokenizer adds. Blocking; raises AdapterInvalid, UploadTooLarge."""
    with ExitStack() as stack:
        return own_tokenizer(partial(_tokenizer_file, _below(stack, root, folder)), "the folder")


def _tokenizer_file(folder: int, name: str) -> bytes | None:
    try:
        os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return None
    with ExitStack() as stack:
        most = sys.maxsize if name == FAST_FILE else _TOKENIZER_BYTES
        begin = os.read(_file(stack, name, folder, most), _TOKENIZER_BYTES)
    return _added_tokens(begin) if name == FAST_FILE else begin


def _added_tokens(begin: bytes) -> bytes:
    """A tokenizer.json's added tokens alone: to parse its vocabulary would hold the interpreter's lock for long."""
    _, _, rest = begin.partition(_ADDED_TOKENS)
    try:
        tokens, _ = json.JSONDecoder().raw_decode(rest.decode("utf-8", "ignore").lstrip())
    except (ValueError, RecursionError) as error:
        message = (
            f"{FAST_FILE} has no added_tokens in its first {_TOKENIZER_BYTES >> 20} MiB: save it again, or remove it"
        )
        raise AdapterInvalid(message) from error
    return json.dumps({"added_tokens": tokens}).encode()


def _opened(stack: ExitStack, root: Path, folder: Path, limits: Limits) -> tuple[int, int]:
    """Its config and its tensors, open until the stack closes."""
    at = _below(stack, root, folder)
    return _file(stack, CONFIG_FILE, at, limits.config_bytes), _file(stack, TENSORS_FILE, at, limits.tensors_bytes)


def _below(stack: ExitStack, root: Path, folder: Path) -> int:
    at = _folder(stack, root, None)
    for part in folder.parts:
        at = _folder(stack, part, at)
    return at


def _folder(stack: ExitStack, name: str | Path, above: int | None) -> int:
    try:
        found = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=above)
    except OSError as error:
        raise AdapterInvalid(f"lora_path has no folder {os.fspath(name)!r} that can be read") from error
    stack.callback(os.close, found)
    return found


def _file(stack: ExitStack, name: str, folder: int, most: int) -> int:
    try:
        found = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
    except OSError as error:
        raise AdapterInvalid(f"the folder has no readable file {name}, or it is a link") from error
    stack.callback(os.close, found)
    facts = os.fstat(found)
    if not stat.S_ISREG(facts.st_mode):
        raise AdapterInvalid(f"{name} is not a file")
    if facts.st_size > most:
        raise UploadTooLarge(f"{name} has {facts.st_size} bytes: at most {most} are accepted")
    return found


def loaded_already(name: str) -> ApiError:
    message = f"The adapter `{name}` is loaded already: send load_inplace: true for another version of it."
    return ApiError(409, message, param="lora_name", code="version_refused")
