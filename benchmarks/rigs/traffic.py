"""Requests at a gang, for simulations of its memory: conversations of many tenants, and prompts that come once."""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass

ADAPTER_PAGES = (14, 27, 54, 108)  # ranks 8, 16, 32 and 64 of SmolLM2-135M, all seven projections; in turn
HOLD_S = 2.0  # mean time that a request runs
THINK_S = 20.0  # mean time between an answer and the next turn
MEAN_TURN_PAGES = 6  # that a turn adds: question and answer
MEAN_ONCE_PAGES = 30  # of a prompt asked once


@dataclass(frozen=True)
class Request:
    """One request, which needs the first `num_pages` pages of `conversation` and fills those that are missing."""

    arrives_s: float
    runs_s: float
    adapter: int  # index
    conversation: int
    num_pages: int


@dataclass(frozen=True)
class Traffic:
    """Rates of requests, per second. Adapter i is used in proportion to 1 / (i + 1)."""

    conversations: float  # that begin
    once: float = 0.0  # prompts without a follow-up
    flood: float = 0.0  # more of these, in 30 of each 120 seconds
    sweep: float = 0.0  # short prompts to one adapter after the other, as a nightly evaluation does
    num_adapters: int = 400
    mean_turns: float = 5.0

    def draw(self, seconds: float, seed: int) -> Iterator[Request]:
        """Requests in the order of arrival. Some conversations are under way at the start, as after a long time."""
        rng = random.Random(seed)
        shares = list(itertools.accumulate(1 / place for place in range(1, self.num_adapters + 1)))
        numbers, ties = itertools.count(), itertools.count()
        coming: list[tuple[float, int, Request, str]] = []

        def push(kind: str, arrives_s: float, adapter: int, conversation: int, num_pages: int) -> None:
            request = Request(arrives_s, rng.expovariate(1 / HOLD_S), adapter, conversation, num_pages)
            heapq.heappush(coming, (arrives_s, next(ties), request, kind))

        def begin(kind: str, rate: float, now: float) -> None:
            if not rate:
                return
            adapter = next(swept) if kind == "sweep" else rng.choices(range(self.num_adapters), cum_weights=shares)[0]
            num_pages = {"talk": MEAN_TURN_PAGES, "sweep": 2}.get(kind, MEAN_ONCE_PAGES)
            push(kind, now + rng.expovariate(rate), adapter, next(numbers), 1 + int(rng.expovariate(1 / num_pages)))

        swept = itertools.cycle(range(self.num_adapters))
        rates = {"talk": self.conversations, "once": self.once, "flood": self.flood, "sweep": self.sweep}
        for kind, rate in rates.items():
            begin(kind, rate, 0.0)
        while coming:
            now, _, request, kind = heapq.heappop(coming)
            if now > seconds:
                return
            if kind != "turn":
                begin(kind, rates[kind], now)
            if kind == "flood" and now % 120 > 30:
                continue
            yield request
            if kind in ("talk", "turn") and rng.random() > 1 / self.mean_turns:
                num_pages = request.num_pages + 1 + int(rng.expovariate(1 / MEAN_TURN_PAGES))
                later = now + request.runs_s + rng.expovariate(1 / THINK_S)
                push("turn", later, request.adapter, request.conversation, num_pages)
