"""Fair scheduling where tenants' adapters do not fit together: answers and loads beside first come, first served.

`--random NUM` draws so many mixes by chance instead, of all sizes, and prints those that have fewest answers.
With `--step-by-step` no plan is made while the step before it runs: what has ended holds its room no step longer.
"""

from __future__ import annotations

import argparse
import random
from dataclasses import dataclass, replace

from motet.benchmarks.rigs.virtual_gang import BLOCK_SIZE, MAX_LEN, VOCAB_SIZE, VirtualGang, Work
from motet.workers.fairness.tenant_counters import Scheduling
from motet.workers.window_pages import GangLimits

_MAX_TOKENS = 512  # of a step
_LEAST_ANSWERS, _ENOUGH_ANSWERS = 30, 300  # of a mix drawn by chance: in 6 s, and as far as 60 s are enough


@dataclass(frozen=True)
class AdapterMix:
    """Tenants with adapters of their own, and room for so many of these."""

    num_tenants: int
    room: float  # adapters that the pool could hold if it held nothing else
    num_adapters: int = 1  # of each tenant
    depth: int = 4  # requests that each tenant has waiting or running
    places: int = 16  # sequences that run at once
    seconds: float = 20.0  # of virtual time
    num_prompt: int = 40  # tokens of a request
    num_output: int = 24
    adapter_pages: int = 24


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


def fair_adapters(mixes: tuple[AdapterMix, ...] = MIXES, overlaps: bool = True) -> list[MixFigures]:
    """Figures of each mix, fair beside first come, first served over the same virtual time."""
    found = []
    for mix in mixes:
        fair, fifo = _run(mix, "fair", overlaps), _run(mix, "fifo", overlaps)
        served = [fair.served(f"tenant-{number}") for number in range(mix.num_tenants)]
        loads = [gang.scheduler.load().counters.num_adapter_loads for gang in (fair, fifo)]
        answers = [sum(gang.num_answers.values()) for gang in (fair, fifo)]
        found.append(MixFigures(mix, answers[0], answers[1], loads[0], loads[1], max(served) / max(min(served), 1.0)))
    return found


def livelock_over_fifo(figures: list[MixFigures]) -> float:
    """Answers over those of first come, first served, in the worst mix."""
    return min(each.over_fifo for each in figures)


def random_mixes(number: int, seed: int) -> list[AdapterMix]:
    """Mixes in which first come, first served gives some answers in 6 s, each over time for several hundred of them."""
    chance = random.Random(seed)
    mixes: list[AdapterMix] = []
    while len(mixes) < number:
        num_prompt, num_output = chance.choice((8, 40, 100, 200, 400, 700)), chance.choice((2, 8, 24, 64))
        adapter_pages, room = chance.choice((4, 12, 24, 60)), chance.choice((2.2, 3.3, 4.7, 8.7, 12.5))
        num_tenants, places = chance.choice((2, 4, 8, 17, 40)), chance.choice((2, 4, 8, 16))
        depth, num_adapters = chance.choice((1, 2, 4, 8)), chance.choice((1, 1, 2, 3))
        if int(room * adapter_pages) < adapter_pages + (num_prompt + num_output) // BLOCK_SIZE + 3:
            continue  # not even one fits
        mix = AdapterMix(num_tenants, room, num_adapters, depth, places, 6.0, num_prompt, num_output, adapter_pages)
        num_answers = sum(_run(mix, "fifo").num_answers.values())
        if num_answers >= _LEAST_ANSWERS:
            mixes.append(replace(mix, seconds=min(60.0, max(12.0, mix.seconds * _ENOUGH_ANSWERS / num_answers))))
    return mixes


def _run(mix: AdapterMix, scheduling: Scheduling, overlaps: bool = True) -> VirtualGang:
    work = [
        Work(
            f"tenant-{tenant}",
            mix.num_prompt,
            mix.num_output,
            tuple(f"adapter-{tenant}-{number}" for number in range(mix.num_adapters)),
            mix.depth,
        )
        for tenant in range(mix.num_tenants)
    ]
    limits = GangLimits(MAX_LEN, VOCAB_SIZE, BLOCK_SIZE, int(mix.room * mix.adapter_pages), _MAX_TOKENS, mix.places)
    gang = VirtualGang(work, limits, mix.adapter_pages, scheduling, overlaps)
    gang.run(mix.seconds)
    return gang


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--random", type=int, metavar="NUM", help="of mixes by chance (default: chosen ones)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--step-by-step", action="store_true", help="plan no step before the one before it has ended")
    arguments = parser.parse_args()
    mixes = MIXES if arguments.random is None else tuple(random_mixes(arguments.random, arguments.seed))
    figures = fair_adapters(mixes, overlaps=not arguments.step_by_step)
    print(
        "tenants adapters  pages  room  places  depth  prompt  output   fair   fifo  fair/fifo  loads  fifo's  shares"
    )
    for each in figures if arguments.random is None else sorted(figures, key=lambda each: each.over_fifo)[:10]:
        mix = each.mix
        print(
            f"{mix.num_tenants:7} {mix.num_adapters:8}  {mix.adapter_pages:5}  {mix.room:4}  {mix.places:6}  "
            f"{mix.depth:5}  {mix.num_prompt:6}  {mix.num_output:6}  {each.num_answers:5}  {each.num_answers_fifo:5}  "
            f"{each.over_fifo:9.2f}  {each.num_loads:5}  {each.num_loads_fifo:6}  {each.shares:6.2f}"
        )
    num_below = sum(each.over_fifo < 0.97 for each in figures)
    print(f"worst: {livelock_over_fifo(figures):.2f}; {num_below} of {len(figures)} under 0.97")


if __name__ == "__main__":
    main()
