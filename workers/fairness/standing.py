"""How far one tenant is in a gang."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(eq=False, slots=True)
class Standing:
    """A tenant's virtual token counter, in one class of service. `Standings` owns what is written here."""

    tenant: str = ""
    is_background: bool = False
    slack: float = float("inf")  # counters that differ by less may count as equal
    weight: float = 1.0
    counter: float = 0.0  # what it was served, in tokens' worth divided by its weight; lifted when it comes back
    served: float = 0.0  # of the counter, what this gang has served it
    num_sequences: int = 0  # of it that wait or run

    @property
    def band(self) -> int:
        """Who is in a lower one is clearly behind: only for those is anybody preempted.

        Of two tenants that are nearly equal one would else be preempted for the other with every token. A tenant
        reaches its next band after `slack`, so two can change places only so often. All bands together are one order,
        in which whoever comes first is preempted by nobody: so somebody always goes on.
        """
        return int(self.counter // self.slack)

    def after(self, price: float) -> float:
        """Its counter if it had been served so much more."""
        return self.counter + price / self.weight
