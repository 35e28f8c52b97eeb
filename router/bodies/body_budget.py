"""The memory that bodies of requests may take in a router while they arrive and are decoded."""

from __future__ import annotations

from collections import Counter
from typing import Final

from ..openai_api.errors import ApiError

TENANT_SHARE: Final = 4  # one tenant may hold a fourth of a router's budget
RETRY_AFTER_S: Final = 1


class BodyBudget:
    """Counts bytes that are held, by tenant. Bytes count when they are there: a declared length holds nothing."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._max_tenant_bytes = max(1, max_bytes // TENANT_SHARE)
        self._held: Counter[str] = Counter()
        self._num_held = 0

    @property
    def num_held(self) -> int:
        """Bytes of all tenants."""
        return self._num_held

    def take(self, tenant: str, num_bytes: int) -> None:
        """Counts bytes that have arrived. Raises 429, and counts nothing, if they are too many."""
        if not num_bytes:
            return  # the end of a body: only tenants that hold bytes are kept
        if self._held[tenant] + num_bytes > self._max_tenant_bytes:
            raise _full(f"Your requests that are arriving hold {self._held[tenant]} bytes", self._max_tenant_bytes)
        if self._num_held + num_bytes > self._max_bytes:
            raise _full("Requests that are arriving hold this router's memory for them", self._max_bytes)
        self._held[tenant] += num_bytes
        self._num_held += num_bytes

    def give_back(self, tenant: str, num_bytes: int) -> None:
        self._held[tenant] -= num_bytes
        self._num_held -= num_bytes
        if not self._held[tenant]:
            del self._held[tenant]

    def check_integrity(self) -> None:
        """Raises AssertionError if bytes are miscounted, or a tenant that holds nothing is remembered."""
        assert self._num_held == self._held.total()
        assert all(0 < held <= self._max_tenant_bytes for held in self._held.values())
        assert self._num_held <= self._max_bytes


def _full(what: str, most: int) -> ApiError:
    message = f"{what}, of at most {most}: send fewer large requests at once, or try again in a moment."
    headers = {"Retry-After": str(RETRY_AFTER_S), "Connection": "close"}  # its body is not read to the end
    return ApiError(429, message, code="bodies_full", headers=headers)
