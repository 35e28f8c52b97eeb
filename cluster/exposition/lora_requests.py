"""A gang's adapters as LoRA-aware gateways read them: the labels of vLLM's `lora_requests_info`.

The endpoint picker of Kubernetes' Gateway API inference extension (its "model server protocol") prefers a server that
has an adapter running, then one with a place for another, then one where it is waited for. The lists hold the names by
which clients ask; two tenants' adapters of one name cannot be distinguished there, so a gateway's choice is a hint.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final

MAX_CHARS: Final = 8 << 10  # of each list


def lora_requests(
    names: Mapping[str, str], num_open: Mapping[str, int], resident: Collection[str], max_adapters: int
) -> dict[str, str]:
    """The labels. `names`: by digest, the one that was requested last comes last. `resident`: digests in the pool.

    `num_open`: unfinished sequences, by digest. `max_adapters`: that can run at once, as every sequence may have its
    own. Those of unfinished sequences come first. Idle ones in the pool follow as long as one place is left, since they
    make room for another adapter. A list that grows too long leaves out those that were requested least recently.
    """
    newest_first = [*names][::-1]
    active = [digest for digest in newest_first if digest in num_open]
    running = [digest for digest in active if digest in resident]
    waiting = [digest for digest in active if digest not in resident]
    idle = [digest for digest in newest_first if digest in resident and digest not in num_open]
    running += idle[: max(0, max_adapters - 1 - len(running) - len(waiting))]
    return {
        "max_lora": str(max_adapters),
        "running_lora_adapters": _listed([names[digest] for digest in running]),
        "waiting_lora_adapters": _listed([names[digest] for digest in waiting]),
    }


def _listed(names: list[str]) -> str:
    """The distinct names, up to the limit of bytes."""
    found, num_chars = dict.fromkeys(names), 0
    for number, name in enumerate(found):
        num_chars += len(name) + 1
        if num_chars > MAX_CHARS:
            return ",".join([*found][:number])
    return ",".join(found)
