"""Messages between a gang's leader and its workers, as msgpack over one connection each."""

from __future__ import annotations

import msgspec

from ..plan import HostAdapters, MoveEnd, SampledToken, StepPlan


class Join(msgspec.Struct, frozen=True, tag="join"):
    """A worker's first word. `secret`: the gang's, so that nobody else joins."""

    rank: int
    secret: str


class Progress(msgspec.Struct, frozen=True, tag="progress"):
    what: str
    done: int
    total: int


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The worker's part of the base is loaded."""

    kernels: str
    device: str


class Done(msgspec.Struct, frozen=True, tag="done"):
    """A step is computed. Tokens are the first worker's to tell."""

    step: int
    tokens: dict[int, SampledToken | None]
    host_adapters: HostAdapters = HostAdapters()


class LoadEnded(msgspec.Struct, frozen=True, tag="load_ended"):
    digest: str
    problem: str | None


class MoveEnded(msgspec.Struct, frozen=True, tag="move_ended"):
    end: MoveEnd


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The worker can do no more."""

    problem: str


class Execute(msgspec.Struct, frozen=True, tag="execute"):
    plan: StepPlan


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    pass


FromWorker = Join | Progress | Ready | Done | LoadEnded | MoveEnded | Failed
ToWorker = Execute | Stop
