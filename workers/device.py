"""Which device a worker computes on."""

from __future__ import annotations

import torch

from .config import FLOAT32_ON_A_GPU, INT8_ON_A_GPU, Device, Float8Part, KVDtype, WeightsDtype, why_not_float8


def check_dtype(device: torch.device, dtype: torch.dtype) -> None:
    """Raises ValueError for a dtype that is not to be served there: float32 on a GPU."""
    if device.type == "cuda" and dtype == torch.float32:
        raise ValueError(FLOAT32_ON_A_GPU)


def check_weights_dtype(device: torch.device, weights_dtype: WeightsDtype) -> None:
    """Raises ValueError for weights that cannot be multiplied there."""
    setting = f"weights_dtype = {weights_dtype!r}"
    if weights_dtype == "float8":
        _check_float8(device, "weights", setting)
    elif weights_dtype == "int8" and device.type != "cpu":
        raise ValueError(f"{setting}: {INT8_ON_A_GPU}")


def check_kv_dtype(device: torch.device, kv_dtype: KVDtype) -> None:
    """Raises ValueError for KV that no kernel reads there."""
    if kv_dtype != "dtype":
        _check_float8(device, "KV", f"kv_dtype = {kv_dtype!r}")


def _check_float8(device: torch.device, part: Float8Part, setting: str) -> None:
    problem = why_not_float8(torch.cuda.get_device_capability(device) if device.type == "cuda" else None, part)
    if problem is not None:
        raise ValueError(f"{setting}: {problem}")


def resolve_device(name: Device) -> torch.device:
    """The device of that name; "auto" is an NVIDIA GPU where torch sees one, and the CPU elsewhere.

    A worker's GPU is the first that its process sees: Ray shows each worker its own. Raises ValueError if a GPU is
    requested and there is none.
    """
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        built = "is built without CUDA" if torch.version.cuda is None else f"is built for CUDA {torch.version.cuda}"
        raise ValueError(
            f"device = {name!r}: torch sees no NVIDIA GPU here (torch {torch.__version__} {built}); "
            "a GPU, its driver and a CUDA build of torch are needed, or device cpu"
        )
    return torch.device("cuda", 0)
