"""Sums of the ledger as rows of an answer: grouped, priced, sorted."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from datetime import datetime
from decimal import Context, Decimal, localcontext
from typing import Final

import msgspec

from ...adapters.ledger.entry import NUMBERS
from ...adapters.ledger.ledger import Sum
from .prices import Prices
from .usage_query import Dimension, UsageQuery

_EXACT: Final = Context(prec=60)
_Place = tuple[str | int, ...]
_FIELDS: Final[dict[Dimension, tuple[str, ...]]] = {
    "hour": ("start",),
    "day": ("start",),
    "tenant": ("tenant",),
    "adapter": ("adapter", "version", "digest"),
    "key": ("key_id",),
}


class UsageRow(msgspec.Struct, kw_only=True, omit_defaults=False):
    """What was used by whom and when. A field that the question does not group by is null."""

    start: str | None = None  # ISO 8601, UTC
    tenant: str | None = None
    adapter: str | None = None
    version: int | None = None  # 0: the base
    digest: str | None = None  # its first digits
    key_id: str | None = None
    requests: int = 0
    cut_off: int = 0  # of these, answers whose client did not hear the end
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    kv_device_page_seconds: str = "0"  # this and what follows: exact decimal numbers
    amount: str | None = None  # in the list's currency; null: there are no prices


class UsageList(msgspec.Struct, kw_only=True):
    object: str = "list"
    start: str
    end: str  # not included
    currency: str | None  # null: there are no prices
    data: list[UsageRow]
    total: UsageRow  # of all rows, those on other pages too
    has_more: bool


class UsageSums:
    """Adds up sums of the ledger as a question wants them grouped."""

    def __init__(self, query: UsageQuery, prices: Prices | None) -> None:
        self._query, self._prices = query, prices
        # By what the question groups by; under it by adapter, which decides the price.
        self._numbers: dict[_Place, dict[str, list[int]]] = {}

    def add(self, tenant: str, sums: Iterable[Sum]) -> None:
        """What is not in the question's time is left out."""
        query = self._query
        for one in sums:
            if not query.start <= one.start < query.end:
                continue
            group = one.group
            by: dict[Dimension, _Place] = {
                "hour": (_iso(one.start),),
                "day": (one.start.date().isoformat(),),
                "tenant": (tenant,),
                "adapter": (group.adapter, group.version, group.digest),
                "key": (group.key_id,),
            }
            place = tuple([value for name in query.by for value in by[name]])
            held = self._numbers.setdefault(place, {}).setdefault(group.adapter, [0] * len(NUMBERS))
            for index, number in enumerate(one.numbers[: len(held)]):
                held[index] += number

    def list(self) -> UsageList:
        query, places = self._query, sorted(self._numbers)
        rows = [self._row(place) for place in places[query.after : query.after + query.limit]]
        return UsageList(
            start=_iso(query.start),
            end=_iso(query.end),
            currency=None if self._prices is None else self._prices.currency,
            data=rows,
            total=self._filled(UsageRow(), places),
            has_more=query.after + query.limit < len(places),
        )

    def _row(self, place: _Place) -> UsageRow:
        row, values = UsageRow(), iter(place)
        for name in self._query.by:
            for field in _FIELDS[name]:
                setattr(row, field, next(values))
        return self._filled(row, [place])

    def _filled(self, row: UsageRow, places: Iterable[_Place]) -> UsageRow:
        sums = dict.fromkeys(NUMBERS, 0)
        with localcontext(_EXACT):
            amount = Decimal(0)
            for adapter, counted in (one for place in places for one in self._numbers[place].items()):
                numbers = dict(zip(NUMBERS, counted, strict=True))
                for name, number in numbers.items():
                    sums[name] += number
                if self._prices is not None:
                    amount += self._prices.amount(adapter, numbers)
            for name, number in sums.items():
                if name.endswith("_page_ms"):
                    setattr(row, name.removesuffix("ms") + "seconds", _plain(Decimal(number) / 1000))
                else:
                    setattr(row, name, number)
            row.amount = None if self._prices is None else _plain(amount)
        return row


def _plain(number: Decimal) -> str:
    """All of its digits, without an exponent and without zeros at the end."""
    text = format(number, "f")
    return text.rstrip("0").rstrip(".") if "." in text else text


def encoded(found: UsageList) -> bytes:
    return msgspec.json.encode(found)


def as_csv(found: UsageList) -> str:
    """The rows, with a line of names before them."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    names: Sequence[str] = UsageRow.__struct_fields__
    writer.writerow([*names, "currency"])
    for row in found.data:
        writer.writerow([*(_cell(getattr(row, name)) for name in names), found.currency])
    return file.getvalue()


def _cell(value: object) -> object:
    """A text that a spreadsheet would take for a formula is shown as text."""
    return f"'{value}" if isinstance(value, str) and value[:1] in ("=", "+", "-", "@", "\t") else value


def _iso(time: datetime) -> str:
    return f"{time:%Y-%m-%dT%H:00:00Z}"
