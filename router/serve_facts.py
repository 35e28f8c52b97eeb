"""What a router knows of the Ray Serve that runs it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ServeFacts:
    """The controller's last answer, and whether it answers."""

    status: str  # of the application: RUNNING, DEPLOYING, DEPLOY_FAILED, UNHEALTHY, …
    num_wanted_gangs: int  # that Serve is to run now
    min_gangs: int  # as `max_gangs`: the wanted number where nothing scales them
    max_gangs: int  # that there may be
    rollout_s: float  # for how long the application has been DEPLOYING; 0: it is not
    is_head_connected: bool  # whether the controller answered the last call
