"""What a layer takes of its token beside the residual: per-layer embeddings (Gemma 4)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...kernels.norms import Activation
from .layers import ForwardContext, LoraLinear
from .passes import Pass
from .sharding import ModelSharding
from .weights import WeightSource


@dataclass(frozen=True)
class LayerInput:
    """What is added to the residual h: norm(project(activation(gate(h)) * x)).

    x is norm(embedding_projection(embedding)) + table[token]. Workers share the features between `gate` and `project`.
    """

    embedding_projection: LoraLinear  # hidden -> all features
    embedding_norm: torch.Tensor  # [features] float32
    embedding_eps: float
    table: torch.Tensor  # [vocab, this worker's features]
    table_scale: float
    features: tuple[int, int]  # this worker's
    gate: LoraLinear  # hidden -> this worker's features
    project: LoraLinear  # this worker's features -> hidden
    norm: torch.Tensor  # [hidden]
    eps: float
    activation: Activation

    def __call__(self, x: torch.Tensor, layer: int, context: ForwardContext) -> Pass[torch.Tensor]:
        """See `LayerEnd`."""
        kernels, tokens = context.kernels, context.tokens
        assert tokens is not None, "the decoder gives them where a layer needs them"
        projected = kernels.rms_norm(
            self.embedding_projection(tokens.embedded, layer, context), self.embedding_norm, self.embedding_eps
        )
        joined = torch.cat(
            (
                self.gate(x, layer, context),
                projected[:, slice(*self.features)] + self.table[tokens.token_ids] * self.table_scale,
            ),
            dim=1,
        )
        y = yield self.project(kernels.gated(joined, self.activation), layer, context)
        return kernels.rms_norm(y, self.norm, self.eps)


@dataclass(frozen=True)
class LayerInputs:
    """What the inputs of all layers are made of, on one worker."""

    embedding_projection: torch.Tensor  # [num_layers, features, hidden]
    norm: torch.Tensor  # [features] float32
    eps: float
    table: torch.Tensor  # [vocab, num_layers, this worker's features]
    table_scale: float

    @property
    def width(self) -> int:
        return self.embedding_projection.shape[1]

    def of(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The projection of the embedding, and the table of tokens, of one layer."""
        return self.embedding_projection[layer], self.table[:, layer]


def load_layer_inputs(sharding: ModelSharding, checkpoint: WeightSource) -> LayerInputs | None:
    """None: this base's layers have no inputs beside the residual. Raises ValueError for missing, misshapen tensors.

    Both parts are multiplied by the root of 1/2, and the projection of the embedding by that of 1/hidden before its
    norm, which is eps * hidden in it.
    """
    config = sharding.config
    width, layers, hidden = config.layer_sizes.input_size, config.num_layers, config.hidden_size
    if not width:
        return None
    table = checkpoint.take(
        "model.embed_tokens_per_layer.weight", (config.layer_sizes.input_vocab_size, layers * width)
    )
    projection = checkpoint.take("model.per_layer_model_projection.weight", (layers * width, hidden))
    norm = checkpoint.take("model.per_layer_projection_norm.weight", (width,))
    part = table.unflatten(1, (layers, width))[:, :, slice(*sharding.layer_inputs)]
    return LayerInputs(
        projection.unflatten(0, (layers, width)),
        norm.float() * 0.5**0.5,
        config.norm_eps * hidden,
        part if sharding.degree == 1 else part.contiguous(),
        float(torch.tensor(width**0.5, dtype=table.dtype)) * 0.5**0.5,
    )
