"""How often things are done for batches."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class BatchPace:
    look_s: float = 1.0  # between looks for batches, and after what became of those that run
    lease_s: float = 20.0  # after which another router takes over the batch of a silent router
    flush_s: float = 0.5  # for which results are collected before they are written
    retry_s: float = 1.0  # before a line that was refused for now is tried again; doubled each time
    longest_retry_s: float = 30.0
    disk_s: float = 5.0  # before a disk that was full is tried again
    turn_s: float = 120.0  # after which a batch gives its place to another tenant's that waits
    stop_s: float = 5.0  # that lines under way have when their router ends
