"""Which names adapters and tenants may have: only such as are safe in a URL, a path and a registry key."""

from __future__ import annotations

import re
from collections.abc import Collection

from .errors import AdapterInvalid, shown

_ADAPTER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_ALIAS = re.compile(r"[A-Za-z][A-Za-z0-9._-]{0,63}")
_TENANT = re.compile(r"(?!\.{1,2}\Z)[A-Za-z0-9._-]{1,64}")  # "." and ".." in a URL are no names


def check_name(name: str, reserved: Collection[str] = ()) -> None:
    """Raises AdapterInvalid unless an adapter may have this name. `reserved`: names of the base."""
    if not _ADAPTER.fullmatch(name):
        raise AdapterInvalid(
            f"name {shown(name)} is not accepted: 1 to 64 letters, digits, '.', '_' and '-', "
            "the first of them a letter or a digit"
        )
    if name in reserved:
        raise AdapterInvalid(f"name {shown(name)} is taken by the base model: choose another")


def check_alias(alias: str) -> None:
    """Raises AdapterInvalid unless versions may have this alias. It begins with a letter, so that it is no number."""
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
