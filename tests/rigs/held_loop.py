"""How long the routers' loops were held in CPU time of their processes, as a running motet's metrics report it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from prometheus_client.parser import text_string_to_metric_families

if TYPE_CHECKING:  # it imports much that a neighbour's process does without
    from motet.tests.rigs.running_motet import RunningMotet

NAME = "motet_loop_held_cpu_seconds"


@dataclass
class HeldLoop:
    """Ticks of a router's loop by how late they came at most."""

    num_within: Counter[float] = field(default_factory=Counter)  # by bound, those below it included

    def quantile_s(self, share: float) -> float:
        """A bound within which this share of the ticks came; 0.0 of none."""
        wanted = share * self.num_within[float("inf")]
        return min((bound for bound, count in self.num_within.items() if count >= wanted), default=0.0)

    def __str__(self) -> str:
        p99_ms, p999_ms = 1000 * self.quantile_s(0.99), 1000 * self.quantile_s(0.999)
        return f"loop held p99 <= {p99_ms:g} ms, p99.9 <= {p999_ms:g} ms of CPU"


def held_until_now(motet: RunningMotet) -> HeldLoop:
    """Since the router began, of a motet that has one."""
    with motet.http() as http:
        families = text_string_to_metric_families(http.get("/metrics").text)
    samples = (sample for family in families if family.name == NAME for sample in family.samples)
    return HeldLoop(Counter({float(one.labels["le"]): int(one.value) for one in samples if "le" in one.labels}))


@contextmanager
def measured_loop(motet: RunningMotet) -> Iterator[HeldLoop]:
    """What is yielded is filled when the block ends, with what came within it."""
    before, found = held_until_now(motet), HeldLoop()
    yield found
    found.num_within.update(held_since(before, motet).num_within)


def held_since(before: HeldLoop, motet: RunningMotet) -> HeldLoop:
    now = held_until_now(motet)
    now.num_within.subtract(before.num_within)
    return now
