"""Checks NVIDIA's GPUs, as the driver and torch report them. torch is loaded in a separate process."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass

from ...workers.device_probe import has_driver
from ..byte_size import format_byte_size
from .finding import Finding, error, ok, warning

CHECK = "gpus"
TIMEOUT_S = 120.0  # torch may be read from a cold disk
QUERY = ("index", "uuid", "name", "driver_version", "memory.total", "memory.used", "mig.mode.current", "compute_mode")
PROBE_TORCH = """
import json, torch
nccl = torch.cuda.nccl.version() if torch.distributed.is_available() and torch.distributed.is_nccl_available() else None
names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
print(json.dumps({"cuda": torch.version.cuda, "names": names, "nccl": ".".join(map(str, nccl)) if nccl else None}))
"""
BUSY_SHARE = 0.1  # of a GPU's memory, taken by others


@dataclass(frozen=True, kw_only=True)
class Gpu:
    index: int
    name: str
    driver: str
    memory_bytes: int
    used_bytes: int
    has_mig: bool  # its MIG mode is on
    compute_mode: str


@dataclass(frozen=True, kw_only=True)
class GpuFacts:
    has_driver: bool
    gpus: tuple[Gpu, ...] = ()
    smi_problem: str = ""  # why nvidia-smi gave no answer
    num_mig_devices: int = 0
    torch_cuda: str | None = None  # the version of CUDA that torch was built with; None: it was built without
    torch_names: tuple[str, ...] = ()  # of the devices that torch sees
    torch_problem: str = ""
    nccl: str | None = None
    wanted_by_ray: int = 0  # GPUs that Ray counts on this node


def gather_gpus(wanted_by_ray: int = 0) -> GpuFacts:
    """Loads nothing, and takes no time, if there is no driver."""
    if not has_driver():
        return GpuFacts(has_driver=False, wanted_by_ray=wanted_by_ray)
    listed, problem = _run("nvidia-smi", f"--query-gpu={','.join(QUERY)}", "--format=csv,noheader,nounits")
    devices, _ = _run("nvidia-smi", "-L")
    answer, torch_problem = _run(sys.executable, "-P", "-c", PROBE_TORCH)
    try:
        facts = json.loads(answer.splitlines()[-1]) if answer else {}
    except ValueError:
        facts, torch_problem = {}, answer
    return GpuFacts(
        has_driver=True,
        gpus=parse_gpus(listed),
        smi_problem=problem,
        num_mig_devices=sum(line.strip().startswith("MIG ") for line in devices.splitlines()),
        torch_cuda=facts.get("cuda"),
        torch_names=tuple(facts.get("names", ())),
        torch_problem=torch_problem,
        nccl=facts.get("nccl"),
        wanted_by_ray=wanted_by_ray,
    )


def parse_gpus(listed: str) -> tuple[Gpu, ...]:
    """Parses the output of nvidia-smi for QUERY; lines of another form are skipped."""
    gpus = []
    for line in listed.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) != len(QUERY) or not cells[0].isdigit():
            continue
        index, _, name, driver, total, used, mig, mode = cells
        gpus.append(
            Gpu(
                index=int(index),
                name=name,
                driver=driver,
                memory_bytes=_mib(total),
                used_bytes=_mib(used),
                has_mig=mig == "Enabled",
                compute_mode=mode,
            )
        )
    return tuple(gpus)


def _mib(text: str) -> int:
    return int(text) << 20 if text.isdigit() else 0  # "[N/A]" if unknown


def _run(*command: str) -> tuple[str, str]:
    """Its output, and the reason if it failed."""
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as problem:
        return "", str(problem)
    if ran.returncode:
        lines = (ran.stderr.strip() or ran.stdout.strip() or f"status {ran.returncode}").splitlines()
        return "", lines[-1]
    return ran.stdout, ""


def check_gpus(facts: GpuFacts, *, tensor_parallel: int) -> list[Finding]:
    if not facts.has_driver:
        if facts.wanted_by_ray:
            return [
                error(
                    CHECK,
                    f"Ray counts {facts.wanted_by_ray} GPUs here, and there is no NVIDIA driver (libcuda.so.1)",
                    why="gangs that are placed here cannot start",
                    do="install the NVIDIA container toolkit, and set NVIDIA_DRIVER_CAPABILITIES=compute,utility in "
                    "the container (motet-cuda has it)",
                )
            ]
        return [ok(CHECK, "no NVIDIA driver: gangs compute on the CPU")]
    return [
        *_driver(facts),
        *_torch(facts, tensor_parallel),
        *(finding for gpu in facts.gpus for finding in _gpu(gpu, facts)),
    ]


def _driver(facts: GpuFacts) -> list[Finding]:
    if facts.gpus:
        names = Counter(gpu.name for gpu in facts.gpus)
        listed = ", ".join(f"{count} × {name}" for name, count in names.items())
        return [ok(CHECK, f"{listed}, driver {facts.gpus[0].driver}")]
    return [
        warning(
            CHECK,
            f"nvidia-smi shows no GPU: {facts.smi_problem or 'it lists none'}",
            why="GPUs, their memory and MIG could not be examined",
            do="set NVIDIA_DRIVER_CAPABILITIES=compute,utility, and nvidia.com/gpu in the container's limits",
        )
    ]


def _torch(facts: GpuFacts, tensor_parallel: int) -> list[Finding]:
    if not facts.torch_names:
        reason = facts.torch_problem or (
            "it is the build for CPUs" if facts.torch_cuda is None else f"built for CUDA {facts.torch_cuda}"
        )
        return [
            error(
                CHECK,
                f"torch sees no GPU: {reason}",
                why="gangs would compute on the CPU, or not start with --device cuda",
                do="use a torch built for CUDA (the image motet-cuda), a driver for its CUDA, and nvidia.com/gpu (or "
                "nvidia.com/mig-…) in the container's limits",
            )
        ]
    findings = [ok(CHECK, f"torch sees {len(facts.torch_names)}, with CUDA {facts.torch_cuda}, NCCL {facts.nccl}")]
    if tensor_parallel > 1 and facts.nccl is None:
        findings.append(
            error(
                CHECK,
                "torch has no NCCL",
                why=f"the {tensor_parallel} workers of a gang add up their shares with it",
                do="use a torch built for CUDA on Linux: the image motet-cuda",
            )
        )
    if tensor_parallel > 1 and facts.num_mig_devices:
        findings.append(
            error(
                CHECK,
                f"a gang of {tensor_parallel} workers on MIG slices",
                why="NCCL does not connect slices of one GPU",
                do="--tensor-parallel 1 on slices, or whole GPUs for gangs of several workers",
            )
        )
    return findings


def _gpu(gpu: Gpu, facts: GpuFacts) -> list[Finding]:
    findings = []
    if gpu.has_mig and not facts.num_mig_devices:
        findings.append(
            error(
                CHECK,
                f"GPU {gpu.index}: MIG is on, and no slice of it is visible",
                why="a GPU in this mode computes only on slices",
                do="use limits of nvidia.com/mig-… instead of nvidia.com/gpu, or run nvidia-smi -mig 0 on the node",
            )
        )
    if gpu.compute_mode not in ("Default", "[N/A]"):
        findings.append(
            warning(
                CHECK,
                f"GPU {gpu.index}: its compute mode is {gpu.compute_mode}",
                why="a new gang needs the GPU while the one that it replaces is still ending",
                do="run nvidia-smi -c DEFAULT on the node",
            )
        )
    if gpu.memory_bytes and gpu.used_bytes > BUSY_SHARE * gpu.memory_bytes:
        amounts = f"{format_byte_size(gpu.used_bytes)} of {format_byte_size(gpu.memory_bytes)}"
        findings.append(
            warning(
                CHECK,
                f"GPU {gpu.index}: {amounts} are already in use",
                why="if not by a gang of motet, as with time slicing, the pool may not fit",
                do="see nvidia-smi; lower --pool-bytes until all fit, or use MIG instead of time slicing",
            )
        )
    return findings
