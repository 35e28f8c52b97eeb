"""The base model: a decoder of the Llama shape, over all rows of a step at once, without padding."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count

import torch

from ...kernels.backend import Kernels, LinearWeight, plain_kernels
from ...kernels.norms import affine
from ...kernels.quantised import QuantisedKernels
from .families import VISION_PREFIXES
from .latent_attention import LatentAttention
from .layer_input import load_layer_inputs
from .layer_loader import load_layer, residual_eps
from .layer_reader import load_norm, load_norm_bias
from .layers import (
    Attention,
    DecoderLayer,
    ExpertMlp,
    ForwardContext,
    GatedMlp,
    LoraLinear,
    Mixer,
    Mlp,
    RecurrentMixer,
    TokenEmbeddings,
    UngatedMlp,
)
from .passes import Pass, alone
from .scaled_weights import ScaledWeights
from .sharding import ModelSharding, Range
from .weights import WeightSource

_log = logging.getLogger(__name__)


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
    logit_multiplier: float
    norm_is_centred: bool  # a layer norm
    norm_bias: torch.Tensor | None  # [hidden] float32
    head_bias: torch.Tensor | None  # [vocab] float32, on every worker
    logit_softcap: float | None  # a logit l becomes softcap * tanh(l / softcap); None: logits are not capped

    def hidden_states(self, token_ids: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """What `forward` returns."""
        return alone(self.forward(token_ids, context), context.parallel)

    def forward(self, token_ids: torch.Tensor, context: ForwardContext) -> Pass[torch.Tensor]:
        """The last layer's normed states of `[num_rows]` tokens, `[num_rows, hidden]`; their KV is in the pool."""
        x, residual = (yield self.embed(token_ids, context)), None
        if self.embedding_scale != 1.0:
            x = x * self.embedding_scale
        if self.layers[0].end is not None:
            context = replace(context, tokens=TokenEmbeddings(token_ids, x))
        for layer in self.layers:
            x, residual = yield from layer.forward(x, residual, context)
        normed = context.kernels.add_norm(self.norm_is_centred)(x, residual, self.norm, self.norm_eps)[0]
        return normed if self.norm_bias is None else affine(normed, None, self.norm_bias)

    def logits(self, hidden: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """`[num_rows, vocab]` in float32, on every worker. `context.ends`: of these rows."""
        logits = self._raw_logits(hidden, context)
        if context.ends is not None:
            context.ends.add_to_logits(logits, hidden, context.pool)
        if self.head_bias is not None:
            logits = logits + self.head_bias
        if self.logit_multiplier != 1.0:
            logits = logits * self.logit_multiplier
        if self.logit_softcap is None:
            return logits
        return self.logit_softcap * torch.tanh(logits / self.logit_softcap)

    def _raw_logits(self, hidden: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        to_floats = context.kernels.linear_to_floats
        if context.parallel.degree == 1 and to_floats is not None:
            return to_floats(hidden, self.head)
        logits = context.kernels.linear(hidden, self.head, None)
        if context.parallel.degree == 1:
            return logits.float()
        share = -(-self.vocab_size // context.parallel.degree)
        padded = logits.new_zeros(len(hidden), share)
        padded[:, : logits.shape[1]] = logits
        gathered = context.parallel.all_gather(padded)  # [degree, num_rows, share]
        return gathered.transpose(0, 1).flatten(1)[:, : self.vocab_size].float()

    def embed(self, token_ids: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """This worker's partial sum `[num_rows, hidden]`, not scaled: of another's tokens it has zeros."""
        if context.parallel.degree == 1:
            x = self.embedding[token_ids]
        else:
            start, stop = self.vocabulary
            mine = (token_ids >= start) & (token_ids < stop)
            x = self.embedding[(token_ids - start).clamp(0, max(stop - start - 1, 0))] * mine.unsqueeze(1)
        if context.ends is not None:
            context.ends.embed(x, token_ids, context.pool, is_whole=context.parallel.rank == 0)
        return x


def _log_bits(layers: Sequence[DecoderLayer], kernels: QuantisedKernels, dtype: torch.dtype) -> None:
    """How many of the layers' weights have four or eight bits in memory."""
    weights = [weight for layer in layers for part in (layer.attention, layer.mlp) for weight in _weights(part)]
    weights += [weight for layer in layers if layer.beside is not None for weight in _weights(layer.beside.experts)]
    _log.info(
        "of %d weights of layers, where all experts of one count as two, %d have four or eight bits in memory, "
        "all else has %s",
        *(len(weights), sum(map(kernels.takes, weights)), str(dtype).removeprefix("torch.")),
    )


def _weights(part: Mixer | Mlp | None) -> list[LinearWeight]:
    """Those of its linears, and of its experts."""
    linears: list[LoraLinear | None] = []
    match part:
        case Attention():
            linears = [part.qkv, part.output]
        case LatentAttention():
            linears = [part.inputs, part.queries, part.output]
        case RecurrentMixer():
            linears = [part.inputs, part.output]
        case GatedMlp():
            linears = [part.gate_up, part.down]
        case UngatedMlp():
            linears = [part.up, part.output]
        case ExpertMlp():
            linears = [*(part.latent or ())]
    weights = [linear.weight for linear in linears if linear is not None]
    if isinstance(part, Attention):
        weights += _weights(part.beside)
    if isinstance(part, ExpertMlp):
        weights += [part.gate_up, part.down, *_weights(part.dense)]
        weights += [] if part.shared is None else [part.shared.gate_up.weight, part.shared.down.weight]
    return weights


def _guessing_layers(num_layers: int, checkpoint: WeightSource) -> Iterator[str]:
    """The beginnings of names of layers behind the last one, which guess several tokens at once (DeepSeek V3)."""
    for layer in count(num_layers):
        prefix = f"model.layers.{layer}."
        if f"{prefix}eh_proj.weight" not in checkpoint:
            return
        yield prefix


def load_decoder(sharding: ModelSharding, checkpoint: WeightSource, kernels: Kernels | None = None) -> Decoder:
    """Reads this worker's part of every weight, laid out for `kernels` (None: the plain twins).

    Raises ValueError for missing, misshapen or left-over tensors.
    """
    kernels = kernels or plain_kernels()
    config = sharding.config
    checkpoint = checkpoint if config.scales is None else ScaledWeights(checkpoint, config)
    hidden, vocab, part = config.hidden_size, config.vocab_size, sharding.vocabulary
    embedding = checkpoint.take("model.embed_tokens.weight", (vocab, hidden), rows=part)
    inputs = load_layer_inputs(sharding, checkpoint)
    layers = tuple(load_layer(index, sharding, checkpoint, kernels, inputs) for index in range(config.num_layers))
    if kernels.quantised is not None:
        _log_bits(layers, kernels.quantised, embedding.dtype)
    norm = load_norm(f"model.{config.family.final_norm}", hidden, sharding, checkpoint)
    norm_bias = load_norm_bias(f"model.{config.family.final_norm}", hidden, sharding, checkpoint)
    if config.tie_word_embeddings and checkpoint.has_other_head():
        raise ValueError(
            "tie_word_embeddings = true, and lm_head.weight is not the embedding: false in config.json is needed, as "
            "transformers then computes with this head; without lm_head.weight the embedding is the head"
        )
    if config.tie_word_embeddings or not checkpoint.has_head:  # then no logits are needed: see `GangLimits`
        checkpoint.drop(suffix="lm_head.weight")
        head = embedding
    else:
        head = checkpoint.take("lm_head.weight", (vocab, hidden), rows=part)
    head_bias = None
    if config.family.head_has_bias and config.mlp_bias and checkpoint.has_head:
        head_bias = checkpoint.take("lm_head.bias", (vocab,), in_floats=True)
    checkpoint.drop(suffix="rotary_emb.inv_freq")
    if config.recurrent is not None:
        checkpoint.drop(prefix="mtp.")  # it guesses several tokens at once: another model beside this one
    checkpoint.drop(prefix="model.mtp_")  # likewise, of ERNIE
    for prefix in _guessing_layers(config.num_layers, checkpoint):
        checkpoint.drop(prefix=prefix)
    for prefix in VISION_PREFIXES if config.is_wrapped else ():
        checkpoint.drop(prefix=prefix)
        checkpoint.drop(prefix=f"model.{prefix}")
    checkpoint.finish()
    scale = 1.0
    if config.family.scaled_embedding:  # rounded to the weights' dtype, as these families were trained
        scale = float(torch.tensor(hidden**0.5, dtype=embedding.dtype))
    return Decoder(
        embedding,
        layers,
        norm,
        residual_eps(config),
        kernels.pack_linear(head),
        part,
        vocab,
        embedding_scale=scale * config.embedding_multiplier / config.residual_multiplier,
        logit_multiplier=config.logit_multiplier,
        norm_is_centred=config.family.centred_norms,
        norm_bias=norm_bias,
        head_bias=head_bias,
        logit_softcap=config.logit_softcap,
    )
