"""A gang's adapters at hand, one by one, as LoRA-aware gateways will read them: vLLM's coming `lora_adapter_loaded`.

`lora_requests_info` lists what requests ask for; this says what need not be loaded any more, and from where the rest
would come. The names are those by which clients ask, so adapters of one name, of two tenants, are one here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from typing import Final, Literal, NamedTuple

from ...workers.leader.requested_adapters import RequestedAdapters
from ...workers.wire.short_digest import short_digest

# Each is a series of a page that is rendered for each scrape, some 120 bytes long. A gateway asks for a page several
# times a second, and an adapter that 256 others were asked for after costs it little to believe absent.
MOST_LISTED: Final = 256


class LoadedAdapter(NamedTuple):
    """The labels of one."""

    adapter_name: str
    level: Literal["gpu", "cpu"]  # the pool, whatever the device, or host memory
    pinned: Literal["true", "false"]
    rank: str  # the largest of its matrices


def loaded_adapters(
    requested: RequestedAdapters, resident: AbstractSet[str], hosted: AbstractSet[int], pinned: AbstractSet[str]
) -> list[LoadedAdapter]:
    """Those with a name, at most MOST_LISTED, each at the nearest level, the pool's first, requested last first.

    `resident` and `pinned`: digests of adapters in the pool, and of those that host memory keeps. `hosted`: short
    digests of those in host memory.
    """
    found: dict[str, LoadedAdapter] = {}
    for digest, level in _nearest_first(requested.names, resident, hosted):
        if len(found) == MOST_LISTED:
            break
        name = requested.names[digest]
        is_pinned: Literal["true", "false"] = "true" if digest in pinned else "false"
        found.setdefault(name, LoadedAdapter(name, level, is_pinned, str(requested.ranks[digest])))
    return [*found.values()]


def _nearest_first(
    names: Mapping[str, str], resident: AbstractSet[str], hosted: AbstractSet[int]
) -> Iterator[tuple[str, Literal["gpu", "cpu"]]]:
    newest_first = [*names][::-1]
    for digest in newest_first:
        if digest in resident:
            yield digest, "gpu"
    for digest in newest_first:
        if digest not in resident and short_digest(digest) in hosted:
            yield digest, "cpu"
