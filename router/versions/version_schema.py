"""Bodies and answers of the routes of versions, as msgspec and the OpenAPI description have them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from ...adapters.adapter import AdapterVersion
from ...adapters.registry.versions.canary_policy import FIRST_TOKEN_EDGES_S, PER_TOKEN_EDGES_S, ArmCounts
from ...adapters.registry.versions.name_state import MAX_NOTE_CHARS, NameState, VersionNote
from ...adapters.registry.versions.rollout import MAX_PINNED_GANGS

MAX_GANGS: Final = MAX_PINNED_GANGS  # that one preload or pin may name
Selector = Annotated[str | int, Meta(description="A version's number, or an alias.")]
NumGangs = Annotated[int, Meta(ge=1, le=MAX_GANGS)]
CanaryShare = Annotated[float, Meta(gt=0, lt=1)]
ShadowShare = Annotated[float, Meta(gt=0, le=1)]


class NoteBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    note: Annotated[str, Meta(max_length=MAX_NOTE_CHARS)]


class PromoteBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    version: Selector | None = None  # none: that of the canary


class EmptyBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    pass


class AliasBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    version: Selector


class PreloadBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    version: Selector | None = None  # none: the current one
    gangs: NumGangs = 1


class PinBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    gangs: NumGangs = 1


class CanaryBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    version: Selector
    share: CanaryShare


class ShadowBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    version: Selector
    share: ShadowShare


class VersionAnswer(msgspec.Struct, frozen=True):
    name: str
    version: int
    digest: str
    rank: int
    targets: tuple[str, ...]
    bytes: int
    packed_bytes: int  # that it takes in a gang's memory; 0: from before this was recorded
    created_at: int
    note: str
    uploaded_by: str  # id of a key; empty: from before they were kept
    user: str | None  # of the tenant, whose it is; null: the key was no user's
    is_current: bool
    aliases: tuple[str, ...]
    is_canary: bool
    is_shadow: bool
    state: Literal["ready", "failed"] = "ready"
    reason: str | None = None  # why it failed
    object: Literal["version"] = "version"


class VersionList(msgspec.Struct, frozen=True):
    """All versions that are kept, the newest first."""

    data: list[VersionAnswer]
    object: Literal["list"] = "list"


class AliasAnswer(msgspec.Struct, frozen=True):
    name: str
    alias: str
    version: int
    object: Literal["alias"] = "alias"


class PreloadAnswer(msgspec.Struct, frozen=True):
    """What has begun. How it goes on: `residency`."""

    name: str
    version: int
    gangs: int  # that it comes to, or is at already
    state: Literal["coming"] = "coming"
    object: Literal["preload"] = "preload"


class AliasList(msgspec.Struct, frozen=True):
    data: list[AliasAnswer]
    object: Literal["list"] = "list"


class PartDeleted(msgspec.Struct, frozen=True):
    """What belonged to a name is deleted; the name and its versions stay."""

    name: str
    object: Literal["alias", "canary", "shadow", "pin"]
    deleted: bool = True


def shown_version(state: NameState, adapter: AdapterVersion, failure: str | None = None) -> VersionAnswer:
    """A version of the name as its tenant sees it. `failure`: why a gang could not load it."""
    note = state.notes.versions.get(adapter.version, VersionNote())
    rollout = state.rollout
    return VersionAnswer(
        name=adapter.name,
        version=adapter.version,
        digest=adapter.digest,
        rank=adapter.rank,
        targets=adapter.targets,
        bytes=adapter.num_bytes,
        packed_bytes=adapter.packed_bytes,
        created_at=int(adapter.created_at),
        note=note.note,
        uploaded_by=note.uploaded_by,
        user=note.user or None,
        is_current=adapter.version == state.current.version,
        aliases=tuple(sorted(alias for alias, version in rollout.aliases.items() if version == adapter.version)),
        is_canary=rollout.canary is not None and rollout.canary.version == adapter.version,
        is_shadow=rollout.shadow is not None and rollout.shadow.version == adapter.version,
        state="ready" if failure is None else "failed",
        reason=failure,
    )


class ArmAnswer(msgspec.Struct, frozen=True):
    """What the answers of one version were."""

    answers: int
    uncounted: int  # further answers, of users or conversations that had reached their limit of counted answers
    errors: int
    refused: int
    thumbs_up: int
    thumbs_down: int
    first_token_p50_s: float | None  # at most; None: nothing was timed
    first_token_p99_s: float | None
    per_token_p50_s: float | None
    per_token_p99_s: float | None


class CanaryAnswer(msgspec.Struct, frozen=True):
    name: str
    version: int
    share: float
    state: Literal["running", "promoted", "stopped", "superseded", "rolled_back"]
    reason: str | None  # why it has ended
    stable: ArmAnswer
    canary: ArmAnswer
    comments: list[str]  # of people who gave feedback, the newest first
    object: Literal["canary"] = "canary"


class ShadowAnswer(msgspec.Struct, frozen=True):
    name: str
    version: int
    share: float
    seen: ArmAnswer
    object: Literal["shadow"] = "shadow"


class FeedbackBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A rating of an answer: `score`, or `thumb`."""

    id: Annotated[str, Meta(min_length=1, max_length=128)]
    score: Annotated[float, Meta(ge=-1, le=1)] | None = None  # above 0: good, below 0: bad
    thumb: Literal["up", "down"] | None = None
    comment: Annotated[str, Meta(max_length=MAX_NOTE_CHARS)] = ""


class FeedbackAnswer(msgspec.Struct, frozen=True):
    id: str
    counted: bool  # False: no answer of this tenant in a trial has this id, or it was rated before
    object: Literal["feedback"] = "feedback"


def shown_arm(counts: ArmCounts) -> ArmAnswer:
    first = [quantile(counts.first_token, FIRST_TOKEN_EDGES_S, share) for share in (0.5, 0.99)]
    each = [quantile(counts.per_token, PER_TOKEN_EDGES_S, share) for share in (0.5, 0.99)]
    return ArmAnswer(
        answers=counts.answers,
        uncounted=counts.uncounted,
        errors=counts.errors,
        refused=counts.refused,
        thumbs_up=counts.thumbs_up,
        thumbs_down=counts.thumbs_down,
        first_token_p50_s=first[0],
        first_token_p99_s=first[1],
        per_token_p50_s=each[0],
        per_token_p99_s=each[1],
    )


def quantile(counts: Sequence[int], edges: Sequence[float], share: float) -> float | None:
    """The edge below which this share of the times is; twice the last edge for those above it.

    >>> quantile([6, 3, 1, 0], [0.1, 0.2, 0.5], 0.5), quantile([6, 3, 1, 0], [0.1, 0.2, 0.5], 0.95)
    (0.1, 0.5)
    >>> quantile([0, 0, 0, 2], [0.1, 0.2, 0.5], 0.5)
    1.0
    """
    target, so_far = share * sum(counts), 0
    for count, edge in zip(counts, (*edges, 2 * edges[-1]), strict=True):
        so_far += count
        if so_far and so_far >= target:
            return edge
    return None
