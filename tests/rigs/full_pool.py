"""A scheduler that keeps no pages back for the sequences that run, so that they are preempted."""

from __future__ import annotations

from motet.workers.scheduling.growing_sequence import GrowingSequence
from motet.workers.scheduling.page_reserve import PageReserve
from motet.workers.scheduling.scheduler import Scheduler


class _NoReserve(PageReserve):
    least = 0

    def num_pages(self, sequence: GrowingSequence, num_pages: int) -> int:
        return 0


def fill_to_the_last_page(scheduler: Scheduler) -> None:
    """From now on sequences start as long as there is a page, whatever the others will need."""
    reserve = scheduler._running.reserve
    reserve.__class__ = _NoReserve
