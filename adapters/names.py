"""Which names adapters and tenants may have: only such as are safe in a URL, a path and a registry key."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Final

from .errors import AdapterInvalid, shown

PRIVATE: Final = "~"  # begins the names of users' private adapters

PART: Final = "[A-Za-z0-9][A-Za-z0-9._-]{0,63}"
_ADAPTER = re.compile(f"(?:{PART}/)?{PART}")  # as hub ids are: one slash at most
_ALIAS = re.compile(r"[A-Za-z][A-Za-z0-9._-]{0,63}")
_USER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@|:+=-]{0,63}")  # what identity providers call people, but no "/"
_TENANT = re.compile(r"(?!\.{1,2}\Z)[A-Za-z0-9._-]{1,64}")  # "." and ".." have another meaning in a URL


def check_name(name: str, reserved: Collection[str] = ()) -> None:
    """Raises AdapterInvalid unless an adapter may be registered under this name. `reserved`: names of the base."""
    owner, own = split_private(name)
    if owner is not None:
        check_user(owner)
    if not _ADAPTER.fullmatch(own):
        raise AdapterInvalid(
            f"name {shown(name)} is not accepted: 1 to 64 letters, digits, '.', '_' and '-', "
            "the first of them a letter or a digit; or two of these with a '/' between them"
        )
    if own in reserved:
        raise AdapterInvalid(f"name {shown(name)} is taken by the base model: choose another")


def check_alias(alias: str) -> None:
    """Raises AdapterInvalid unless versions may have this alias. It begins with a letter, so it cannot be a number."""
    if not _ALIAS.fullmatch(alias):
        raise AdapterInvalid(
            f"alias {shown(alias)} is not accepted: 1 to 64 letters, digits, '.', '_' and '-', "
            "the first of them a letter"
        )


def check_tenant(tenant: str) -> None:
    """Raises AdapterInvalid unless a tenant may have this name."""
    if not _TENANT.fullmatch(tenant):
        raise AdapterInvalid(
            f"tenant {shown(tenant)} is not accepted: 1 to 64 letters, digits, '.', '_' and '-', "
            "but neither '.' nor '..'"
        )


def check_user(user: str) -> None:
    """Raises AdapterInvalid unless a tenant's user may have this name."""
    if not _USER.fullmatch(user):
        raise AdapterInvalid(
            f"user {shown(user)} is not accepted: 1 to 64 letters, digits, '.', '_', '@', '|', ':', '+', '=' and '-', "
            "the first of them a letter or a digit"
        )


def split_private(name: str) -> tuple[str | None, str]:
    """The user in `~user/name`, and the name there; None: the name is plain."""
    if not name.startswith(PRIVATE) or "/" not in name:
        return None, name
    user, _, own = name[1:].partition("/")
    return user, own


def split_selector(model: str) -> tuple[str, str | None]:
    """The name in `name@3` or `name@alias`, and what is behind the @; None: there is none. A user may have one, too."""
    folder, slash, last = model.rpartition("/")
    name, is_selected, selector = last.partition("@")
    return f"{folder}{slash}{name}", selector if is_selected else None
