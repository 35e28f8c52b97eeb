"""`quantization_config` in config.json: how the files of a base store the weights of its linears.

Every key is read, or is known to change no weight, or is refused by its name. The formats are those that transformers'
FP8 and MXFP4, compressed-tensors and llm-compressor, GPTQModel and AutoAWQ write.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

# By the tensors of a linear: "fp8" and "naive" have its weight and scales, the others a packed weight.
Layout = Literal["fp8", "naive", "packed", "mxfp4-packed", "mxfp4-blocks", "gptq", "awq"]


@dataclass(frozen=True)
class WeightFormat:
    """How one linear's weight `[out, in]` is stored, or those of all linears that a config names together."""

    layout: Layout
    bits: int
    is_float: bool = False
    group_size: int | None = None  # inputs that share a scale; None: all of a row
    block: tuple[int, int] | None = None  # outputs and inputs that share a scale
    per_tensor: bool = False  # one scale for all
    has_zeros: bool = False  # zero points are stored
    zero_offset: int = 0  # what is added to the stored ones
    rounds_inputs: bool = False  # to eight bits with a scale for each token, as it was published
    is_reordered: bool = False  # the file says for each input which group it is of


@dataclass(frozen=True)
class Quantisation:
    """The formats of a base. A linear that is stored in 16 or 32 bits is read as it is, whatever the config names."""

    method: str
    formats: tuple[tuple[tuple[str, ...], WeightFormat], ...]  # of modules by name, or by "re:" and a pattern of names

    def format_of(self, module: str) -> WeightFormat:
        """The format of a linear, by its name in the file. One that is named alone has that format, before "Linear".

        Raises ValueError if the config names it nowhere.
        """
        for targets, weight_format in self.formats:
            if any(_matches(module, target) for target in targets):
                return weight_format
        for targets, weight_format in self.formats:
            if "Linear" in targets:
                return weight_format
        raise ValueError(
            f"quantization_config: {module!r} has quantised tensors, and no targets of its config_groups name it"
        )

    @property
    def summary(self) -> str:
        """In a few words, for the log."""
        kinds = dict.fromkeys(
            f"{'float' if each.is_float else 'int'}{each.bits}{_sharing(each)}" for _, each in self.formats
        )
        return f"{self.method} ({', '.join(kinds)})"


def _sharing(weight_format: WeightFormat) -> str:
    if weight_format.group_size is not None:
        return f" in groups of {weight_format.group_size}"
    if weight_format.block is not None:
        return " in blocks of {} x {}".format(*weight_format.block)
    return " by tensor" if weight_format.per_tensor else " by output"


def _matches(module: str, target: str) -> bool:
    """As in compressed-tensors: a pattern need not reach the end of the name."""
    if target.startswith("re:"):
        return re.match(target.removeprefix("re:"), module) is not None
    return module == target


def read_quantisation(raw: Mapping[str, Any]) -> Quantisation | None:
    """The formats that config.json says; None: weights are in 16 or 32 bits.

    Raises ValueError for a method, a version or a key that is not known, and for values that no weight was seen with.
    """
    values = (raw.get(key) for key in ("quantization_config", "compression_config"))
    stored = next((each for each in values if each not in (None, {})), None)
    if stored is None:
        return None
    if not isinstance(stored, dict):
        raise ValueError(f"quantization_config = {stored!r}: an object is needed")
    method = stored.get("quant_method")
    if isinstance(method, str) and method in _REFUSED:
        raise ValueError(f"quantization_config: quant_method = {method!r} is not supported: {_REFUSED[method]}")
    if not isinstance(method, str) or method not in _READERS:
        raise ValueError(
            f"quantization_config: quant_method = {method!r} is not supported: {', '.join(_READERS)} are accepted"
        )
    keys = _Keys(stored, "quantization_config")
    keys.skip("quant_method")
    formats = _READERS[method](keys)
    keys.finish()
    return Quantisation(method, tuple(formats))


_AS_PUBLISHED: Final = "the base in bfloat16, or one in compressed-tensors, GPTQ, AWQ or FP8, is accepted"
_REFUSED: Final[Mapping[Any, str]] = {
    "bitsandbytes": f"its weights are quantised as they are loaded, by kernels for GPUs: {_AS_PUBLISHED}",
    "gguf": f"llama.cpp's files hold no safetensors: {_AS_PUBLISHED}",
    "modelopt": f"NVFP4 and ModelOpt's FP8 are for GPUs' own kernels: {_AS_PUBLISHED}",
    "nvfp4": f"it is for GPUs' own kernels: {_AS_PUBLISHED}",
}

_Formats = Sequence[tuple[tuple[str, ...], WeightFormat]]
_ALL_LINEARS: Final = ("Linear",)


class _Keys:
    """The keys of an object, each of which is to be read, skipped or refused."""

    def __init__(self, values: Mapping[str, Any], path: str) -> None:
        self._values, self.path, self._unread = values, path, {*values}

    def get(self, key: str, default: Any = None) -> Any:
        self._unread.discard(key)
        value = self._values.get(key)
        return default if value is None else value

    def skip(self, *keys: str) -> None:
        """Keys that change no weight."""
        self._unread -= {*keys}

    def one_of(self, key: str, accepted: Sequence[Any], default: Any = None) -> Any:
        value = self.get(key, default)
        if not any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in accepted):
            raise self.refusal(key, value, " or ".join(map(repr, accepted)) + " is accepted")
        return value

    def flag(self, key: str, default: bool) -> bool:
        return bool(self.one_of(key, (True, False), default))

    def absent(self, *keys: str, reason: str) -> None:
        """Refuses a key with a value that would change something."""
        for key in keys:
            if value := self.get(key):
                raise self.refusal(key, value, reason)

    def group_size(self, key: str = "group_size", default: int | None = 128) -> int | None:
        """Inputs of a group; -1 in the file: all of a row."""
        value = self.get(key, default)
        if value is None or value == -1:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or value < 8 or value % 8:
            raise self.refusal(key, value, "a multiple of 8, or -1 for all inputs of a row, is accepted")
        return value

    def block(self, key: str, default: Sequence[int] | None = None) -> tuple[int, int] | None:
        value = self.get(key, default)
        if value is None:
            return None
        if not isinstance(value, list | tuple) or len(value) != 2 or not all(_is_size(each) for each in value):
            raise self.refusal(key, value, "the outputs and the inputs of a block are needed, as [128, 128]")
        return int(value[0]), int(value[1])

    def names(self, key: str) -> tuple[str, ...]:
        value = self.get(key, ())
        if not isinstance(value, list | tuple) or not all(isinstance(each, str) for each in value):
            raise self.refusal(key, value, "a list of modules' names is needed")
        for each in value:
            if each.startswith("re:"):
                try:
                    re.compile(each.removeprefix("re:"))
                except re.error as error:
                    raise self.refusal(key, each, f"no regular expression: {error}") from None
        return tuple(value)

    def refusal(self, key: str, value: Any, reason: str) -> ValueError:
        return ValueError(f"{self.path}: {key} = {value!r}: {reason}")

    def finish(self) -> None:
        for key in sorted(self._unread):
            if self._values[key] is not None:
                raise self.refusal(key, self._values[key], "this key is not known, and may change what weights mean")


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _fp8(keys: _Keys) -> _Formats:
    """transformers' FP8, which DeepSeek and Qwen publish. Inputs stay in 16 bits here, whatever `activation_scheme`."""
    keys.one_of("activation_scheme", ("dynamic", "static"), "dynamic")
    keys.one_of("fmt", ("e4m3",), "e4m3")
    keys.one_of("scale_fmt", ("float", "ue8m0"), "float")
    keys.one_of("expert_dtype", ("fp8",), "fp8")
    keys.skip("dequantize")
    for key in ("modules_to_not_convert", "ignored_layers"):
        keys.names(key)
    keys.absent("modules_to_convert", reason="embeddings in FP8 are not supported: leave it out or set it to null")
    # Null is one scale for a tensor; without the key it is 128 x 128.
    block = keys.block("weight_block_size") if "weight_block_size" in keys._values else (128, 128)
    return [(_ALL_LINEARS, WeightFormat("fp8", 8, is_float=True, block=block, per_tensor=block is None))]


def _gptq(keys: _Keys) -> _Formats:
    bits = keys.one_of("bits", (4, 8))
    version = keys.one_of("format", ("gptq", "gptq_v2"), "gptq")
    checkpoint = keys.one_of("checkpoint_format", ("gptq", "gptq_v2"), version)
    if checkpoint != version and keys._values.get("format") is not None:
        raise keys.refusal("checkpoint_format", checkpoint, f"it contradicts format = {version!r}: keep one")
    keys.one_of("method", ("gptq",), "gptq")
    keys.one_of("pack_dtype", ("int32",), "int32")
    keys.flag("sym", True)
    keys.absent("is_marlin_format", reason="Marlin's order of weights is not supported: the base in GPTQ's is accepted")
    dynamic = keys.get("dynamic", {})
    if not isinstance(dynamic, dict) or any(not str(pattern).startswith("-:") for pattern in dynamic):
        raise keys.refusal("dynamic", dynamic, "only modules that are left out (-:) are accepted, all others alike")
    keys.skip(*_GPTQ_MAKING)
    group_size = keys.group_size()
    is_reordered = keys.flag("desc_act", False)
    offset = 1 if checkpoint == "gptq" else 0  # the first version stores a zero point less one
    return [
        (
            _ALL_LINEARS,
            WeightFormat(
                *("gptq", bits),
                group_size=group_size,
                has_zeros=True,
                zero_offset=offset,
                is_reordered=is_reordered,
            ),
        )
    ]


# How weights were found, and with what: of AutoGPTQ, Optimum, transformers and GPTQModel.
_GPTQ_MAKING: Final = (
    *("meta", "true_sequential", "static_groups", "damp_percent", "damp_auto_increment", "act_group_aware", "lm_head"),
    *("mse", "dataset", "tokenizer", "model_seqlen", "batch_size", "block_name_to_quantize", "pad_token_id"),
    *("module_name_preceding_first_block", "max_input_length", "cache_block_outputs", "modules_in_block_to_quantize"),
    *("use_cuda_fp16", "use_exllama", "disable_exllama", "exllama_config", "backend", "model_name_or_path"),
    *("model_file_base_name", "quantizer", "rotation", "hyb_act", "max_shard_size", "quant_embed"),
)


def _awq(keys: _Keys) -> _Formats:
    bits = keys.one_of("bits", (4,), keys.get("w_bit", 4))
    for key in ("version", "format", "checkpoint_format"):
        keys.one_of(key, ("gemm", "GEMM"), "gemm")
    keys.one_of("method", ("awq",), "awq")
    keys.one_of("pack_dtype", ("int32",), "int32")
    keys.flag("zero_point", True)  # the file holds zero points either way, then 8 each
    keys.names("modules_to_not_convert")
    keys.absent("desc_act", reason="AWQ has no act-order: false is accepted")
    keys.skip("sym", "backend", "do_fuse", "fuse_max_seq_len", "modules_to_fuse", *_GPTQ_MAKING)
    group_size = keys.group_size(default=keys.get("q_group_size", 128))
    return [(_ALL_LINEARS, WeightFormat("awq", bits, group_size=group_size, has_zeros=True))]


def _mxfp4(keys: _Keys) -> _Formats:
    """gpt-oss: the experts of a layer as blocks of 32 numbers of four bits, with a power of two for each."""
    keys.names("modules_to_not_convert")
    keys.skip("dequantize")
    return [(_ALL_LINEARS, WeightFormat("mxfp4-blocks", 4, is_float=True, group_size=32))]


def _compressed_tensors(keys: _Keys) -> _Formats:
    # Of a frozen one the tensors say whether they are compressed: else its scales are left over.
    keys.one_of("quantization_status", ("compressed", "frozen"), "compressed")
    keys.skip("global_compression_ratio", "version")
    keys.names("ignore")
    keys.absent("kv_cache_scheme", reason="KV with scales from the file is not supported: null is accepted")
    keys.absent("transform_config", "moe_sparsity_config", reason="it changes what linears compute: {} is accepted")
    sparsity = keys.get("sparsity_config", {})
    if sparsity and sparsity.get("format", "dense") != "dense":
        raise keys.refusal("sparsity_config", sparsity, "files of sparse weights are not supported: {} is accepted")
    file_format = keys.get("format")
    groups = keys.get("config_groups", {})
    if not isinstance(groups, dict) or not groups or not all(isinstance(group, dict) for group in groups.values()):
        raise keys.refusal("config_groups", groups, "an object of groups, each with targets and weights, is needed")
    formats = []
    for name, stored in groups.items():
        group = _Keys(stored, f"{keys.path}.config_groups.{name}")
        inputs = group.get("input_activations", {})
        group.absent("output_activations", reason="quantised outputs are not supported: null is accepted")
        layout = group.get("format", file_format)
        targets = group.names("targets")
        weights = _Keys(group.get("weights", {}), f"{group.path}.weights")
        weight_format = _compressed(weights, layout, group)
        rounds = isinstance(inputs, dict) and all(inputs.get(key) == value for key, value in _INT8_INPUTS.items())
        formats.append((targets, replace(weight_format, rounds_inputs=rounds)))
        weights.finish()
        group.finish()
    return formats


# Inputs that are rounded to eight bits. All others stay in 16.
_INT8_INPUTS: Final = {"num_bits": 8, "type": "int", "dynamic": True, "strategy": "token", "symmetric": True}

_INT_LAYOUTS: Final = {"pack-quantized": "packed", "int-quantized": "naive", "naive-quantized": "naive"}
_FLOAT_LAYOUTS: Final = {
    "float-quantized": "naive",
    "naive-quantized": "naive",
    "mxfp4-pack-quantized": "mxfp4-packed",
}


def _compressed(keys: _Keys, layout: Any, group: _Keys) -> WeightFormat:
    """The weights of a group, stored in `layout`."""
    is_float = keys.one_of("type", ("int", "float"), "int") == "float"
    layouts: Mapping[str, Any] = _FLOAT_LAYOUTS if is_float else _INT_LAYOUTS
    if layout not in layouts:
        advice = f"; of NVFP4 {_AS_PUBLISHED}" if "nvfp4" in str(layout) else ""
        kind = "float" if is_float else "int"
        raise group.refusal("format", layout, f"for weights of type {kind} {', '.join(layouts)} are accepted{advice}")
    stored = layouts[layout]
    accepted = (4,) if stored == "mxfp4-packed" else (8,) if stored == "naive" else (4, 8)
    bits = keys.one_of("num_bits", accepted, 8)
    keys.skip("observer", "observer_kwargs", "dynamic", "scale_dtype", "zp_dtype")
    symmetric = keys.flag("symmetric", True)
    if is_float and not symmetric:
        raise keys.refusal("symmetric", symmetric, "floats have no zero points: true is accepted")
    strategy = keys.one_of("strategy", ("tensor", "channel", "group", "block"), "tensor")
    actorder = keys.one_of("actorder", (False, "weight", "static", "group", "dynamic"), False)
    block = keys.block("block_structure")
    group_size = keys.group_size(default=None)
    if (strategy == "group") != (group_size is not None):
        raise keys.refusal(
            "group_size", group_size, f"strategy = {strategy!r} needs {'one' if strategy == 'group' else 'none'}"
        )
    if stored == "mxfp4-packed" and group_size != 32:
        raise keys.refusal("group_size", group_size, "MXFP4 has groups of 32")
    if strategy == "block" and (block is None or stored == "packed"):
        raise keys.refusal("block_structure", block, "blocks, as [128, 128], are for weights that are not packed")
    return WeightFormat(
        *(stored, bits, is_float, group_size, block if strategy == "block" else None),
        per_tensor=strategy == "tensor",
        has_zeros=not symmetric,
        is_reordered=actorder in ("group", "dynamic"),
    )


_READERS: Final = {
    "fp8": _fp8,
    "compressed-tensors": _compressed_tensors,
    "gptq": _gptq,
    "awq": _awq,
    "mxfp4": _mxfp4,
}
