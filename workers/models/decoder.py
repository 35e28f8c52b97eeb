"""The base model: a decoder of the Llama shape, over all rows of a step at once, without padding."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .config import ModelConfig
from .context import DOWN, GATE_UP, OUTPUT, QKV, ForwardContext
from .layers import AdaptedLinear, Attention, DecoderLayer, GatedMlp, HeadNorm
from .weights import Checkpoint


@dataclass(frozen=True)
class Decoder:
    embedding: torch.Tensor  # [vocab, hidden]
    layers: tuple[DecoderLayer, ...]
    norm: torch.Tensor  # [hidden]
    norm_eps: float
    head: torch.Tensor  # [vocab, hidden]

    def hidden_states(self, token_ids: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """The last layer's normed states of `[num_rows]` tokens, `[num_rows, hidden]`; their KV is in the pool."""
        x, residual = self.embedding[token_ids], None
        for layer in self.layers:
            x, residual = layer(x, residual, context)
        return context.kernels.add_rms_norm(x, residual, self.norm, self.norm_eps)[0]

    def logits(self, hidden: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """`[num_rows, vocab]` in float32."""
        return context.kernels.linear(hidden, self.head, None).float()


def load_decoder(config: ModelConfig, checkpoint: Checkpoint) -> Decoder:
    """Reads every weight of the checkpoint. Raises ValueError for missing, misshapen or left-over tensors."""
    hidden, vocab = config.hidden_size, config.vocab_size
    embedding = checkpoint.take("model.embed_tokens.weight", (vocab, hidden))
    layers = tuple(_load_layer(index, config, checkpoint) for index in range(config.num_layers))
    norm = checkpoint.take("model.norm.weight", (hidden,))
    if config.tie_word_embeddings:
        checkpoint.drop("lm_head.weight")
        head = embedding
    else:
        head = checkpoint.take("lm_head.weight", (vocab, hidden))
    checkpoint.drop("rotary_emb.inv_freq")
    checkpoint.finish()
    return Decoder(embedding, layers, norm, config.norm_eps, head)


def _load_layer(index: int, config: ModelConfig, checkpoint: Checkpoint) -> DecoderLayer:
    prefix, hidden, shapes = f"model.layers.{index}.", config.hidden_size, config.shape.modules

    def adapted(names: tuple[str, ...], modules: tuple[int, ...], has_bias: bool) -> AdaptedLinear:
        sides = [shapes[name.rpartition(".")[2]] for name in names]
        weights = [
            checkpoint.take(f"{prefix}{name}.weight", (num_out, num_in))
            for name, (num_in, num_out) in zip(names, sides, strict=True)
        ]
        biases = [
            checkpoint.take(f"{prefix}{name}.bias", (num_out,))
            for name, (_, num_out) in zip(names, sides, strict=True)
            if has_bias
        ]
        return AdaptedLinear(torch.cat(weights), torch.cat(biases) if biases else None, modules)

    qkv_names = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    head_norm = None
    if config.family.qk_norm:
        head_norm = HeadNorm(
            checkpoint.take(f"{prefix}self_attn.q_norm.weight", (config.head_dim,)),
            checkpoint.take(f"{prefix}self_attn.k_norm.weight", (config.head_dim,)),
            config.norm_eps,
        )
    attention = Attention(
        qkv=adapted(qkv_names, QKV, config.qkv_bias),
        output=adapted(("self_attn.o_proj",), OUTPUT, config.output_bias),
        head_norm=head_norm,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        window=config.sliding_windows[index],
    )
    mlp = GatedMlp(
        adapted(("mlp.gate_proj", "mlp.up_proj"), GATE_UP, config.mlp_bias),
        adapted(("mlp.down_proj",), DOWN, config.mlp_bias),
    )
    return DecoderLayer(
        index,
        attention,
        mlp,
        checkpoint.take(f"{prefix}input_layernorm.weight", (hidden,)),
        checkpoint.take(f"{prefix}post_attention_layernorm.weight", (hidden,)),
        config.norm_eps,
    )
