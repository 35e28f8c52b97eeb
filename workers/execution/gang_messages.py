"""Messages between a gang's leader and its workers, as msgpack over one connection each."""

from __future__ import annotations

import msgspec

from ..plan import AdapterFailure, HostAdapterStats, Int32s, MoveEnd, SampledToken, StepPlan
from ..wire.prompt_scores import PromptScores


class Join(msgspec.Struct, frozen=True, tag="join"):
    """A worker's first message. `secret`: the gang's, so that no other process joins."""

    rank: int
    secret: str


class Progress(msgspec.Struct, frozen=True, tag="progress"):
    what: str
    done: int
    total: int


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The worker's part of the base is loaded. `num_pages`: of its pool, the same on every worker.

    `num_host_pages`: that its host memory has room for; the gang uses as many as all have.
    """

    kernels: str
    device: str
    num_pages: int
    num_host_pages: int


class Done(msgspec.Struct, frozen=True, tag="done"):
    """A step is computed. Only the first worker sends the tokens, the scores and what is pooled."""

    step: int
    tokens: dict[int, SampledToken | None]
    host_adapter_stats: HostAdapterStats = HostAdapterStats()
    scores: dict[int, PromptScores | None] = {}
    pooled: dict[int, bytes | None] = {}


class LoadEnded(msgspec.Struct, frozen=True, tag="load_ended"):
    digest: str
    failure: AdapterFailure | None


class MoveEnded(msgspec.Struct, frozen=True, tag="move_ended"):
    end: MoveEnd


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The worker has failed and ends."""

    problem: str


class WantMasks(msgspec.Struct, frozen=True, tag="want_masks"):
    """The first worker is about to choose tokens, and asks for the masks that are made: `MaskSource.take`.

    Only the masks are sent: for each sequence and step the vocabulary's size in bits.
    """

    wanted: list[tuple[int, int]]


class Masks(msgspec.Struct, frozen=True, tag="masks"):
    """The answer, by sequence id."""

    made: dict[int, bytes]


class Execute(msgspec.Struct, frozen=True, tag="execute"):
    """A plan whose sequences have only those of their pages that follow the ones that the worker keeps.

    Made and read by `plan_deltas.py`.
    """

    plan: StepPlan
    num_kept_pages: Int32s  # of each of its sequences


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    pass


FromWorker = Join | Progress | Ready | Done | LoadEnded | MoveEnded | Failed | WantMasks
ToWorker = Execute | Masks | Stop
