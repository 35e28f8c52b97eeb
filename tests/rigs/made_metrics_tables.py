"""The tables of docs/metrics.md, from what routers and gangs really show: `python -m … docs/metrics.md` renews them."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from motet.cluster.exposition.gang_metrics import GangFacts, GangMetrics
from motet.router.exposition.families import GANG, RouterFacts, router_families, text_of
from motet.router.metrics import Metrics, ServeFacts
from motet.workers.leader.residency import RequestedAdapters
from motet.workers.wire.engine_load import EngineLoad, TenantShare
from motet.workers.wire.messages import GangInfo

COMMAND = "python -m motet.tests.rigs.made_metrics_tables docs/metrics.md"
_EVERYWHERE = {"router", GANG, "base", "le"}
_TABLE = "<!-- {name}: made by {command} -->\n\n{rows}\n\n<!-- end of {name} -->"


def example_router() -> Iterator[Metric]:
    """All metrics of a router that has seen one of each."""
    metrics = Metrics()
    metrics.requests["POST /v1/completions", 200] += 1
    metrics.errors[404, "not_found"] += 1
    metrics.store_free_bytes, metrics.sweep_tried_at, metrics.redis_memory = 1, 1.0, (1, 1)
    metrics.starts = ()
    metrics.edge_refused = lambda: {"keyless": 1}
    metrics.serve = ServeFacts(
        status="RUNNING", num_wanted_gangs=1, min_gangs=1, max_gangs=1, rollout_s=0.0, is_head_connected=True
    )
    facts = RouterFacts(num_gangs=1, num_resumed=0, num_moved=0, num_gang_faults={}, is_registry_connected=True)
    return router_families(metrics, facts, {"router": "r", "base": "b"})


def example_gang() -> Iterator[Metric]:
    """All metrics of a gang that has one adapter."""
    info = GangInfo(
        gang_id="g",
        model="",
        device="cpu",
        dtype="float32",
        kernels="",
        max_model_len=1,
        block_size=16,
        num_pages=1,
        page_bytes=1,
        num_threads=1,
        vocab_size=1,
    )
    requested = RequestedAdapters()
    requested.names["d"], requested.ranks["d"] = "adapter", 8
    facts = GangFacts(
        EngineLoad(),
        {},
        num_routers=0,
        num_orphans=0,
        requested=requested,
        resident=frozenset({"d"}),
        hosted=frozenset(),
        pinned=frozenset(),
        shares=(TenantShare("t", 1.0, 0, 1, 1, served=1.0),),
        num_loads={"d": 1},
        num_evictions={"d": 1},
    )
    return GangMetrics(info, "b").families(facts)


def table(metrics: Iterable[Metric]) -> str:
    """A row for each metric, in their order."""
    rows = ["| name | kind | meaning |", "| --- | --- | --- |"]
    for family in text_string_to_metric_families(text_of(metrics).decode()):
        labels = dict.fromkeys(
            label for sample in family.samples for label in sample.labels if label not in _EVERYWHERE
        )
        name = f"{family.name}_total" if family.type == "counter" else family.name
        by = f", by {', '.join(f'`{label}`' for label in labels)}" if labels else ""
        rows.append(f"| `{name}` | {family.type}{by} | {family.documentation} |")
    return "\n".join(rows)


def renewed(page: str) -> str:
    """The page with its tables as they should be. Raises ValueError if one has no place there."""
    for name, metrics in (("routers", example_router()), ("gangs", example_gang())):
        pattern = re.compile(rf"<!-- {name}: .*?<!-- end of {name} -->", re.DOTALL)
        if not pattern.search(page):
            raise ValueError(f"no place for the table of {name}: <!-- {name}: --> … <!-- end of {name} -->")
        text = _TABLE.format(name=name, command=COMMAND, rows=table(metrics))
        page = pattern.sub(text.replace("\\", r"\\"), page)
    return page


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(renewed(path.read_text()))
