"""Fair scheduling where tenants' adapters do not fit together: answers and loads beside first come, first served."""

from __future__ import annotations

from dataclasses import dataclass

from motet.benchmarks.rigs.virtual_gang import BLOCK_SIZE, MAX_LEN, VOCAB_SIZE, VirtualGang, Work
from motet.workers.fairness.tenant_counters import Scheduling
from motet.workers.scheduling.request_limits import GangLimits

_ADAPTER_PAGES = 24
_NUM_PROMPT, _NUM_OUTPUT = 40, 24  # tokens of a request: four pages
_MAX_TOKENS = 512  # of a step


@dataclass(frozen=True)
class AdapterMix:
    """Tenants with adapters of their own, and room for so many of these."""

    num_tenants: int
    room: float  # adapters that the pool could hold if it held nothing else
    num_adapters: int = 1  # of each tenant
    depth: int = 4  # requests that each tenant has waiting or running
    places: int = 16  # sequences that run at once
    seconds: float = 20.0  # of virtual time


MIXES = (
    AdapterMix(8, 4.7),
    AdapterMix(8, 4.7, num_adapters=3),
    AdapterMix(8, 2.2),
    AdapterMix(17, 8.7),
    AdapterMix(40, 8.7),
    AdapterMix(87, 8.7),
    AdapterMix(87, 8.7, depth=1),
    AdapterMix(40, 25, places=32),
    AdapterMix(87, 25, places=32),
    AdapterMix(87, 50, places=64),
)


@dataclass(frozen=True)
class MixFigures:
    mix: AdapterMix
    num_answers: int
    num_answers_fifo: int
    num_loads: int
    num_loads_fifo: int
    shares: float  # the most that a tenant was served, over the least

    @property
    def over_fifo(self) -> float:
        return self.num_answers / max(self.num_answers_fifo, 1)


def fair_adapters(mixes: tuple[AdapterMix, ...] = MIXES) -> list[MixFigures]:
    """Figures of each mix, fair beside first come, first served over the same virtual time."""
    found = []
    for mix in mixes:
        fair, fifo = _run(mix, "fair"), _run(mix, "fifo")
        served = [fair.served(f"tenant-{number}") for number in range(mix.num_tenants)]
        loads = [gang.scheduler.load().counters.num_adapter_loads for gang in (fair, fifo)]
        answers = [sum(gang.num_answers.values()) for gang in (fair, fifo)]
        found.append(MixFigures(mix, answers[0], answers[1], loads[0], loads[1], max(served) / max(min(served), 1.0)))
    return found


def livelock_over_fifo(figures: list[MixFigures]) -> float:
    """Answers over those of first come, first served, in the worst mix."""
    return min(each.over_fifo for each in figures)


def _run(mix: AdapterMix, scheduling: Scheduling) -> VirtualGang:
    work = [
        Work(
            f"tenant-{tenant}",
            _NUM_PROMPT,
            _NUM_OUTPUT,
            tuple(f"adapter-{tenant}-{number}" for number in range(mix.num_adapters)),
            mix.depth,
        )
        for tenant in range(mix.num_tenants)
    ]
    limits = GangLimits(MAX_LEN, VOCAB_SIZE, BLOCK_SIZE, int(mix.room * _ADAPTER_PAGES), _MAX_TOKENS, mix.places)
    gang = VirtualGang(work, limits, _ADAPTER_PAGES, scheduling)
    gang.run(mix.seconds)
    return gang


def main() -> None:
    figures = fair_adapters()
    print("tenants  adapters  room  places  depth   fair   fifo  fair/fifo  loads  fifo's  shares")
    for each in figures:
        mix = each.mix
        print(
            f"{mix.num_tenants:7}  {mix.num_adapters:8}  {mix.room:4}  {mix.places:6}  {mix.depth:5}  "
            f"{each.num_answers:5}  {each.num_answers_fifo:5}  {each.over_fifo:9.2f}  {each.num_loads:5}  "
            f"{each.num_loads_fifo:6}  {each.shares:6.2f}"
        )
    print(f"worst: {livelock_over_fifo(figures):.2f}")


if __name__ == "__main__":
    main()
