"""The least time of a decode step, by what it must read and launch, and measured times beside it.

`python benchmarks/gpu/roofline.py` prints the floor of Llama-3-8B for a batch; no GPU is needed. The model is simple:
every weight, every key and value and every adapter of the batch is read from the device's memory once, the kernels run
one after the other, and what a layer hands on to the next one stays in the cache. A batch so large that products take
longer than reading their weights is counted by its products.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if __name__ == "__main__":
    from run import make_importable  # type: ignore[import-not-found]  # it makes motet importable
if TYPE_CHECKING:
    from motet.workers.models.config import ModelConfig

LAUNCH_S = 1e-6  # an assumption, not measured: between two kernels of a CUDA graph on Hopper


@dataclass(frozen=True)
class DeviceLimits:
    name: str
    bytes_per_s: float  # of the device's memory
    flops_per_s: float  # of dense bfloat16 matrix products
    launch_s: float = LAUNCH_S  # from one kernel of a CUDA graph to the next


# What NVIDIA's data sheets state: nothing reaches it. A large copy reaches nine tenths of the bandwidth or a little
# more, so that floors by a measured copy (`Machine.find`) are higher by as much.
DATA_SHEETS = {
    "A100 SXM 80GB": DeviceLimits("A100 SXM 80GB", 2.039e12, 312e12),
    "H100 PCIe": DeviceLimits("H100 PCIe", 2.0e12, 756e12),
    "H100 SXM": DeviceLimits("H100 SXM", 3.35e12, 989e12),
    "H200": DeviceLimits("H200", 4.8e12, 989e12),
}

# Of a layer: two norms, four products, rotary embedding with the write of KV, attention and its combination of splits,
# the activation. An adapter adds a shrink and an expand for each of the four products.
_LAUNCHES_A_LAYER, _LAUNCHES_OF_ADAPTERS = 10, 8
_LAUNCHES_OF_FLOAT8 = 4  # the inputs of each product are quantised
_OTHER_LAUNCHES = 4  # embedding, last norm, head, logits to float32


@dataclass(frozen=True)
class DecodeStep:
    """One token for each sequence. `num_adapters`: different ones in the batch, of `rank` on every module."""

    contexts: tuple[int, ...]  # tokens that each sequence sees, its new one included
    num_adapters: int = 0
    rank: int = 16
    element_bytes: int = 2
    weights_in_float8: bool = False  # those of the layers' linears
    kv_in_float8: bool = False


@dataclass(frozen=True)
class Component:
    name: str
    num_bytes: int
    floor_s: float


@dataclass(frozen=True)
class Floor:
    """`components`: weights, KV, adapters, launches, in this order."""

    components: tuple[Component, ...]

    @property
    def seconds(self) -> float:
        return sum(component.floor_s for component in self.components)

    @property
    def num_bytes(self) -> int:
        return sum(component.num_bytes for component in self.components)


def roofline(model: ModelConfig, step: DecodeStep, limits: DeviceLimits) -> Floor:
    """The floor of a decode step on one device. Raises ValueError for a model with experts.

    Which experts a batch takes decides what is read, and no batch says so before it runs.
    """
    if model.experts is not None:
        raise ValueError("a model with experts has no floor that is known before a batch chooses its experts")
    sides = model.shape.modules.values()
    linears = model.num_layers * sum(num_in * num_out for num_in, num_out in sides)
    head = model.vocab_size * model.hidden_size  # of the embedding only the batch's rows are read
    weights_bytes = (linears + head) * step.element_bytes
    products_s = 2 * len(step.contexts) * (linears + head) / limits.flops_per_s
    if step.weights_in_float8:  # with a scale in float32 for each output, and products at twice the rate
        scales = model.num_layers * sum(num_out for _, num_out in sides)
        weights_bytes = linears + 4 * scales + head * step.element_bytes
        products_s = 2 * len(step.contexts) * (linears / 2 + head) / limits.flops_per_s
    token = 2 * model.num_kv_heads * model.head_dim * step.element_bytes  # keys and values of a layer
    if step.kv_in_float8:  # with a scale in float32 for each of them
        token = 2 * model.num_kv_heads * (model.head_dim + 4)
    kv = token * sum(min(context, window or context) for window in model.sliding_windows for context in step.contexts)
    adapter = model.num_layers * step.rank * sum(num_in + num_out for num_in, num_out in sides)

    def read(name: str, num_bytes: int, at_least_s: float = 0.0) -> Component:
        return Component(name, num_bytes, max(num_bytes / limits.bytes_per_s, at_least_s))

    launches = num_launches(model, step.num_adapters > 0, step.weights_in_float8)
    return Floor(
        (
            read("weights", weights_bytes, products_s),
            read("KV", kv),
            read("adapters", step.num_adapters * adapter * step.element_bytes),
            Component("launches", 0, launches * limits.launch_s),
        )
    )


def num_launches(model: ModelConfig, adapters: bool, weights_in_float8: bool = False) -> int:
    """Kernels of a decode step, with one for each operation that the product has."""
    layer = _LAUNCHES_A_LAYER + _LAUNCHES_OF_ADAPTERS * adapters + _LAUNCHES_OF_FLOAT8 * weights_in_float8
    layer += 2 * model.family.qk_norm + 2 * model.family.post_norms
    return model.num_layers * layer + _OTHER_LAUNCHES


@dataclass(frozen=True)
class KernelTime:
    """Of one kernel in one step, as the profiler saw it."""

    name: str
    launches: float
    seconds: float


@dataclass(frozen=True)
class Line:
    """A component of a step: the least it can take, and what it took. None: it was not measured."""

    component: str
    floor_s: float
    measured_s: float | None

    @property
    def lost_s(self) -> float:
        return 0.0 if self.measured_s is None else self.measured_s - self.floor_s


_KERNELS_OF = {  # parts of names, in lower case; the first component with one that fits
    "adapters": ("shrink_kernel", "expand_kernel"),
    "KV": ("decode_kernel", "combine_kernel", "chunk_kernel", "flash", "fmha"),
    "weights": ("gemm", "gemv", "cutlass", "nvjet", "cublas", "xmma", "splitk", "grouped_linear", "quantise"),
}
OTHER_KERNELS = "other kernels"


def component_of(kernel: str) -> str:
    """Which component of the floor a kernel of this name belongs to; `OTHER_KERNELS`: none."""
    name = kernel.lower()
    return next((what for what, parts in _KERNELS_OF.items() if any(part in name for part in parts)), OTHER_KERNELS)


def explained(floor: Floor, step_s: float | None, kernels: Sequence[KernelTime]) -> list[Line]:
    """Each component's floor beside its measured time; with what no component owns, the lines sum up to `step_s`.

    `kernels`: of one step; empty: only the whole step was timed. What no kernel ran in is the launches' line: the
    gaps between the kernels, and the device's waiting for the host.
    """
    if step_s is None or not kernels:
        return [Line(component.name, component.floor_s, None) for component in floor.components]
    taken = dict.fromkeys((*_KERNELS_OF, OTHER_KERNELS), 0.0)
    for kernel in kernels:
        taken[component_of(kernel.name)] += kernel.seconds
    taken["launches"] = step_s - sum(taken.values())
    lines = [Line(component.name, component.floor_s, taken[component.name]) for component in floor.components]
    return [*lines, Line(OTHER_KERNELS, 0.0, taken[OTHER_KERNELS])]


def table(lines: Sequence[Line], step_s: float | None = None) -> str:
    """The lines in Markdown, in milliseconds, and their sums."""
    rows = ["| component | floor ms | measured ms | lost ms |", "| --- | ---: | ---: | ---: |"]
    total = Line("a step", sum(line.floor_s for line in lines), step_s)
    for line in (*lines, total):
        measured = (
            ("–", "–") if line.measured_s is None else (f"{line.measured_s * 1e3:.2f}", f"{line.lost_s * 1e3:.2f}")
        )
        rows.append(f"| {line.component} | {line.floor_s * 1e3:.2f} | {measured[0]} | {measured[1]} |")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description="The floor of a decode step of Llama-3-8B in bfloat16.")
    parser.add_argument("--device", choices=DATA_SHEETS, default="H100 SXM", help="whose data sheet is taken")
    parser.add_argument("--batch", type=int, default=64, help="sequences")
    parser.add_argument("--context", type=int, default=1024, help="tokens of each of them")
    parser.add_argument("--adapters", type=int, default=64, help="different ones in the batch")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--weights-dtype", choices=("dtype", "float8"), default="dtype", help="of the layers' linears")
    parser.add_argument("--kv-dtype", choices=("dtype", "float8"), default="dtype")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="motet-bench-") as folder:
        make_importable(Path(folder))
        from motet.benchmarks.gpu.engine_bench import FULL_SIZE, model_of

        contexts = (arguments.context,) * arguments.batch
        in_float8 = {
            "weights_in_float8": arguments.weights_dtype == "float8",
            "kv_in_float8": arguments.kv_dtype == "float8",
        }
        step = DecodeStep(contexts, arguments.adapters, arguments.rank, **in_float8)
        floor = roofline(model_of(FULL_SIZE), step, DATA_SHEETS[arguments.device])
    print(table(explained(floor, None, ())))
    gigabytes = ", ".join(f"{part.name} {part.num_bytes / 1e9:.2f} GB" for part in floor.components if part.num_bytes)
    print(f"\n{arguments.device}, from data sheets: {gigabytes}")


if __name__ == "__main__":
    main()
