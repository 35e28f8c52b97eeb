"""Numbers of the host on their way to a device."""

from __future__ import annotations

import torch


def staged(device: torch.device, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The tensors on the device, in one copy that the host does not wait for. Those of wider numbers come first."""
    if device.type == "cpu":
        return tensors
    together = torch.cat([x.reshape(-1).view(torch.uint8) for x in tensors])
    if device.type == "cuda":
        together = together.pin_memory()
    pieces = torch.split(together.to(device, non_blocking=True), [x.nbytes for x in tensors])
    return tuple(piece.view(x.dtype).view(x.shape) for piece, x in zip(pieces, tensors, strict=True))
