"""The limits of devices: what their makers' data sheets state. Nothing reaches them."""

from __future__ import annotations

from dataclasses import dataclass

LAUNCH_S = 1e-6  # an assumption, not measured: between two kernels of a CUDA graph on Hopper


@dataclass(frozen=True)
class Device:
    """`flops_per_s`: of dense 16-bit matrix products. A gang of several has each of these limits as often."""

    name: str
    flops_per_s: float
    bytes_per_s: float  # of the device's memory
    memory_bytes: float
    network_bytes_per_s: float | None = None  # that a device sends to those beside it; None: not known
    launch_s: float = LAUNCH_S  # from one kernel of a CUDA graph to the next
    efficiency: float | None = None  # time by these limits over motet's measured time; None: not measured


# The network is NVLink or Infinity Fabric in one direction, half of what data sheets state; of the H100 PCIe
# it is PCIe.
DEVICES = {
    device.name: device
    for device in (
        Device("V100 SXM", 125e12, 0.9e12, 32e9, 150e9),
        Device("A100 SXM 40GB", 312e12, 1.555e12, 40e9, 300e9),
        Device("A100 SXM 80GB", 312e12, 2.039e12, 80e9, 300e9),
        Device("H100 PCIe", 756e12, 2.0e12, 80e9, 64e9),
        # 0.60 to 0.71 in steps of Llama-3-8B with 1 to 256 sequences or full of prompts, with and without adapters; in
        # one of prompts with 64 adapters, which waits for the host, 0.41 (docs/benchmarks.md, On a GPU).
        Device("H100 SXM", 989e12, 3.35e12, 80e9, 450e9, efficiency=0.6),
        Device("H200", 989e12, 4.8e12, 141e9, 450e9),
        Device("B100", 1750e12, 8e12, 192e9, 900e9),
        Device("B200", 2250e12, 8e12, 192e9, 900e9),
        Device("B300", 2250e12, 8e12, 288e9, 900e9),
        Device("MI250", 362.1e12, 3.277e12, 128e9, 400e9),
        Device("MI300X", 1307.4e12, 5.3e12, 192e9, 448e9),
    )
}
