"""What the operations of a step need: floating-point operations, bytes of memory and bytes of network.

All numbers are of the whole gang. Products, attention and collectives are counted; norms, rotary embeddings and
activations are not, as they run where their inputs are. The names are NanoFlow's (arXiv 2408.12757, table 2).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from ...adapters.adapter import EXPERT_MODULES, SHARED_MODULES
from ..models.config import ModelConfig
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

    def kv_bytes(self, model: ModelConfig) -> int:
        """Of a token in one layer."""
        head = model.head_dim + 4 if self.kv_in_float8 else model.head_dim * self.element_bytes
        return 2 * model.num_kv_heads * head


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


def kv_copies(model: ModelConfig, degree: int) -> int:
    """Workers of a gang that hold the same KV head: several if they outnumber the heads."""
    return max(1, degree // model.num_kv_heads)


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

    @property
    def _kv_copies(self) -> int:
        return kv_copies(self.model, self.degree)

    def linears(self) -> Iterator[Operation]:
        model, rows = self.model, self.batch.num_rows
        hidden, query, kv = model.hidden_size, model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
        kv *= self._kv_copies
        gates, num_attention = query if model.family.gated_attention else 0, len(model.kv_layers)
        num_dense = model.num_layers - (0 if model.experts is None else sum(model.experts.layers))
        yield self._linear("KQV", num_attention, hidden, query + gates + 2 * kv)
        yield self._linear("O", num_attention, query, hidden)
        if model.recurrent is not None:
            *inputs, output = model.recurrent.modules(hidden).values()
            num_recurrent = len(model.recurrent_layers)
            yield self._linear("state inputs", num_recurrent, hidden, sum(num_out for _, num_out in inputs))
            yield self._linear("state output", num_recurrent, *output)
        yield self._linear("UG", num_dense, hidden, 2 * model.intermediate_size)
        yield self._linear("D", num_dense, model.intermediate_size, hidden)
        head, logits = model.vocab_size * hidden, self.batch.num_logits
        size, num_peers = self.formats.element_bytes, self.degree - 1
        gathered = logits * -(-model.vocab_size // self.degree) * self.degree * num_peers * size
        between = logits * (hidden + model.vocab_size) * size
        yield Operation("head", 2 * logits * head, head * size, between, gathered)
        yield Operation("embedding", 0, 0, 2 * rows * hidden * size, 2 * num_peers * rows * hidden * size)

    def _linear(self, name: str, num_layers: int, num_in: int, num_out: int) -> Operation:
        rows, formats = self.batch.num_rows, self.formats
        weights = num_layers * num_in * num_out
        read = weights + 4 * num_layers * num_out if formats.weights_in_float8 else weights * formats.element_bytes
        between = num_layers * rows * (num_in + num_out) * formats.element_bytes
        rate = 2.0 if formats.weights_in_float8 else 1.0
        return Operation(name, 2.0 * rows * weights, read, between, flops_rate=rate)

    def experts(self) -> Iterator[Operation]:
        model, rows, size = self.model, self.batch.num_rows, self.formats.element_bytes
        if (experts := model.experts) is None:
            return
        layers, hidden, width = sum(experts.layers), model.hidden_size, experts.intermediate_size
        router, expert = hidden * experts.num_experts, 3 * hidden * width
        shared = experts.shared_intermediate_size or 0
        always = router + 3 * hidden * shared + (hidden if shared and experts.shared_is_gated else 0)
        weights = always + self._num_chosen(rows) * expert
        flops = 2 * rows * (always + experts.top_k * expert)
        between = rows * (experts.num_experts + experts.top_k * (2 * hidden + 3 * width) + 3 * shared + 2 * hidden)
        yield Operation("experts", layers * flops, layers * weights * size, layers * between * size)

    def _num_chosen(self, num_rows: float) -> float:
        """Experts that at least one of so many rows is expected to choose in a layer."""
        experts = self.model.experts
        assert experts is not None
        missed = float((1 - experts.top_k / experts.num_experts) ** num_rows)  # the chance that no row chooses one
        return experts.num_experts * (1 - missed)

    def attention(self) -> Iterator[Operation]:
        model, batch = self.model, self.batch
        windows, query = Counter(_attention_windows(model)).items(), model.num_heads * model.head_dim
        contexts, chunks = Counter(batch.contexts).items(), Counter(batch.chunks).items()
        decoded = sum(
            layers * many * min(context, window or context) for window, layers in windows for context, many in contexts
        )
        yield self._attention("decode attention", decoded, decoded, len(batch.contexts) * query)
        pairs = sum(layers * many * chunk.num_pairs(window) for window, layers in windows for chunk, many in chunks)
        seen = sum(layers * many * chunk.num_seen(window) for window, layers in windows for chunk, many in chunks)
        num_tokens = sum(chunk.num_tokens for chunk in batch.chunks)
        yield self._attention("prefill attention", pairs, seen, num_tokens * query)

    def _attention(self, name: str, num_pairs: int, num_seen: int, num_queries: int) -> Operation:
        """`num_queries`: elements of a layer's queries, of which there are as many results."""
        model, formats = self.model, self.formats
        between = 2 * len(model.kv_layers) * num_queries * formats.element_bytes
        flops = 4.0 * num_pairs * model.num_heads * model.head_dim  # of scores, and of weighted values
        return Operation(name, flops, self._kv_copies * num_seen * formats.kv_bytes(model), between)

    def recurrence(self) -> Iterator[Operation]:
        """Each sequence's state is read and written once a step, and each token decays, reads and changes it."""
        recurrent, batch = self.model.recurrent, self.batch
        if recurrent is None:
            return
        size = recurrent.num_value_heads * recurrent.key_dim * recurrent.value_dim
        num_layers, num_sequences = len(self.model.recurrent_layers), batch.num_logits
        width = recurrent.num_channels + 2 * recurrent.num_value_heads * recurrent.value_dim
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
        for module, (num_in, num_out) in model.shape.modules.items():
            cut_in = module in _ROW_PARALLEL
            num_out *= self._kv_copies if module in ("k_proj", "v_proj") else 1
            sides = num_in * (1 if cut_in else self.degree) + num_out * (self.degree if cut_in else 1)
            num_layers = sum(model.shape.has(layer, module) for layer in range(model.num_layers))
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
            squares = 2 * len(model.kv_layers) * times
        num_bytes = 2 * (added * self.formats.element_bytes + squares * 4)
        yield Operation("communication", added + squares, 0, num_bytes, num_bytes)


def _attention_windows(model: ModelConfig) -> list[int | None]:
    """Of the layers that have attention."""
    return [model.sliding_windows[layer] for layer in model.kv_layers]


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
    hidden, layers, dim = model.hidden_size, model.num_layers, model.head_dim
    query, kv = model.num_heads * dim, model.num_kv_heads * dim
    gates = query if model.family.gated_attention else 0
    products = hidden * (query + gates + 2 * kv) + query * hidden
    biases = (query + 2 * kv) * model.qkv_bias + hidden * model.output_bias
    dense = 3 * hidden * model.intermediate_size
    dense_bias = (2 * model.intermediate_size + hidden) * model.mlp_bias
    experts, num_sparse, sparse, chosen = model.experts, 0, 0, 0
    if experts is not None:
        num_sparse, shared = sum(experts.layers), experts.shared_intermediate_size or 0
        always = hidden * experts.num_experts + 3 * hidden * shared
        always += hidden if shared and experts.shared_is_gated else 0
        per_expert = 3 * hidden * experts.intermediate_size
        sparse, chosen = always + experts.num_experts * per_expert, always + experts.top_k * per_expert
        if model.family.experts is not None and model.family.experts.take_turns:  # with biases, and the router too
            sparse += experts.num_experts * (2 * experts.intermediate_size + hidden + 1)
    num_dense = layers - num_sparse
    embedding = model.vocab_size * hidden
    num_attention = len(model.kv_layers)
    family = model.family
    num_norms = sum(name is not None for name in (family.attention_norm, family.mlp_norm, *(family.post_norms or ())))
    norms = (layers * num_norms + 1) * hidden
    norms += (
        num_attention
        * (query + kv if family.qk_norm_spans_heads else 2 * dim)
        * (model.qk_norm and family.qk_norm_has_weights)
    )
    all_products, recurrent = num_attention * products, model.recurrent
    small = num_attention * model.num_heads * model.family.has_sinks  # weights of what is no linear
    if recurrent is not None:
        num_recurrent = layers - num_attention
        all_products += num_recurrent * sum(a * b for a, b in recurrent.modules(hidden).values())
        small += num_recurrent * (recurrent.num_channels * recurrent.kernel + 2 * recurrent.num_value_heads)
        norms += num_recurrent * recurrent.value_dim
    return ModelSize(
        embedding=embedding,
        attention=all_products + num_attention * biases + small,
        mlp=num_dense * (dense + dense_bias) + num_sparse * sparse,
        norms=norms,
        head=0 if model.tie_word_embeddings else embedding,
        active=all_products + num_dense * dense + num_sparse * chosen + embedding,
    )


def gang_weights_bytes(model: ModelConfig, degree: int, element_bytes: int = 2) -> int:
    """Of all workers together. Those that hold the same KV head hold its projections too; the rest counts once."""
    copied = 2 * len(model.kv_layers) * model.hidden_size * model.num_kv_heads * model.head_dim
    return model_size(model).weights_bytes(element_bytes) + (kv_copies(model, degree) - 1) * copied * element_bytes


def kv_bytes_of_a_token(model: ModelConfig, formats: Formats | None = None, degree: int = 1) -> int:
    """Of all layers, on all workers of a gang of so many."""
    return kv_copies(model, degree) * len(model.kv_layers) * (formats or Formats()).kv_bytes(model)


def state_bytes_of_a_sequence(model: ModelConfig, element_bytes: int = 2) -> int:
    """Of its recurrent states in all layers, on all workers of a gang; 0: the base has none."""
    recurrent = model.recurrent
    if recurrent is None:
        return 0
    state = 4 * recurrent.num_value_heads * recurrent.key_dim * recurrent.value_dim
    return len(model.recurrent_layers) * (state + (recurrent.kernel - 1) * recurrent.num_channels * element_bytes)


def attention_flops(model: ModelConfig, context: int) -> int:
    """Of one token that sees so many, itself included."""
    seen = sum(min(context, window or context) for window in _attention_windows(model))
    return 4 * seen * model.num_heads * model.head_dim
