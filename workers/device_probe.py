"""Which device workers on this machine will compute on, for a process that does without torch."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any, Literal, get_args

import msgspec

from .config import INT8_ON_A_GPU, Device, Float8Part, KVDtype, WeightsDtype, why_not_float8

_DRIVER = "libcuda.so.1"  # NVIDIA's; torch sees no GPU without it
_TIMEOUT_S = 120.0  # torch comes from a cold disk
_VISIBLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True)
class DeviceFacts:
    kind: Literal["cpu", "cuda"]
    memory_bytes: int | None = None  # of the first GPU
    capability: tuple[int, int] | None = None  # the first GPU's compute capability; None: unknown

    def why_not(self, dtype: WeightsDtype | KVDtype, part: Float8Part) -> str | None:
        """Why it cannot compute with such weights or KV, and what can be served; None: it can, as far as is known."""
        if dtype == "int8":
            return INT8_ON_A_GPU if self.kind == "cuda" else None
        is_unknown = self.kind == "cuda" and self.capability is None
        return None if dtype == "dtype" or is_unknown else why_not_float8(self.capability, part)


def probe_device(name: Device) -> DeviceFacts:
    """What `resolve_device` says of `name` here.

    Where there is a GPU's driver, a process of its own imports torch and answers, once for all calls. Raises ValueError
    as `resolve_device` does, and if that process fails.
    """
    if name == "cpu" or (name == "auto" and not has_driver()):
        return DeviceFacts("cpu")
    return probe_torch(name)


def probe_counted_device(name: Device) -> DeviceFacts:
    """`probe_device` for a process that Ray gives a GPU. From this one, which asked for none, Ray may hide all."""
    if name == "cpu" or (name == "auto" and not has_driver()):
        return DeviceFacts("cpu")
    return _probed_apart(name, {key: value for key, value in os.environ.items() if key != _VISIBLE or value})


def has_driver() -> bool:
    try:
        ctypes.CDLL(_DRIVER)
    except OSError:
        return False
    return True


@cache
def probe_torch(name: Device) -> DeviceFacts:
    return _probed_apart(name, os.environ)


def _probed_apart(name: Device, environment: Mapping[str, str]) -> DeviceFacts:
    command = [sys.executable, "-P", "-m", __name__, name]  # -P: a torch/ in the current folder is not torch
    try:
        requested = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, env=environment)
    except subprocess.TimeoutExpired:
        raise ValueError(f"device = {name!r}: torch did not say within {_TIMEOUT_S:g} s what there is") from None
    if requested.returncode:
        reason = (requested.stderr.strip() or f"status {requested.returncode}").splitlines()[-1]
        raise ValueError(f"device = {name!r}: torch cannot look for a GPU here: {reason}")
    last_line = (requested.stdout.splitlines() or [""])[-1]  # what comes with torch may print, too
    try:
        answer = json.loads(last_line)
        refusal = answer.get("refusal")
        facts = None if refusal is not None else msgspec.convert(answer, DeviceFacts)
    except (ValueError, TypeError, AttributeError, msgspec.ValidationError):
        raise ValueError(f"device = {name!r}: torch was asked for a GPU, and this came back: {last_line!r}") from None
    if facts is None:
        raise ValueError(refusal)
    return facts


def _answer(name: Device) -> dict[str, Any]:
    """In the process that may import torch."""
    import torch

    from .device import resolve_device

    try:
        device = resolve_device(name)
    except ValueError as error:
        return {"refusal": str(error)}
    if device.type == "cpu":
        return asdict(DeviceFacts("cpu"))
    memory_bytes = torch.cuda.get_device_properties(device).total_memory
    return asdict(DeviceFacts("cuda", memory_bytes, torch.cuda.get_device_capability(device)))


if __name__ == "__main__":
    device_name = sys.argv[1]
    assert device_name in get_args(Device)
    print(json.dumps(_answer(device_name)))  # type: ignore[arg-type]  # which the line above has checked
