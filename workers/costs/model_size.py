"""The size of a base: parameters, bytes, and floating-point operations of a token. By config.json alone."""

from __future__ import annotations

from dataclasses import dataclass

from ..models.config import ModelConfig
from .operations import Formats, kv_copies


@dataclass(frozen=True)
class ModelSize:
    """Parameters by part. `active`: those that compute one token, the embedding left out."""

    embedding: int
    attention: int
    mlp: int  # experts included
    norms: int
    head: int  # 0: the embedding is used
    active: int

    @property
    def num_parameters(self) -> int:
        return self.embedding + self.attention + self.mlp + self.norms + self.head

    def weights_bytes(self, element_bytes: int = 2) -> int:
        return self.num_parameters * element_bytes

    @property
    def flops_of_a_token(self) -> int:
        """Of products; attention adds `attention_flops`."""
        return 2 * self.active


def model_size(model: ModelConfig) -> ModelSize:
    hidden, layers, dim = model.hidden_size, model.num_layers, model.head_dim
    query, kv = model.num_heads * dim, model.num_kv_heads * dim
    products = hidden * (query + 2 * kv) + query * hidden
    biases = (query + 2 * kv) * model.qkv_bias + hidden * model.output_bias
    dense = 3 * hidden * model.intermediate_size
    dense_bias = (2 * model.intermediate_size + hidden) * model.mlp_bias
    experts, num_sparse, sparse, chosen = model.experts, 0, 0, 0
    if experts is not None:
        num_sparse, shared = sum(experts.layers), experts.shared_intermediate_size or 0
        always = hidden * experts.num_experts + 3 * hidden * shared + (hidden if shared else 0)
        one = 3 * hidden * experts.intermediate_size
        sparse, chosen = always + experts.num_experts * one, always + experts.top_k * one
    num_dense = layers - num_sparse
    embedding = model.vocab_size * hidden
    norms = layers * (hidden * (4 if model.family.post_norms else 2) + 2 * dim * model.family.qk_norm) + hidden
    return ModelSize(
        embedding=embedding,
        attention=layers * (products + biases),
        mlp=num_dense * (dense + dense_bias) + num_sparse * sparse,
        norms=norms,
        head=0 if model.tie_word_embeddings else embedding,
        active=layers * products + num_dense * dense + num_sparse * chosen + embedding,
    )


def gang_weights_bytes(model: ModelConfig, degree: int, element_bytes: int = 2) -> int:
    """Of all workers together. Those that hold the same KV head hold its projections too; the rest counts once."""
    copied = 2 * model.num_layers * model.hidden_size * model.num_kv_heads * model.head_dim
    return model_size(model).weights_bytes(element_bytes) + (kv_copies(model, degree) - 1) * copied * element_bytes


def kv_bytes_of_a_token(model: ModelConfig, formats: Formats | None = None, degree: int = 1) -> int:
    """Of all layers, on all workers of a gang of so many."""
    return kv_copies(model, degree) * model.num_layers * (formats or Formats()).kv_bytes(model)


def attention_flops(model: ModelConfig, context: int) -> int:
    """Of one token that sees so many, itself included."""
    seen = sum(min(context, window or context) for window in model.sliding_windows)
    return 4 * seen * model.num_heads * model.head_dim
