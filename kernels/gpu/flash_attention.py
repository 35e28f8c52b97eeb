"""Paged attention by vllm-flash-attn where it is installed: FlashAttention 3 on Hopper, for the heads that it is built
for, and 2 elsewhere.

The package reads the same pages, through strided views. It is maintained as a part of vllm (`vllm.vllm_flash_attn`);
the older package of its own (`vllm_flash_attn`) has the same interface. Both need the table and the lengths in int32.
"""

from __future__ import annotations

import importlib
import itertools
import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..attention import AttentionBatch, DerivedFromBatches, PagedAttention, page_table
from ..staging import staged
from ..windows import AttentionChunk

PACKAGES = ("vllm.vllm_flash_attn", "vllm_flash_attn")
_PAGE_MULTIPLE = 16  # tokens: FlashAttention 2 takes pages of a multiple of this
_HEADS_OF_3 = frozenset((64, 96, 128, 192, 256))  # sizes that version 3 is built for; 2 pads others, multiples of 8
_WIDEST_HEAD = 256

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class FlashPackage:
    name: str  # as `motet status` shows it
    attend: Callable[..., torch.Tensor]  # flash_attn_varlen_func
    versions: tuple[int, ...]  # of FlashAttention that run on this GPU, the best first

    def version_for(self, head_dim: int) -> int | None:
        """The best version that computes heads of this size; None: none does."""
        if head_dim > _WIDEST_HEAD or head_dim % 8:
            return None
        return next((version for version in self.versions if version != 3 or head_dim in _HEADS_OF_3), None)


@dataclass(frozen=True)
class _Lengths:
    """A batch as the package takes it, made once for all layers."""

    query_starts: torch.Tensor  # [num_sequences + 1] int32
    context_lens: torch.Tensor  # [num_sequences] int32
    page_table: torch.Tensor  # [num_sequences, most_pages] int32
    most_queries: int  # rows of the sequence with the most


def find_flash_attention(capability: tuple[int, int]) -> FlashPackage | None:
    """The first package that can be imported and runs on a GPU of this compute capability; None: there is none.

    A package that is there and cannot be used is worth a warning, and never an error: Triton computes the same.
    """
    candidates = (3, 2) if capability[0] == 9 else (2,)
    for package in PACKAGES:
        try:
            module = importlib.import_module(package)
            versions = tuple(version for version in candidates if module.is_fa_version_supported(version))
            attend = module.flash_attn_varlen_func
        except Exception as problem:  # another package of this name, or one built for another torch or driver
            is_absent = isinstance(problem, ModuleNotFoundError) and package.startswith(problem.name or " ")
            if not is_absent:
                reason = f"{type(problem).__name__}: {problem}"
                log.warning("%s is installed and cannot be used; other kernels compute attention: %s", package, reason)
            continue
        if versions:
            names = ", ".join(f"FA{version}" for version in versions)
            return FlashPackage(f"{package} ({names})", attend, versions)
        log.warning("%s has no FlashAttention for compute capability %d.%d", package, *capability)
    return None


class FlashAttention:
    """`attention.PagedAttention`; `otherwise` computes what the package cannot."""

    def __init__(self, package: FlashPackage, otherwise: PagedAttention) -> None:
        self._package, self._otherwise = package, otherwise
        self._lengths = DerivedFromBatches[_Lengths]()

    def paged_attention(
        self,
        q: torch.Tensor,
        kv: torch.Tensor,
        batch: AttentionBatch,
        scale: float,
        window: int | None,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `attention.PagedAttention`. Version 2 computes no sinks, so that none are given to the package."""
        block_size, version = kv.shape[2], self._package.version_for(q.shape[2])
        if (
            q.dtype == torch.float32
            or version is None
            or block_size % _PAGE_MULTIPLE
            or sinks is not None
            or isinstance(window, AttentionChunk)
        ):
            return self._otherwise(q, kv, batch, scale, window, softcap, sinks)
        lengths = self._lengths.of(batch, lambda: _lengths(batch))
        return self._package.attend(
            q.contiguous(),
            kv[:, 0],
            kv[:, 1],
            max_seqlen_q=lengths.most_queries,
            cu_seqlens_q=lengths.query_starts,
            max_seqlen_k=batch.most_pages * block_size,
            seqused_k=lengths.context_lens,
            block_table=lengths.page_table,
            softmax_scale=scale,
            causal=True,
            window_size=(-1, -1) if window is None else (window - 1, 0),
            softcap=softcap or 0.0,
            fa_version=version,
        )


def _lengths(batch: AttentionBatch) -> _Lengths:
    """The batch for the package.

    For decodes alone it is computed from the batch's tensors, so that a captured launch follows their content; for
    other batches from the lists.
    """
    device, starts = batch.positions.device, batch.query_starts
    most_queries = max((end - start for start, end in itertools.pairwise(starts)), default=0)
    num_sequences = len(starts) - 1
    if starts == tuple(range(num_sequences + 1)):
        query_starts = torch.arange(num_sequences + 1, dtype=torch.int32, device=device)
        context_lens = (batch.positions + 1).to(torch.int32)
    else:
        numbers = (torch.tensor(each, dtype=torch.int32) for each in (starts, batch.context_lens))
        query_starts, context_lens = staged(device, *numbers)
    table = page_table(batch, torch.arange(num_sequences, device=device), batch.most_pages)
    return _Lengths(query_starts, context_lens, table, most_queries)
