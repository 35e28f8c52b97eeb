"""What a request for usage asks for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final, Literal, get_args

from ...adapters.errors import AdapterInvalid
from ...adapters.names import check_tenant
from ...adapters.registry.ledger.ledger import HOURS_KEPT_DAYS
from ..openai_api.errors import invalid_value

Dimension = Literal["hour", "day", "adapter", "key", "user", "tenant"]
MAX_ROWS: Final = 10_000
_DEFAULT_DAYS: Final = 30
_MOST_DAYS: Final = 400
_DAY: Final = timedelta(days=1)


@dataclass(frozen=True)
class UsageQuery:
    by: tuple[Dimension, ...]  # in the order in which rows are sorted; empty: one row
    start: datetime  # UTC
    end: datetime  # UTC, not included
    is_csv: bool
    limit: int | None  # rows; None: all of them
    after: int  # rows that are left out at the beginning
    tenant: str | None  # of operators' questions: only this one

    @property
    def needs_hours(self) -> bool:
        """Sums of days do not have it."""
        return "hour" in self.by or any(time.hour for time in (self.start, self.end))


def usage_query(params: Mapping[str, str], now: datetime, *, for_operators: bool) -> UsageQuery:
    """Raises a 400 that says what is accepted. `now`: UTC."""
    accepted = [one for one in get_args(Dimension) if for_operators or one != "tenant"]
    by: list[Dimension] = []
    for word in filter(None, params.get("by", "day").split(",")):
        if word not in accepted or word in by:
            raise invalid_value("by", f"{word[:20]!r}: {', '.join(accepted)}, each once, are accepted.")
        by.append(word)  # type: ignore[arg-type]  # it is one of them
    if "hour" in by and "day" in by:
        by.remove("day")  # an hour includes its day
    midnight = now.replace(hour=0, minute=0, second=0, microsecond=0)
    end = _time(params, "to") or midnight + _DAY
    start = _time(params, "from") or end - _DAY * (1 if "hour" in by else _DEFAULT_DAYS)
    format_ = params.get("format", "json")
    if format_ not in ("json", "csv"):
        raise invalid_value("format", f"{format_[:20]!r}: json and csv are accepted.")
    tenant = params.get("tenant") if for_operators else None
    if tenant is not None:
        try:
            check_tenant(tenant)
        except AdapterInvalid as error:
            raise invalid_value("tenant", str(error)) from error
    is_csv = format_ == "csv"
    query = UsageQuery(
        by=tuple(by),
        start=start,
        end=end,
        is_csv=is_csv,
        limit=None if is_csv and "limit" not in params else _count(params, "limit", MAX_ROWS, 1, MAX_ROWS),
        after=_count(params, "after", 0, 0, 10**9),
        tenant=tenant,
    )
    most = HOURS_KEPT_DAYS if query.needs_hours else _MOST_DAYS
    if not timedelta(0) < end - start <= _DAY * most:
        hint = " (whole days may be more)" if query.needs_hours else ""
        raise invalid_value(
            "from", f"the time from 'from' to 'to' must be more than none, and {most} days at most{hint}."
        )
    return query


def _time(params: Mapping[str, str], name: str) -> datetime | None:
    text = params.get(name)
    if text is None:
        return None
    try:
        time = datetime.fromisoformat(text)
        time = time.replace(tzinfo=UTC) if time.tzinfo is None else time.astimezone(UTC)
        if (time.minute, time.second, time.microsecond) == (0, 0, 0) and 2000 <= time.year <= 9000:
            return time
    except (ValueError, OverflowError):
        pass
    accepted = "a day like 2026-11-22 or a full hour like 2026-11-22T13:00 (UTC unless it has an offset) is accepted."
    raise invalid_value(name, f"{text[:40]!r}: {accepted}")


def _count(params: Mapping[str, str], name: str, default: int, least: int, most: int) -> int:
    text = params.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdigit() and len(text) <= 10 and least <= int(text) <= most):
        raise invalid_value(name, f"{text[:20]!r} is not a whole number from {least} to {most}.")
    return int(text)
