"""The key of this motet's operators."""

from __future__ import annotations


class OperatorKey:
    """The key that counts now. Its maker may put another in its place; readers read it for each request."""

    def __init__(self, key: str) -> None:
        self.now = key

    @classmethod
    def of(cls, key: str | OperatorKey) -> OperatorKey:
        """`key` itself, or one that never changes."""
        return cls(key) if isinstance(key, str) else key

    def __repr__(self) -> str:
        return "OperatorKey(…)"
