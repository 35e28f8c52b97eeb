"""What a person sees of a deployment that a command runs."""

from __future__ import annotations

import io
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from motet.cluster.commands import foreground
from motet.cluster.config import MotetConfig
from motet.tests.rigs.running_motet import DEMO


class SlowToStop:
    """Is interrupted while it stops."""

    def __init__(self) -> None:
        self.has_stopped = False

    def start(self, *_: object, **__: object) -> None:
        self._before = signal.signal(signal.SIGTERM, lambda *_: None)

    def stop(self) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)
        signal.signal(signal.SIGTERM, self._before)
        self.has_stopped = True


def test_a_second_interrupt_does_not_keep_it_from_stopping(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deployment = SlowToStop()
    monkeypatch.setattr(foreground, "Deployment", lambda: deployment)
    monkeypatch.setattr(logging, "disable", lambda _: None)  # of this process, for good
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    said = io.StringIO()
    config = MotetConfig.of(model_path=DEMO / "base", data_dir=tmp_path)
    try:
        with pytest.raises(SystemExit) as ended, foreground.deployed(config, Console(file=said)):
            raise KeyboardInterrupt
        after = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    finally:
        signal.signal(signal.SIGINT, before[0])
    assert ended.value.code == foreground.INTERRUPTED_EXIT_CODE
    assert deployment.has_stopped
    assert said.getvalue().splitlines()[-3:] == ["stopping", "still stopping", "still stopping"]
    assert after == [signal.SIG_IGN, before[1]]


def test_the_demo_is_called_as_it_is_started() -> None:
    command = [sys.executable, "-m", "motet.cluster.commands.run_demo", "--help"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert said.startswith("Usage: scripts/demo [OPTIONS]")
    assert "Holds the demo's adapters" in said
