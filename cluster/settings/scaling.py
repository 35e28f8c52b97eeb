"""Settings: how many gangs there are, and when."""

from __future__ import annotations

from typing import Annotated

from .setting import Count, CountOrNone, PositiveAmount, PositiveSeconds, Seconds, Setting, Share
from .setting_field import SettingGroup


class Scaling(SettingGroup, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Scaling."""

    min_gangs: Annotated[
        CountOrNone,
        Setting(
            "Copies of the base, each with its own memory. 0: none without requests.",
            "live",
            flags=("min-gangs", "gangs"),
        ),
    ] = 1
    max_gangs: Annotated[
        Count | None, Setting("The most copies under load.", "live", unset="as --min-gangs, at least 1")
    ] = None
    queued_tokens_per_gang: Annotated[
        Count | None,
        Setting(
            "Prompt tokens that may wait for each gang before another gang is started.",
            "live",
            unset="16 times --max-tokens-per-step, 8,192 where that is not given",
        ),
    ] = None
    pool_pressure: Annotated[
        Share,
        Setting(
            "Share of a gang's pages, or of its places for running sequences, that may be in use before another "
            "gang is started.",
            "live",
        ),
    ] = 0.8
    adapter_loads_per_s: Annotated[
        PositiveAmount,
        Setting("Adapters that a gang may load into its full pool each second before another gang is started.", "live"),
    ] = 4.0
    scale_down_share: Annotated[
        Share,
        Setting(
            "Gangs are stopped only if the others would stay below this share of --queued-tokens-per-gang, "
            "--pool-pressure and --adapter-loads-per-s.",
            "live",
        ),
    ] = 0.7
    scale_down_after_s: Annotated[
        Seconds, Setting("Gangs stop when fewer would have been enough for this time.", "live")
    ] = 60.0
    scale_to_zero_after_s: Annotated[
        Seconds,
        Setting(
            "With --min-gangs 0: the last gang stops after this time without a request. At least two scaling windows.",
            "live",
        ),
    ] = 300.0
    tenant_scaling_share: Annotated[
        Share,
        Setting(
            "Share of --max-gangs that may be started for one tenant's backlog, so that one tenant does not start "
            "them all. 1: no limit.",
            "live",
        ),
    ] = 1.0
    scaling_window_s: Annotated[PositiveSeconds, Setting("The load is averaged over this time.", "live")] = 5.0
