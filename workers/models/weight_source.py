"""Where a decoder's tensors come from."""

from __future__ import annotations

from typing import Protocol

import torch


class WeightSource(Protocol):
    """Each tensor is taken once; `finish` refuses what nobody took."""

    def take(
        self,
        name: str,
        shape: tuple[int, ...],
        rows: tuple[int, int] | None = None,
        columns: tuple[int, int] | None = None,
    ) -> torch.Tensor:
        """The tensor or the given part of it, in the engine's dtype and on its device. `shape` is the whole tensor's.

        Raises ValueError if it is missing or misshapen.
        """

    def drop(self, suffix: str) -> None:
        """Forgets tensors that the model computes by itself or shares."""

    def finish(self) -> None:
        """Raises ValueError if tensors are left that no part of the model took."""
