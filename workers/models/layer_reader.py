"""Reads one worker's part of the weights of a decoder layer from a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...kernels.backend import Kernels, LinearWeight
from ...kernels.experts import ExpertWeight
from ...kernels.quantised import QuantisedWeight, joined
from .layers import LoraLinear, NarrowLinear
from .sharding import ModelSharding, Range
from .weights import WeightSource


def load_norm_bias(name: str, width: int, sharding: ModelSharding, checkpoint: WeightSource) -> torch.Tensor | None:
    """In float32; None: norms of the family have none."""
    return checkpoint.take(f"{name}.bias", (width,)).float() if sharding.config.family.norms_have_bias else None


StoredWeight = torch.Tensor | QuantisedWeight  # `[out, in]`


def some_rows(weight: StoredWeight, rows: slice | list[int]) -> StoredWeight:
    return weight[rows] if isinstance(weight, torch.Tensor) else weight.rows(rows)


def some_columns(weight: StoredWeight, part: Range) -> StoredWeight:
    return weight[:, slice(*part)] if isinstance(weight, torch.Tensor) else weight.columns(*part)


def load_norm(
    name: str, width: int, sharding: ModelSharding, checkpoint: WeightSource, part: Range | None = None
) -> torch.Tensor:
    """A norm's weights, or a part of them.

    Families that store them less `norm_offset`, or say so by `wide_norms`, compute them in float32: these are float32.
    """
    weight, offset = checkpoint.take(f"{name}.weight", (width,), rows=part), sharding.config.family.norm_offset
    return weight.float() + offset if offset or sharding.config.family.wide_norms else weight


class LayerReader:
    """Names are those within the layer."""

    def __init__(self, index: int, sharding: ModelSharding, checkpoint: WeightSource, kernels: Kernels) -> None:
        self.prefix = f"model.layers.{index}."
        self.index, self.sharding, self.checkpoint = index, sharding, checkpoint
        self.config, self.pack, self.pack_experts = sharding.config, kernels.pack_linear, kernels.pack_experts
        self.path = sharding.config.shape.path
        self._float8, self._quantised = kernels.float8, kernels.quantised
        self.pack_layer = kernels.pack_linear if kernels.float8 is None else kernels.float8.pack

    def norm(self, name: str | None) -> torch.Tensor | None:
        """None: the layer has no such norm."""
        if name is None:
            return None
        return load_norm(f"{self.prefix}{name}", self.config.hidden_size, self.sharding, self.checkpoint)

    def norm_bias(self, name: str | None) -> torch.Tensor | None:
        if name is None:
            return None
        return load_norm_bias(f"{self.prefix}{name}", self.config.hidden_size, self.sharding, self.checkpoint)

    def places(self, *modules: str) -> tuple[int, ...]:
        """Indices of this layer's modules in `BaseShape.dense_modules`."""
        shape = self.config.shape
        return tuple(shape.dense_modules.index(shape.placed(self.index, module)) for module in modules)

    def stored(
        self, name: str, num_in: int, num_out: int, rows: Range | None = None, columns: Range | None = None
    ) -> StoredWeight:
        """A weight or a part of it, in few bits if the file has it so and the kernels multiply such."""
        path, shape = f"{self.prefix}{name}.weight", (num_out, num_in)
        narrow = self.stored_narrow(path, shape, rows, columns)
        return self.checkpoint.take(path, shape, rows=rows, columns=columns) if narrow is None else narrow

    def stored_narrow(
        self, path: str, shape: tuple[int, int], rows: Range | None = None, columns: Range | None = None
    ) -> QuantisedWeight | None:
        """See `WeightSource.take_quantised`; None also if the kernels multiply no such weights."""
        return None if self._quantised is None else self.checkpoint.take_quantised(path, shape, rows, columns)

    def joined(self, weights: Sequence[StoredWeight]) -> StoredWeight:
        """The outputs of all, side by side: in few bits if all are stored alike."""
        narrow = [weight for weight in weights if isinstance(weight, QuantisedWeight)]
        together = joined(narrow) if len(narrow) == len(weights) else None
        return torch.cat([self._wide(weight) for weight in weights]) if together is None else together

    def packed(self, weights: Sequence[StoredWeight]) -> LinearWeight:
        """The outputs of all, side by side: in few bits if all are, or are to be rounded to eight."""
        weight = self.joined(weights)
        if self._quantised is None:
            return self.pack_layer(self._wide(weight))
        if isinstance(weight, QuantisedWeight) and (packed := self._quantised.pack(weight)) is not None:
            return packed
        if self._quantised.rounds:
            return self._quantised.pack(QuantisedWeight.of_eight_bits(self._wide(weight)))
        return self.pack_layer(self._wide(weight))

    def packed_experts(self, weights: Sequence[StoredWeight]) -> ExpertWeight:
        """Those of a layer's experts, one for each: in four bits if all are."""
        narrow = [weight for weight in weights if isinstance(weight, QuantisedWeight)]
        if self._quantised is not None and len(narrow) == len(weights):
            packed = self._quantised.pack_experts(narrow)
            if packed is not None:
                return packed
        return self.pack_experts(torch.stack([self._wide(weight) for weight in weights]))

    def _wide(self, weight: StoredWeight) -> torch.Tensor:
        if isinstance(weight, torch.Tensor):
            return weight
        assert self._quantised is not None, "else none is stored narrow"
        return weight.dequantised().to(self._quantised.dtype)

    def packed_columns(self, name: str, num_in: int, num_out: int, part: Range) -> LinearWeight:
        if self._quantised is None or not self._quantised.rounds:
            return self.packed([self.stored(name, num_in, num_out, columns=part)])
        # A row's scale is that of all its inputs, so that gangs of all sizes have the same weights.
        stored = self.stored(name, num_in, num_out)
        if isinstance(stored, QuantisedWeight):
            packed = self._quantised.pack(stored.columns(*part))
            if packed is not None:
                return packed
        return self._quantised.pack(QuantisedWeight.of_eight_bits(self._wide(stored)).columns(*part))

    def rows(self, name: str, num_in: int, num_out: int, part: Range | None) -> torch.Tensor:
        return self.checkpoint.take(f"{self.prefix}{name}.weight", (num_out, num_in), rows=part)

    def columns(self, name: str, num_in: int, num_out: int, part: Range) -> torch.Tensor:
        return self.checkpoint.take(f"{self.prefix}{name}.weight", (num_out, num_in), columns=part)

    def row_linear(self, module: str, num_in: int, part: Range, modules: tuple[int, ...], has_bias: bool) -> LoraLinear:
        hidden, name = self.config.hidden_size, self.path(module)
        if self._float8 is None:
            packed = self.packed_columns(name, num_in, hidden, part)
        else:  # a row's scale is that of all its inputs, so that gangs of all sizes have the same weights
            packed = self._float8.pack(self.rows(name, num_in, hidden, None), part)
        return LoraLinear(packed, self.sum_bias(name, hidden, has_bias), modules)

    def bias(self, name: str, width: int, part: Range | None = None) -> torch.Tensor:
        return self.checkpoint.take(f"{self.prefix}{name}.bias", (width,), rows=part)

    def sum_bias(self, name: str, width: int, has_bias: bool) -> torch.Tensor | None:
        """That of partial sums: one worker has it."""
        bias = self.bias(name, width) if has_bias else None
        return bias if self.sharding.rank == 0 else None

    def narrow(self, module: str, name: str, num_in: int, num_out: int, bias: torch.Tensor | None) -> NarrowLinear:
        """A linear that is whole on every worker."""
        weight, shape = self.pack(self.rows(name, num_in, num_out, None)), self.config.shape
        return NarrowLinear(weight, bias, self.places(module), num_out + shape.padding(module))
