"""A router's app with every route that a router of a cluster has, on a Redis that is not there."""

from __future__ import annotations

from pathlib import Path

from motet.adapters.registry.administration.administration import Administration
from motet.adapters.registry.canary_counts import CanaryCounts
from motet.adapters.registry.preloads import Preloads
from motet.adapters.registry.registry import connect
from motet.adapters.registry.versions.pins import KnownPins
from motet.router.batches.batches import Batches
from motet.router.fleet.pin_keeper import PinKeeper
from motet.router.text.text import TextService
from motet.router.usage.usage import UsageService
from motet.tests.rigs.router_rig import RouterRig


def rig_with_all_routes(folder: Path, text: TextService) -> RouterRig:
    redis = connect("redis://127.0.0.1:1")  # it is never called
    usage = UsageService(
        redis, folder / "ledger", folder / "archive", kept_days=1, spool_bytes=1 << 20, min_free_bytes=0, prices=None
    )
    return RouterRig(
        folder / "spool",
        text,
        more_routes=usage.routes,
        administration=Administration.of(redis),
        counts=CanaryCounts(redis),
        preloads=Preloads(redis),
        pins=PinKeeper(KnownPins(), tuple),
        make_batches=lambda view, config, metrics: Batches(redis, folder / "files", view, config, metrics),
    )
