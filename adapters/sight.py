"""Which of a tenant's adapters a caller may see, and which of them a name in a request means.

A user's private adapter is registered under `~user/name`, beside the tenant's own, which have plain names. So versions,
canaries, pins and usage deal with names and need not know users.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from .errors import AdapterInvalid, quote
from .names import PRIVATE, check_user, split_private

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
    return split_private(name)[0] or ""
