"""A bound on the sequences of a gang that have no token yet, and for how long they have waited.

A leader that took all that comes would hold it in memory, and serve it when its clients have long gone.
"""

from __future__ import annotations

from ..wire.messages import SequenceError
from .leader_config import LeaderConfig


class QueueLimit:
    """Counts the sequences, by the engine's id. `now`: seconds of any clock that never goes back."""

    def __init__(self, config: LeaderConfig) -> None:
        self._config = config
        self._waiting: dict[int, tuple[float, int]] = {}  # arrival and number of tokens of each; the oldest first
        self._num_tokens = 0

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def num_tokens(self) -> int:
        return self._num_tokens

    def oldest_s(self, now: float) -> float:
        """For how long the oldest sequence has waited; 0: none waits."""
        return now - next(iter(self._waiting.values()))[0] if self._waiting else 0.0

    def refusal(self, num_tokens: int, now: float, times: int = 1) -> SequenceError | None:
        """Why a sequence of so many tokens may not wait here; None: it may. `times`: the bounds are so many times as high.

        The error says to come back after as long as the oldest sequence has waited so far: as long as this one would.
        """
        config, num_waiting = self._config, len(self._waiting)
        if num_waiting >= times * config.max_waiting_sequences:
            problem = f"{num_waiting} sequences wait for their first token, and no more may"
        elif num_waiting and self._num_tokens + num_tokens > times * config.max_waiting_tokens:
            problem = (
                f"sequences of {self._num_tokens} tokens wait for their first token: {num_tokens} more would be over "
                f"{times * config.max_waiting_tokens}"
            )
        else:
            return None
        return SequenceError(
            "overloaded",
            f"the gang's queue is full: {problem}; try again later",
            retry_after_s=self.oldest_s(now),
            reason="full",
        )

    def enter(self, engine_id: int, num_tokens: int, now: float) -> None:
        assert engine_id not in self._waiting
        self._waiting[engine_id] = now, num_tokens
        self._num_tokens += num_tokens

    def leave(self, engine_id: int) -> None:
        """The sequence has a token, has ended or was cancelled. Ids that are not here are ignored."""
        _, num_tokens = self._waiting.pop(engine_id, (0.0, 0))
        self._num_tokens -= num_tokens

    def check_integrity(self) -> None:
        """Raises AssertionError if the tokens are miscounted."""
        assert self._num_tokens == sum(num_tokens for _, num_tokens in self._waiting.values())
