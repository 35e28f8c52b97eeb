"""What quotas keep of one answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from ..accounts.account import AnswerRequest, Ending
from .bounds import Bounds
from .local_shares import Held
from .standing import Headers


@dataclass(frozen=True, slots=True)
class Opened:
    """An answer that Redis was asked to open under this lease."""

    lease: str
    bounds: Bounds
    response_id: str
    is_resumed: bool


class QuotaAccount:
    """`held`: what the router gave the answer of its share, by rate; None: Redis keeps what it was given.

    `lease`: names it among all that are made. `is_unheard`: Redis has not been told of it. `on_end` gets it and the
    tokens that it has used.
    """

    __slots__ = ("_on_end", "asked", "bounds", "headers", "held", "is_unheard", "lease", "num_tokens")

    def __init__(
        self, bounds: Bounds, lease: str, asked: AnswerRequest, on_end: Callable[[QuotaAccount, int], None]
    ) -> None:
        self.bounds, self.lease, self.asked = bounds, lease, asked
        self.num_tokens = asked.num_prompt_tokens + asked.num_new_tokens  # that it may use
        self.headers: Headers = []
        self.held: list[Held] | None = None
        self.is_unheard = False
        self._on_end = on_end

    @property
    def opened(self) -> Opened:
        return Opened(self.lease, self.bounds, self.asked.response_id, self.asked.is_resumed)

    @property
    def is_kept(self) -> bool:
        """Whether something of it is held until it ends."""
        return self.bounds.has_tokens or self.bounds.has_streams

    @property
    def may_exceed(self) -> bool:
        """Whether it may use more than it was given, because that is more than a whole bucket holds."""
        if self.held is not None:
            return any(held.units < self.num_tokens for held in self.held)
        return any(rate.kind == "tokens" and rate.limit < self.num_tokens for rate in self.bounds.rates)

    def used(self) -> int:
        """Tokens, by now."""
        progress = self.asked.progress()
        return progress.num_prompt_tokens + progress.num_completion_tokens

    def settle(self, ending: Ending) -> None:
        self._on_end(self, ending.progress.num_prompt_tokens + ending.progress.num_completion_tokens)


class _Unbounded:
    headers: Sequence[tuple[bytes, bytes]] = ()

    def settle(self, ending: Ending) -> None: ...


UNBOUNDED: Final = _Unbounded()
