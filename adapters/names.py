"""Which names adapters and tenants may have, and the names of bases."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Final

from .errors import AdapterInvalid, quote

PRIVATE: Final = "~"  # begins the names of users' private adapters

PART: Final = "[A-Za-z0-9][A-Za-z0-9._-]{0,63}"
_ADAPTER = re.compile(f"(?:{PART}/)?{PART}")  # as hub ids are: one slash at most
_ALIAS = re.compile(r"[A-Za-z][A-Za-z0-9._-]{0,63}")
_USER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@|:+=-]{0,63}")  # what identity providers call people, but no "/"
_TENANT = re.compile(r"(?!\.{1,2}\Z)[A-Za-z0-9._-]{1,64}")  # "." and ".." have another meaning in a URL


def check_name(name: str, reserved: Collection[str] = ()) -> None:
    """Raises AdapterInvalid unless an adapter may be registered under this name. `reserved`: names of the base."""
    owner, local_name = split_private(name)
    if owner is not None:
        check_user(owner)
    if not _ADAPTER.fullmatch(local_name):
        raise AdapterInvalid(
            f"name {quote(name)} is not accepted: 1 to 64 letters, digits, '.', '_' and '-', "
            "the first of them a letter or a digit; or two of these with a '/' between them"
        )
    if local_name in reserved:
        raise AdapterInvalid(f"name {quote(name)} is taken by the base model: choose another")


def check_alias(alias: str) -> None:
    """Raises AdapterInvalid unless versions may have this alias. It begins with a letter, so it cannot be a number."""
    if not _ALIAS.fullmatch(alias):
        raise AdapterInvalid(
            f"alias {quote(alias)} is not accepted: 1 to 64 letters, digits, '.', '_' and '-', "
            "the first of them a letter"
        )


def check_tenant(tenant: str) -> None:
    """Raises AdapterInvalid unless a tenant may have this name."""
    if not _TENANT.fullmatch(tenant):
        raise AdapterInvalid(
            f"tenant {quote(tenant)} is not accepted: 1 to 64 letters, digits, '.', '_' and '-', "
            "but neither '.' nor '..'"
        )


def check_user(user: str) -> None:
    """Raises AdapterInvalid unless a tenant's user may have this name."""
    if not _USER.fullmatch(user):
        raise AdapterInvalid(
            f"user {quote(user)} is not accepted: 1 to 64 letters, digits, '.', '_', '@', '|', ':', '+', '=' and '-', "
            "the first of them a letter or a digit"
        )


def split_private(name: str) -> tuple[str | None, str]:
    """The user in `~user/name`, and the name there; None: the name is plain."""
    if not name.startswith(PRIVATE) or "/" not in name:
        return None, name
    user, _, local_name = name[1:].partition("/")
    return user, local_name


def split_selector(model: str) -> tuple[str, str | None]:
    """The name in `name@3` or `name@alias`, and what is behind the @; None: there is none. A user may have one, too."""
    folder, slash, last = model.rpartition("/")
    name, is_selected, selector = last.partition("@")
    return f"{folder}{slash}{name}", selector if is_selected else None


# Names of bases, by which an adapter says what it was trained on. Shapes decide what can be computed, not these.

_HUB_CACHE: Final = re.compile(r"models--(?:[^/]+?--)?([^/]+)")  # a folder in the hub's cache
_UNINFORMATIVE: Final = re.compile(
    r"\.{0,2}|~|(?:base|final|latest|merged|model|output|weights|checkpoint)s?|(?:base|final|merged)[-_]model"
    r"|(?:checkpoint|step|epoch)[-_]?[0-9]+|[0-9a-f]{32,}"
)


def base_name(path: str) -> str:
    """What a hub's name or a folder says of a base, in small letters; empty: nothing, as `./output` or `checkpoint-90`.

    The owner before a hub's name does not count: mirrors have others.
    """
    parts = path.strip().lower().replace("\\", "/").rstrip("/").split("/")
    for part in parts:
        if match := _HUB_CACHE.fullmatch(part):
            return match[1]
    name = parts[-1].rpartition("--")[2]  # owner--name, as downloads are kept
    return "" if _UNINFORMATIVE.fullmatch(name) else name


def names_of_folder(folder: Path) -> tuple[str, ...]:
    """The path of a base's folder, and what its config.json was saved from, where that is written."""
    saved_from = json.loads((folder / "config.json").read_text("utf-8")).get("_name_or_path")
    return (str(folder), *([saved_from] if isinstance(saved_from, str) else []))


class BaseNames:
    """The names of the served base."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names = sorted({base_name(name) for name in names} - {""})

    def mismatch(self, named: str) -> str | None:
        """What is wrong with an adapter that names this base; None: nothing, or one of them is unknown."""
        name = base_name(named)
        if not name or not self._names or name in self._names:
            return None
        return (
            f"the adapter was trained on {quote(named, 160)}, by base_model_name_or_path of its adapter_config.json, "
            f"and the base here is {' or '.join(self._names)}: on another base of the same shapes it answers nonsense"
        )
