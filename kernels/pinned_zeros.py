"""Host memory that a GPU copies from and to by itself.

torch's own pinned memory would round each tensor up to a power of two, and each new one stalls all launches while the
driver maps it. So plain memory is registered with the driver instead, whole and once.
"""

from __future__ import annotations

import math
import weakref

import torch

from .huge_pages import zeros_in_huge_pages

_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every CUDA context of this process


def pinned_zeros(shape: tuple[int, ...], dtype: torch.dtype, advice: str) -> torch.Tensor:
    """Zeros in pinned memory, which is unpinned when the tensor itself is gone.

    Keep the tensor for as long as any view of it. Raises ValueError, which ends in `advice`, if the driver cannot pin
    that much.
    """
    zeros = zeros_in_huge_pages(math.prod(shape), dtype).view(shape)
    runtime, address = torch.cuda.cudart(), zeros.data_ptr()
    status = int(runtime.cudaHostRegister(address, zeros.nbytes, _PORTABLE))
    if status != 0:
        raise ValueError(
            f"{zeros.nbytes} bytes of host memory could not be pinned for the GPU (CUDA error {status}): {advice}"
        )
    memory = zeros.untyped_storage()  # stays mapped until it is unpinned
    weakref.finalize(zeros, _unpin, runtime, address, memory)
    return zeros


def _unpin(runtime: object, address: int, memory: torch.UntypedStorage) -> None:
    runtime.cudaHostUnregister(address)  # type: ignore[attr-defined]
