"""Small tensors copied to a device and back without a wait."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def staged(device: torch.device, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The tensors on the device, in one copy that the host does not wait for. Pass the widest elements first."""
    if device.type == "cpu":
        return tensors
    together = torch.cat([x.reshape(-1).view(torch.uint8) for x in tensors])
    if device.type == "cuda":
        together = together.pin_memory()
    pieces = torch.split(together.to(device, non_blocking=True), [x.nbytes for x in tensors])
    return tuple(piece.view(x.dtype).view(x.shape) for piece, x in zip(pieces, tensors, strict=True))


class Arriving:
    """Tensors of a device on their way to the host, in one copy that begins at once."""

    def __init__(self, parts: Sequence[torch.Tensor]) -> None:
        self._parts = [(part.nbytes, part.dtype, part.shape) for part in parts]
        self._widest_first = sorted(range(len(parts)), key=lambda index: -parts[index].itemsize)
        pieces = [parts[index].contiguous().view(-1).view(torch.uint8) for index in self._widest_first]
        together = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
        self._together = together.to("cpu", non_blocking=True)
        self._arrival = None
        if together.device.type == "cuda":
            self._arrival = torch.cuda.current_stream(together.device).record_event()

    def read(self) -> list[torch.Tensor]:
        """The same on the host. Waits until they have arrived."""
        if self._arrival is not None:
            self._arrival.synchronize()
        pieces = torch.split(self._together, [self._parts[index][0] for index in self._widest_first])
        arrived = dict(zip(self._widest_first, pieces, strict=True))
        return [arrived[index].view(dtype).view(shape) for index, (_, dtype, shape) in enumerate(self._parts)]
