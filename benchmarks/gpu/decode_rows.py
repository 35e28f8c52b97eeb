"""Decode steps of Llama-3-8B, explained: the floor by component beside what the profiler saw; two layers against 32."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

import torch

from motet.benchmarks.gpu.attention_rows import PagedCase
from motet.benchmarks.gpu.engine_bench import DRY_SIZE, FULL_SIZE, TINY, Bench, Size
from motet.benchmarks.gpu.lora_rows import GROUPS, LLAMA, LoraCase
from motet.benchmarks.gpu.lora_rows import TINY as TINY_SIDES
from motet.benchmarks.gpu.machine import Machine, Row
from motet.benchmarks.gpu.roofline import explained, num_launches, table
from motet.benchmarks.gpu.step_profile import StepProfile
from motet.kernels.backend import Kernels, choose_kernels, with_float8_weights
from motet.kernels.lora import LoraSegment
from motet.workers.costs.devices import DEVICES, Device

_TIMED, _WATCHED = 10, 8  # decode steps, one after the other
_DRY_TIMED = _DRY_WATCHED = 1
_DRY_LIMITS = DEVICES["H100 SXM"]  # where nothing is measured
Record = dict[str, Any]


def decode_size(num_sequences: int, is_dry: bool, **changed: Any) -> Size:
    """Of sequences with 1,024 tokens each, on the base and on 64 adapters. `changed`: other fields of `Size`.

    All of them still decode when the last prompt is computed, and for as long as it takes to watch them.
    """
    if is_dry:
        size = replace(DRY_SIZE, num_sequences=min(num_sequences, 3))
    else:
        size = replace(FULL_SIZE, num_sequences=num_sequences, adapters=(0, 64), pool_bytes=48 << 30)
    size = replace(size, **changed)
    num_prompt_steps = -(-sum(size.contexts) // (size.max_tokens - size.num_sequences))
    return replace(size, num_steps=num_prompt_steps + (_DRY_TIMED + _DRY_WATCHED if is_dry else _TIMED + _WATCHED) + 4)


def time_decodes(machine: Machine, kernels: Kernels | None, num_sequences: int) -> Iterator[Record]:
    """A step without and with adapters. `kernels`: None: the best there are."""
    yield from _explained(machine, kernels, decode_size(num_sequences, machine.is_dry), f"B {num_sequences}")


def time_float8_decodes(machine: Machine, kernels: Kernels | None, num_sequences: int) -> Iterator[Record]:
    """The same with weights of eight bits in the layers' linears, where the GPU has products of them."""
    if torch.cuda.get_device_capability(machine.device)[0] < 9:
        yield {"kind": "fact", "name": "float8", "value": "needs compute capability 9.0"}
        return
    chosen = with_float8_weights(kernels or choose_kernels(machine.device, machine.dtype, 1))
    size = decode_size(num_sequences, machine.is_dry)
    yield from _explained(machine, chosen, size, f"B {num_sequences}, float8 weights")


QWEN3_5_9B = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "vocab_size": 248320,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 32,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
_TINY_HYBRID = TINY | {
    "architectures": ["Qwen3_5ForCausalLM"],
    "head_dim": 16,
    "layer_types": ["linear_attention", "full_attention"],
    **{"linear_num_key_heads": 1, "linear_num_value_heads": 2},
    **{"linear_key_head_dim": 8, "linear_value_head_dim": 8},
}


def time_hybrid_decodes(machine: Machine, kernels: Kernels | None, num_sequences: int) -> Iterator[Record]:
    """A step of a base of which most layers have a recurrent state in place of attention."""
    config = _TINY_HYBRID if machine.is_dry else QWEN3_5_9B
    size = decode_size(num_sequences, machine.is_dry, config=config)
    yield from _explained(machine, kernels, size, f"B {num_sequences}, Qwen3.5-9B")


def time_long_beside_short(machine: Machine, kernels: Kernels | None) -> Iterator[Record]:
    """One sequence of 128k tokens beside 63 of 1,024: attention alone, then the whole step."""
    chosen = kernels or choose_kernels(machine.device, machine.dtype, 1)
    contexts = (60, 20, 20) if machine.is_dry else (131072, *(1024,) * 63)
    if not machine.is_dry:
        for name, lengths in (("128k beside 63 of 1k", contexts), ("the same keys, all alike", (3056,) * 64)):
            case = PagedCase(machine, [(length, 1) for length in lengths], 32, 8, 128)
            calls = [lambda i=i, case=case: _attend(chosen, case, i) for i in range(2)]
            floor_s = machine.floor_s(sum(lengths) * 2 * 8 * 128 * case.pool.element_size())
            yield Row("decode attention", name, time_s=machine.time_s(calls), floor_s=floor_s).record
            del case, calls
    config = (TINY if machine.is_dry else FULL_SIZE.config) | {"max_position_embeddings": max(contexts) + 256}
    size = decode_size(
        len(contexts), machine.is_dry, config=config, longest=contexts[0], context=contexts[1], adapters=(0,)
    )
    yield from _explained(machine, kernels, size, f"{contexts[0]} tokens beside {len(contexts) - 1} of {contexts[1]}")


def time_layers(machine: Machine, kernels: Kernels | None) -> Iterator[Record]:
    """Two layers against 32: what a page of all layers costs a kernel that reads one, and what a step costs besides.

    One layer's part of a page of 32 layers is a 32nd of it, so that a kernel's reads are spread over 32 times the
    address space: more than the TLB reaches, perhaps. The same reads from pages of two layers show whether that costs.
    """
    chosen = kernels or choose_kernels(machine.device, machine.dtype, 1)
    count, context = (2, 20) if machine.is_dry else (64, 1024)
    adapters = 2 if machine.is_dry else 64
    for layers in (2, 4 if machine.is_dry else 32):
        case = PagedCase(machine, [(context, 1)] * count, 4, 2, 64, layers) if machine.is_dry else None
        case = case or PagedCase(machine, [(context, 1)] * count, 32, 8, 128, layers)
        calls = [lambda i=i, case=case: _attend(chosen, case, i) for i in range(2)]
        floor_s = machine.floor_s(count * context * 2 * 8 * 128 * case.pool.element_size())
        what = f"pages of {layers} layers"
        yield Row("decode attention", what, time_s=machine.time_s(calls), floor_s=floor_s).record | {
            "num_layers": layers
        }
        del case, calls
        lora = LoraCase(machine, [16] * adapters, TINY_SIDES if machine.is_dry else LLAMA, layers, 7)
        yield _lora_row(machine, chosen, lora, what).record | {"num_layers": layers}
        del lora
    base = decode_size(64, machine.is_dry).config | {"num_hidden_layers": 2}
    small = {} if machine.is_dry else {"pool_bytes": 4 << 30, "host_bytes": 1 << 30}
    size = decode_size(64, machine.is_dry, config=base, adapters=(0,), **small)
    yield from _explained(machine, kernels, size, "2 layers, B 64")


def _explained(machine: Machine, kernels: Kernels | None, size: Size, case: str) -> Iterator[Record]:
    """A step's time, its components and its kernels. The time is of the steps before those that are watched."""
    bench = Bench(machine, size, kernels or choose_kernels(machine.device, machine.dtype, 1))
    for num_adapters in size.adapters:
        timed, watched = (_DRY_TIMED, _DRY_WATCHED) if machine.is_dry else (_TIMED, _WATCHED)
        profile = StepProfile(timed, watched, on_gpu=not machine.is_dry)
        bench.bring_adapters(num_adapters)
        served = bench.serve(num_adapters, profile)
        step_s = None if machine.is_dry else statistics.median(served.steps_s[:timed])
        limits: Device = machine.limits or _DRY_LIMITS
        kernels_seen = profile.kernels()
        lines = explained(bench.floor(num_adapters, limits), step_s, kernels_seen)
        what = f"{case}, {num_adapters} adapters"
        print(f"\n{what}\n{table(lines, step_s)}", flush=True)
        yield {
            "kind": "step",
            "case": what,
            "step_s": step_s,
            "lines": [asdict(line) for line in lines],
            "launches": sum(kernel.launches for kernel in kernels_seen),
            "expected_launches": num_launches(bench.model, num_adapters > 0, bench.weights_in_float8),
            "kernels": [asdict(kernel) for kernel in kernels_seen[:20]],
        }
    bench.engine.close()


def _attend(kernels: Kernels, case: PagedCase, layer: int) -> torch.Tensor:
    return kernels.paged_attention(case.q, case.pool[:, layer], case.batch, case.head_dim**-0.5, None)


def _lora_row(machine: Machine, kernels: Kernels, case: LoraCase, what: str) -> Row:
    """q, k and v of one row for each adapter."""
    count, modules = len(case.adapters), GROUPS["qkv"]
    num_in, num_out = case.sides[modules[0]][0], sum(case.sides[module][1] for module in modules)
    segments = [LoraSegment(i, i + 1, adapter) for i, adapter in enumerate(case.adapters)]
    batch = kernels.lora.prepare(segments, case.geometry, machine.device)
    x, y = (torch.randn(count, width, dtype=machine.dtype, device=machine.device) for width in (num_in, num_out))

    def call(layer: int) -> None:
        kernels.lora.add(y, x, case.pool, layer, batch, modules)

    num_bytes = 16 * count * sum(sum(case.sides[module]) for module in modules) * x.element_size()
    time_s = machine.time_s([lambda layer=layer: call(layer) for layer in range(2)])  # type: ignore[misc]
    return Row("LoRA of q, k, v", what, time_s=time_s, floor_s=machine.floor_s(num_bytes))
