"""A sequence's stream without a gang."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence

from motet.workers.wire.messages import SequenceUpdate, SequenceUsage


class FakeStream:
    """Yields its updates, one in each turn of the loop; without a last update it waits forever, like a hung gang."""

    is_reported = True

    def __init__(
        self, updates: Sequence[SequenceUpdate], hangs: bool, num_prompt_tokens: int = 0, *, shares_prompt: bool = False
    ) -> None:
        """Unless the updates report a usage, what is not cached of the prompt is computed with the first token."""
        self._updates = updates
        self._num_prompt_tokens, self._shares_prompt = num_prompt_tokens, shares_prompt
        self.usage = SequenceUsage()
        self.usage_at: float | None = None
        self._hangs = hangs
        self.num_read = 0
        self.cancelled = asyncio.Event()

    async def __aiter__(self) -> AsyncIterator[SequenceUpdate]:
        for update in self._updates:
            await asyncio.sleep(0)
            if self.cancelled.is_set():
                return
            self.num_read += 1
            self._count(update)
            yield update
        if self._hangs:
            await self.cancelled.wait()

    async def reported(self) -> None: ...

    def _count(self, update: SequenceUpdate) -> None:
        num_generated = self.usage.num_generated_tokens + len(update.token_ids)
        if update.usage is not None:
            self.usage, self.usage_at = update.usage, time.perf_counter()
        elif update.token_ids and num_generated == len(update.token_ids):
            num_cached = self._num_prompt_tokens if self._shares_prompt else update.num_cached_tokens or 0
            self.usage = SequenceUsage(
                num_computed_prompt_tokens=self._num_prompt_tokens - num_cached, num_cached_prompt_tokens=num_cached
            )
        self.usage = self.usage.with_generated(num_generated)

    def cancel(self) -> None:
        self.cancelled.set()
