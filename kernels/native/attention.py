"""Paged attention in C++ (`cpp/attention.h`, `cpp/rows.h`): checks and passes the arguments."""

from __future__ import annotations

import ctypes
import logging
from dataclasses import dataclass

import torch

from ..attention import AttentionBatch, DerivedFromBatches
from ..plain import attention as plain_attention
from ..windows import as_number
from .build import kernel

log = logging.getLogger(__name__)

# Limits of cpp/attention.h.
MOST_DIMS = 576  # head_dim
MOST_GROUPED = 32  # query heads that share a KV head


@dataclass(frozen=True)
class HostBatch:
    """A batch's lists as arrays, made once for all layers."""

    query_starts: torch.Tensor
    context_lens: torch.Tensor
    pages: torch.Tensor
    page_starts: torch.Tensor
    positions: torch.Tensor
    row_pages: torch.Tensor
    row_slots: torch.Tensor

    @staticmethod
    def make(batch: AttentionBatch) -> HostBatch:
        return HostBatch(
            torch.tensor(batch.query_starts, dtype=torch.int64),
            torch.tensor(batch.context_lens, dtype=torch.int64),
            batch.pages.to(torch.int32).contiguous(),
            *(
                tensor.to(torch.int64).contiguous()
                for tensor in (batch.page_starts, batch.positions, batch.row_pages, batch.row_slots)
            ),
        )


class NativeAttention:
    """`attention.KVWriter` and `attention.PagedAttention` of one dtype."""

    def __init__(self, library: ctypes.CDLL, dtype: torch.dtype, num_threads: int) -> None:
        self._dtype, self._num_threads = dtype, num_threads
        self._has_warned = False
        self._hosts = DerivedFromBatches[HostBatch]()
        self._write = kernel(library, "write_kv", "ppppppppppi", dtype)
        self._attend = kernel(library, "paged_attention", "pppppppppffi", dtype)

    def write_kv(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        rotary: torch.Tensor,
        kv: torch.Tensor,
        batch: AttentionBatch,
    ) -> torch.Tensor:
        """See `attention.KVWriter`."""
        self._check(q, k, v, kv)
        host, turned = self._host_of(batch), torch.empty(q.shape, dtype=q.dtype)
        strides = (stride for x in (q, k, v) for stride in x.stride()[:2])
        shape = (*q.shape[:2], k.shape[1], q.shape[2])
        sizes = (ctypes.c_int64 * 15)(*shape, *strides, *kv.stride()[:3], rotary.shape[1], v.shape[1])
        self._write(
            q.data_ptr(),
            k.data_ptr(),
            v.data_ptr(),
            rotary.data_ptr(),
            kv.data_ptr(),
            host.positions.data_ptr(),
            host.row_pages.data_ptr(),
            host.row_slots.data_ptr(),
            turned.data_ptr(),
            ctypes.addressof(sizes),
            self._num_threads,
        )
        return turned

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
        """See `attention.PagedAttention`.

        The plain twin computes heads of more than 576 elements and groups of more than 32 heads, with one warning. A
        single group of more is computed in several.
        """
        _, num_heads, head_dim = q.shape
        block_size, num_kv_heads = kv.shape[2:4]
        if num_kv_heads == 1 and num_heads > MOST_GROUPED:
            parts = [slice(head, head + MOST_GROUPED) for head in range(0, num_heads, MOST_GROUPED)]
            all_sinks = [None if sinks is None else sinks[part] for part in parts]
            of_parts = zip(parts, all_sinks, strict=True)
            return torch.cat(
                [self.paged_attention(q[:, part], kv, batch, scale, window, softcap, each) for part, each in of_parts],
                1,
            )
        if head_dim > MOST_DIMS or num_heads // num_kv_heads > MOST_GROUPED:
            self._warn_once(head_dim, num_heads // num_kv_heads)
            return plain_attention.paged_attention(q, kv, batch, scale, window, softcap, sinks)
        self._check(q, kv)
        assert sinks is None or (sinks.dtype == torch.float32 and sinks.shape == (num_heads,) and sinks.is_contiguous())
        host, out = self._host_of(batch), torch.empty(q.shape, dtype=q.dtype)
        shape = (len(host.page_starts), num_heads, num_kv_heads, head_dim, block_size)
        sizes = (ctypes.c_int64 * 11)(*shape, *q.stride()[:2], *kv.stride()[:3], as_number(window))
        self._attend(
            q.data_ptr(),
            out.data_ptr(),
            kv.data_ptr(),
            host.query_starts.data_ptr(),
            host.context_lens.data_ptr(),
            host.pages.data_ptr(),
            host.page_starts.data_ptr(),
            ctypes.addressof(sizes),
            None if sinks is None else sinks.data_ptr(),
            scale,
            softcap or 0.0,
            self._num_threads,
        )
        return out

    def _warn_once(self, head_dim: int, group: int) -> None:
        if not self._has_warned:
            reason = f"heads of {head_dim} in groups of {group}, at most {MOST_DIMS} and {MOST_GROUPED} are native"
            log.warning("plain torch attention serves, several times slower: %s", reason)
        self._has_warned = True

    def _host_of(self, batch: AttentionBatch) -> HostBatch:
        return self._hosts.of(batch, lambda: HostBatch.make(batch))

    def _check(self, *tensors: torch.Tensor) -> None:
        for x in tensors:
            assert x.dtype == self._dtype and x.stride(-1) == 1, "heads are contiguous and of the kernels' dtype"
        kv = tensors[-1]
        assert kv.dim() != 5 or kv.shape[3] == 1 or kv.stride(3) == kv.shape[4], (
            "the heads of a token lie side by side in its page"
        )
