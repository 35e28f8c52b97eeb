"""What the operations of a step need: floating-point operations, bytes of memory and bytes of network.

All numbers are of the whole gang. Products, attention and collectives are counted; norms, rotary embeddings and
activations are not, as they run where their inputs are. The names are NanoFlow's (arXiv 2408.12757, table 2).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ...adapters.adapter import EXPERT_MODULES, SHARED_MODULES, name_of
from ...kernels.norms import XIELU, Ungated
from ..models.config import ModelConfig
from ..models.expert_config import ExpertConfig
from .devices import Device

# Cut along their inputs, the others along their outputs.
_ROW_PARALLEL = ("o_proj", "down_proj", EXPERT_MODULES[2], SHARED_MODULES[2])


@dataclass(frozen=True)
class Chunk:
    """Prompt tokens of one sequence that a step computes."""

    start: int  # tokens before them
    num_tokens: int

    def __post_init__(self) -> None:
        if self.start < 0 or self.num_tokens < 1:
            raise ValueError(f"{self}: a chunk has one token at least, and none before the first")

    def num_pairs(self, window: int | None) -> int:
        """Pairs of a token and one that it sees, itself included."""
        stop = self.start + self.num_tokens
        return _triangle(stop, window) - _triangle(self.start, window)

    def num_seen(self, window: int | None) -> int:
        """Tokens that at least one of its own sees."""
        return min(self.start + self.num_tokens, (window or self.start + 1) - 1 + self.num_tokens)


@dataclass(frozen=True)
class StepBatch:
    """What a step computes. Its rows are shared out evenly to `num_adapters` different adapters; 0: to the base."""

    contexts: tuple[int, ...] = ()  # of each sequence that decodes: tokens that it sees, its new one included
    chunks: tuple[Chunk, ...] = ()
    num_adapters: float = 0  # an expected number need not be whole
    rank: float = 16  # of the adapters, on all their modules; of several their mean

    @property
    def num_rows(self) -> int:
        return len(self.contexts) + sum(chunk.num_tokens for chunk in self.chunks)

    @property
    def num_logits(self) -> int:
        """Rows that choose a token, if each chunk ends its prompt."""
        return len(self.contexts) + len(self.chunks)


@dataclass(frozen=True)
class Formats:
    """How weights and KV are held. In eight bits each output or head has a scale in float32."""

    element_bytes: int = 2
    weights_in_float8: bool = False  # those of attention and of dense MLPs
    kv_in_float8: bool = False

    def kv_bytes(self, elements: int, head_dim: int, num_sides: int = 2) -> int:
        """Of a token in one layer, whose keys have so many elements. `num_sides`: 1: keys are its values, too."""
        return num_sides * (elements + 4 * elements // head_dim if self.kv_in_float8 else elements * self.element_bytes)


@dataclass(frozen=True)
class Operation:
    """One operation of all layers. An input counts once, though each worker of a gang reads it whole."""

    name: str
    flops: float
    read_bytes: float  # of weights, KV or adapters
    activation_bytes: float = 0.0  # inputs and outputs; a cache may hold them
    network_bytes: float = 0.0  # that all workers send
    flops_rate: float = 1.0  # over that of 16-bit products

    @property
    def memory_bytes(self) -> float:
        return self.read_bytes + self.activation_bytes

    def times_s(self, device: Device, degree: int = 1) -> tuple[float, float, float]:
        """By compute, memory and network, each as if it alone limited the gang."""
        if self.network_bytes and device.network_bytes_per_s is None:
            raise ValueError(f"the network of {device.name} is not known: only a degree of 1 can be computed")
        return (
            self.flops / (self.flops_rate * device.flops_per_s * degree),
            self.memory_bytes / (device.bytes_per_s * degree),
            self.network_bytes / ((device.network_bytes_per_s or 1.0) * degree),
        )

    def seconds(self, device: Device, degree: int = 1) -> float:
        """The least time on a gang of so many devices."""
        return max(self.times_s(device, degree))


def kv_copies(num_kv_heads: int, degree: int) -> int:
    """Workers of a gang that hold the same KV head: several if they outnumber the heads."""
    return max(1, degree // num_kv_heads)


class _AttentionKind(NamedTuple):
    """The sizes of a layer's attention. Most layers of a base are of one kind."""

    query: int  # elements of a row's queries
    kv: int  # of its keys, on all workers; 0: it attends to the KV of a layer before it
    kv_seen: int  # of the keys of a token that it sees
    num_kv_heads: int
    window: int | None

    @staticmethod
    def of_layers(model: ModelConfig, degree: int = 1) -> Counter[_AttentionKind]:
        """How many layers each kind has, of those that have attention."""
        sizes = model.layer_sizes

        def kind(layer: int) -> _AttentionKind:
            dim, num_kv_heads = sizes.head_dims[layer], sizes.num_kv_heads[layer]
            kv = num_kv_heads * kv_copies(num_kv_heads, degree) * dim
            computed = kv if sizes.kv_sources[layer] == layer else 0
            return _AttentionKind(model.num_heads * dim, computed, kv, num_kv_heads, model.sliding_windows[layer])

        return Counter(map(kind, model.attention_layers))


def _widths_of_mlps(model: ModelConfig) -> Counter[int]:
    """How many layers have a dense MLP of each width."""
    experts = model.experts
    some = range(model.num_layers) if model.mlp_layers is None else model.mlp_layers
    layers = (layer for layer in some if experts is None or experts.has_dense(layer))
    return Counter(model.layer_sizes.intermediate_sizes[layer] for layer in layers)


def step_operations(
    model: ModelConfig, batch: StepBatch, degree: int = 1, formats: Formats | None = None
) -> tuple[Operation, ...]:
    """The operations of one step, without those that have nothing to do.

    Which experts a batch takes is known only when it runs: their number is the expected one if each row chooses evenly.
    """
    if degree < 1:
        raise ValueError(f"degree {degree}: a gang has one worker at least")
    if batch.num_rows == 0:
        return ()
    parts = _Parts(model, batch, degree, formats or Formats())
    operations = (
        *parts.linears(),
        *parts.experts(),
        *parts.attention(),
        *parts.recurrence(),
        *parts.adapters(),
        *parts.collectives(),
    )
    return tuple(operation for operation in operations if operation.flops or operation.memory_bytes)


@dataclass(frozen=True)
class _Parts:
    model: ModelConfig
    batch: StepBatch
    degree: int
    formats: Formats

    def linears(self) -> Iterator[Operation]:
        model, rows = self.model, self.batch.num_rows
        hidden, attention, mlps = model.hidden_size, self._attention_kinds, _widths_of_mlps(model)
        gated = 2 if model.family.gated_attention else 1
        if model.latent is not None:  # what is absorbed is multiplied as often as its linear would be
            *inputs, output = model.latent.modules(hidden, model.num_heads).values()
            yield self._linears("KQV", [(model.num_layers, *sides) for sides in inputs])
            yield self._linears("O", [(model.num_layers, *output)])
        else:
            yield self._linears("KQV", [(n, hidden, gated * kind.query + 2 * kind.kv) for kind, n in attention.items()])
            yield self._linears("O", [(n, kind.query, hidden) for kind, n in attention.items()])
        if model.recurrent is not None:
            *inputs, output = model.recurrent.modules(hidden).values()
            num_recurrent = len(model.recurrent_layers)
            yield self._linears("state inputs", [(num_recurrent, hidden, sum(num_out for _, num_out in inputs))])
            yield self._linears("state output", [(num_recurrent, *output)])
        ups = 1 + model.family.has_gates
        yield self._linears("UG", [(n, hidden, ups * width) for width, n in mlps.items()])
        yield self._linears("D", [(n, width, hidden) for width, n in mlps.items()])
        if width := model.layer_sizes.input_size:
            sides = (hidden, width), (hidden, width), (width, hidden)
            yield self._linears("layers' inputs", [(model.num_layers, *side) for side in sides])
        head, logits = model.vocab_size * hidden, self.batch.num_logits
        size, num_peers = self.formats.element_bytes, self.degree - 1
        gathered = logits * -(-model.vocab_size // self.degree) * self.degree * num_peers * size
        between = logits * (hidden + model.vocab_size) * size
        yield Operation("head", 2 * logits * head, head * size, between, gathered)
        yield Operation("embedding", 0, 0, 2 * rows * hidden * size, 2 * num_peers * rows * hidden * size)

    def _linears(self, name: str, sides: Sequence[tuple[int, int, int]]) -> Operation:
        """`sides`: layers, inputs, outputs."""
        rows, formats = self.batch.num_rows, self.formats
        weights = sum(layers * num_in * num_out for layers, num_in, num_out in sides)
        scales = sum(layers * num_out for layers, _, num_out in sides)
        read = weights + 4 * scales if formats.weights_in_float8 else weights * formats.element_bytes
        between = rows * formats.element_bytes * sum(layers * (num_in + num_out) for layers, num_in, num_out in sides)
        rate = 2.0 if formats.weights_in_float8 else 1.0
        return Operation(name, 2.0 * rows * weights, read, between, flops_rate=rate)

    @property
    def _attention_kinds(self) -> Counter[_AttentionKind]:
        return _AttentionKind.of_layers(self.model, self.degree)

    def experts(self) -> Iterator[Operation]:
        model, rows, size = self.model, self.batch.num_rows, self.formats.element_bytes
        if (experts := model.experts) is None:
            return
        layers, hidden, width = sum(experts.layers), model.hidden_size, experts.intermediate_size
        always, expert, sides = *_expert_products(experts, hidden), 2 + experts.has_gates
        weights = always + self._num_chosen(rows) * expert
        flops = 2 * rows * (always + experts.top_k * expert)
        pairs, shared = 2 * experts.num_in(hidden) + sides * width, sides * (experts.shared_intermediate_size or 0)
        between = rows * (experts.num_experts + experts.top_k * pairs + shared + 2 * hidden)
        yield Operation("experts", layers * flops, layers * weights * size, layers * between * size)

    def _num_chosen(self, num_rows: float) -> float:
        """Experts that at least one of so many rows is expected to choose in a layer."""
        experts = self.model.experts
        assert experts is not None
        missed = float((1 - experts.top_k / experts.num_experts) ** num_rows)  # the chance that no row chooses one
        return experts.num_experts * (1 - missed)

    def attention(self) -> Iterator[Operation]:
        batch, kinds = self.batch, self._attention_kinds.items()
        contexts, chunks = Counter(batch.contexts).items(), Counter(batch.chunks).items()
        decoded = {
            kind: layers * sum(many * min(context, kind.window or context) for context, many in contexts)
            for kind, layers in kinds
        }
        yield self._attention("decode attention", decoded, decoded, len(batch.contexts))
        pairs = {kind: n * sum(many * chunk.num_pairs(kind.window) for chunk, many in chunks) for kind, n in kinds}
        seen = {kind: n * sum(many * chunk.num_seen(kind.window) for chunk, many in chunks) for kind, n in kinds}
        yield self._attention("prefill attention", pairs, seen, sum(chunk.num_tokens for chunk in batch.chunks))

    def _attention(
        self, name: str, num_pairs: Mapping[_AttentionKind, int], num_seen: Mapping[_AttentionKind, int], num_rows: int
    ) -> Operation:
        """`num_pairs`, `num_seen`: of all layers of a kind. A row's results are as large as its queries."""
        formats = self.formats
        queries = sum(layers * kind.query for kind, layers in self._attention_kinds.items())
        flops = 4.0 * sum(number * kind.query for kind, number in num_pairs.items())  # scores, and weighted values
        read = sum(
            number * formats.kv_bytes(kind.kv_seen, kind.query // self.model.num_heads, self.model.kv_sides)
            for kind, number in num_seen.items()
        )
        return Operation(name, flops, read, 2 * num_rows * queries * formats.element_bytes)

    def recurrence(self) -> Iterator[Operation]:
        """Each sequence's state is read and written once a step, and each token decays, reads and changes it."""
        recurrent, batch = self.model.recurrent, self.batch
        if recurrent is None:
            return
        size = recurrent.num_heads * recurrent.head_size
        num_layers, num_sequences = len(self.model.recurrent_layers), batch.num_logits
        *inputs, output = recurrent.modules(self.model.hidden_size).values()
        width = sum(num_out for _, num_out in inputs) + output[0]
        between = num_layers * batch.num_rows * width * self.formats.element_bytes
        yield Operation(
            "recurrence", 7.0 * num_layers * batch.num_rows * size, 8.0 * num_layers * num_sequences * size, between
        )

    def adapters(self) -> Iterator[Operation]:
        """An adapter's matrix on the side that is not cut is on every worker, and computed there."""
        model, batch, size = self.model, self.batch, self.formats.element_bytes
        if not batch.num_adapters:
            return
        flops = read = between = 0.0
        for entry, (num_in, num_out) in model.shape.modules.items():
            module, layers = name_of(entry), model.shape.layers_of(entry)
            cut_in, num_layers = module in _ROW_PARALLEL, len(layers)
            if module in ("k_proj", "v_proj"):
                num_out *= kv_copies(model.layer_sizes.num_kv_heads[next(iter(layers))], self.degree)
            sides = num_in * (1 if cut_in else self.degree) + num_out * (self.degree if cut_in else 1)
            rows, num_adapters = float(batch.num_rows), float(batch.num_adapters)
            if module in EXPERT_MODULES:
                assert model.experts is not None
                num_adapters *= self._num_chosen(rows / num_adapters)
                num_layers, rows = sum(model.experts.layers), rows * model.experts.top_k
            flops += 2 * num_layers * rows * batch.rank * sides
            read += num_layers * num_adapters * batch.rank * sides * size
            between += num_layers * rows * (num_in + 2 * batch.rank + 2 * num_out) * size
        yield Operation("LoRA", flops, read, between)

    def collectives(self) -> Iterator[Operation]:
        """Two all-reduces a layer, over a ring: each element is sent twice by all workers but one, and added once.

        Norms over all heads need one more of two numbers in float32.
        """
        model, times = self.model, (self.degree - 1) * self.batch.num_rows
        added, squares = 2 * model.num_layers * times * model.hidden_size, 0
        if model.family.qk_norm_spans_heads:
            squares = 2 * len(model.attention_layers) * times
        num_bytes = 2 * (added * self.formats.element_bytes + squares * 4)
        yield Operation("communication", added + squares, 0, num_bytes, num_bytes)


def _expert_products(experts: ExpertConfig, hidden: int) -> tuple[int, int]:
    """Weights of what computes every row in a layer with experts, the router included, and of one expert."""
    sides, shared = 2 + experts.has_gates, experts.shared_intermediate_size or 0
    always = hidden * (experts.num_experts + sides * shared + 2 * (experts.latent_size or 0))
    always += hidden if shared and experts.shared_is_gated else 0
    return always, sides * experts.num_in(hidden) * experts.intermediate_size


def _triangle(num_tokens: int, window: int | None) -> int:
    """Pairs of one of the first tokens and one that it sees."""
    full = min(num_tokens, window or num_tokens)
    return full * (full + 1) // 2 + (num_tokens - full) * full


# The size of a base: parameters, bytes, and floating-point operations of a token. By config.json alone.


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
    hidden, layers, sizes = model.hidden_size, model.num_layers, model.layer_sizes
    kinds, gated = _AttentionKind.of_layers(model), 2 if model.family.gated_attention else 1
    products = sum(n * hidden * (gated * kind.query + 2 * kind.kv + kind.query) for kind, n in kinds.items())
    if (latent := model.latent) is not None:
        products = layers * sum(a * b for a, b in latent.modules(hidden, model.num_heads).values())
    stored = products - sum(  # where values are what keys are made of, there is one weight for both
        hidden * sizes.num_kv_heads[layer] * sizes.head_dims[layer] * sizes.keys_are_values[layer]
        for layer in model.kv_layers
    )
    biases = layers * (latent.num_biases if latent is not None else 0)
    biases += sum(
        n * ((kind.query + 2 * kind.kv) * model.qkv_bias + hidden * model.output_bias) for kind, n in kinds.items()
    )
    mlps = _widths_of_mlps(model)
    ups = 1 + model.family.has_gates
    dense = sum(n * (ups + 1) * hidden * width for width, n in mlps.items())
    dense_bias = sum(n * (ups * width + hidden) for width, n in mlps.items()) * model.mlp_bias
    experts, num_sparse, sparse, chosen = model.experts, 0, 0, 0
    if experts is not None:
        num_sparse, (always, per_expert) = sum(experts.layers), _expert_products(experts, hidden)
        sparse, chosen = always + experts.num_experts * per_expert, always + experts.top_k * per_expert
        if model.mlp_bias:  # of what computes every row
            sparse += (1 + experts.has_gates) * (experts.shared_intermediate_size or 0) + hidden
            sparse += 0 if experts.latent_size is None else experts.latent_size + hidden
        if model.family.experts is not None and model.family.experts.take_turns:  # with biases, and the router too
            sparse += experts.num_experts * (2 * experts.intermediate_size + hidden + 1)
    embedding = model.vocab_size * hidden
    num_attention, family = len(model.attention_layers), model.family
    num_norms = sum(name is not None for name in (family.attention_norm, family.mlp_norm, *(family.post_norms or ())))
    norms = (layers * num_norms + 1) * hidden * (1 + family.norms_have_bias)
    norms += sum(
        n
        * (
            kind.query + kind.kv
            if family.qk_norm_spans_heads or family.qk_norm_is_centred
            else (2 if kind.kv else 1) * kind.query // model.num_heads
        )
        for kind, n in kinds.items()
    ) * (model.qk_norm and family.qk_norm_has_weights)
    if latent is not None:
        norms += layers * (latent.rank + (latent.query_rank or 0))
    all_products, recurrent = products, model.recurrent
    if sizes.input_size:
        all_products += 3 * layers * hidden * sizes.input_size
        norms += layers * hidden + sizes.input_size
    small = num_attention * model.num_heads * family.has_sinks  # weights of what is no linear
    small += 2 * layers * (model.activation == Ungated(XIELU))
    if recurrent is not None:
        num_recurrent = len(model.recurrent_layers)
        *inputs, output = recurrent.modules(hidden).values()
        all_products += num_recurrent * sum(a * b for a, b in (*inputs, output))
        small += num_recurrent * recurrent.num_weights
        small += num_recurrent * recurrent.has_bias * sum(num_out for _, num_out in inputs)
        small += num_recurrent * recurrent.output_has_bias * hidden
        norms += num_recurrent * recurrent.norm_width
    if experts is not None and family.experts_beside:
        norms += num_sparse * (4 * hidden + experts.num_experts)
    of_tokens = embedding + sizes.input_vocab_size * layers * sizes.input_size
    return ModelSize(
        embedding=of_tokens,
        attention=all_products - products + stored + biases + small,
        mlp=dense + dense_bias + num_sparse * sparse,
        norms=norms,
        head=(0 if model.tie_word_embeddings else embedding)
        + model.vocab_size * (family.head_has_bias and model.mlp_bias),
        active=all_products + dense + num_sparse * chosen + embedding,
    )


def gang_weights_bytes(model: ModelConfig, degree: int, element_bytes: int = 2) -> int:
    """Of all workers together. Those that hold the same KV head hold its projections too; the rest counts once."""
    kinds = _AttentionKind.of_layers(model, degree)
    if (latent := model.latent) is not None:  # what is not of heads is whole on each
        weights = model.hidden_size * (latent.width + (latent.query_rank or 0)) + latent.num_biases
        copied = model.num_layers * (degree - 1) * weights
        return model_size(model).weights_bytes(element_bytes) + copied * element_bytes
    copied = sum(
        n * 2 * model.hidden_size * (kind.kv - kind.kv // kv_copies(kind.num_kv_heads, degree))
        for kind, n in kinds.items()
    )
    return model_size(model).weights_bytes(element_bytes) + copied * element_bytes


def kv_bytes_of_a_token(model: ModelConfig, formats: Formats | None = None, degree: int = 1) -> int:
    """Of all layers, on all workers of a gang of so many."""
    formats, kinds = formats or Formats(), _AttentionKind.of_layers(model, degree)
    sizes = ((n, kind.kv, kind.query // model.num_heads) for kind, n in kinds.items())
    return sum(n * formats.kv_bytes(kv, dim, model.kv_sides) for n, kv, dim in sizes)


def state_bytes_of_a_sequence(model: ModelConfig, element_bytes: int = 2) -> int:
    """Of its recurrent states in all layers, on all workers of a gang; 0: the base has none."""
    recurrent = model.recurrent
    if recurrent is None:
        return 0
    state = 4 * recurrent.num_heads * recurrent.head_size
    return len(model.recurrent_layers) * (state + (recurrent.kernel - 1) * recurrent.num_channels * element_bytes)


def attention_flops(model: ModelConfig, context: int) -> int:
    """Of one token that sees so many, itself included."""
    kinds = _AttentionKind.of_layers(model).items()
    return 4 * sum(n * kind.query * min(context, kind.window or context) for kind, n in kinds)
