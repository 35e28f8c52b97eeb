"""The facts of a family of bases, and of a wrapper around one, that config.json does not state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ...kernels.experts import Routing
from .rotary_config import SCALINGS
from .sliding import Slides, never


@dataclass(frozen=True)
class ExpertNames:
    """The names of a family for the tensors of its experts, within a layer.

    `are_fused`: all experts of a layer are two tensors, `gate_up_proj` `[num_experts, hidden, 2 * width]` and
    `down_proj` `[num_experts, width, hidden]`. `take_turns`: of these the columns of the first are gate, up, gate, up
    and so on, not gate and then up; each has a bias, and so has the router.
    """

    block: str
    gate: str  # empty: experts have no gate
    up: str
    down: str
    router: str = "gate"
    bias: str = ""  # of the router's scores, for the choice alone; empty: none
    shared: str = "shared_expert"  # that computes every row, in bases that have one
    shared_gate: str = "shared_expert_gate"  # empty: it is added as it is
    are_fused: bool = False
    take_turns: bool = False
    mlp: str = "mlp"  # the block of a layer with dense linears or experts, in the model
    stacked: tuple[str, str] = ("experts.gate_up_proj", "experts.down_proj")  # where all experts are in two tensors
    beside_dense: bool = False  # layers with experts have a dense MLP too, and add both
    are_parameters: bool = False  # as in transformers, where PEFT finds no modules of theirs; fused ones are
    factors: str = ""  # of the experts' weights, once chosen; empty: none

    @property
    def are_stacked(self) -> bool:
        """No file has the experts one by one."""
        return not self.stacked[0].startswith("experts.")

    @property
    def ups(self) -> tuple[str, ...]:
        """What reads an expert's input."""
        return (self.gate, self.up) if self.gate else (self.up,)

    @property
    def prefix(self) -> str:
        """What stands before the names within a layer."""
        return f"{self.block}." if self.block else ""

    @property
    def swaps_sides(self) -> bool:
        """PEFT takes the inputs of fused experts for their outputs, as their order in the tensors is another one."""
        return self.are_fused and not self.take_turns


# See `recurrent_config.py`. A rule that is parallel is beside attention, in all layers.
RecurrentRule = Literal["delta", "grouped_delta", "short_convolution", "mamba", "parallel_mamba"]

# Read by `rotary_config.py`. With `original_max_position_embeddings` transformers overrides that of the scaling.
ROPE_KEYS = frozenset({"rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor"}) | {
    "original_max_position_embeddings"
}


@dataclass(frozen=True)
class Family:
    """The facts of a family that config.json does not state, and which of its keys the family reads.

    `defaults`: the keys, beside those that every family needs and those of the rotary embedding, with their values
    where they are absent, as in transformers' config class. `nullable`: of these, keys that may be null although null
    is not their default. `computes`: keys with the only value that is true of the family.
    """

    name: str
    model_type: str  # in config.json
    defaults: Mapping[str, Any]
    nullable: frozenset[str] = frozenset()
    computes: Mapping[str, Any] = field(default_factory=dict)
    old_names: Mapping[str, str] = field(default_factory=dict)  # of keys, in files of another code
    qkv_bias: bool = False  # q, k and v have a bias even without `attention_bias`
    qk_norm: bool = False  # RMS norm over each head of q and k before the rotary embedding
    qk_norm_has_weights: bool = True  # without, only layers that rotate q and k have it
    qk_norm_spans_heads: bool = False  # it is over all heads of q, and all of k, at once
    norm_offset: float = 0.0  # added to the stored weights of all norms
    centred_norms: bool = False  # norms of the residual are layer norms, not RMS norms
    norms_have_bias: bool = False
    qk_norm_is_centred: bool = False  # it is a layer norm over each head, with weights of each
    qk_norm_is_last: bool = False  # it is behind the rotary embedding, which leaves its means as they are
    wide_norms: bool = False  # norms are multiplied by their weights in float32
    has_sinks: bool = False  # `self_attn.sinks`, a score of each head that has no value
    attention_norm: str | None = "input_layernorm"  # name of the norm before attention; None: none
    mlp_norm: str | None = "post_attention_layernorm"  # of that before the MLP
    is_parallel: bool = False  # the MLP has the input that attention has
    head_norms: tuple[str, str] = ("q_norm", "k_norm")  # of `qk_norm`
    final_norm: str = "norm"
    # Within a layer, of linears that other bases name otherwise, and of such an embedding.
    paths: Mapping[str, str] = field(default_factory=dict)
    post_norms: tuple[str, str] | None = None  # of the outputs of attention and MLP before they are added; None: none
    output_has_bias: bool = True  # `attention_bias` is of o_proj too
    head_has_bias: bool = False  # where MLPs have
    fused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # linears of a layer that are one in the file
    scaled_embedding: bool = False  # the embedding is multiplied by the square root of the hidden size
    slides: Slides = never  # which layers see only a window of the newest tokens
    only_windows_rotate: bool = False  # layers without a window do not, if the base has windows
    rope_theta: float = 10_000.0  # default
    local_rope_theta: float | None = None  # default for the own rotary embedding of layers that slide; None: no own one
    rope_kinds: tuple[str, ...] = SCALINGS
    default_rope: Mapping[str, Any] | None = None  # `rope_parameters` where config.json has none; None: plain ones
    scales_queries: bool = False  # by their position, after their rotation
    rotated_share: float | None = None  # default of `partial_rotary_factor`; None: heads are rotated whole
    rotates_neighbours: bool = False  # pairs (0, 1), (2, 3) …, not (0, half), (1, half + 1) …
    linear_is_in_context: bool = False  # max_position_embeddings is the context after linear scaling, not before it
    experts: ExpertNames | None = None  # None: the family has no experts
    routing: Routing = field(default_factory=Routing)  # what config.json does not say of it
    activations: Mapping[str, str] = field(default_factory=dict)  # what is computed where config.json names another
    recurrent: RecurrentRule | None = None  # of layers with a recurrent state in place of attention, or beside it
    gated_attention: bool = False  # q_proj gives each head's q and then a gate of attention's output
    reads_wrapped: bool = False  # it is also read from the files, and has the adapters, of one that takes pictures too
    experts_beside: bool = False  # layers with experts have a dense MLP too: see `layers.ExpertsBeside`
    sizes_differ: bool = False  # between layers: see `layer_sizes.py`
    last_is_full: bool = False  # the last layer sees all tokens, whatever `layer_types` says
    has_value_norm: bool = False  # RMS norm without weights over each head of v
    attention_scale: float | None = None  # None: as config.json says, or by the heads' size
    has_layer_scalars: bool = False  # each layer's output is multiplied by its `layer_scalar`
    is_latent: bool = False  # keys and values are made of one latent vector of each token: see `latent_config.py`
    has_halves: bool = False  # each layer is a mixer or an MLP, with one norm before it
    has_gates: bool = True  # MLPs have `gate_proj`
    rotates: bool = True
    mixer_block: str = ""  # of layers with a recurrent state, in names of tensors; empty: that of the rule
    always_normalized: bool = False  # the chosen experts' weights add up to one, whatever `norm_topk_prob` says

    @property
    def activation_key(self) -> str:
        keys = "hidden_activation", "mlp_hidden_act"
        return next((key for key in keys if key in self.defaults), "hidden_act")

    @property
    def norm_eps_key(self) -> str:
        return next(
            key
            for key in ("rms_norm_eps", "layer_norm_eps", "norm_eps", "layer_norm_epsilon", "norm_epsilon")
            if key in self.defaults
        )


@dataclass(frozen=True)
class Wrapper:
    """A model that takes pictures too, of which motet computes the text model: the facts of its config.json.

    Text alone has the same position on all axes of a rotary embedding of several (`mrope`), which is then plain.
    """

    model_type: str
    text: Family  # what `text_config` describes
    other_texts: tuple[Family, ...] = ()  # likewise, where its `model_type` says so
    ties_by_default: bool = False  # `tie_word_embeddings` counts beside `text_config`, not in it
    may_be_flat: bool = False  # older files have the text model's keys beside `vision_config`
    has_axes: bool = False  # its rotary embedding has to name `mrope_section`

    @property
    def texts(self) -> tuple[Family, ...]:
        return (self.text, *self.other_texts)
