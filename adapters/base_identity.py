"""The identity of a base, which a store and a registry record."""

from __future__ import annotations

from dataclasses import dataclass

from .errors import OtherBase, shown


@dataclass(frozen=True)
class BaseIdentity:
    """`fingerprint` is a hash of the base's content and decides; `name` is for people. One base may have two names."""

    fingerprint: str
    name: str

    def __str__(self) -> str:
        return f"{self.fingerprint} {self.name}"

    @classmethod
    def parse(cls, text: str) -> BaseIdentity:
        """The identity that `str` wrote as `text`. Raises ValueError for other text."""
        fingerprint, space, name = text.rstrip("\n").partition(" ")
        if not space:
            raise ValueError(f"{shown(text)} names no base: its fingerprint and its name are needed")
        return cls(fingerprint, name)

    def check(self, held: BaseIdentity, place: str, remedy: str) -> None:
        """Raises OtherBase unless `held`, the base that `place` belongs to, is this one.

        `place` and `remedy` are for the message; `remedy` says what to use instead of `place`.
        """
        if held.fingerprint != self.fingerprint:
            raise OtherBase(
                f"{place} belongs to another base: {shown(held.name)} with the fingerprint {held.fingerprint[:12]}, "
                f"and this is {shown(self.name)} with {self.fingerprint[:12]}. Adapters work only on the very base "
                "that they were trained on, and a model that was trained again is another one. Serve the former base, "
                f"or {remedy}"
            )
