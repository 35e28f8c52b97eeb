"""What an upload takes: on disk, of a router's memory while it packs, of a gang's memory, and of a quota.

Two uploads: LoRA of rank 8 on one expert of one layer of a mixture of experts of Qwen3-30B's shape, and an ordinary one
of rank 16 on all projections of Llama-3.2-1B's shape. Memory is the growth of a child's peak. The last line is JSON.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from motet.adapters.adapter import BaseShape, ExpertShape
from motet.adapters.format.validation import validate
from motet.adapters.packing import layout as layouts
from motet.adapters.packing.layout import AdapterLayout
from motet.adapters.store.store import AdapterStore

GATE, UP, DOWN = "gate_proj", "up_proj", "down_proj"
SMALL_HOST_BYTES = 1 << 20


def moe(folder: Path) -> tuple[bytes, Path, AdapterLayout]:
    """One expert of one layer: config, tensors, and the layout of a gang of one worker."""
    hidden, width, block = 2048, 768, 16
    sides = {"q_proj": (hidden, 4096), "k_proj": (hidden, 512), "v_proj": (hidden, 512), "o_proj": (4096, hidden)}
    sides |= {"experts.gate_proj": (hidden, width), "experts.up_proj": (hidden, width)}
    sides |= {"experts.down_proj": (width, hidden)}
    names = {f"experts.{name}": name for name in (GATE, UP, DOWN)}
    shape = BaseShape(48, sides, ExpertShape(128, tuple(range(48)), "mlp", names))
    prefixes = {f"mlp.experts.5.{name}": sides[f"experts.{name}"] for name in (GATE, UP, DOWN)}
    config = {"r": 8, "target_modules": [f"experts.5.{name}" for name in (GATE, UP, DOWN)], "layers_to_transform": [7]}
    return (
        _write(folder, config, [7], prefixes),
        folder / "tensors",
        AdapterLayout(shape, block * 2 * 4 * 128, "bfloat16"),
    )


def dense(folder: Path) -> tuple[bytes, Path, AdapterLayout]:
    """All projections of all layers."""
    hidden, width, block = 2048, 8192, 16
    sides = {"q_proj": (hidden, hidden), "k_proj": (hidden, 512), "v_proj": (hidden, 512), "o_proj": (hidden, hidden)}
    sides |= {GATE: (hidden, width), UP: (hidden, width), DOWN: (width, hidden)}
    prefixes = {f"{'self_attn' if name[0] in 'qkvo' else 'mlp'}.{name}": of for name, of in sides.items()}
    config = {"r": 16, "target_modules": list(sides)}
    layout = AdapterLayout(BaseShape(16, sides), block * 2 * 8 * 64, "bfloat16")
    return _write(folder, config, range(16), prefixes), folder / "tensors", layout


UPLOADS: dict[str, Callable[[Path], tuple[bytes, Path, AdapterLayout]]] = {"moe": moe, "dense": dense}


def measure() -> dict[str, float]:
    """Bytes by upload and place, and the CPU seconds of packing and storing."""
    found: dict[str, float] = {}
    for name in UPLOADS:
        for part in ("put", "load"):
            child = subprocess.run(
                [sys.executable, __file__, name, part], check=True, stdout=subprocess.PIPE, text=True
            )
            found |= {f"{name}_{key}": value for key, value in json.loads(child.stdout).items()}
    return found


def _write(folder: Path, config: dict[str, Any], layers: Any, prefixes: dict[str, tuple[int, int]]) -> bytes:
    tensors = {}
    for layer in layers:
        for prefix, (num_in, num_out) in prefixes.items():
            path = f"base_model.model.model.layers.{layer}.{prefix}.lora_"
            tensors[f"{path}A.weight"] = torch.randn(config["r"], num_in).bfloat16()
            tensors[f"{path}B.weight"] = torch.randn(num_out, config["r"]).bfloat16()
    save_file(tensors, folder / "tensors")
    return json.dumps({"peft_type": "LORA", "lora_alpha": 16, **config}).encode()


def _put(name: str, folder: Path) -> dict[str, float]:
    config, tensors, layout = UPLOADS[name](folder)
    store = AdapterStore(folder / "store")
    started = time.process_time()
    peak = _Peak()
    content = validate(config, tensors, layout.shape)
    store.put(content, [layout])
    grown = peak.grown_bytes()
    cpu_s = time.process_time() - started
    (packed,) = (folder / "store").glob("*/*/*.packed")
    counted = content.num_bytes
    if hasattr(layouts, "packed_bytes"):
        counted += layouts.packed_bytes([layout], content.module_ranks)
    return {
        "uploaded_bytes": tensors.stat().st_size,
        "disk_bytes": sum(path.stat().st_size for path in packed.parent.iterdir()),
        "pool_pages": layout.num_pages(content.module_ranks),
        "router_peak_bytes": grown,
        "counted_bytes": counted,
        "put_cpu_s": round(cpu_s, 3),
    }


def _load(name: str, folder: Path) -> dict[str, float]:
    from motet.workers.memory.host_adapter_cache import HostAdapterCache

    config, tensors, layout = UPLOADS[name](folder)
    store = AdapterStore(folder / "store")
    content = validate(config, tensors, layout.shape)
    store.put(content, [layout])
    peak = _Peak()
    small = HostAdapterCache(store, layout, SMALL_HOST_BYTES)
    num_pages = layout.num_pages(content.module_ranks)
    start, has_parts = 0, hasattr(small, "part")
    while start < num_pages:
        part = small.part(start, num_pages) if has_parts else None
        pages = small.get(content.digest) if part is None else small.get_part(part, content.digest)
        start += len(pages)
    grown = peak.grown_bytes()
    cache = HostAdapterCache(store, layout, 4 << 30)
    cache.get(content.digest)
    return {"small_host_peak_bytes": grown, "host_cache_bytes": cache.num_bytes}


class _Peak:
    """The peak of this process' memory, anew from its making on."""

    def __init__(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")
        self._before = _status("VmRSS")

    def grown_bytes(self) -> int:
        return _status("VmHWM") - self._before


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{field}:"))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        with tempfile.TemporaryDirectory() as place:
            print(json.dumps({"put": _put, "load": _load}[sys.argv[2]](sys.argv[1], Path(place))))
    else:
        print(json.dumps(measure()))
