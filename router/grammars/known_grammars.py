"""An LRU cache of grammars that were checked, bounded by bytes."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from .check_process import Verdict

MAX_TENANT_BYTES: Final = 1 << 20
MAX_BYTES: Final = 32 << 20
_FIXED_BYTES: Final = 512  # of each, about


class KnownGrammars:
    """Kept by tenant: the time of an answer shows no tenant what another has requested.

    Beyond the bound of a tenant its least recently used grammars are dropped; beyond the bound of all, those of the
    tenant that has requested none for longest.
    """

    def __init__(self) -> None:
        self._of_tenant: OrderedDict[str, OrderedDict[bytes, Verdict]] = OrderedDict()  # the last used one last
        self._num_bytes: dict[str, int] = {}

    def get(self, tenant: str, digest: bytes) -> Verdict | None:
        own = self._of_tenant.get(tenant)
        verdict = None if own is None else own.get(digest)
        if own is not None and verdict is not None:
            own.move_to_end(digest)
            self._of_tenant.move_to_end(tenant)
        return verdict

    def put(self, tenant: str, digest: bytes, verdict: Verdict) -> None:
        own = self._of_tenant.setdefault(tenant, OrderedDict())
        self._of_tenant.move_to_end(tenant)
        own[digest] = verdict
        self._num_bytes[tenant] = self._num_bytes.get(tenant, 0) + _num_bytes(verdict)
        while self._num_bytes[tenant] > MAX_TENANT_BYTES:
            _, oldest = own.popitem(last=False)
            self._num_bytes[tenant] -= _num_bytes(oldest)
        while sum(self._num_bytes.values()) > MAX_BYTES:
            tenant, _ = self._of_tenant.popitem(last=False)
            del self._num_bytes[tenant]

    def check_integrity(self) -> None:
        """Raises AssertionError if bytes are miscounted, or are too many."""
        counted = {tenant: sum(map(_num_bytes, own.values())) for tenant, own in self._of_tenant.items()}
        assert counted == self._num_bytes
        assert all(0 < num_bytes <= MAX_TENANT_BYTES for num_bytes in counted.values())
        assert sum(counted.values()) <= MAX_BYTES


def _num_bytes(verdict: Verdict) -> int:
    return _FIXED_BYTES + len(verdict.lark.encode()) + len(verdict.problem)
