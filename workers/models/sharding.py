"""The part of a base that each worker of a gang holds."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from ...adapters.adapter import EXPERT_MODULES, SHARED_MODULES, BaseShape, name_of
from ...adapters.packing.layout import AdapterLayout, Dtype, Sharding
from ...adapters.packing.packing import PAGE_DTYPES
from ..config import ExpertSharding, KVDtype
from ..window_pages import FullLayers
from .config import ModelConfig, slab_of_head
from .latent_config import LatentConfig
from .recurrent_config import Range as Range
from .recurrent_config import RecurrentPart

_MAX_SLABS = 1024  # of a page; page tables count slabs of the whole pool in 32 bits
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
        shared["features of layers' inputs"] = config.layer_sizes.input_size
        if config.recurrent is not None:
            shared |= config.recurrent.shared
        for label, count in shared.items():
            if count % degree:
                raise ValueError(f"a gang of {degree} workers cannot share {count} {label}: a divisor is needed")
        if config.recurrent is not None and (problem := config.recurrent.unsupported_degree(degree)):
            raise ValueError(f"a gang of {degree} workers cannot share {problem}")
        for num_kv_heads in set(config.layer_sizes.num_kv_heads):
            if num_kv_heads % degree and degree % num_kv_heads:
                raise ValueError(
                    f"a gang of {degree} workers cannot share {num_kv_heads} KV heads: "
                    "a divisor or a multiple is needed"
                )

    @property
    def heads(self) -> Range:
        return self._share(self.config.num_heads)

    def kv_heads_of(self, layer: int) -> Range:
        """The KV heads that this worker's heads attend to. If workers outnumber them, several workers hold the same."""
        num_kv_heads = self.config.layer_sizes.num_kv_heads[layer]
        if num_kv_heads >= self.degree:
            return self._share(num_kv_heads)
        first = self.rank * num_kv_heads // self.degree
        return first, first + 1

    def num_kv_heads_of(self, layer: int) -> int:
        start, stop = self.kv_heads_of(layer)
        return stop - start

    def intermediate_of(self, layer: int) -> Range:
        """This worker's features of the dense MLP."""
        return self._share(self.config.layer_sizes.intermediate_sizes[layer])

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
    def recurrent(self) -> RecurrentPart:
        assert self.config.recurrent is not None
        return self.config.recurrent.part(self.rank, self.degree)

    @property
    def vocabulary(self) -> Range:
        """Rows of the embedding and of the head; the last worker may have fewer."""
        share = -(-self.config.vocab_size // self.degree)
        return min(self.rank * share, self.config.vocab_size), min((self.rank + 1) * share, self.config.vocab_size)

    @property
    def layer_inputs(self) -> Range:
        """This worker's features of what each layer takes of its token beside the residual."""
        return self._share(self.config.layer_sizes.input_size)

    @property
    def linears(self) -> tuple[tuple[int, int], ...]:
        """Inputs and outputs of each linear of dense layers, as this worker multiplies it."""
        hidden, sizes, query = self.config.hidden_size, self.config.layer_sizes, self.heads[1] - self.heads[0]
        latent = self.config.latent
        gates, kinds = query if self.config.family.gated_attention else 0, dict[tuple[int, int], None]()
        for layer, dim in enumerate(sizes.head_dims):
            kv = self.num_kv_heads_of(layer) if sizes.kv_sources[layer] == layer else 0
            start, stop = self.intermediate_of(layer)
            if latent is not None:
                kinds |= dict.fromkeys(self._latent_linears(latent))
            else:
                kinds |= dict.fromkeys(((hidden, (query + gates + 2 * kv) * dim), (query * dim, hidden)))
            ups = 2 if self.config.family.has_gates else 1
            kinds |= dict.fromkeys(((hidden, ups * (stop - start)), (stop - start, hidden)))
        linears = tuple(kinds)
        if self.config.recurrent is None:
            return linears
        part = self.recurrent
        num_out = sum(stop - start for pieces in part.outputs.values() for start, stop in pieces)
        return *linears, (hidden, num_out), (part.inputs[1] - part.inputs[0], hidden)

    def _latent_linears(self, latent: LatentConfig) -> tuple[tuple[int, int], ...]:
        hidden, num_heads = self.config.hidden_size, self.heads[1] - self.heads[0]
        query, output = num_heads * latent.query_dim, (num_heads * latent.value_dim, hidden)
        if latent.query_rank is None:
            return (hidden, query + latent.width), output
        return (hidden, latent.query_rank + latent.width), (latent.query_rank, query), output

    def slab(self, block_size: int, kv_dtype: KVDtype = "dtype", element_bytes: int = 2) -> int:
        """Elements that a page of `block_size` tokens holds in one layer of this worker; see `slab_of_head`.

        Where `spreads_kv`, the KV of all layers is spread over the slabs of all.
        """
        kv = sum(self.kv_slab(layer, block_size, kv_dtype, element_bytes) for layer in self.config.kv_layers)
        if not self.spreads_kv:
            return kv // self.config.num_layers
        slab = -(-kv // self.config.num_layers)
        return -(-slab // _SLAB_ELEMENTS) * _SLAB_ELEMENTS

    def window_pages(
        self, block_size: int, kv_dtype: KVDtype = "dtype", element_bytes: int = 2
    ) -> tuple[int | None, FullLayers | None]:
        """The newest tokens that layers with a window see, past which a sequence gives pages back; None: it gives none.

        And the layers that see all tokens nevertheless; None: none does.
        """
        windows = [window for window in self.config.sliding_windows if window is not None]
        if not windows or self.config.recurrent is not None:
            return None, None
        full = [layer for layer in self.config.kv_layers if self.config.sliding_windows[layer] is None]
        if not full:
            return max(windows), None
        kv = sum(self.kv_slab(layer, block_size, kv_dtype, element_bytes) for layer in full)
        page = self.config.num_layers * self.slab(block_size, kv_dtype, element_bytes)
        num_units = page // math.gcd(page, _SLAB_ELEMENTS)
        divisors = [count for count in range(1, _MAX_SLABS + 1) if num_units % count == 0]
        layers = [FullLayers(-(-kv * count // page), count) for count in divisors]
        densest = max(layers, key=lambda each: (each.num_blocks, -each.num_full / each.num_slabs))
        return (max(windows), densest) if densest.num_blocks > 1 else (None, None)

    @property
    def spreads_kv(self) -> bool:
        """Layers have KV of different sizes, or a recurrent state in place of it, or that of another layer."""
        return self.config.recurrent is not None or self.config.sizes is not None

    def kv_slab(self, layer: int, block_size: int, kv_dtype: KVDtype = "dtype", element_bytes: int = 2) -> int:
        """Elements of the KV of `block_size` tokens in a layer of this worker."""
        head_dim = self.config.layer_sizes.head_dims[layer]
        slab = slab_of_head(head_dim, block_size, kv_dtype, element_bytes, self.config.kv_sides)
        return self.num_kv_heads_of(layer) * slab

    def layout(self, block_size: int, dtype: Dtype, kv_dtype: KVDtype = "dtype") -> AdapterLayout:
        """How adapters are packed for this worker."""
        sharding = None
        if self.degree > 1:
            outputs, inputs = self._cut(self.config.shape)
            if self.config.experts is not None:
                gate, up, down = SHARED_MODULES
                outputs |= {gate: self.shared_features, up: self.shared_features}
                inputs |= {down: self.shared_features}
            if self.config.experts is not None and self.expert_sharding == "tensor":
                gate, up, down = EXPERT_MODULES
                outputs |= {gate: self.expert_features, up: self.expert_features}
                inputs |= {down: self.expert_features}
            pieces: Mapping[str, tuple[Range, ...]] = {}
            if self.config.recurrent is not None:
                pieces = self.recurrent.outputs
                inputs |= {self.config.shape.recurrent_modules[-1]: self.recurrent.inputs}
            sharding = Sharding(self.degree, self.rank, outputs, inputs, pieces)
        slab = self.slab(block_size, kv_dtype, PAGE_DTYPES[dtype].itemsize)
        return AdapterLayout(self.config.shape, slab, dtype, sharding)

    def _cut(self, shape: BaseShape) -> tuple[dict[str, Range], dict[str, Range]]:
        """This worker's outputs, and inputs, of the entries of attention, of dense MLPs and of the layers' inputs."""
        outputs, inputs = dict[str, Range](), dict[str, Range]()
        for entry in shape.modules:
            layer, module = next(iter(shape.layers_of(entry))), name_of(entry)
            dim, gated = self.config.layer_sizes.head_dims[layer], 2 if self.config.family.gated_attention else 1
            if module == "q_proj":
                outputs[entry] = self.heads[0] * gated * dim, self.heads[1] * gated * dim
            elif module in ("k_proj", "v_proj"):
                start, stop = self.kv_heads_of(layer)
                outputs[entry] = start * dim, stop * dim
            elif module == "o_proj":
                inputs[entry] = self.heads[0] * dim, self.heads[1] * dim
            elif module in ("gate_proj", "up_proj"):
                outputs[entry] = self.intermediate_of(layer)
            elif module == "down_proj":
                inputs[entry] = self.intermediate_of(layer)
            elif module == "per_layer_input_gate":
                outputs[entry] = self.layer_inputs
            elif module == "per_layer_projection":
                inputs[entry] = self.layer_inputs
        if (latent := self.config.latent) is not None:
            start, stop = self.heads
            queries = "q_proj" if latent.query_rank is None else "q_b_proj"
            outputs[queries] = start * latent.query_dim, stop * latent.query_dim
            of_head = latent.plain_dim + latent.value_dim
            outputs["kv_b_proj"] = start * of_head, stop * of_head
            inputs["o_proj"] = start * latent.value_dim, stop * latent.value_dim
        return outputs, inputs

    def _mlp_features(self) -> dict[str, int]:
        """The counts, by name, that workers must share evenly in dense MLPs and experts."""
        experts = self.config.experts
        if experts is None:
            return {"intermediate features": self.config.intermediate_size}
        counts = {"features of the shared expert": experts.shared_intermediate_size or 0}
        dense_layers = range(self.config.num_layers) if self.config.mlp_layers is None else self.config.mlp_layers
        if any(map(experts.has_dense, dense_layers)):
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
