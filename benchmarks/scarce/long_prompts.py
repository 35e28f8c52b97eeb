"""Long prompts under fair scheduling: answers beside first come, first served, work done twice, and who gets what."""

from __future__ import annotations

from dataclasses import dataclass

from motet.benchmarks.rigs.virtual_gang import BLOCK_SIZE, MAX_LEN, VOCAB_SIZE, VirtualGang, Work
from motet.workers.fairness.tenant_counters import Scheduling
from motet.workers.window_pages import GangLimits

_NUM_PAGES = 1000
_PART = 0.3  # of the pool, that a long prompt takes
_MAX_TOKENS = 512  # of a step
_SECONDS = 60.0


@dataclass(frozen=True)
class PromptFigures:
    num_answers: int
    num_answers_fifo: int
    computed_over_needed: float
    computed_over_needed_fifo: float

    @property
    def over_fifo(self) -> float:
        return self.num_answers / max(self.num_answers_fifo, 1)


def long_prompts(num_tenants: int = 4, num_output: int = 64, seconds: float = _SECONDS) -> PromptFigures:
    """Tenants whose prompts take 30 % of the pool each."""
    num_prompt = int(_PART * _NUM_PAGES * BLOCK_SIZE)
    work = [Work(f"tenant-{number}", num_prompt, num_output, depth=2) for number in range(num_tenants)]
    fair, fifo = (_run(work, scheduling, 16, seconds) for scheduling in ("fair", "fifo"))
    return PromptFigures(
        sum(fair.num_answers.values()), sum(fifo.num_answers.values()), _computed_twice(fair), _computed_twice(fifo)
    )


def shares_of_long_and_short(places: int, seconds: float = 4 * _SECONDS) -> float:
    """What a tenant of long prompts was served over what one of short ones was, or the reverse: the larger."""
    num_prompt = int(_PART * _NUM_PAGES * BLOCK_SIZE)
    work = [Work("long", num_prompt, 64, depth=4), Work("short", 64, 64, depth=2 * places)]
    gang = _run(work, "fair", places, seconds / 4)  # the first of them have a head start
    before = {each.tenant: gang.served(each.tenant) for each in work}
    gang.run(seconds)
    long, short = (gang.served(each.tenant) - before[each.tenant] for each in work)
    return max(long, short) / max(min(long, short), 1.0)


def _run(work: list[Work], scheduling: Scheduling, places: int, seconds: float) -> VirtualGang:
    limits = GangLimits(MAX_LEN, VOCAB_SIZE, BLOCK_SIZE, _NUM_PAGES, _MAX_TOKENS, places)
    gang = VirtualGang(work, limits, scheduling=scheduling)
    gang.run(seconds)
    return gang


def _computed_twice(gang: VirtualGang) -> float:
    return gang.executor.num_computed / max(gang.num_needed, 1)


def main() -> None:
    for num_tenants, num_output in ((4, 64), (4, 256), (8, 64), (3, 64)):
        found = long_prompts(num_tenants, num_output)
        print(
            f"{num_tenants} tenants, {num_output} tokens: {found.num_answers} answers, fifo {found.num_answers_fifo} "
            f"({found.over_fifo:.2f}); computed over needed {found.computed_over_needed:.2f}, "
            f"fifo {found.computed_over_needed_fifo:.2f}"
        )
    for places in (2, 64):
        print(f"shares of long and short, {places} places: {shares_of_long_and_short(places):.2f}")


if __name__ == "__main__":
    main()
