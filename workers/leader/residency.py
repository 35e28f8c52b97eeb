"""What lies in a gang's pool, and which adapters lie in its host memory, as routers are informed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from collections.abc import Set as AbstractSet
from typing import Final

from ...adapters.adapter import lora_ranks
from ..wire.engine_load import TenantShare
from ..wire.messages import ResidencyChange, SequenceRequest

# Which adapters a gang's sequences ask for, under the names that clients give them.

_MAX_NAMES: Final = 4096  # of adapters that were requested last


class RequestedAdapters:
    """A request costs a few dictionary steps here, and a token nothing. Belongs to one event loop."""

    def __init__(self) -> None:
        self.names: dict[str, str] = {}  # by digest, the one that was requested last comes last
        self.ranks: dict[str, int] = {}  # the largest of each adapter that has a name here, by digest
        self.num_open: Counter[str] = Counter()  # unfinished sequences, by digest
        self._digests: dict[int, str] = {}  # of unfinished sequences

    def copy(self) -> RequestedAdapters:
        """Names and numbers of this moment, for another thread to read."""
        copied = RequestedAdapters()
        copied.names, copied.ranks = dict(self.names), dict(self.ranks)
        copied.num_open = Counter(self.num_open)
        return copied

    def begin(self, sequence_id: int, request: SequenceRequest) -> None:
        if request.adapter is None:
            return
        digest = request.adapter.digest
        self._digests[sequence_id] = digest
        self.num_open[digest] += 1
        if request.adapter_name:
            self.names.pop(digest, None)
            self.names[digest] = request.adapter_name
            self.ranks[digest] = max(lora_ranks(request.adapter.module_ranks), default=0)
            if len(self.names) > _MAX_NAMES:
                oldest = next(iter(self.names))
                del self.names[oldest], self.ranks[oldest]

    def end(self, sequence_id: int) -> None:
        """No-op for a sequence that has ended, or that needs no adapter."""
        digest = self._digests.pop(sequence_id, None)
        if digest is not None:
            self.num_open[digest] -= 1
            if not self.num_open[digest]:
                del self.num_open[digest]


# The shares of a gang that its engine has reported, for the routers that connect later.

_MAX_SHARES = 16_384


class KnownShares:
    """The latest share of each tenant. Beyond _MAX_SHARES, idle tenants are dropped, the longest unreported first."""

    def __init__(self) -> None:
        self._shares: dict[str, TenantShare] = {}

    @property
    def tenants(self) -> Iterable[str]:
        return self._shares.keys()

    def apply(self, changed: Iterable[TenantShare]) -> None:
        for share in changed:
            self._shares.pop(share.tenant, None)
            self._shares[share.tenant] = share
        if len(self._shares) > _MAX_SHARES:
            idle = [tenant for tenant, of in self._shares.items() if not of.num_running and not of.num_waiting]
            for tenant in idle[: _MAX_SHARES // 2]:
                del self._shares[tenant]

    def __iter__(self) -> Iterator[TenantShare]:
        return iter(self._shares.values())

    def of(self, tenants: Iterable[str]) -> list[TenantShare]:
        """The shares of those tenants that are known."""
        return [self._shares[tenant] for tenant in tenants if tenant in self._shares]


_MAX_COUNTED: Final = 128  # adapters whose loads and evictions are counted
_NO_CHANGE: Final = ResidencyChange()


class Residency:
    """Adapters by digest and full pages of KV by short key, those on their way into the pool included.

    Adapters in host memory, and pins that failed, by short digest.
    """

    def __init__(self) -> None:
        self.adapters: set[str] = set()
        self.pages: set[int] = set()
        self.hosted: set[int] = set()
        self.failed_pins: dict[int, str] = {}  # reasons
        self.num_loads: Counter[str] = Counter()  # by digest; beyond _MAX_COUNTED the least loaded are forgotten
        self.num_evictions: Counter[str] = Counter()  # of the digests in `num_loads`

    def apply(self, change: ResidencyChange) -> None:
        self.adapters.difference_update(change.went)
        self.adapters.update(change.came)
        self.num_loads.update(change.came)
        self.num_evictions.update(digest for digest in change.went if digest in self.num_loads)
        if len(self.num_loads) > _MAX_COUNTED:
            self.num_loads = Counter(dict(self.num_loads.most_common(_MAX_COUNTED // 2)))
            self.num_evictions = Counter({key: self.num_evictions[key] for key in self.num_loads})
        self.pages.difference_update(change.pages_went)
        self.pages.update(change.pages_came)
        self.hosted.difference_update(change.hosted_went)
        self.hosted.update(change.hosted_came)
        for short, reason in change.pin_news.items():
            if reason:
                self.failed_pins[short] = reason
            else:
                self.failed_pins.pop(short, None)

    def change_of(
        self,
        adapters: AbstractSet[str],
        pages: AbstractSet[int],
        hosted: AbstractSet[int] = frozenset(),
        pins: AbstractSet[int] = frozenset(),
    ) -> ResidencyChange:
        """Which of these are there now, and which are not; of `pins`, why they failed if they have."""
        if not (adapters or pages or hosted or pins):  # as after most steps
            return _NO_CHANGE
        return ResidencyChange(
            sorted(adapters & self.adapters),
            sorted(adapters - self.adapters),
            [*(pages & self.pages)],
            [*(pages - self.pages)],
            [*(hosted & self.hosted)],
            [*(hosted - self.hosted)],
            {short: self.failed_pins.get(short, "") for short in pins},
        )
