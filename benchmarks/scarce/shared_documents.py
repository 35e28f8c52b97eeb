"""Prompts that begin with documents of which the pool holds a few: how much is found, and how long they wait."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from unittest.mock import patch

from motet.benchmarks.rigs.virtual_gang import BLOCK_SIZE, MAX_LEN, VOCAB_SIZE, VirtualGang, Work
from motet.workers.fairness import prompt_budget
from motet.workers.scheduling.prefix_reuse import PrefixReuse
from motet.workers.scheduling.waiting_queue import WaitingQueue
from motet.workers.window_pages import GangLimits

_DOCUMENT_TOKENS = 2048
_NUM_PROMPT, _NUM_OUTPUT = _DOCUMENT_TOKENS + 64, 32
_PLACES, _NUM_WAITING = 4, 64


@dataclass(frozen=True)
class DocumentFigures:
    found_part: float  # of the prompts' tokens
    num_answers: int
    p99_s: float  # of answers, from the request on
    shares: float  # the most that a tenant was served, over the least


def shared_documents(
    num_documents: int = 32, room: int = 8, num_tenants: int = 1, seconds: float = 40.0
) -> DocumentFigures:
    """`room`: documents that the pool holds beside the sequences that run."""
    depth = (_NUM_WAITING + _PLACES) // num_tenants
    work = [
        Work(
            f"tenant-{number}",
            _NUM_PROMPT,
            _NUM_OUTPUT,
            depth=depth,
            num_documents=num_documents // num_tenants,
            document_tokens=_DOCUMENT_TOKENS,
        )
        for number in range(num_tenants)
    ]
    num_pages = room * _DOCUMENT_TOKENS // BLOCK_SIZE + _PLACES * 8
    gang = VirtualGang(work, GangLimits(MAX_LEN, VOCAB_SIZE, BLOCK_SIZE, num_pages, 512, _PLACES))
    gang.run(seconds)
    waits = sorted(gang.waits_s)
    served = [gang.served(each.tenant) for each in work]
    num_found = gang.scheduler.load().counters.num_cached_tokens
    return DocumentFigures(
        num_found / max(sum(gang.num_prompt_tokens.values()), 1),
        sum(gang.num_answers.values()),
        waits[int(0.99 * len(waits))] if waits else 0.0,
        max(served) / max(min(served), 1.0),
    )


def frontier(num_tenants: int, seconds: float) -> dict[str, DocumentFigures]:
    """By what decides: age, or the prefix, and how often a sequence may be passed over; what evicts pages."""
    by_age = patch.object(WaitingQueue, "promote", lambda *_: None)
    by_worth = patch.object(PrefixReuse, "pages_here", lambda *_: list[int]())
    found = dict[str, DocumentFigures]()
    with by_age:
        found["by age, pages evicted by next use"] = shared_documents(num_tenants=num_tenants, seconds=seconds)
        with by_worth:
            found["by age"] = shared_documents(num_tenants=num_tenants, seconds=seconds)
    with by_worth:
        found["by prefix, pages evicted by worth"] = shared_documents(num_tenants=num_tenants, seconds=seconds)
    for part in (0.15, 0.25, 0.35, 0.5):
        with patch.object(prompt_budget, "_PART_PASSED", part):
            found[f"by prefix, pages evicted by next use, at most {part} passed over"] = shared_documents(
                num_tenants=num_tenants, seconds=seconds
            )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--frontier", type=float, metavar="SECONDS", help="compare policies over this virtual time")
    if (seconds := parser.parse_args().frontier) is not None:
        for num_tenants in (1, 4):
            outcomes = frontier(num_tenants, seconds)
            by_age = outcomes["by age"]
            for name, found in outcomes.items():
                print(
                    f"{num_tenants} tenants, {name}: {found.found_part:.0%} found, {found.num_answers} answers, p99 "
                    f"{found.p99_s / by_age.p99_s:.2f} times that by age, shares {found.shares:.2f}",
                    flush=True,
                )
        return
    for num_tenants in (1, 4):
        found = shared_documents(num_tenants=num_tenants)
        print(
            f"{num_tenants} tenants: {found.found_part:.0%} of prompts found, {found.num_answers} answers, "
            f"p99 {found.p99_s:.1f} s, shares {found.shares:.2f}"
        )


if __name__ == "__main__":
    main()
