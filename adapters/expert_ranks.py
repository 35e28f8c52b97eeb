"""Ranks of a layer's experts as entries of `module_ranks`.

Experts that all have one rank are the entry of their module, "experts.up_proj". Others are grouped by rank, as in
"experts.0-3,7.up_proj". An expert that no entry names has no LoRA of this module, and takes no room.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Final

_MAX_GROUPS: Final = 8  # of a module, so that a record stays small whatever is uploaded
_SOME = re.compile(r"experts\.([0-9,-]+)\.\w+")


def expert_entries(module: str, ranks: Mapping[int, int], num_experts: int) -> dict[str, int]:
    """Entries of the module "experts.…" for `ranks`, by expert. The base has `num_experts`.

    If there are too many ranks they are padded to powers of two, of which there are few.
    """
    if len(set(ranks.values())) > _MAX_GROUPS:
        ranks = {expert: 1 << (rank - 1).bit_length() for expert, rank in ranks.items()}
    groups: dict[int, list[int]] = {}
    for expert in sorted(ranks):
        groups.setdefault(ranks[expert], []).append(expert)
    if len(groups) == 1 and len(ranks) == num_experts:
        return {module: next(iter(groups))}
    return {module.replace(".", f".{_ranges(experts)}."): rank for rank, experts in groups.items()}


@lru_cache(1024)
def named_experts(entry: str) -> tuple[int, ...] | None:
    """The experts that an entry of `module_ranks` names; None: it is of all, or of no experts."""
    match = _SOME.fullmatch(entry)
    if match is None:
        return None
    edges = ([int(edge) for edge in part.split("-")] for part in match[1].split(","))
    return tuple(expert for edge in edges for expert in range(edge[0], edge[-1] + 1))


def _ranges(experts: Iterable[int]) -> str:
    """Ascending numbers as "0-3,7"."""
    runs: list[list[int]] = []
    for expert in experts:
        if runs and runs[-1][1] == expert - 1:
            runs[-1][1] = expert
        else:
            runs.append([expert, expert])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
