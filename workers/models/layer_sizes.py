"""The sizes of a base's layers, which differ in Gemma 4, and whose KV each layer attends to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

_OVERRIDES: Final = ("head_dim", "num_key_value_heads")  # that `per_layer_config` may have


@dataclass(frozen=True)
class LayerSizes:
    """By layer, of the whole model, before any sharding."""

    head_dims: tuple[int, ...]
    num_kv_heads: tuple[int, ...]
    intermediate_sizes: tuple[int, ...]
    kv_sources: tuple[int, ...]  # the layer whose KV it attends to: itself, or one before it
    keys_are_values: tuple[bool, ...]  # v is made of what `k_proj` gives
    input_size: int = 0  # of what each layer takes of its token beside the residual; 0: nothing
    input_vocab_size: int = 0

    @staticmethod
    def uniform(num_layers: int, head_dim: int, num_kv_heads: int, intermediate_size: int) -> LayerSizes:
        """All layers have these sizes and a KV of their own."""
        return LayerSizes(
            (head_dim,) * num_layers,
            (num_kv_heads,) * num_layers,
            (intermediate_size,) * num_layers,
            tuple(range(num_layers)),
            (False,) * num_layers,
        )

    @staticmethod
    def from_values(values: Mapping[str, Any], slides: Sequence[bool]) -> LayerSizes:
        """Of a family whose layers that see all tokens have heads of their own (Gemma 4). `slides`: by layer.

        Raises ValueError for sizes that differ between layers of one kind, and for KV that is shared without a source.
        """
        if values["hidden_size_per_layer_input"] and values["vocab_size_per_layer_input"] < values["vocab_size"]:
            raise ValueError(
                f"vocab_size_per_layer_input = {values['vocab_size_per_layer_input']}: at least vocab_size = "
                f"{values['vocab_size']} is needed"
            )
        if values["num_kv_shared_layers"] and not values["hidden_size_per_layer_input"]:
            raise ValueError(
                f"num_kv_shared_layers = {values['num_kv_shared_layers']} is not supported with "
                "hidden_size_per_layer_input = 0: transformers computes no such base"
            )
        overrides = _overrides(values["per_layer_config"], len(slides))
        heads = [_heads_of(values, overrides, layer, slide) for layer, slide in enumerate(slides)]
        for kind in (True, False):
            sizes = {size for size, slide in zip(heads, slides, strict=True) if slide == kind}
            if len(sizes) > 1:
                raise ValueError(
                    f"per_layer_config gives layers of one kind heads of different sizes, {sorted(sizes)}: one size "
                    "for those that slide, and one for the others, is accepted"
                )
        first_shared = len(slides) - values["num_kv_shared_layers"]
        sources = [_source(layer, slides, first_shared) for layer in range(len(slides))]
        wide = 2 if values["use_double_wide_mlp"] else 1
        widths = (values["intermediate_size"] * (1 if layer < first_shared else wide) for layer in range(len(slides)))
        are_values = (values["attention_k_eq_v"] and not slide for slide in slides)
        head_dims, num_kv_heads = zip(*heads, strict=True)
        return LayerSizes(
            *(head_dims, num_kv_heads, tuple(widths), tuple(sources), tuple(are_values)),
            values["hidden_size_per_layer_input"],
            values["vocab_size_per_layer_input"],
        )

    @property
    def kv_layers(self) -> tuple[int, ...]:
        """The layers with a KV of their own."""
        return tuple(layer for layer, source in enumerate(self.kv_sources) if layer == source)


def _overrides(written: Mapping[str, Mapping[str, int]] | None, num_layers: int) -> dict[int, Mapping[str, int]] | None:
    """By layer. transformers writes the numbers of layers with as many digits as the last one's: "05"."""
    if written is None:
        return None
    for layer, heads in written.items():
        if not layer.isdecimal() or int(layer) >= num_layers:
            raise ValueError(f"per_layer_config has {layer!r}: layers 0 to {num_layers - 1} are accepted")
        for key in heads:
            if key not in _OVERRIDES:
                raise ValueError(f"per_layer_config has {key!r}: {' and '.join(_OVERRIDES)} are accepted")
    return {int(layer): heads for layer, heads in written.items()}


def _heads_of(
    values: Mapping[str, Any], overrides: Mapping[int, Mapping[str, int]] | None, layer: int, slides: bool
) -> tuple[int, int]:
    """Elements of a head, and how many heads KV has."""
    head_dim, num_kv_heads = values["head_dim"], values["num_key_value_heads"]
    if overrides is not None:
        heads = overrides.get(layer, {})
        return heads.get("head_dim", head_dim), heads.get("num_key_value_heads", num_kv_heads)
    if slides:
        return head_dim, num_kv_heads
    global_heads = values["num_global_key_value_heads"] if values["attention_k_eq_v"] else None
    return values["global_head_dim"] or 512, global_heads or num_kv_heads


def _source(layer: int, slides: Sequence[bool], first_shared: int) -> int:
    """The layer itself, or of those before the first one that shares KV the last one that slides as it does."""
    if layer < first_shared:
        return layer
    source = next((before for before in reversed(range(first_shared)) if slides[before] == slides[layer]), None)
    if source is None:
        raise ValueError(
            f"num_kv_shared_layers = {len(slides) - first_shared}: layer {layer} has no layer of its kind before the "
            "shared ones whose KV it could attend to"
        )
    return source
