"""A base's tensors, multiplied by what the base multiplies inputs and outputs of its linears by."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from ...kernels.quantised import QuantisedWeight
from .config import ModelConfig
from .weights import WeightSource

_Part = tuple[int, int] | None  # start, stop


class ScaledWeights:
    """`WeightSource`; see `module_scales.ModuleScales`."""

    def __init__(self, source: WeightSource, config: ModelConfig) -> None:
        assert config.scales is not None, "else the source itself serves"
        self._source, self.has_head = source, source.has_head
        path = config.shape.path
        self._scales = {f"{path(module)}.weight": runs for module, runs in config.scales.weights.items()}
        self._scales |= {f"{path(module)}.bias": runs for module, runs in config.scales.biases.items()}

    def take(
        self, name: str, shape: tuple[int, ...], rows: _Part = None, columns: _Part = None, *, in_floats: bool = False
    ) -> torch.Tensor:
        """See `WeightSource.take`."""
        tensor = self._source.take(name, shape, rows, columns, in_floats=in_floats)
        factors = self._factors(name, rows, tensor.device)
        return tensor if factors is None else tensor * factors.view(-1, *[1] * (tensor.dim() - 1)).to(tensor.dtype)

    def take_quantised(
        self, name: str, shape: tuple[int, ...], rows: _Part = None, columns: _Part = None
    ) -> QuantisedWeight | None:
        """See `WeightSource.take_quantised`."""
        weight = self._source.take_quantised(name, shape, rows, columns)
        if weight is None or (factors := self._factors(name, rows, weight.scales.device)) is None:
            return weight
        return replace(weight, scales=weight.scales * factors[:, None])

    def __contains__(self, name: str) -> bool:
        return name in self._source

    def has_other_head(self) -> bool:
        return self._source.has_other_head()

    def drop(self, *, prefix: str = "", suffix: str = "") -> None:
        self._source.drop(prefix=prefix, suffix=suffix)

    def split(self, name: str, num_rows: Mapping[str, int]) -> None:
        self._source.split(name, num_rows)

    def finish(self) -> None:
        self._source.finish()

    def _factors(self, name: str, rows: _Part, device: torch.device) -> torch.Tensor | None:
        """Of these rows of a tensor, float32; None: it is as it is stored."""
        runs = self._scales.get(name.split(".", 3)[-1])  # behind `model.layers.0.`
        if runs is None:
            return None
        factors = torch.cat([torch.full((count,), factor, device=device) for count, factor in runs])
        return factors if rows is None else factors[slice(*rows)]
