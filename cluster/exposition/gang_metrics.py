"""What one gang counts of itself, and all that its page shows."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from heapq import nlargest
from typing import Final, Literal, NamedTuple

from prometheus_client.metrics_core import Metric

from ... import __version__
from ...router.exposition.families import BUILD_INFO, GANG, Families, gang_families
from ...router.metrics import Histogram
from ...workers.leader.frame_server import FrameServer
from ...workers.leader.residency import RequestedAdapters
from ...workers.wire.engine_load import EngineLoad, TenantShare
from ...workers.wire.messages import GangInfo
from ...workers.wire.page_keys import short_digest

# A gang's adapters as LoRA-aware gateways read them: the labels of vLLM's `lora_requests_info`.
#
# The endpoint picker of Kubernetes' Gateway API inference extension (its "model server protocol") prefers a server
# that has an adapter running, then one with a place for another, then one where it is waited for. The lists hold the
# names by which clients ask; two tenants' adapters of one name cannot be distinguished there, so a gateway's choice is
# a hint.

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
    distinct_names, num_chars = dict.fromkeys(names), 0
    for number, name in enumerate(distinct_names):
        num_chars += len(name) + 1
        if num_chars > MAX_CHARS:
            return ",".join([*distinct_names][:number])
    return ",".join(distinct_names)


# A gang's adapters at hand, one by one, as LoRA-aware gateways will read them: vLLM's coming `lora_adapter_loaded`.
#
# `lora_requests_info` lists what requests ask for; this says what need not be loaded any more, and from where the rest
# would come. The names are those by which clients ask, so adapters of one name, of two tenants, are one here.

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
    by_name: dict[str, LoadedAdapter] = {}
    for digest, level in _nearest_first(requested.names, resident, hosted):
        if len(by_name) == MOST_LISTED:
            break
        name = requested.names[digest]
        is_pinned: Literal["true", "false"] = "true" if digest in pinned else "false"
        by_name.setdefault(name, LoadedAdapter(name, level, is_pinned, str(requested.ranks[digest])))
    return [*by_name.values()]


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


STEP_BOUNDS_S: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 30.0, 120.0)
BATCH_BOUNDS: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16_384)
MAX_NAMED: Final = 20  # tenants or adapters that one metric names, so that their number bounds no page
# Known from the start, so that the first of each is an increase.
_OUTCOMES: Final = ("stop", "length", "adapter_failed", "adapter_overflow", "overloaded", "timeout", "internal")


@dataclass(frozen=True)
class GangFacts:
    """What is counted elsewhere than in `GangMetrics`, of one moment."""

    load: EngineLoad
    num_ended: Mapping[str, int]  # sequences, by finish reason or kind of error
    num_routers: int
    num_orphans: int
    requested: RequestedAdapters
    resident: AbstractSet[str]  # digests of adapters
    hosted: AbstractSet[int]  # short digests
    pinned: AbstractSet[str]  # digests
    shares: Sequence[TenantShare]
    num_loads: Mapping[str, int]  # by digest
    num_evictions: Mapping[str, int]  # likewise

    @classmethod
    def of(cls, server: FrameServer) -> GangFacts:
        """To be called on the server's event loop."""
        return cls(
            server.load,
            dict(server.num_ended),
            server.num_routers,
            server.num_orphans,
            server.requested_adapters.copy(),
            frozenset(server.resident_adapters),
            frozenset(server.hosted_adapters),
            frozenset(server.pinned_adapters),
            tuple(server.shares),
            *map(dict, server.adapter_counts),
        )


class GangMetrics:
    """Histograms of a gang's steps. Written on the leader's event loop; another thread may read at the same time."""

    def __init__(self, info: GangInfo, base: str) -> None:
        self._info, self._base = info, base
        self._step_s = Histogram(STEP_BOUNDS_S)
        self._step_tokens = Histogram(BATCH_BOUNDS)
        self._step_sequences = Histogram(BATCH_BOUNDS)
        self._load = EngineLoad()

    def observe(self, load: EngineLoad) -> None:
        """Takes in the load after a step. One that computed nothing is none."""
        before, now = self._load.counters, load.counters
        self._load = load
        num_tokens = now.num_computed_tokens - before.num_computed_tokens
        if num_tokens > 0:
            self._step_s.observe(now.busy_s - before.busy_s)
            self._step_tokens.observe(num_tokens)
            self._step_sequences.observe(load.gauges.num_running)

    def families(self, facts: GangFacts) -> Iterator[Metric]:
        """All metrics of the gang. May be read by another thread than the one that counts."""
        base = {"base": self._base}
        make = Families({GANG: self._info.gang_id, **base})
        yield make.gauges(*BUILD_INFO, ("version",), [((__version__,), 1)])
        yield from gang_families({self._info.gang_id: facts.load}, base)
        yield make.gauge("motet_engine_routers", "Routers that are connected to the gang.", facts.num_routers)
        help_text = "Sequences of lost routers that the gang keeps for another router."
        yield make.gauge("motet_engine_orphans", help_text, facts.num_orphans)
        help_text = (
            "Sequences that ended in the gang, by OpenAI's finish_reason or by the kind of their error. Those that "
            "were cancelled or handed over are not in it."
        )
        outcomes = {(outcome,): facts.num_ended.get(outcome, 0) for outcome in {*_OUTCOMES, *facts.num_ended}}
        yield make.counters("motet_engine_ended_sequences", help_text, ("outcome",), outcomes.items())
        help_text = "A step of the gang, from its plan to its tokens."
        yield make.histogram("motet_engine_step_seconds", help_text, self._step_s)
        yield make.histogram("motet_engine_step_tokens", "Tokens computed in a step.", self._step_tokens)
        yield make.histogram("motet_engine_step_sequences", "Sequences that ran after a step.", self._step_sequences)
        yield from self._of_tenants(facts.shares, make)
        yield from self._of_adapters(facts, make)
        yield from self._for_gateways(facts)

    def _of_tenants(self, shares: Sequence[TenantShare], make: Families) -> Iterator[Metric]:
        """Two metrics with at most MAX_NAMED series each."""
        served = nlargest(
            MAX_NAMED, shares, key=lambda share: (share.num_running + share.num_waiting > 0, share.served)
        )
        help_text = (
            "Service that the gang has given a tenant, in tokens' worth divided by its weight: of the "
            f"{MAX_NAMED} tenants who had most, those with sequences here first."
        )
        yield make.counters(
            "motet_engine_top_tenant_service",
            help_text,
            ("tenant",),
            [((share.tenant,), share.served) for share in served],
        )
        waiting = nlargest(
            MAX_NAMED, (share for share in shares if share.num_waiting), key=lambda share: share.num_waiting
        )
        help_text = f"Sequences of a tenant that wait in the gang: of the {MAX_NAMED} tenants with most."
        yield make.gauges(
            "motet_engine_top_tenant_waiting",
            help_text,
            ("tenant",),
            [((share.tenant,), share.num_waiting) for share in waiting],
        )

    def _of_adapters(self, facts: GangFacts, make: Families) -> Iterator[Metric]:
        """Two metrics with at most MAX_NAMED series each. Adapters of one name, of two tenants, are one series."""
        loads, evictions = Counter[str](), Counter[str]()
        for digest, name in facts.requested.names.items():
            loads[name] += facts.num_loads.get(digest, 0)
            evictions[name] += facts.num_evictions.get(digest, 0)
        names = [name for name, number in loads.most_common(MAX_NAMED) if number]
        for kind, text, numbers in (("loads", "loaded into", loads), ("evictions", "evicted from", evictions)):
            help_text = f"How often an adapter was {text} the pool: of the {MAX_NAMED} that were loaded most."
            values = [((name,), numbers[name]) for name in names]
            yield make.counters(f"motet_engine_top_adapter_{kind}", help_text, ("adapter",), values)

    def _for_gateways(self, facts: GangFacts) -> Iterator[Metric]:
        """What the endpoint picker of the Gateway API inference extension asks of a server, under vLLM's names."""
        make, now = Families({GANG: self._info.gang_id, "model_name": self._base}), facts.load.gauges
        yield make.gauge("vllm:num_requests_running", "For gateways: sequences that run.", now.num_running)
        yield make.gauge("vllm:num_requests_waiting", "For gateways: sequences that wait.", now.num_waiting)
        num_idle = now.num_free_pages + now.num_idle_adapter_pages + now.num_idle_prefix_pages
        used = (now.num_pages - num_idle) / max(now.num_pages, 1)
        help_text = "For gateways: share of the pool's pages that are in use; 1 is all."
        yield make.gauge("vllm:kv_cache_usage_perc", help_text, used)
        names = ("block_size", "num_gpu_blocks")
        sizes = (str(self._info.block_size), str(self._info.num_pages))
        yield make.gauges(
            "vllm:cache_config_info", "For gateways: 1; the labels are the pool's size.", names, [(sizes, 1)]
        )
        requested = facts.requested
        labels = lora_requests(requested.names, requested.num_open, facts.resident, self._info.max_num_sequences)
        help_text = "For gateways: time of this list of adapters that run or are at hand, and of those waited for."
        yield Families({GANG: self._info.gang_id}).gauges(
            "vllm:lora_requests_info", help_text, tuple(labels), [(tuple(labels.values()), time.time())]
        )
        loaded = loaded_adapters(requested, facts.resident, facts.hosted, facts.pinned)
        help_text = (
            f"For gateways: 1 for each adapter in the pool (level gpu) or in host memory, {MOST_LISTED} at most."
        )
        yield make.gauges(
            "vllm:lora_adapter_loaded", help_text, LoadedAdapter._fields, [(adapter, 1) for adapter in loaded]
        )
