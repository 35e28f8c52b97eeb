"""The base model: a decoder of the Llama shape, over all rows of a step at once, without padding."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...kernels.backend import Kernels, LinearWeight, plain_kernels
from .context import ForwardContext
from .layer_loader import load_layer, load_norm
from .layers import DecoderLayer
from .passes import Pass, alone
from .sharding import ModelSharding, Range
from .weight_source import WeightSource


@dataclass(frozen=True)
class Decoder:
    """One worker's part of the base. Embedding and head are cut along the vocabulary."""

    embedding: torch.Tensor  # [this worker's share of the vocabulary, hidden]
    layers: tuple[DecoderLayer, ...]
    norm: torch.Tensor  # [hidden]
    norm_eps: float
    head: LinearWeight  # [this worker's share of the vocabulary, hidden]
    vocabulary: Range
    vocab_size: int
    embedding_scale: float
    logit_softcap: float | None  # a logit l becomes softcap * tanh(l / softcap); None: logits are not capped

    def hidden_states(self, token_ids: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """What `forward` returns."""
        return alone(self.forward(token_ids, context), context.parallel)

    def forward(self, token_ids: torch.Tensor, context: ForwardContext) -> Pass[torch.Tensor]:
        """The last layer's normed states of `[num_rows]` tokens, `[num_rows, hidden]`; their KV is in the pool."""
        x, residual = (yield self._embed(token_ids, context)), None
        if self.embedding_scale != 1.0:
            x = x * self.embedding_scale
        for layer in self.layers:
            x, residual = yield from layer.forward(x, residual, context)
        return context.kernels.add_rms_norm(x, residual, self.norm, self.norm_eps)[0]

    def logits(self, hidden: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """`[num_rows, vocab]` in float32, on every worker."""
        logits = self._raw_logits(hidden, context)
        if self.logit_softcap is None:
            return logits
        return self.logit_softcap * torch.tanh(logits / self.logit_softcap)

    def _raw_logits(self, hidden: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        to_floats = context.kernels.linear_to_floats
        if context.parallel.degree == 1 and to_floats is not None:
            return to_floats(hidden, self.head)
        own = context.kernels.linear(hidden, self.head, None)
        if context.parallel.degree == 1:
            return own.float()
        share = -(-self.vocab_size // context.parallel.degree)
        padded = own.new_zeros(len(hidden), share)
        padded[:, : own.shape[1]] = own
        gathered = context.parallel.all_gather(padded)  # [degree, num_rows, share]
        return gathered.transpose(0, 1).flatten(1)[:, : self.vocab_size].float()

    def _embed(self, token_ids: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """This worker's partial sum: of another's tokens it has zeros."""
        if context.parallel.degree == 1:
            return self.embedding[token_ids]
        start, stop = self.vocabulary
        mine = (token_ids >= start) & (token_ids < stop)
        return self.embedding[(token_ids - start).clamp(0, max(stop - start - 1, 0))] * mine.unsqueeze(1)


def load_decoder(sharding: ModelSharding, checkpoint: WeightSource, kernels: Kernels | None = None) -> Decoder:
    """Reads this worker's part of every weight, laid out for `kernels` (None: the plain twins).

    Raises ValueError for missing, misshapen or left-over tensors.
    """
    kernels = kernels or plain_kernels()
    config = sharding.config
    hidden, vocab, own = config.hidden_size, config.vocab_size, sharding.vocabulary
    embedding = checkpoint.take("model.embed_tokens.weight", (vocab, hidden), rows=own)
    layers = tuple(load_layer(index, sharding, checkpoint, kernels) for index in range(config.num_layers))
    norm = load_norm("model.norm", hidden, sharding, checkpoint)
    if config.tie_word_embeddings and checkpoint.has_other_head():
        raise ValueError(
            "tie_word_embeddings = true, and lm_head.weight is not the embedding: false in config.json is needed, as "
            "transformers then computes with this head; without lm_head.weight the embedding is the head"
        )
    if config.tie_word_embeddings or not checkpoint.has_head:  # then no logits are needed: see `GangLimits`
        checkpoint.drop("lm_head.weight")
        head = embedding
    else:
        head = checkpoint.take("lm_head.weight", (vocab, hidden), rows=own)
    checkpoint.drop("rotary_emb.inv_freq")
    checkpoint.finish()
    scale = 1.0
    if config.family.scaled_embedding:  # rounded to the weights' dtype, as these families were trained
        scale = float(torch.tensor(hidden**0.5, dtype=embedding.dtype))
    packed_head = kernels.pack_linear(head)
    return Decoder(embedding, layers, norm, config.norm_eps, packed_head, own, vocab, scale, config.logit_softcap)
