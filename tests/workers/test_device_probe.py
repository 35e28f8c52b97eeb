"""A process without torch gets of torch's device what torch says."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from motet.workers import device_probe
from motet.workers.config import Device
from motet.workers.device import resolve_device
from motet.workers.device_probe import DeviceFacts, probe_counted_device, probe_device


@pytest.mark.parametrize("name", ["auto", "cpu", "cuda"])
@pytest.mark.parametrize("has_driver", [True, False])
def test_the_answer_is_torchs(name: Device, has_driver: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not has_driver and torch.cuda.is_available():
        pytest.skip("there is a GPU, and with it a driver")
    monkeypatch.setattr(device_probe, "has_driver", lambda: has_driver)
    refusal = None
    try:
        device = resolve_device(name)
    except ValueError as error:
        refusal = str(error)
    if refusal is not None:
        with pytest.raises(ValueError) as caught:
            probe_device(name)
        assert str(caught.value) == refusal
    else:
        memory_bytes = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None
        assert probe_device(name) == DeviceFacts(device.type, memory_bytes)  # type: ignore[arg-type]


def test_torch_is_not_loaded_where_there_is_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_probe, "_DRIVER", "libmotet-has-no-such.so")
    monkeypatch.setattr(subprocess, "run", None)  # would be called
    assert probe_device("auto") == probe_device("cpu") == DeviceFacts("cpu")


def test_a_torch_that_cannot_be_imported_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    failing = [sys.executable, "-c", "raise ImportError('libtorch.so is missing')"]
    run = subprocess.run
    monkeypatch.setattr(subprocess, "run", lambda _, **options: run(failing, **options))
    device_probe.probe_torch.cache_clear()
    with pytest.raises(ValueError, match=r"device = 'cuda': torch cannot look for a GPU .*libtorch\.so is missing"):
        probe_device("cuda")


def test_a_torch_that_hangs_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_probe, "_TIMEOUT_S", 1e-6)
    device_probe.probe_torch.cache_clear()
    with pytest.raises(ValueError, match="torch did not say within"):
        probe_device("cuda")


@pytest.fixture
def _asked_anew() -> Iterator[None]:
    device_probe.probe_torch.cache_clear()
    yield
    device_probe.probe_torch.cache_clear()


def answering(monkeypatch: pytest.MonkeyPatch, stdout: str) -> None:
    run = subprocess.run
    saying = [sys.executable, "-c", f"print({stdout!r})"]
    monkeypatch.setattr(subprocess, "run", lambda _, **options: run(saying, **options))


@pytest.mark.usefixtures("_asked_anew")
def test_only_the_last_line_is_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    answering(monkeypatch, 'a plugin of torch says hello\n{"kind": "cuda", "memory_bytes": 1024}')
    assert device_probe.probe_torch("cuda") == DeviceFacts("cuda", 1024)


@pytest.mark.usefixtures("_asked_anew")
@pytest.mark.parametrize("stdout", ["", "hello", "[1]", '{"colour": "red"}'])
def test_what_is_no_answer_is_reported(stdout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    answering(monkeypatch, stdout)
    with pytest.raises(ValueError, match=r"device = 'cuda': torch was asked for a GPU, and this came back: "):
        device_probe.probe_torch("cuda")


@pytest.mark.usefixtures("_asked_anew")
@pytest.mark.parametrize("visible", ["", "1"])
def test_a_gpu_that_ray_counts_is_seen_from_a_process_that_requested_none(
    visible: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray may hide all GPUs from it. What other settings hide of them stays hidden."""
    seen, run = list[str | None](), subprocess.run
    saying = [sys.executable, "-c", 'print(\'{"kind": "cuda", "memory_bytes": 1024, "capability": [9, 0]}\')']

    def reported(_: object, env: dict[str, str], **options: Any) -> Any:
        seen.append(env.get("CUDA_VISIBLE_DEVICES"))
        return run(saying, env=env, **options)

    monkeypatch.setattr(subprocess, "run", reported)
    monkeypatch.setattr(device_probe, "has_driver", lambda: True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert probe_device("auto") == probe_counted_device("auto") == DeviceFacts("cuda", 1024, (9, 0))
    assert seen == [visible, visible or None]
    assert probe_counted_device("cpu") == DeviceFacts("cpu")


@pytest.mark.usefixtures("_asked_anew")
def test_modules_in_the_current_folder_are_not_taken_for_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("torch.py", "json.py"):
        (tmp_path / name).write_text("raise SystemExit('this is not the module that was meant')")
    monkeypatch.chdir(tmp_path)
    assert device_probe.probe_torch("cpu") == DeviceFacts("cpu")
