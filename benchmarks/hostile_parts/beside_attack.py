"""What an attack takes from a neighbour of a running `motet serve` of the demo model."""

from __future__ import annotations

import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path

from motet.cluster.launch.local_serve import free_ports
from motet.tests.rigs.neighbour import Neighbour, Waits
from motet.tests.rigs.running_motet import BASE, KEYS, RunningMotet, running_motet

TENANT = "acme"
ROUNDS = 4  # of quiet and of the attack, in turn, whose waits count together

# Under way inside the context manager; what is yielded has the answers by status at its end.
Attack = Callable[[RunningMotet], AbstractContextManager[Mapping[str, int]]]


def beside_attack(name: str, seconds: float, attack: Attack) -> dict[str, float]:
    """`NAME_p99_ratio` and `NAME_p50_ratio`: of a neighbour's first tokens beside the attack and in quiet."""
    quiet, attacked = Waits(), Waits()
    answered = Counter[str]()
    with (
        tempfile.TemporaryDirectory(prefix="motet-bench-") as folder,
        # One thread computes: two that wait for each other on busy cores would be what the neighbour measures.
        running_motet(Path(folder) / "data", free_ports(1)[0], "--threads", "1") as motet,
    ):
        neighbour = Neighbour(motet.url, KEYS[TENANT], BASE)
        for _ in range(ROUNDS):
            _add(quiet, neighbour.measured_for(seconds / ROUNDS))
            with attack(motet) as statuses, neighbour.measuring() as waits:
                time.sleep(seconds / ROUNDS)
            _add(attacked, waits)
            answered.update(statuses)
    print(f"  quiet {quiet}")
    print(f"  beside the attack {attacked}; its answers {dict(answered)}", flush=True)
    return {f"{name}_p99_ratio": _ratio(attacked, quiet, 0.99), f"{name}_p50_ratio": _ratio(attacked, quiet, 0.5)}


def _ratio(attacked: Waits, quiet: Waits, share: float) -> float:
    return round(attacked.quantile_s(share) / quiet.quantile_s(share), 2)


def _add(to: Waits, more: Waits) -> None:
    to.first_token_s += more.first_token_s
    to.errors += more.errors
