"""MIG: the placements of an A100, and a fleet of models on slices of GPUs against a GPU for each model.

Published: a 3B model (Flan-T5-XL) on 1g.20gb gives up to 8 users a token in 50 ms, on 2g.20gb up to 16, and a 7B model
(Mistral) on 4g.40gb up to 8; 54 models need 13 A100s instead of 31. Limits of data sheets alone allow many more users;
one efficiency is fitted on the first of these rows. Which 54 models is not published, so the fleet here is our own.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace

from motet.benchmarks.rigs.published_bases import published_base
from motet.cluster.tools.mig import EFFICIENCY, MIG_GPUS, ModelDemand, plan, whole_placements

GPU = MIG_GPUS["A100 SXM 80GB"]
CONTEXT = 1000
FLAN_T5_XL = ModelDemand("3B", 5.7e9, 24 * 2 * 2 * 32 * 64 * 2, 2 * 2.85e9, 8, CONTEXT)  # own and cross attention
MISTRAL = ModelDemand.of("7B", published_base("Mistral-7B"), 8, CONTEXT)
PUBLISHED = ((FLAN_T5_XL, "1g.20gb", 8), (FLAN_T5_XL, "2g.20gb", 16), (MISTRAL, "4g.40gb", 8))
FLEET = ((FLAN_T5_XL, 4, 18), (FLAN_T5_XL, 8, 18), (MISTRAL, 4, 18))  # users, and models of this kind


def main() -> None:
    argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0]).parse_args()
    small = tuple(profile for profile in GPU.profiles if profile.name != "1g.20gb")
    counts = len(whole_placements(small)), len(whole_placements(GPU.profiles))
    print(
        f"placements of an A100 80GB to which nothing can be added: {counts[0]} without 1g.20gb, {counts[1]} with it\n"
    )
    print(f"{'':12} {'users':>5} {'by memory':>9} {'ms by limits':>12} {'efficiency':>10} {'ms, fitted':>10}")
    residuals = []
    for demand, name, users in PUBLISHED:
        device = GPU.profile(name).device(GPU.device)
        limit_s = demand.token_s(device, users)
        fitting = replace(demand, objective_s=1e9).most_users(device, 1.0)
        residuals.append(limit_s / EFFICIENCY / demand.objective_s - 1)
        print(
            f"{demand.name}, {name} {users:5} {fitting:9} {limit_s * 1e3:12.1f} {limit_s / demand.objective_s:10.3f}"
            f" {limit_s / EFFICIENCY * 1e3:10.1f}"
        )
    demands = [
        replace(demand, name=f"{demand.name}-{users}-{number}", users=users)
        for demand, users, many in FLEET
        for number in range(many)
    ]
    found = plan(demands, GPU)
    print(f"\n{len(demands)} models, a GPU each otherwise: {len(found.gpus)} GPUs, {found.at_least} at least")
    summary = {
        "placements": counts,
        "residuals": [round(residual, 3) for residual in residuals],
        "gpus": len(found.gpus),
        "at_least": found.at_least,
        "models": len(demands),
    }
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
