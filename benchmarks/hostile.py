"""A neighbour of attackers at one motet: its p50 and p99 to the first token under a flood, beside the same without it.

`motet serve` runs the demo model. The neighbour, a tenant in a process of its own, asks one short chat after another.
Each part floods motet in another way, in turn with quiet, and the waits of all its rounds count together. The last line
is JSON with a ratio for each part.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from motet.benchmarks.hostile_parts import keyless
from motet.cluster.launch.local_serve import free_ports
from motet.tests.rigs.running_motet import RunningMotet, running_motet

# Each measures one kind of attack, prints what it has found, and returns the figures of the last line.
PARTS: Mapping[str, Callable[[RunningMotet, argparse.Namespace], dict[str, float]]] = {
    "keyless": keyless.keyless,
    "health": keyless.health,
    "unknown-keys": keyless.unknown_keys,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=[*PARTS], help="default: all")
    parser.add_argument("--rounds", type=int, default=4, help="of quiet and of each attack (default 4)")
    parser.add_argument("--seconds", type=float, default=6, help="of quiet, and of an attack, in a round (default 6)")
    parser.add_argument("--rate", type=int, default=5000, help="offered requests a second of a flood (default 5000)")
    options = parser.parse_args()
    figures: dict[str, float] = {}
    with (
        tempfile.TemporaryDirectory(prefix="motet-bench-") as folder,
        # One thread computes: two that wait for each other on busy cores would be what the neighbour measures.
        running_motet(Path(folder) / "data", free_ports(1)[0], "--threads", "1") as motet,
    ):
        for part in options.parts:
            figures |= PARTS[part](motet, options)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
