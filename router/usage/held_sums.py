"""How many sums all answers for usage hold in a router's memory together: no more than there is room for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from ..openai_api.errors import ApiError

MAX_HELD: Final = 2_000_000  # some 800 MB
MAX_HELD_FOR_CSV: Final = 1_500_000  # the rest is left to others while clients read their CSV slowly
_RETRY_AFTER_S: Final = 10


class HeldSums:
    """Belongs to one event loop."""

    def __init__(self) -> None:
        self.num_held = 0

    @contextmanager
    def answer(self, *, is_csv: bool) -> Iterator[Callable[[int], None]]:
        """What is called with how many sums the answer holds by now; they are given back when the block ends.

        It raises a 429 if there is no room for more. What it was called with is counted before it is checked, so that
        a page of the ledger may be over what there is room for.
        """
        own = 0

        def hold(num_sums: int) -> None:
            nonlocal own
            grown = num_sums - own
            own = num_sums
            self.num_held += grown
            if grown and self.num_held > (MAX_HELD_FOR_CSV if is_csv else MAX_HELD):
                message = "Other answers for usage take the memory that is for them: ask again later, or for less time."
                raise ApiError(429, message, code="too_many_requests", headers={"Retry-After": str(_RETRY_AFTER_S)})

        try:
            yield hold
        finally:
            self.num_held -= own
