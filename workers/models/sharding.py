"""The part of a base that each worker of a gang holds."""

from __future__ import annotations

from dataclasses import dataclass

from ...adapters.adapter import EXPERT_MODULES, RECURRENT_MODULES, SHARED_MODULES
from ...adapters.packing.layout import AdapterLayout, Dtype, Sharding
from ...adapters.packing.packing import PAGE_DTYPES
from ..config import ExpertSharding, KVDtype
from .config import ModelConfig, slab_of_head

Range = tuple[int, int]  # start, stop
_SLAB_ELEMENTS = 32  # a multiple: kernels read 16 bytes and more at a time, states are float32


@dataclass(frozen=True)
class ModelSharding:
    """The part of worker `rank` in a gang of `degree` workers: heads, features of MLPs, experts, tokens."""

    config: ModelConfig
    degree: int = 1
    rank: int = 0
    expert_sharding: ExpertSharding = "tensor"

    def __post_init__(self) -> None:
        config, degree = self.config, self.degree
        if not 0 <= self.rank < degree:
            raise ValueError(f"rank {self.rank}: 0 to {degree - 1} are the workers of this gang")
        shared = {"attention heads": config.num_heads, "hidden features": config.hidden_size} | self._mlp_features()
        if config.recurrent is not None:
            shared["key heads of layers with a recurrent state"] = config.recurrent.num_key_heads
        for label, count in shared.items():
            if count % degree:
                raise ValueError(f"a gang of {degree} workers cannot share {count} {label}: a divisor is needed")
        if config.num_kv_heads % degree and degree % config.num_kv_heads:
            raise ValueError(
                f"a gang of {degree} workers cannot share {config.num_kv_heads} KV heads: "
                "a divisor or a multiple is needed"
            )

    @property
    def heads(self) -> Range:
        return self._share(self.config.num_heads)

    @property
    def kv_heads(self) -> Range:
        """The KV heads that this worker's heads attend to. If workers outnumber them, several workers hold the same."""
        if self.config.num_kv_heads >= self.degree:
            return self._share(self.config.num_kv_heads)
        first = self.rank * self.config.num_kv_heads // self.degree
        return first, first + 1

    @property
    def intermediate(self) -> Range:
        return self._share(self.config.intermediate_size)

    @property
    def experts(self) -> Range:
        """The experts that this worker computes."""
        assert self.config.experts is not None
        count = self.config.experts.num_experts
        if self.expert_sharding == "tensor":
            return 0, count
        return self.rank * count // self.degree, (self.rank + 1) * count // self.degree

    @property
    def expert_features(self) -> Range:
        """The features of each of this worker's experts that this worker computes."""
        assert self.config.experts is not None
        width = self.config.experts.intermediate_size
        return self._share(width) if self.expert_sharding == "tensor" else (0, width)

    @property
    def shared_features(self) -> Range:
        """This worker's features of the shared expert, which computes every row and is cut over all workers."""
        assert self.config.experts is not None
        return self._share(self.config.experts.shared_intermediate_size or 0)

    @property
    def recurrent_pieces(self) -> dict[str, tuple[Range, ...]]:
        """By module of layers with a recurrent state: the outputs of the base that are this worker's, side by side.

        Of `out_proj`: its inputs.
        """
        recurrent = self.config.recurrent
        assert recurrent is not None
        key_start, key_stop = (head * recurrent.key_dim for head in self._share(recurrent.num_key_heads))
        heads = self._share(recurrent.num_value_heads)
        values = heads[0] * recurrent.value_dim, heads[1] * recurrent.value_dim
        all_keys = recurrent.num_key_heads * recurrent.key_dim
        qkv = (
            (key_start, key_stop),
            (all_keys + key_start, all_keys + key_stop),
            (2 * all_keys + values[0], 2 * all_keys + values[1]),
        )
        return dict(zip(RECURRENT_MODULES, (qkv, (values,), (heads,), (heads,), (values,)), strict=True))

    @property
    def vocabulary(self) -> Range:
        """Rows of the embedding and of the head; the last worker may have fewer."""
        share = -(-self.config.vocab_size // self.degree)
        return min(self.rank * share, self.config.vocab_size), min((self.rank + 1) * share, self.config.vocab_size)

    @property
    def num_kv_heads(self) -> int:
        return self.kv_heads[1] - self.kv_heads[0]

    @property
    def linears(self) -> tuple[tuple[int, int], ...]:
        """Inputs and outputs of each linear of a dense layer, as this worker multiplies it."""
        dim, hidden = self.config.head_dim, self.config.hidden_size
        query, kv, width = ((stop - start) for start, stop in (self.heads, self.kv_heads, self.intermediate))
        gates = query if self.config.family.gated_attention else 0
        linears = (hidden, (query + gates + 2 * kv) * dim), (query * dim, hidden), (hidden, 2 * width), (width, hidden)
        if self.config.recurrent is None:
            return linears
        *inputs, output = self.config.recurrent.modules(hidden).values()
        num_out = sum(num_out for _, num_out in inputs) // self.degree
        return *linears, (hidden, num_out), (output[0] // self.degree, hidden)

    def slab(self, block_size: int, kv_dtype: KVDtype = "dtype", element_bytes: int = 2) -> int:
        """Elements that a page of `block_size` tokens holds in one layer of this worker; see `slab_of_head`.

        Where layers have a recurrent state in place of KV, the KV of the others is spread over the slabs of all.
        """
        config, kv = self.config, self.kv_slab(block_size, kv_dtype, element_bytes)
        if config.recurrent is None:
            return kv
        slab = -(-kv * len(config.kv_layers) // config.num_layers)
        return -(-slab // _SLAB_ELEMENTS) * _SLAB_ELEMENTS

    def kv_slab(self, block_size: int, kv_dtype: KVDtype = "dtype", element_bytes: int = 2) -> int:
        """Elements of the KV of `block_size` tokens in one layer of this worker."""
        return self.num_kv_heads * slab_of_head(self.config.head_dim, block_size, kv_dtype, element_bytes)

    def layout(self, block_size: int, dtype: Dtype, kv_dtype: KVDtype = "dtype") -> AdapterLayout:
        """How adapters are packed for this worker."""
        sharding = None
        if self.degree > 1:
            query, kv = self._features(self.heads), self._features(self.kv_heads)
            gated = 2 if self.config.family.gated_attention else 1
            outputs = {"q_proj": (gated * query[0], gated * query[1]), "k_proj": kv, "v_proj": kv}
            outputs |= {"gate_proj": self.intermediate, "up_proj": self.intermediate}
            inputs = {"o_proj": query, "down_proj": self.intermediate}
            if self.config.experts is not None:
                gate, up, down = SHARED_MODULES
                outputs |= {gate: self.shared_features, up: self.shared_features}
                inputs |= {down: self.shared_features}
            if self.config.experts is not None and self.expert_sharding == "tensor":
                gate, up, down = EXPERT_MODULES
                outputs |= {gate: self.expert_features, up: self.expert_features}
                inputs |= {down: self.expert_features}
            pieces = {} if self.config.recurrent is None else self.recurrent_pieces
            if pieces:
                inputs |= {RECURRENT_MODULES[-1]: pieces.pop(RECURRENT_MODULES[-1])[0]}
            sharding = Sharding(self.degree, self.rank, outputs, inputs, pieces)
        slab = self.slab(block_size, kv_dtype, PAGE_DTYPES[dtype].itemsize)
        return AdapterLayout(self.config.shape, slab, dtype, sharding)

    def _mlp_features(self) -> dict[str, int]:
        """The counts, by name, that workers must share evenly in dense MLPs and experts."""
        experts = self.config.experts
        if experts is None:
            return {"intermediate features": self.config.intermediate_size}
        counts = {"features of the shared expert": experts.shared_intermediate_size or 0}
        if not all(experts.layers):
            counts["intermediate features"] = self.config.intermediate_size
        if self.expert_sharding == "tensor":
            counts["features of an expert"] = experts.intermediate_size
        elif experts.num_experts < self.degree:
            raise ValueError(
                f"a gang of {self.degree} workers cannot share {experts.num_experts} experts: one each is needed"
            )
        return counts

    def _share(self, count: int) -> Range:
        share = count // self.degree
        return self.rank * share, (self.rank + 1) * share

    def _features(self, heads: Range) -> Range:
        return heads[0] * self.config.head_dim, heads[1] * self.config.head_dim


def layouts_of_gang(
    config: ModelConfig,
    degree: int,
    block_size: int,
    dtype: Dtype,
    expert_sharding: ExpertSharding = "tensor",
    kv_dtype: KVDtype = "dtype",
) -> list[AdapterLayout]:
    """The layouts of all workers of a gang, by rank."""
    parts = [ModelSharding(config, degree, rank, expert_sharding) for rank in range(degree)]
    return [part.layout(block_size, dtype, kv_dtype) for part in parts]
