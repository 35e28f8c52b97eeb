"""Prompts that begin with documents of which the pool holds a few: how much is found, and how long they wait."""

from __future__ import annotations

from dataclasses import dataclass

from motet.benchmarks.rigs.virtual_gang import BLOCK_SIZE, MAX_LEN, VOCAB_SIZE, VirtualGang, Work
from motet.workers.scheduling.request_limits import GangLimits

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


def main() -> None:
    for num_tenants in (1, 4):
        found = shared_documents(num_tenants=num_tenants)
        print(
            f"{num_tenants} tenants: {found.found_part:.0%} of prompts found, {found.num_answers} answers, "
            f"p99 {found.p99_s:.1f} s, shares {found.shares:.2f}"
        )


if __name__ == "__main__":
    main()
