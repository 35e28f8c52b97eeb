"""Which kernels compute each operation, chosen once at start.

There are three sets: "native" (C++, for CPUs), "triton" (for NVIDIA GPUs) and the plain twins, which are written in
plain torch, compute everything on any device, and are what the other two are tested against. `motet status` and the
logs call the plain twins "torch", after the library that computes them.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import linear

from . import norms, pages
from .attention import KVWriter, PagedAttention
from .expert_lora import CapturableExpertLora, ExpertLoraKernels
from .experts import ExpertGroups, ExpertKernels, ExpertWeight
from .float8 import Float8Kernels
from .gpu.flash_attention import FlashAttention, FlashPackage, find_flash_attention
from .lora import CapturableLora, LoraKernels
from .model_ends import EndKernels, PlainEnds
from .native import onednn_linear
from .native.attention import MOST_GROUPED, NativeAttention
from .native.build import NativeUnavailable, load_library
from .native.experts import NativeExperts
from .native.linear import NativeLinear
from .native.lora import NativeEnds, NativeLora, NativeOutputs
from .native.quantised_linear import NativeQuantised
from .native.recurrence import NativeRecurrence
from .native.rows import NativeRows
from .native.sampling import NativeSampling
from .native.step import NativeStepKernels
from .output_vectors import OutputKernels, PlainOutputs
from .plain import attention as plain_attention
from .plain import float8_kv as plain_float8_kv
from .plain.expert_lora import HostExpertLora
from .plain.experts import PlainExperts
from .plain.float8 import PlainFloat8
from .plain.lora import PlainLora
from .plain.quantised import PlainQuantised
from .plain.recurrence import recur as plain_recur
from .plain.sampling import PlainSampling
from .quantised import QuantisedKernels
from .recurrence import RecurrentKernel
from .sampling import SamplingKernels
from .step import Heads, StepKernels

log = logging.getLogger(__name__)

LinearWeight = Any  # a weight `[out, in]` as `pack_linear` laid it out; opaque to the caller
PackLinear = Callable[[torch.Tensor], LinearWeight]
PackExperts = Callable[[torch.Tensor], ExpertWeight]
Linear = Callable[[torch.Tensor, LinearWeight, torch.Tensor | None], torch.Tensor]
AddNorm = Callable[[torch.Tensor, torch.Tensor | None, torch.Tensor, float], tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class Kernels:
    """One function or object for each operation. Protocols and plain twins in this folder state the contracts."""

    name: str  # of the set that most operations come from: "native", "triton" or "torch"
    pack_linear: PackLinear  # called once for each weight
    linear: Linear  # x weightᵀ + bias, `[rows, out]` of x `[rows, in]`
    rms_norm: Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]
    add_rms_norm: AddNorm  # see `norms.add_rms_norm`
    add_layer_norm: AddNorm
    gated: Callable[[torch.Tensor, norms.Activation], torch.Tensor]  # see `norms.gated`
    multiply_gate: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # see `norms.multiply_gate`
    recur: RecurrentKernel
    write_kv: KVWriter
    paged_attention: PagedAttention
    lora: LoraKernels
    pack_experts: PackExperts  # called once for each weight `[num_experts, out, in]`
    experts: ExpertKernels
    expert_lora: ExpertLoraKernels  # makes batches of `lora`
    sampling: SamplingKernels
    read_pages: Callable[[torch.Tensor, Sequence[int]], torch.Tensor]
    write_pages: Callable[[torch.Tensor, Sequence[int], torch.Tensor], None]
    # The same object as `lora` where CUDA graphs can record a step of decodes: launches then depend on tensors alone.
    # None: they cannot.
    capturable_lora: CapturableLora | None = None
    capturable_expert_lora: CapturableExpertLora | None = None  # likewise, of `expert_lora`
    outputs: OutputKernels = field(default_factory=PlainOutputs)
    ends: EndKernels = field(default_factory=PlainEnds)
    compiles: bool = False  # for shapes when they first occur: a worker runs all kinds of steps before it is ready
    libraries: Mapping[str, str] = field(default_factory=dict)  # operations that another library computes: its name
    library: ctypes.CDLL | None = None  # of the native kernels
    # `linear` without a bias, in float32, for logits; None: what `linear` gives is converted.
    linear_to_floats: Callable[[torch.Tensor, LinearWeight], torch.Tensor] | None = None
    step: StepKernels | None = None  # carry out a whole step in one call; None: nothing does
    float8: Float8Kernels | None = None  # of the linears of layers; None: these are like all others
    quantised: QuantisedKernels | None = None  # of those whose weights stay in four or eight bits; None: none does

    def add_norm(self, is_centred: bool) -> AddNorm:
        return self.add_layer_norm if is_centred else self.add_rms_norm

    @cached_property
    def layer_linear(self) -> Linear:
        """The linear of a layer's own projections, of a weight that was packed for it."""
        if self.float8 is not None:
            return self.float8.linear
        return self.linear if self.quantised is None else self._linear_of_its_kind

    def expert_linear(
        self, x: torch.Tensor, weight: ExpertWeight, groups: ExpertGroups, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """`ExpertKernels.linear` of a weight that was packed for `experts` or by `quantised`."""
        if self.quantised is not None and self.quantised.takes(weight):
            return self.quantised.expert_linear(x, weight, groups, bias)
        return self.experts.linear(x, weight, groups, bias)

    def _linear_of_its_kind(self, x: torch.Tensor, weight: LinearWeight, bias: torch.Tensor | None) -> torch.Tensor:
        assert self.quantised is not None
        return (self.quantised.linear if self.quantised.takes(weight) else self.linear)(x, weight, bias)

    def is_native(self, heads: Heads) -> bool:
        """Whether native kernels compute all that takes long, of layers with such heads, on threads of their own.

        Else torch's threads compute some of it.
        """
        if self.name != "native" or {"linear", "layers' linears", "attention"} & self.libraries.keys():
            return False
        if heads.num_kv_heads == 1:  # its group is computed in several
            heads = replace(heads, num_heads=min(heads.num_heads, MOST_GROUPED))
        return self.step is not None and self.step.why_not([heads]) is None

    @property
    def choice(self) -> str:
        """What computes each operation, in one line for `motet status`: "native; linear by oneDNN"."""
        operations_of: dict[str, list[str]] = {}
        for operation, library in self.libraries.items():
            operations_of.setdefault(library, []).append(operation)
        exceptions = [f"{', '.join(operations)} by {library}" for library, operations in operations_of.items()]
        if self.quantised is not None and self.quantised.rounds:
            exceptions.append("layers' linears in int8")
        return "; ".join([self.name, *exceptions])


def plain_kernels() -> Kernels:
    """The plain twins, for any device."""
    lora = PlainLora()
    return Kernels(
        name="torch",
        pack_linear=identity,
        linear=linear,
        rms_norm=norms.rms_norm,
        add_rms_norm=norms.add_rms_norm,
        add_layer_norm=norms.add_layer_norm,
        gated=norms.gated,
        multiply_gate=norms.multiply_gate,
        recur=plain_recur,
        write_kv=plain_attention.write_kv,
        paged_attention=plain_attention.paged_attention,
        lora=lora,
        pack_experts=identity,
        experts=PlainExperts(),
        expert_lora=HostExpertLora(lora),
        sampling=PlainSampling(),
        read_pages=pages.read_pages,
        write_pages=pages.write_pages,
    )


def native_kernels(dtype: torch.dtype, num_threads: int, library: ctypes.CDLL) -> Kernels:
    """The C++ kernels, for CPUs, from the `library` that `load_library` returned; plain twins for the rest.

    Where oneDNN multiplies faster on this CPU, it computes linears, and the plain twins compute experts.
    """
    attention, rows = NativeAttention(library, dtype, num_threads), NativeRows(library, dtype, num_threads)
    lora = NativeLora(library, dtype, num_threads)
    native, libraries = NativeLinear(library, dtype, num_threads), {"page copies": "torch"}
    pack: PackLinear = native.pack
    multiply: Linear = native.linear
    native_experts = NativeExperts(library, native, num_threads)
    pack_experts: PackExperts = native_experts.pack
    experts: ExpertKernels = native_experts
    step: StepKernels | None = NativeStepKernels(library, dtype, num_threads)
    to_floats: Callable[[torch.Tensor, LinearWeight], torch.Tensor] | None = native.to_floats
    if not native.is_best and onednn_linear.can_pack(dtype):
        pack, multiply = onednn_linear.pack_linear, onednn_linear.linear
        pack_experts, experts, step, to_floats = identity, PlainExperts(), None, None
        libraries |= {"linear": "oneDNN", "experts": "torch"}
    return Kernels(
        name="native",
        pack_linear=pack,
        linear=multiply,
        rms_norm=rows.rms_norm,
        add_rms_norm=rows.add_rms_norm,
        add_layer_norm=rows.add_layer_norm,
        gated=rows.gated,
        multiply_gate=norms.multiply_gate,
        recur=NativeRecurrence(library, dtype, num_threads),
        write_kv=attention.write_kv,
        paged_attention=attention.paged_attention,
        lora=lora,
        pack_experts=pack_experts,
        experts=experts,
        expert_lora=HostExpertLora(lora),
        outputs=NativeOutputs(library, dtype, num_threads),
        ends=NativeEnds(library, dtype, num_threads),
        sampling=NativeSampling(library, num_threads),
        read_pages=pages.read_pages,
        write_pages=pages.write_pages,
        linear_to_floats=to_floats,
        step=step,
        libraries=libraries,
        library=library,
    )


def triton_kernels(device: torch.device, dtype: torch.dtype, flash: FlashPackage | None = None) -> Kernels:
    """The Triton kernels, for an NVIDIA GPU; cuBLAS for linears, plain twins for the rest.

    `flash` computes attention where it can; None: Triton always does. Raises ImportError if Triton is not installed.
    """
    # Imported here, because Triton is not installed everywhere and decides at its import whether to compile its kernels
    # or to interpret them.
    from .gpu import rows as triton_rows
    from .gpu.attention import TritonAttention
    from .gpu.expert_lora import TritonExpertLora
    from .gpu.experts import TritonExperts
    from .gpu.lora import TritonLora
    from .gpu.recurrence import TritonRecurrence

    attention, lora = TritonAttention(), TritonLora()
    expert_lora = TritonExpertLora(lora)
    on_gpu = device.type == "cuda"
    libraries = {
        "linear": "cuBLAS" if on_gpu else "torch",
        "draws": "torch",
        "page copies": "the copy engine" if on_gpu else "torch",
    }
    attend: PagedAttention = attention.paged_attention
    if flash is not None and dtype != torch.float32:  # FlashAttention has no float32
        attend, libraries["attention"] = FlashAttention(flash, attend).paged_attention, flash.name
    return Kernels(
        name="triton",
        pack_linear=identity,
        linear=linear,
        rms_norm=triton_rows.rms_norm,
        add_rms_norm=triton_rows.add_rms_norm,
        add_layer_norm=triton_rows.add_layer_norm,
        gated=triton_rows.gated,
        multiply_gate=norms.multiply_gate,
        recur=TritonRecurrence(),
        write_kv=attention.write_kv,
        paged_attention=attend,
        lora=lora,
        pack_experts=identity,
        experts=TritonExperts(),
        expert_lora=expert_lora,
        sampling=PlainSampling(),
        read_pages=pages.read_pages,
        write_pages=pages.copy_runs if on_gpu else pages.write_pages,
        capturable_lora=lora,
        capturable_expert_lora=expert_lora,
        compiles=on_gpu,
        libraries=libraries,
    )


def with_float8_weights(kernels: Kernels) -> Kernels:
    """The same with weights of eight bits for layers' linears: by cuBLAS on a GPU, elsewhere by the plain twin."""
    if kernels.name != "triton":
        return replace(
            kernels, float8=PlainFloat8(), libraries={**kernels.libraries, "layers' linears": "torch in float8"}
        )
    from .gpu.float8 import ScaledFloat8

    product = kernels.libraries["linear"]
    return replace(
        kernels, float8=ScaledFloat8(), libraries={**kernels.libraries, "layers' linears": f"{product} in float8"}
    )


def with_quantised_weights(kernels: Kernels, dtype: torch.dtype, num_threads: int, *, rounds: bool) -> Kernels:
    """The same, on a CPU, for layers' linears whose weights stay in four or eight bits.

    `rounds`: those of 16 or 32 bits are rounded to eight as they are loaded.
    """
    if kernels.library is None:
        return replace(kernels, quantised=PlainQuantised(dtype, rounds))
    return replace(kernels, quantised=NativeQuantised(kernels.library, dtype, num_threads, rounds))


def with_float8_kv(kernels: Kernels) -> Kernels:
    """The same for a pool whose KV has eight bits: attention by Triton on a GPU, elsewhere by the plain twin."""
    libraries = {operation: library for operation, library in kernels.libraries.items() if operation != "attention"}
    if kernels.name != "triton":
        write, attend = plain_float8_kv.write_kv, plain_float8_kv.paged_attention
        libraries["attention"] = "torch on KV in float8"
        return replace(kernels, write_kv=write, paged_attention=attend, libraries=libraries)
    from .gpu.attention import TritonAttention

    attention = TritonAttention()
    libraries["attention"] = "triton on KV in float8"
    return replace(kernels, write_kv=attention.write_kv, paged_attention=attention.paged_attention, libraries=libraries)


class FastKernelsUnavailable(ValueError):  # noqa: N818
    """Only the plain twins work here, and the caller does not want them; the message says why."""


def choose_kernels(
    device: torch.device,
    dtype: torch.dtype,
    num_threads: int,
    cache: Path | None = None,
    on_compile: Callable[[int, int], None] = lambda done, total: None,
    *,
    allow_plain: bool = True,
) -> Kernels:
    """The fastest kernels for this machine. Logs one warning that says what is lost where the plain twins serve.

    `cache`: the folder that keeps compiled kernels; None: `.cache/motet` in the user's home. `on_compile`: see
    `load_library`. `allow_plain`: the plain twins may serve; else raises FastKernelsUnavailable where nothing else can.
    """

    def plain(lost: str, problem: object) -> Kernels:
        if not allow_plain:
            raise FastKernelsUnavailable(f"only plain torch kernels are available, {lost}, and refused: {problem}")
        log.warning("plain torch kernels serve, %s: %s", lost, problem)
        return plain_kernels()

    if device.type == "cuda":
        try:
            return triton_kernels(device, dtype, find_flash_attention(torch.cuda.get_device_capability(device)))
        except ImportError as problem:
            return plain("several times slower", f"Triton cannot be imported: {problem}")
    if device.type != "cpu" or dtype not in (torch.float32, torch.bfloat16):
        return plain("several times slower", f"none is faster for {dtype} on {device.type}")
    try:
        return native_kernels(dtype, num_threads, load_library(cache, on_compile=on_compile))
    except NativeUnavailable as problem:
        return plain("with several times fewer tokens per second", problem)


def identity(weight: torch.Tensor) -> torch.Tensor:
    """The weight itself, for kernels that read torch's own layout."""
    return weight
