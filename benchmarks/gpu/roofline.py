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

    _LINK = tempfile.TemporaryDirectory(prefix="motet-bench-")
    make_importable(Path(_LINK.name))
from motet.workers.costs.devices import DEVICES, Device
from motet.workers.costs.operations import Formats, StepBatch, step_operations

if TYPE_CHECKING:
    from motet.workers.models.config import ModelConfig

# Of a layer: two norms, four products, rotary embedding with the write of KV, attention and its combination of splits,
# the activation; with a recurrent state in place of attention the convolution, the state and the gated norm. An adapter
# adds a shrink and an expand for each of the four products.
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
    """`components`: weights, KV, adapters, launches, and of a base with recurrent states these, in this order."""

    components: tuple[Component, ...]

    @property
    def seconds(self) -> float:
        return sum(component.floor_s for component in self.components)

    @property
    def num_bytes(self) -> int:
        return sum(component.num_bytes for component in self.components)


def roofline(model: ModelConfig, step: DecodeStep, limits: Device) -> Floor:
    """The floor of a decode step on one device. Raises ValueError for a model with experts.

    Which experts a batch takes decides what is read, and no batch says so before it runs.
    """
    if model.experts is not None:
        raise ValueError("a model with experts has no floor that is known before a batch chooses its experts")
    batch = StepBatch(step.contexts, num_adapters=step.num_adapters, rank=step.rank)
    formats = Formats(step.element_bytes, step.weights_in_float8, step.kv_in_float8)
    operations = {operation.name: operation for operation in step_operations(model, batch, formats=formats)}

    def read(name: str, *parts: str) -> Component:
        """What a layer hands on is not counted; products take their time, too."""
        read_bytes = int(sum(operations[part].read_bytes for part in parts))
        products_s = sum(operations[part].times_s(limits)[0] for part in parts) if name == "weights" else 0.0
        return Component(name, read_bytes, max(read_bytes / limits.bytes_per_s, products_s))

    launches = num_launches(model, step.num_adapters > 0, step.weights_in_float8)
    has_states = model.recurrent is not None
    return Floor(
        (
            read("weights", "KQV", "O", "UG", "D", "head", *(["state inputs", "state output"] if has_states else [])),
            read("KV", "decode attention"),
            read("adapters", *(["LoRA"] if step.num_adapters else [])),
            Component("launches", 0, launches * limits.launch_s),
            *([read("states", "recurrence")] if has_states else []),
        )
    )


def num_launches(model: ModelConfig, adapters: bool, weights_in_float8: bool = False) -> int:
    """Kernels of a decode step, with one for each operation that the product has."""
    layer = _LAUNCHES_A_LAYER + _LAUNCHES_OF_ADAPTERS * adapters + _LAUNCHES_OF_FLOAT8 * weights_in_float8
    layer += 2 * model.qk_norm + 2 * (model.family.post_norms is not None)
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
    "states": ("convolution_kernel", "recurrence_kernel", "gated_norm_kernel"),
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
    parser.add_argument("--device", choices=DEVICES, default="H100 SXM", help="whose data sheet is taken")
    parser.add_argument("--batch", type=int, default=64, help="sequences")
    parser.add_argument("--context", type=int, default=1024, help="tokens of each of them")
    parser.add_argument("--adapters", type=int, default=64, help="different ones in the batch")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--weights-dtype", choices=("dtype", "float8"), default="dtype", help="of the layers' linears")
    parser.add_argument("--kv-dtype", choices=("dtype", "float8"), default="dtype")
    arguments = parser.parse_args()
    from motet.benchmarks.gpu.engine_bench import FULL_SIZE, model_of

    contexts = (arguments.context,) * arguments.batch
    in_float8 = {
        "weights_in_float8": arguments.weights_dtype == "float8",
        "kv_in_float8": arguments.kv_dtype == "float8",
    }
    step = DecodeStep(contexts, arguments.adapters, arguments.rank, **in_float8)
    floor = roofline(model_of(FULL_SIZE), step, DEVICES[arguments.device])
    print(table(explained(floor, None, ())))
    gigabytes = ", ".join(f"{part.name} {part.num_bytes / 1e9:.2f} GB" for part in floor.components if part.num_bytes)
    print(f"\n{arguments.device}, from data sheets: {gigabytes}")


if __name__ == "__main__":
    main()
