"""The base model: a decoder of the Llama shape, over all rows of a step at once, without padding."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .context import DOWN, GATE_UP, OUTPUT, QKV, ForwardContext
from .layers import BASE, Attention, ColumnLinear, DecoderLayer, GatedMlp, HeadNorm, RowLinear
from .sharding import ModelSharding, Range
from .weights import Checkpoint


@dataclass(frozen=True)
class Decoder:
    """One worker's part. Embedding and head are cut along the vocabulary."""

    embedding: torch.Tensor  # [this worker's share of the vocabulary, hidden]
    layers: tuple[DecoderLayer, ...]
    norm: torch.Tensor  # [hidden]
    norm_eps: float
    head: torch.Tensor  # [this worker's share of the vocabulary, hidden]
    vocabulary: Range
    vocab_size: int

    def hidden_states(self, token_ids: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """The last layer's normed states of `[num_rows]` tokens, `[num_rows, hidden]`; their KV is in the pool."""
        x, residual = self._embed(token_ids, context), None
        for layer in self.layers:
            x, residual = layer(x, residual, context)
        return context.kernels.add_rms_norm(x, residual, self.norm, self.norm_eps)[0]

    def logits(self, hidden: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """`[num_rows, vocab]` in float32, on every worker."""
        own = context.kernels.linear(hidden, self.head, None)
        if context.parallel.degree == 1:
            return own.float()
        share = -(-self.vocab_size // context.parallel.degree)
        padded = own.new_zeros(len(hidden), share)
        padded[:, : own.shape[1]] = own
        gathered = context.parallel.all_gather(padded, BASE)  # [degree, num_rows, share]
        return gathered.transpose(0, 1).flatten(1)[:, : self.vocab_size].float()

    def _embed(self, token_ids: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        if context.parallel.degree == 1:
            return self.embedding[token_ids]
        start, stop = self.vocabulary
        mine = (token_ids >= start) & (token_ids < stop)
        found = self.embedding[(token_ids - start).clamp(0, max(stop - start - 1, 0))] * mine.unsqueeze(1)
        return context.parallel.all_reduce(found, BASE)


def load_decoder(sharding: ModelSharding, checkpoint: Checkpoint) -> Decoder:
    """Reads this worker's part of every weight. Raises ValueError for missing, misshapen or left-over tensors."""
    config = sharding.config
    hidden, vocab, own = config.hidden_size, config.vocab_size, sharding.vocabulary
    embedding = checkpoint.take("model.embed_tokens.weight", (vocab, hidden), rows=own)
    layers = tuple(_load_layer(index, sharding, checkpoint) for index in range(config.num_layers))
    norm = checkpoint.take("model.norm.weight", (hidden,))
    if config.tie_word_embeddings:
        checkpoint.drop("lm_head.weight")
        head = embedding
    else:
        head = checkpoint.take("lm_head.weight", (vocab, hidden), rows=own)
    checkpoint.drop("rotary_emb.inv_freq")
    checkpoint.finish()
    return Decoder(embedding, layers, norm, config.norm_eps, head, own, vocab)


def _load_layer(index: int, sharding: ModelSharding, checkpoint: Checkpoint) -> DecoderLayer:
    prefix, config = f"model.layers.{index}.", sharding.config
    hidden, dim = config.hidden_size, config.head_dim
    query, kv = ((start * dim, stop * dim) for start, stop in (sharding.heads, sharding.kv_heads))
    features = sharding.intermediate

    def column(parts: dict[str, Range], modules: tuple[int, ...], has_bias: bool) -> ColumnLinear:
        weights, biases = [], []
        for name, rows in parts.items():
            num_in, num_out = config.shape.modules[name.rpartition(".")[2]]
            weights.append(checkpoint.take(f"{prefix}{name}.weight", (num_out, num_in), rows=rows))
            if has_bias:
                biases.append(checkpoint.take(f"{prefix}{name}.bias", (num_out,), rows=rows))
        return ColumnLinear(torch.cat(weights), torch.cat(biases) if biases else None, modules)

    def row(name: str, columns: Range, modules: tuple[int, ...], has_bias: bool) -> RowLinear:
        num_in, num_out = config.shape.modules[name.rpartition(".")[2]]
        weight = checkpoint.take(f"{prefix}{name}.weight", (num_out, num_in), columns=columns)
        bias = checkpoint.take(f"{prefix}{name}.bias", (num_out,)) if has_bias else None
        return RowLinear(weight.contiguous(), bias if sharding.rank == 0 else None, modules)

    head_norm = None
    if config.family.qk_norm:
        head_norm = HeadNorm(
            checkpoint.take(f"{prefix}self_attn.q_norm.weight", (dim,)),
            checkpoint.take(f"{prefix}self_attn.k_norm.weight", (dim,)),
            config.norm_eps,
        )
    attention = Attention(
        qkv=column({"self_attn.q_proj": query, "self_attn.k_proj": kv, "self_attn.v_proj": kv}, QKV, config.qkv_bias),
        output=row("self_attn.o_proj", query, OUTPUT, config.output_bias),
        head_norm=head_norm,
        num_heads=sharding.heads[1] - sharding.heads[0],
        num_kv_heads=sharding.num_kv_heads,
        head_dim=dim,
        window=config.sliding_windows[index],
    )
    mlp = GatedMlp(
        column({"mlp.gate_proj": features, "mlp.up_proj": features}, GATE_UP, config.mlp_bias),
        row("mlp.down_proj", features, DOWN, config.mlp_bias),
    )
    return DecoderLayer(
        index,
        attention,
        mlp,
        checkpoint.take(f"{prefix}input_layernorm.weight", (hidden,)),
        checkpoint.take(f"{prefix}post_attention_layernorm.weight", (hidden,)),
        config.norm_eps,
    )
