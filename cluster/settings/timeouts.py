"""Settings: how long each part waits for another, and what it keeps for a retry."""

from __future__ import annotations

from typing import Annotated

from .setting import CountOrNone, PositiveSeconds, Seconds, Setting
from .setting_field import SettingGroup


class Timeouts(SettingGroup, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Timeouts and recovery."""

    gang_wait_s: Annotated[
        Seconds,
        Setting(
            "How long a sequence waits while no gang is connected: long enough for Ray Serve to replace one.", "live"
        ),
    ] = 30.0
    cold_start_wait_s: Annotated[
        Seconds,
        Setting(
            "How long a sequence waits for a gang with --min-gangs 0; a gang may take as long to start.",
            "live",
        ),
    ] = 600.0
    drain_s: Annotated[
        Seconds,
        Setting("How long a gang that stops continues its sequences before it hands them over.", "live"),
    ] = 5.0
    router_drain_s: Annotated[
        Seconds,
        Setting("How long a router that stops continues its requests; then its clients' streams break.", "live"),
    ] = 600.0
    orphan_s: Annotated[
        Seconds,
        Setting(
            "How long a gang continues the sequences of a lost router: long enough to replace a router.",
            "live",
            live_in="gang",
            flags=("orphan-life",),
        ),
    ] = 60.0
    finished_s: Annotated[
        Seconds,
        Setting(
            "How long a gang keeps an ended sequence for a client that reconnects.",
            "live",
            live_in="gang",
            flags=("finished-life",),
        ),
    ] = 10.0
    max_finished: Annotated[
        CountOrNone, Setting("Ended sequences that a gang keeps at most.", "live", live_in="gang")
    ] = 1024
    max_finished_values: Annotated[
        CountOrNone,
        Setting("Tokens and log-probabilities of ended sequences that a gang keeps at most.", "live", live_in="gang"),
    ] = 4 << 20
    step_deadline_s: Annotated[
        PositiveSeconds,
        Setting(
            "A worker that takes longer for a step counts as hung, and its gang is replaced. It counts earlier if it "
            "takes 20 times as long as for any earlier step, and 30 seconds.",
            "live",
        ),
    ] = 120.0
    store_deadline_s: Annotated[
        PositiveSeconds,
        Setting(
            "The most time to read an adapter from the data folder. Then its sequences continue at another gang, or "
            "retry a few times.",
            "live",
        ),
    ] = 15.0
    start_deadline_s: Annotated[
        PositiveSeconds,
        Setting("The most time for the workers of a gang to start, before they load the model.", "live"),
    ] = 300.0
    ready_interval_s: Annotated[
        PositiveSeconds,
        Setting("How long /ready assumes after a served token that another can be served.", "live", live_in="router"),
    ] = 5.0
    ready_timeout_s: Annotated[
        PositiveSeconds, Setting("How long /ready waits for its test token.", "live", live_in="router")
    ] = 10.0
