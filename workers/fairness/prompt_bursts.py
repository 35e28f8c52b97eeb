"""How many prompts the tenants have that decode: steps may take longer while each of these has a burst of its own."""

from __future__ import annotations

from collections.abc import Mapping

from .tenant_counters import TenantCounter

_MAX_STRETCH = 5  # times the token interval
_MOST_COUNTED = 5  # prompts of a tenant


class PromptBursts:
    """Counts of each tenant's prompts and decodes. A change takes constant time."""

    def __init__(self) -> None:
        self._counts: dict[TenantCounter, list[int]] = {}  # sequences that decode, and prompts that wait or run
        # Tenants that decode, by their number of prompts; in the last place those that have as many or more.
        self._tenants = [0] * (_MOST_COUNTED + 1)

    def change(self, counter: TenantCounter, num_prompts: int, num_decodes: int = 0) -> None:
        """Adds to a tenant's numbers of prompts to be computed, and of sequences that decode; may be negative."""
        if counter.is_background:
            return
        counts = self._counts.setdefault(counter, [0, 0])
        if counts[0]:
            self._tenants[min(counts[1], _MOST_COUNTED)] -= 1
        counts[0] += num_decodes
        counts[1] += num_prompts
        if counts[0]:
            self._tenants[min(counts[1], _MOST_COUNTED)] += 1
        elif not counts[1]:
            del self._counts[counter]

    @property
    def stretch(self) -> int:
        """Times the token interval that a step may take while prompts burst in; at least 1.

        Where each tenant whose sequences decode has several prompts, they all gain more by an early first token than
        they lose by a late next one. A tenant whose answers decode without that waits for no other's burst, and a
        single long prompt stretches nothing. Background work counts for nothing.
        """
        for number, num_tenants in enumerate(self._tenants):
            if num_tenants:
                return min(_MAX_STRETCH, max(1, number))
        return _MAX_STRETCH

    def num_coming(self) -> int:
        """How many more sequences decode once these bursts are computed. Takes time for each tenant.

        Each tenant counts with as many prompts as the one with the fewest: a longer burst of another makes no step
        longer for that one.
        """
        bursts = [num_prompts for num_decodes, num_prompts in self._counts.values() if num_decodes]
        return len(bursts) * min(bursts, default=0)

    def check_integrity(self, counts: Mapping[TenantCounter, tuple[int, int]]) -> None:
        """Raises AssertionError if a tenant is miscounted. `counts`: decodes and prompts of each."""
        here = {counter: [*each] for counter, each in counts.items() if not counter.is_background}
        assert self._counts == here, "a tenant's prompts or decodes are miscounted"
        tenants = [0] * (_MOST_COUNTED + 1)
        for num_decodes, num_prompts in here.values():
            tenants[min(num_prompts, _MOST_COUNTED)] += num_decodes > 0
        assert self._tenants == tenants, "tenants that decode are miscounted"
