"""What adapters do to the outputs of linears beside LoRA: DoRA, IA3 and biases, read as one gain and one shift.

y becomes y * (1 + gain) + shift (`OutputVectors`), y the outputs of the base with the adapter's LoRA:

- DoRA (arXiv 2402.09353): 1 + gain is the magnitude of each row over the norm of that row of the base with LoRA.
  PEFT does not scale the base's bias, which the shift puts right.
- IA3 (arXiv 2205.05638): 1 + gain is its vector. That of the inputs of a gated MLP's down projection is one of the
  outputs of the up projection, with which these inputs are linear.
- A trained bias of the base, in place of the base's own, and LoRA's bias (`lora_bias`) are in the shift.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from hashlib import sha256

import numpy as np

from ..adapter import (
    ABSORBED,
    EXPERT_MODULES,
    LATENT_EXPERT_MODULES,
    NARROW_MODULES,
    OUTER,
    BaseShape,
    family_of_module,
)
from ..errors import AdapterInvalid, listed, quote
from .base_weights import BaseWeights
from .content import LoraMatrices, OutputVectors
from .peft import CONFIG_FILE, IA3, TENSORS_FILE, LoraConfig
from .targets import Target
from .tensor_file import DTYPE_NAMES, Tensor, tensor_bytes

_WITHOUT_OUTPUTS = frozenset({*EXPERT_MODULES, *NARROW_MODULES, *LATENT_EXPERT_MODULES, ABSORBED})
_FEATURES = {"magnitude": "DoRA (use_dora)", "lora_bias": "lora_bias", "bias": "trained biases (bias)", "ia3": "IA3"}
_NAMES = {"magnitude": "lora_magnitude_vector", "lora_bias": "lora_B.bias", "bias": "base_layer.bias", "ia3": "ia3_l"}
VectorKey = tuple[int, str, str]  # layer, module as PEFT finds it, kind as in `peft.parse_vector_name`


def check_vectors(
    names: Mapping[VectorKey, str],
    shapes: Mapping[VectorKey, tuple[int, ...]],
    config: LoraConfig,
    targets: Mapping[tuple[int, str], Target],
    shape: BaseShape,
) -> None:
    """Raises AdapterInvalid unless a file's vectors are those that the config says, and fit the base.

    `names`: in the file. `targets`: linears that the config names.
    """
    kinds = {"ia3"} if config.kind == IA3 else {"magnitude"} if config.use_dora else set[str]()
    kinds |= {"lora_bias"} if config.lora_bias else set()
    expected = {(layer, module, kind) for layer, module in targets for kind in kinds}
    for layer, module, kind in sorted(expected | names.keys()):
        if not has_outputs(shape, layer, module):
            raise AdapterInvalid(
                f"{_FEATURES[kind]} of {shape.path(module)} is not supported: train it on linears of attention and of "
                "dense MLPs alone"
            )
    if missing := sorted(expected - names.keys()):
        lacking = [f"layers.{layer}.{shape.path(module)}.{_NAMES[kind]}" for layer, module, kind in missing]
        raise AdapterInvalid(f"{TENSORS_FILE} lacks tensors that {CONFIG_FILE} targets: {listed(lacking)}")
    for key, name in sorted(names.items()):
        layer, module, kind = key
        sides = shape.sides(layer, module)
        if sides is None or not (key in expected or (kind == "bias" and config.has_biases)):
            raise AdapterInvalid(
                f"{TENSORS_FILE} holds {quote(name, 160)}, {_FEATURES[kind]}, which {CONFIG_FILE} does not name, or "
                "of a module that the base does not have"
            )
        num_in, num_out = sides
        expected_shapes = [(num_out, 1), (1, num_in)] if kind == "ia3" else [(num_out,)]
        if shapes[key] not in expected_shapes:
            options = " or ".join(str([*each]) for each in expected_shapes)
            raise AdapterInvalid(
                f"{name} has shape {[*shapes[key]]}, expected {options}: the base's {module} has {num_in} inputs and "
                f"{num_out} outputs"
            )
        if kind == "ia3" and shapes[key][0] == 1 and _up_of(layer, module, shape) is None:
            raise AdapterInvalid(
                f"{name} scales inputs of {shape.path(module)}: of feedforward_modules down projections of gated MLPs "
                "alone are supported"
            )


def has_outputs(shape: BaseShape, layer: int, module: str) -> bool:
    """Whether adapters may scale and shift outputs of this module, as PEFT finds it."""
    parts = shape.fused.get(module, (module,))
    return layer != OUTER and _WITHOUT_OUTPUTS.isdisjoint(map(family_of_module, parts))


def scaled_modules(shapes: Mapping[VectorKey, tuple[int, ...]], shape: BaseShape) -> set[tuple[int, str]]:
    """(layer, module) of all whose outputs vectors of these shapes, which were checked, scale and shift."""
    return {(layer, part) for (layer, module, _), got in shapes.items() for part in _parts(layer, module, got, shape)}


def outputs_of(
    arrays: Mapping[VectorKey, Tensor],
    loras: Mapping[tuple[int, str], LoraMatrices],
    shape: BaseShape,
    base: BaseWeights | None,
) -> dict[tuple[int, str], OutputVectors]:
    """The outputs' vectors by (layer, module), of modules that are one in the base each its own.

    `arrays` were checked. `loras`: by (layer, module as PEFT finds it). Raises AdapterInvalid if numbers are too large,
    or if the base's weights are needed and are not there.
    """
    scales: dict[tuple[int, str], Tensor] = {}
    shifts: dict[tuple[int, str], Tensor] = {}
    by_module: dict[tuple[int, str], dict[str, Tensor]] = {}
    for (layer, module, kind), array in arrays.items():
        by_module.setdefault((layer, module), {})[kind] = array
    for (layer, module), vectors in by_module.items():
        with np.errstate(all="ignore"):  # what is not finite is refused below
            scale, shift = _whole(layer, module, vectors, loras.get((layer, module)), shape, base)
        start, got = 0, next(iter(vectors.values())).shape
        for part in _parts(layer, module, got, shape):
            sides = shape.sides(layer, part)
            assert sides is not None, "it was checked"
            rows = slice(start, start := start + sides[1])
            scales[layer, part] = scales.get((layer, part), np.float64(1.0)) * scale[rows]
            shifts[layer, part] = shift[rows]
    outputs = {}
    for (layer, part), scale in scales.items():
        with np.errstate(over="ignore"):
            gain, shift = (scale - 1).astype(np.float32), shifts[layer, part].astype(np.float32)
        if not (np.isfinite(gain).all() and np.isfinite(shift).all()):
            raise AdapterInvalid(
                f"outputs of {part} of layer {layer} are scaled or shifted by NaN or infinity: the adapter's numbers "
                "are too large, or a row of its weights is zero"
            )
        if shift.any() and part in shape.output_scales:
            raise AdapterInvalid(
                f"{part} of layer {layer} has a bias, and this base multiplies its outputs: there DoRA, lora_bias and "
                "trained biases are supported for linears without a bias alone"
            )
        outputs[layer, part] = OutputVectors(gain, shift)
    return outputs


def source_digest(arrays: Mapping[VectorKey, Tensor]) -> str:
    """SHA-256, hex, of all vectors of a file; empty: there are none."""
    hasher = sha256()
    for key, array in sorted(arrays.items()):
        hasher.update(json.dumps([*key, DTYPE_NAMES[array.dtype], list(array.shape)]).encode() + b"\n")
        hasher.update(tensor_bytes(array))
    return hasher.hexdigest() if arrays else ""


def _whole(
    layer: int,
    module: str,
    vectors: Mapping[str, Tensor],
    lora: LoraMatrices | None,
    shape: BaseShape,
    base: BaseWeights | None,
) -> tuple[Tensor, Tensor]:
    """Scale and shift of a module's outputs, float64."""
    wide = {kind: vector.astype(np.float64).reshape(-1) for kind, vector in vectors.items()}
    if "ia3" in wide:
        return wide["ia3"], np.zeros_like(wide["ia3"])
    size = len(next(iter(wide.values())))
    scale, shift = np.ones(size), np.zeros(size)
    if not wide.keys().isdisjoint(("magnitude", "bias")):
        if base is None:
            raise AdapterInvalid("DoRA and trained biases need the base's weights, which are not at hand here")
        name = f"model.layers.{layer}.{shape.path(module)}"
        base_bias = base.bias(f"{name}.bias", size)
        if "magnitude" in wide:
            assert lora is not None, "it was checked"
            scale = wide["magnitude"] / base.row_norms(f"{name}.weight", lora.a, lora.b, lora.scaling)
        if "bias" in wide and base_bias is None:
            raise AdapterInvalid(
                f"{shape.path(module)} of the base has no bias: remove the adapter's, or serve its base"
            )
        if base_bias is not None:
            shift = wide.get("bias", base_bias) - scale * base_bias
    if "lora_bias" in wide:
        assert lora is not None, "it was checked"
        shift = shift + lora.scaling * wide["lora_bias"]
    return scale, shift


def _parts(layer: int, module: str, got: tuple[int, ...], shape: BaseShape) -> tuple[str, ...]:
    """The modules whose outputs, side by side, a vector of the shape `got` is of."""
    if len(got) == 2 and got[0] == 1:  # IA3 of inputs
        up = _up_of(layer, module, shape)
        assert up is not None, "it was checked"
        return (up,)
    return shape.fused.get(module, (module,))


def _up_of(layer: int, module: str, shape: BaseShape) -> str | None:
    """The module whose outputs, times those of a gate, are the inputs of this one; None: there is none."""
    before, is_down, _ = module.rpartition("down_proj")
    gate, up = f"{before}gate_proj", f"{before}up_proj"
    return up if is_down and shape.has(layer, gate) and shape.has(layer, up) else None
