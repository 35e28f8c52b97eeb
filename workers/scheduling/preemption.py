"""Which sequence is preempted when pages run out: a pure policy."""

from __future__ import annotations

from .sequence import Sequence


def choose_victim(newest: Sequence | None, needy: Sequence) -> Sequence | None:
    """The newest running sequence, if it is newer than the one that needs pages; None: no sequence is preempted.

    No sequence is ever preempted for a newer one, so the oldest one always goes on, and all are served in the end.
    """
    return newest if newest is not None and newest.arrival > needy.arrival else None
