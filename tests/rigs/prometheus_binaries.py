"""Prometheus and promtool, as scripts/prometheus finds or fetches them."""

from __future__ import annotations

import subprocess
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@cache
def prometheus_folder() -> Path:
    """The folder of both programs. Fails where they can be neither found nor fetched: nothing is skipped."""
    found = subprocess.run([ROOT / "scripts" / "prometheus"], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    return Path(found.stdout.strip())


def promtool(*arguments: str | Path, text: str | None = None) -> str:
    """What promtool says; fails if it finds fault. `text`: what it reads."""
    command = [str(prometheus_folder() / "promtool"), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, input=text, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr
