"""TRL's AsyncGRPOTrainer, unchanged but for what needs a GPU, trains an adapter whose rollouts a motet serves.

It costs a minute of CPU. `scripts/trl` puts TRL into an environment of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from statistics import fmean

import pytest

from motet.cluster.launch.local_serve import free_ports
from motet.tests.rigs.imports import ROOT
from motet.tests.rigs.running_motet import DEMO, KEYS, ONE_THREAD, running_motet

TRL = ROOT / ".venv" / "trl"
NUM_STEPS = 20
pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(not (TRL / "packages").exists(), reason="scripts/trl has not been run"),
]


def test_a_reward_rises_and_both_sides_have_the_same_log_probabilities(tmp_path: Path) -> None:
    (tmp_path / "acme").mkdir()
    several = ("--gangs", "2", "--routers", "2", *ONE_THREAD)
    options = ("--dtype", "float32", "--adapter-folders", f"{tmp_path}/{{tenant}}", *several)
    with running_motet(tmp_path / "data", free_ports(1)[0], *options) as motet:
        url = motet.url.replace("//", f"//:{KEYS['acme']}@")
        command = [
            TRL / "bin" / "python",
            "examples/rl_loop.py",
            url,
            DEMO / "base",
            tmp_path / "acme" / "run",
            "--steps",
            NUM_STEPS,
        ]
        offline = {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
        log = tmp_path / "trl.log"
        with log.open("w") as stderr:
            output = subprocess.run(
                [*map(str, command)], cwd=ROOT, env=os.environ | offline, stdout=subprocess.PIPE, stderr=stderr
            )
        assert output.returncode == 0, log.read_text()
        with motet.http() as http:
            names = [adapter["name"] for adapter in http.get("/v1/adapters").json()["data"]]
            assert http.get("/is_paused").json() == {"is_paused": False}
    lines = [json.loads(line) for line in output.stdout.splitlines()]
    print(*lines, sep="\n")
    assert [line["step"] for line in lines] == [*range(1, NUM_STEPS + 1)]
    assert max(line["off_policy_error"] for line in lines) < 1e-3
    assert fmean(line["reward"] for line in lines[-5:]) > fmean(line["reward"] for line in lines[:3]) + 0.2
    # The newest version, and those before it of which rollouts may be trained.
    assert names == [f"trl-policy-v{number}" for number in range(NUM_STEPS - 1, NUM_STEPS + 2)]
