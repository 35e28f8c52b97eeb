"""Which kernels compute each operation, chosen once at start."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import linear

from . import attention_torch, norms, pages
from .attention import PagedAttention, WriteKV
from .experts import ExpertKernels
from .experts_torch import TorchExperts
from .lora import LoraKernels
from .lora_torch import TorchLora


@dataclass(frozen=True)
class Kernels:
    """One seam per operation; the protocols and plain twins say what each takes and gives."""

    name: str
    linear: Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
    rms_norm: Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]
    add_rms_norm: Callable[
        [torch.Tensor, torch.Tensor | None, torch.Tensor, float],
        tuple[torch.Tensor, torch.Tensor],
    ]
    silu_mul: Callable[[torch.Tensor], torch.Tensor]
    gelu_tanh_mul: Callable[[torch.Tensor], torch.Tensor]
    write_kv: WriteKV
    paged_attention: PagedAttention
    lora: LoraKernels
    experts: ExpertKernels
    write_pages: Callable[[torch.Tensor, Sequence[int], torch.Tensor], None]


def torch_kernels() -> Kernels:
    """The plain torch twins, for any device."""
    return Kernels(
        name="torch",
        linear=linear,
        rms_norm=norms.rms_norm,
        add_rms_norm=norms.add_rms_norm,
        silu_mul=norms.silu_mul,
        gelu_tanh_mul=norms.gelu_tanh_mul,
        write_kv=attention_torch.write_kv,
        paged_attention=attention_torch.paged_attention,
        lora=TorchLora(),
        experts=TorchExperts(),
        write_pages=pages.write_pages,
    )
