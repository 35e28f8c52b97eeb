"""Plans on their way to workers in other processes, which keep the page tables of the sequences that run.

The leader sends the pages that a sequence has got since the last plan with it, and its whole table where the workers
have none, or where it does not begin with the one that they have. What workers keep follows from the messages alone,
and all get the same ones. Tables of runs that have ended are dropped.
"""

from __future__ import annotations

from array import array

import msgspec

from ..plan import INT32_BYTES, Int32s, SequencePlan, StepPlan, packed, unpacked
from .gang_messages import Execute


class PlanMismatchError(Exception):
    """A worker does not keep what the leader says: it would compute on wrong pages."""


class DeltaEncoder:
    """The leader's side: knows the tables that every worker keeps."""

    def __init__(self) -> None:
        self.kept: dict[int, Int32s] = {}  # page tables, by sequence id

    def encode(self, plan: StepPlan) -> Execute:
        """The message for the plan. It must be sent, after those for earlier plans."""
        kept = self.kept
        for sequence_id in plan.ended_runs:
            kept.pop(sequence_id, None)
        parts, num_kept = list[SequencePlan](), array("i")
        for part in plan.sequences:
            table, pages = kept.get(part.sequence_id, b""), part.pages
            new = b""
            if pages is not table:  # most sequences do not grow in a step
                if not pages.startswith(table):
                    table = b""
                new = pages[len(table) :]
                kept[part.sequence_id] = pages
            num_kept.append(len(table) // INT32_BYTES)
            parts.append(_with_pages(part, new))
        return Execute(msgspec.structs.replace(plan, sequences=tuple(parts)), packed(num_kept))

    def check_integrity(self, workers: DeltaDecoder) -> None:
        """Raises AssertionError if these workers, which have read all messages, keep other tables."""
        assert self.kept == workers.kept, "leader and workers keep different tables"


class DeltaDecoder:
    """A worker's side: keeps the tables."""

    def __init__(self) -> None:
        self.kept: dict[int, Int32s] = {}  # page tables, by sequence id

    def decode(self, message: Execute) -> StepPlan:
        """The plan, whose sequences have all of their pages.

        Raises PlanMismatchError if another number of a sequence's pages is kept than the leader says.
        """
        kept, plan = self.kept, message.plan
        for sequence_id in plan.ended_runs:
            kept.pop(sequence_id, None)
        parts = list[SequencePlan]()
        for part, num_kept in zip(plan.sequences, unpacked(message.num_kept_pages), strict=True):
            table = kept.get(part.sequence_id, b"") if num_kept else b""
            if len(table) != num_kept * INT32_BYTES:
                raise PlanMismatchError(
                    f"step {plan.step}: the leader says that this worker keeps {num_kept} pages of sequence "
                    f"{part.sequence_id}, and it keeps {len(table) // INT32_BYTES}"
                )
            if part.pages:
                table += part.pages
                kept[part.sequence_id] = table
            parts.append(_with_pages(part, table))
        return msgspec.structs.replace(plan, sequences=tuple(parts))


def _with_pages(part: SequencePlan, pages: Int32s) -> SequencePlan:
    return SequencePlan(
        part.sequence_id,
        part.token_ids,
        part.start,
        pages,
        part.adapter,
        part.sample,
        part.is_fed,
        part.scores,
        part.pool,
    )
