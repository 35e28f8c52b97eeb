"""The interface from which a decoder takes its tensors."""

from __future__ import annotations

from typing import Protocol

import torch


class WeightSource(Protocol):
    """Each tensor is taken once; `finish` raises an error if any is left over."""

    has_head: bool  # the model was saved with its head, or with one that is the embedding

    def take(
        self,
        name: str,
        shape: tuple[int, ...],
        rows: tuple[int, int] | None = None,
        columns: tuple[int, int] | None = None,
    ) -> torch.Tensor:
        """The tensor, or these rows and columns of it, in the engine's dtype and on its device.

        `shape` is that of the whole tensor. Raises ValueError if it is missing, has another shape or holds integers.
        """

    def has_other_head(self) -> bool:
        """Whether the model was saved with a head that is not its embedding. Reads both."""

    def drop(self, suffix: str) -> None:
        """Removes tensors whose names end with `suffix`, which the model computes by itself or shares."""

    def finish(self) -> None:
        """Raises ValueError if tensors are left that no part of the model took."""
