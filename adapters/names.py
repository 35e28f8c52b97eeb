"""Names of adapters, tenants and bases, and which of a tenant's adapters a caller may see."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
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


# Which of a tenant's adapters a caller may see, and which of them a name in a request means.
#
# A user's private adapter is registered under `~user/name`, beside the tenant's own, which have plain names. So
# versions, canaries, pins and usage deal with names and need not know users.

Range = tuple[str, str]  # a range of sorted names: from the first one up to the second, not included
_PLAIN: Final[Range] = ("", PRIVATE)  # no plain name begins with a character that sorts after "~"
_ALL: Final[Range] = ("", "\x7f")


@dataclass(frozen=True, slots=True)
class Sight:
    """What one caller may see. Without arguments: a caller without a user, who sees only the tenant's own adapters."""

    user: str = ""
    sees_all: bool = False  # an administrator of the tenant, or motet itself

    def sees(self, name: str) -> bool:
        """`name`: as it is registered."""
        owner, _ = split_private(name)
        return owner is None or self.sees_all or (owner == self.user and owner != "")

    def names(self, requested: str) -> tuple[str, ...]:
        """The registered names that `requested` may mean: the first one that exists is meant.

        `~user/name` is that user's, `~/name` the tenant's. A plain name is the caller's own private adapter, else the
        tenant's. Empty: the caller may not see such an adapter, so nothing is looked up.
        """
        owner, name = split_private(requested)
        if owner == "":
            return (name,)
        if owner is not None:
            return (requested,) if self.sees(requested) else ()
        return (private_name(self.user, requested), requested) if self.user else (requested,)

    def ranges(self) -> tuple[Range, ...]:
        """The ranges of names that the caller sees, in order."""
        if self.sees_all:
            return (_ALL,)
        return (_PLAIN, (f"{PRIVATE}{self.user}/", f"{PRIVATE}{self.user}0")) if self.user else (_PLAIN,)

    def uploaded(self, name: str, *, is_private: bool) -> str:
        """The name under which an upload is registered. Raises AdapterInvalid if the caller may not use it."""
        owner, local_name = split_private(name)
        if owner is None and not is_private:
            return name
        if owner is None:
            if not self.user:
                raise AdapterInvalid("this key belongs to no user: a private adapter (`~user/name`) needs a user's key")
            return private_name(self.user, name)
        if owner == "":
            if is_private:
                raise AdapterInvalid(f"{quote(name)} is the tenant's, and cannot be private")
            return local_name
        check_user(owner)
        if not self.sees(name):
            raise AdapterInvalid(f"name {quote(name)} is not accepted: only that user and administrators may use it")
        return name


PLAIN_SIGHT: Final = Sight()
FULL_SIGHT: Final = Sight(sees_all=True)


def private_name(user: str, name: str) -> str:
    return f"{PRIVATE}{user}/{name}"


def user_place(user: str) -> str:
    """Sorts users as their private adapters are sorted."""
    return f"{user}/"


def owner_of(name: str) -> str:
    """The user whose private adapter has this registered name; empty: it is the tenant's."""
    return split_private(name)[0] or "" if name.startswith(PRIVATE) else ""
