"""Settings: what a gang computes at once, and which requests it takes."""

from __future__ import annotations

from typing import Annotated, Literal

from ...adapters.errors import AdapterInvalid
from ...adapters.names import check_tenant
from ...workers.config import NanoBatches
from .setting import Count, Pairs, Refusal, Seconds, Setting, Share, Threads
from .setting_field import SettingGroup


def check_objectives(objectives_s: tuple[tuple[str, float], ...]) -> Refusal | None:
    """Whether there are such tenants is the registry's business."""
    seen: set[str] = set()
    for tenant, objective_s in objectives_s:
        given = f"{tenant}={objective_s:g}"
        try:
            check_tenant(tenant)
        except AdapterInvalid as error:
            return given, str(error)
        if not 0 < objective_s < float("inf"):
            return given, "a positive number of seconds is needed"
        if tenant in seen:
            return given, f"{tenant} has another one already; one is accepted"
        seen.add(tenant)
    return None


class Batching(SettingGroup, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Batching and admission."""

    max_num_sequences: Annotated[
        Count | None, Setting("Sequences of a gang that run at once.", "live", unset="128 on CPUs, 256 on a GPU")
    ] = None
    max_tokens_per_step: Annotated[
        Count | None, Setting("Tokens that a gang computes in one step.", "live", unset="512 on CPUs, 2,048 on a GPU")
    ] = None
    token_interval_s: Annotated[
        Seconds | Literal["auto"],
        Setting(
            "Target time of a step while answers are generated: each waits a step for its next token. It "
            "limits the prompt tokens of a step; while each tenant that generates has several prompts of its own to "
            "compute, a step may take up to 5 times as long. auto: 0.1 on CPUs, 0.05 on a GPU. 0: no target, up to "
            "max-tokens-per-step, for offline batches.",
            "live",
            live_in="gang",
        ),
    ] = "auto"
    scheduling: Annotated[
        Literal["fair", "fifo"],
        Setting(
            "fair: the tenant that a gang has served least goes first, by its weight, and is preempted last. fifo: "
            "first come, first served, without weights, priorities and background requests.",
            "live",
        ),
    ] = "fair"
    max_waiting_sequences: Annotated[
        Count,
        Setting("Sequences that wait for their first token in one gang; more are refused.", "live", live_in="gang"),
    ] = 4096
    max_waiting_tokens: Annotated[
        Count,
        Setting(
            "Prompt tokens of all sequences that wait in one gang for their first token; more are refused. A single "
            "sequence may always wait.",
            "live",
            live_in="gang",
        ),
    ] = 4 << 20
    tenant_queue_share: Annotated[
        Share,
        Setting(
            "Share of both limits of a gang's queue that one tenant may take; requests beyond that are refused.",
            "live",
            live_in="gang",
        ),
    ] = 0.5
    tenant_running_share: Annotated[
        Share,
        Setting(
            "Share of a gang's running sequences that one tenant may have. Its further ones wait, even if there are "
            "free places. 1: no limit.",
            "live",
            live_in="gang",
        ),
    ] = 1.0
    max_queue_wait_s: Annotated[
        Seconds,
        Setting(
            "A request with a longer expected wait in the queue is refused at once. 0: no limit.",
            "live",
            live_in="router",
        ),
    ] = 60.0
    latency_objectives_s: Annotated[
        tuple[tuple[str, float], ...],
        Pairs("TENANT=SECONDS", example="acme=2.5"),
        Setting(
            "A tenant's request whose first token would come later, because of the queue, is refused at once.",
            "live",
            live_in="router",
            flags=("latency-objective",),
            check=check_objectives,
        ),
    ] = ()
    nano_batches: Annotated[
        NanoBatches,
        Setting(
            "Whether gangs of several workers compute a step in two parts, one while the other's sum is under way. "
            "auto: the steps that are predicted to be faster so, by what a gang measures at its start. off: none.",
            "live",
        ),
    ] = "auto"
    num_threads: Annotated[
        Threads | Literal["auto"],
        Setting(
            "Threads that each worker computes with. auto: on this machine at most a worker's share of the cores, less "
            "what routers and HAProxy need; on a running cluster at most its CPUs of Ray (--gang-num-cpus); a worker "
            "alone on a CPU measures at its start how many of these are fastest; 1 on a GPU.",
            "live",
        ),
    ] = "auto"
