"""Multi-head latent attention (DeepSeek V2, arXiv 2405.04434, §2.1) over latents in pages, with absorbed weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ...kernels.experts import ExpertGroups, ExpertWeight, groups_of_all
from ...kernels.latent_lora import LatentLora, add_to_queries, add_to_values, of_layer
from .latent_config import LatentConfig
from .layers import ForwardContext, LoraLinear
from .rotary import query_scales

INNER_EPS = 1e-6  # of the norms of what queries are made of and of the latent, whatever config.json says of the others


@dataclass(frozen=True)
class AbsorbedWeights:
    """What makes keys and values of a latent, multiplied with queries and with what is attended to instead.

    A score of a head is its query times key weights times latent. So the query is multiplied with the weights once, and
    all heads attend to latents: one KV head, whose keys are its values.
    """

    keys: ExpertWeight  # [heads of this worker, rank, plain_dim]: to kernels heads are experts that have all rows
    values: ExpertWeight  # [heads of this worker, value_dim, rank]

    def of_queries(self, q: torch.Tensor, groups: ExpertGroups, context: ForwardContext) -> torch.Tensor:
        """`[num_rows, heads, rank]` of q `[num_rows, heads, plain_dim]`."""
        return _by_head(q, self.keys, groups, context)

    def of_attended(self, x: torch.Tensor, groups: ExpertGroups, context: ForwardContext) -> torch.Tensor:
        """`[num_rows, heads, value_dim]` of x `[num_rows, heads, rank]`."""
        return _by_head(x, self.values, groups, context)


def _by_head(x: torch.Tensor, weight: ExpertWeight, groups: ExpertGroups, context: ForwardContext) -> torch.Tensor:
    """Each head of x `[num_rows, heads, in]` times its own weight, transposed: `[num_rows, heads, out]`."""
    num_rows, num_heads, num_in = x.shape
    pairs = context.kernels.experts.linear(x.transpose(0, 1).reshape(-1, num_in), weight, groups)
    return pairs.view(num_heads, num_rows, -1).transpose(0, 1)


@dataclass(frozen=True)
class LatentAttention:
    """This worker's partial sum. Its heads are cut among workers; the latent is the same on all."""

    inputs: LoraLinear  # to what queries are made of, or to them, then the latent and what is rotated of keys
    queries: LoraLinear | None  # None: `inputs` gives them
    query_norm: torch.Tensor | None  # [query_rank]
    latent_norm: torch.Tensor  # [rank]
    absorbed: AbsorbedWeights
    output: LoraLinear
    sizes: LatentConfig
    num_heads: int  # of this worker
    scale: float
    query_scaling: Mapping[str, float] | None  # see `rotary.query_scales`
    kv_index: int

    def __call__(self, x: torch.Tensor, layer: int, context: ForwardContext) -> torch.Tensor:
        kernels, batch, sizes = context.kernels, context.attention, self.sizes
        columns = self.inputs(x, layer, context)
        queries, latent, key = columns.split_with_sizes(
            [columns.shape[1] - sizes.width, sizes.rank, sizes.rotated_dim], dim=1
        )
        if self.queries is not None and self.query_norm is not None:
            queries = self.queries(kernels.rms_norm(queries, self.query_norm, INNER_EPS), layer, context)
        plain, rotated = queries.reshape(len(x), self.num_heads, -1).split([sizes.plain_dim, sizes.rotated_dim], dim=2)
        if self.query_scaling is not None:  # what is rotated is scaled by its table
            plain = plain * query_scales(self.query_scaling, batch.positions)[:, None, None].to(plain.dtype)
        lora: tuple[LatentLora, ...] = ()
        if context.latent_lora is not None:
            lora = of_layer(context.latent_lora, context.pool, layer, self.num_heads, sizes.plain_dim)
        kv = context.kv[self.kv_index]
        kv[:, 0, :, 0, : sizes.rank][batch.row_pages, batch.row_slots] = kernels.rms_norm(
            latent, self.latent_norm, INNER_EPS
        )
        key = self._in_halves(key).unsqueeze(1)
        rotated = kernels.write_kv(
            self._in_halves(rotated), key, key[:, :0], context.rotary[layer], kv[..., sizes.rank :], batch
        )
        groups = groups_of_all(len(x), self.num_heads, x.device)
        absorbed = self.absorbed.of_queries(plain, groups, context)
        add_to_queries(absorbed, plain, lora)
        q = torch.cat((absorbed, rotated), dim=2)
        attended = kernels.paged_attention(q, kv, batch, self.scale, None)[..., : sizes.rank]
        values = self.absorbed.of_attended(attended, groups, context)
        add_to_values(values, attended, lora)
        return self.output(values.flatten(1), layer, context)

    def _in_halves(self, x: torch.Tensor) -> torch.Tensor:
        """x `[…, rotated_dim]` in the order in which kernels rotate; see `rotary_config.head_order`."""
        if not self.sizes.rotates_neighbours:
            return x
        pairs: torch.Tensor = x.unflatten(-1, (-1, 2))
        return pairs.transpose(-1, -2).flatten(-2)
