"""Sends a share of a name's requests to its shadow as well. Nobody sees those answers: only how they end is counted."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Final

from msgspec import structs

from ...adapters.adapter import AdapterVersion
from ...adapters.registry.canary_counts import Outcome
from ...adapters.versions.canary_choice import gets_canary
from ...adapters.versions.rollout import rollout_of, version_of
from ...workers.wire.messages import AdapterRef
from ..accounts.account import Ending
from ..fleet.dispatch import Dispatcher
from ..generation.generation import Generation, GenerationRequest, SequenceFailedError
from ..metrics import Metrics
from ..openai_api.errors import from_sequence_error
from ..text.text import TextService
from .canary_book import CanaryBook, counted_of

MAX_AT_ONCE: Final = 4  # shadowed requests of a router; what comes meanwhile is not shadowed
MAX_TOKENS: Final = 512  # of a shadowed answer
TIMEOUT_S: Final = 120.0
_log = logging.getLogger(__name__)


class ShadowSender:
    """Owned by one event loop. What it sends is background work, counts in no tenant's metrics and in no account."""

    def __init__(self, dispatcher: Dispatcher, text: TextService, book: CanaryBook) -> None:
        self._dispatcher, self._text, self._book = dispatcher, text, book
        self._running: set[asyncio.Task[None]] = set()

    @property
    def num_running(self) -> int:
        return len(self._running)

    def send(
        self, versions: Sequence[AdapterVersion | None], model: str, request: GenerationRequest, response_id: str
    ) -> None:
        """Returns at once. `versions`: of the name, with its current one. Requests of one new sequence are shadowed."""
        if "@" in model or request.num_seen or request.n * len(request.prompts) > 1 or request.beams:
            return
        current = next((one for one in versions if one is not None and one.rollout), None)
        shadow = None if current is None else rollout_of(current).shadow
        if current is None or shadow is None or len(self._running) >= MAX_AT_ONCE:
            return
        version = version_of(current, shadow.version)
        if version is None or not gets_canary(shadow.share, response_id, shadow.id):
            return
        (prompt,) = request.prompts
        most = min(MAX_TOKENS, prompt.sampling.max_tokens or MAX_TOKENS)
        copy = replace(
            request,
            prompts=[replace(prompt, sampling=structs.replace(prompt.sampling, max_tokens=most))],
            adapter=AdapterRef(version.digest, dict(version.module_ranks)),
            key="",
            timeout_s=TIMEOUT_S,
            is_background=True,
        )
        task = asyncio.create_task(self._run(copy, version, shadow.id, response_id), name="shadow")
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def _run(self, request: GenerationRequest, version: AdapterVersion, shadow_id: str, response_id: str) -> None:
        started_at, error = time.perf_counter(), ""
        generation = Generation(request, self._dispatcher, self._text, Metrics(), started_at)
        try:
            async with aclosing(generation.deltas()) as arriving:
                async for _ in arriving:
                    pass
        except SequenceFailedError as failure:
            error = from_sequence_error(failure.error).detail.code or ""
        except Exception:
            _log.exception("a shadowed request failed")
            return
        finally:
            generation.cancel()
        first_at = generation.first_token_at
        ending = Ending(
            progress=generation.progress(),
            error=error,
            is_cancelled=False,
            first_token_s=None if first_at is None else first_at - started_at,
            duration_s=time.perf_counter() - started_at,
        )
        self._book.count(Outcome(version.tenant, f"shadow {response_id}", shadow_id, "shadow", counted_of(ending)))
