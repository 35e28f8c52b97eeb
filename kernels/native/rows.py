"""Norms and gated activations in C++ (`cpp/rows.h`): checks and passes the arguments."""

from __future__ import annotations

import ctypes

import torch

from ..norms import ACTIVATIONS, Activation, ClampedSwiglu, Ungated
from .build import kernel


class NativeRows:
    """The functions of `norms.py`, for one dtype."""

    def __init__(self, library: ctypes.CDLL, dtype: torch.dtype, num_threads: int) -> None:
        self._dtype, self._num_threads = dtype, num_threads
        self._rms_norm, self._layer_norm = (
            kernel(library, name, "pnppippnnfi", dtype) for name in ("add_rms_norm", "add_layer_norm")
        )
        self._clamped_swiglu = kernel(library, "clamped_swiglu", "pnpnnffi", dtype)
        self._gated = {activation: gated_kernel(library, activation, dtype) for activation in ACTIVATIONS}

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """See `norms.rms_norm`."""
        return self.add_rms_norm(x.reshape(-1, x.shape[-1]), None, weight, eps)[0].view(x.shape)

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `norms.add_rms_norm`."""
        return self._add_norm(self._rms_norm, x, residual, weight, eps)

    def add_layer_norm(
        self, x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `norms.add_layer_norm`."""
        return self._add_norm(self._layer_norm, x, residual, weight, eps)

    def _add_norm(
        self,
        norm: ctypes._NamedFuncPointer,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        weight: torch.Tensor,
        eps: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert x.dtype == self._dtype, "x has the kernels' dtype"
        assert weight.dtype in (self._dtype, torch.float32), "the weight has the kernels' dtype or float32"
        x = x if x.stride(1) == 1 else x.contiguous()
        normed = torch.empty(x.shape, dtype=x.dtype)
        total = x if residual is None else torch.empty(x.shape, dtype=x.dtype)
        residual = None if residual is None else residual.contiguous()
        norm(
            x.data_ptr(),
            x.stride(0),
            None if residual is None else residual.data_ptr(),
            weight.data_ptr(),
            weight.dtype == torch.float32,
            total.data_ptr(),
            normed.data_ptr(),
            *x.shape,
            eps,
            self._num_threads,
        )
        return normed, total

    def gated(self, gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
        """See `norms.gated`."""
        assert not isinstance(activation, Ungated), "an activation of gates"
        stride, unit = gate_up.stride()
        assert gate_up.dtype == self._dtype, "the input has the kernels' dtype"
        if unit != 1:
            gate_up = gate_up.contiguous()
            stride = gate_up.stride(0)
        num_rows, width = gate_up.shape
        width //= 2
        product = gate_up.new_empty((num_rows, width))
        rows = (gate_up.data_ptr(), stride, product.data_ptr(), num_rows, width)
        if isinstance(activation, ClampedSwiglu):
            self._clamped_swiglu(*rows, activation.alpha, activation.limit, self._num_threads)
        else:
            self._gated[activation](*rows, self._num_threads)
        return product


def gated_kernel(library: ctypes.CDLL, activation: str, dtype: torch.dtype) -> ctypes._NamedFuncPointer:
    """A `GatedKernel` of `cpp/rows.h`."""
    return kernel(library, f"gated_{activation}", "pnpnni", dtype)
