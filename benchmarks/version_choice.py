"""What it costs a request that its name has a canary and a shadow: CPU of the choice of its version, trials included.

Beside it, in the same run: a name without either, and one hash of the same prompt, which finds out whom the canary is
for and cannot be spared. The name keeps eleven versions.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from functools import partial

from motet.adapters.adapter import AdapterVersion
from motet.adapters.registry.tenants.records import KeyRecord, TenantRecord
from motet.adapters.registry.versions.rollout import Canary, Rollout, Shadow, VersionFacts
from motet.router.http.auth import Identity
from motet.router.openai.request_schema import CompletionRequest
from motet.router.versions.version_choice import choose_version, sticky_key

NUM_OTHERS = 10
RANKS = {"q_proj": 16, "k_proj": 16, "v_proj": 16, "o_proj": 16}
IDENTITY = Identity(TenantRecord(name="acme"), KeyRecord(key_id="key", tenant="acme"))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=int, default=2000, help="of each kind and round (default 2000)")
    parser.add_argument("--rounds", type=int, default=5, help="of which the fastest counts (default 5)")
    options = parser.parse_args()
    plain = current_version(Rollout())
    on_trial = current_version(
        Rollout(
            others=tuple(
                VersionFacts(number, f"{number:064}", 1000, 0.0, RANKS) for number in range(1, NUM_OTHERS + 1)
            ),
            canary=Canary("a-trial", NUM_OTHERS, 0.2),
            shadow=Shadow("a-shadow", NUM_OTHERS - 1, 0.2),
        )
    )
    found: dict[str, float] = {}
    for name, num_bytes in (("short", 100), ("128_kb", 128 << 10)):
        request = CompletionRequest(model="pirate", prompt="a" * num_bytes)
        found[f"{name}_plain_us"] = cpu_us(partial(choose, plain, request), options)
        found[f"{name}_hash_us"] = cpu_us(partial(sticky_key, request, IDENTITY), options)
        found[f"{name}_on_trial_us"] = cpu_us(partial(choose, on_trial, request), options)
        found[f"{name}_over_hash"] = found[f"{name}_on_trial_us"] / found[f"{name}_hash_us"]
    print(json.dumps({"benchmark": "version_choice", **{name: round(value, 2) for name, value in found.items()}}))


def choose(current: AdapterVersion, request: CompletionRequest) -> object:
    """All that a request asks of its choice."""
    choice = choose_version(current, request, IDENTITY)
    return choice.version, choice.trial, choice.shadow


def current_version(rollout: Rollout) -> AdapterVersion:
    return AdapterVersion("acme", "pirate", NUM_OTHERS + 1, "d" * 64, RANKS, 1000, 0.0, rollout=rollout.json())


def cpu_us(work: Callable[[], object], options: argparse.Namespace) -> float:
    """CPU microseconds of one call, of the fastest round."""
    rounds: list[float] = []
    for _ in range(options.rounds):
        began = time.process_time()
        for _ in range(options.requests):
            work()
        rounds.append(time.process_time() - began)
    return min(rounds) / int(options.requests) * 1e6


if __name__ == "__main__":
    main()
