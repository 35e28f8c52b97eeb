"""Which device a worker computes on."""

from __future__ import annotations

import torch

from .config import FLOAT8_KV_ON_A_CPU, FLOAT8_ON_A_CPU, FLOAT32_ON_A_GPU, Device, KVDtype, WeightsDtype


def check_dtype(device: torch.device, dtype: torch.dtype) -> None:
    """Raises ValueError for a dtype that is not to be served there: float32 on a GPU."""
    if device.type == "cuda" and dtype == torch.float32:
        raise ValueError(FLOAT32_ON_A_GPU)


def check_weights_dtype(device: torch.device, weights_dtype: WeightsDtype) -> None:
    """Raises ValueError for weights that cannot be multiplied there."""
    if weights_dtype == "dtype":
        return
    if device.type != "cuda":
        raise ValueError(f"weights_dtype = {weights_dtype!r}: {FLOAT8_ON_A_CPU}")
    _check_capability(device, "weights_dtype", weights_dtype)


def check_kv_dtype(device: torch.device, kv_dtype: KVDtype) -> None:
    """Raises ValueError for KV that no kernel reads there."""
    if kv_dtype == "dtype":
        return
    if device.type != "cuda":
        raise ValueError(f"kv_dtype = {kv_dtype!r}: {FLOAT8_KV_ON_A_CPU}")
    _check_capability(device, "kv_dtype", kv_dtype)


def _check_capability(device: torch.device, setting: str, value: str) -> None:
    major, minor = torch.cuda.get_device_capability(device)
    if major < 9:  # no instructions for float8
        raise ValueError(
            f"{setting} = {value!r}: this GPU has the compute capability {major}.{minor}, and 9.0 or more is needed; "
            f"{setting} = 'dtype' is served"
        )


def resolve_device(name: Device) -> torch.device:
    """The device of that name; "auto" is an NVIDIA GPU where torch sees one, and the CPU elsewhere.

    A worker's GPU is the first that its process sees: Ray shows each worker its own. Raises ValueError if a GPU is
    asked for and there is none.
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
