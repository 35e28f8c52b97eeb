"""Whether this machine has the driver of an NVIDIA GPU, told without loading torch."""

from __future__ import annotations

from pathlib import Path

# The control devices of the driver: a workstation's or server's, that of the Windows subsystem, a Jetson's.
CONTROL_DEVICES = (Path("/dev/nvidiactl"), Path("/dev/dxg"), Path("/dev/nvhost-ctrl"))


def has_gpu_driver() -> bool:
    """False: torch sees no GPU here. True: torch knows."""
    return any(path.exists() for path in CONTROL_DEVICES)
