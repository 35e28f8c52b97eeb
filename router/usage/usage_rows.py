"""Sums of the ledger as rows of an answer: grouped, priced, sorted."""

from __future__ import annotations

import csv
import io
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from decimal import Context, Decimal, localcontext
from heapq import merge
from itertools import chain, islice
from typing import Final

import msgspec

from ...adapters.registry.ledger.entry import NUMBERS, Group
from ...adapters.registry.ledger.ledger import Sum
from ..loop_share import LoopShare
from ..openai_api.errors import invalid_value
from .prices import Price, Prices
from .usage_query import Dimension, UsageQuery

MAX_SUMS: Final = 500_000  # that an answer is made of: some 200 MB
_RUN_LENGTH: Final = 500  # of what is sorted in one piece
_NUM_PARTS: Final = 64
_EXACT: Final = Context(prec=60)
_Place = tuple[str | int, ...]
_FIELDS: Final[dict[Dimension, tuple[str, ...]]] = {
    "hour": ("start",),
    "day": ("start",),
    "tenant": ("tenant",),
    "adapter": ("adapter", "version", "digest"),
    "key": ("key_id",),
    "user": ("user",),
}
_VALUES: Final[dict[Dimension, Callable[[str, Sum], _Place]]] = {
    "hour": lambda tenant, one: (_iso(one.start),),
    "day": lambda tenant, one: (one.start.date().isoformat(),),
    "tenant": lambda tenant, one: (tenant,),
    "adapter": lambda tenant, one: (one.group.adapter, one.group.version, one.group.digest),
    "key": lambda tenant, one: (one.group.key_id,),
    "user": lambda tenant, one: (one.group.user,),
}


class UsageRow(msgspec.Struct, kw_only=True, omit_defaults=False):
    """What was used by whom and when. A field that the question does not group by is null."""

    start: str | None = None  # ISO 8601, UTC
    tenant: str | None = None
    adapter: str | None = None
    version: int | None = None  # 0: the base
    digest: str | None = None  # its first digits
    key_id: str | None = None
    user: str | None = None  # of the tenant; empty: the key was no user's
    requests: int = 0
    cut_off: int = 0  # of these, answers whose client did not receive the end
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    recomputed_tokens: int = 0  # computed again, or in vain: never charged
    kv_device_page_seconds: str = "0"  # this and what follows: exact decimal numbers
    adapter_device_page_seconds: str = "0"
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
    """Adds up sums of the ledger as a question wants them grouped. What may be long it does in pieces."""

    def __init__(
        self, query: UsageQuery, prices: Prices | None, shown: Callable[[Group], Group | None] = lambda group: group
    ) -> None:
        """`shown`: a group as the caller may see it; None: the caller may not."""
        self._query, self._prices, self._shown = query, prices, shown
        # By what the question groups by, and then by which price it has: amounts follow from sums.
        # In several parts, since a dictionary that is large takes long when it grows.
        self._parts: list[dict[_Place, list[int]]] = [{} for _ in range(_NUM_PARTS)]
        self.num_sums = 0  # of all parts
        self._total: defaultdict[int, list[int]] = defaultdict(lambda: [0] * len(NUMBERS))  # by price
        self._known_prices: list[Price | None] = []
        self._price_of: dict[str, int] = {}  # by adapter

    def add(self, tenant: str, sums: Iterable[Sum]) -> None:
        """What is not in the question's time is left out. Raises a 400 if the answer would be too long to be made."""
        query = self._query
        for one in sums:
            if not query.start <= one.start < query.end:
                continue
            price = self._price_of.get(one.group.adapter)
            if price is None:
                price = self._learn_price(one.group.adapter)
            group = self._shown(one.group)
            if group is None:
                continue
            if group is not one.group:
                one = replace(one, group=group)
            place = (*(value for name in query.by for value in _VALUES[name](tenant, one)), price)
            part = self._parts[hash(place) % _NUM_PARTS]
            held = part.get(place)
            if held is None:
                held = part[place] = [0] * len(NUMBERS)
                self.num_sums += 1
            total = self._total[price]
            for index, number in enumerate(one.numbers[: len(held)]):
                held[index] += number
                total[index] += number
        if self.num_sums > MAX_SUMS:
            raise invalid_value("by", f"it takes more than {MAX_SUMS} sums: ask for less time at once, or by less.")

    def _learn_price(self, adapter: str) -> int:
        price = None if self._prices is None else self._prices.price_of(adapter)
        if price not in self._known_prices:
            self._known_prices.append(price)
        number = self._price_of[adapter] = self._known_prices.index(price)
        return number

    async def rows(self, share: LoopShare) -> AsyncIterator[UsageRow]:
        """From the question's first one on, to the last of all."""
        number = -1
        async for place, by_price in self._in_order(share):
            number += 1
            if number >= self._query.after:
                yield self._row(place, by_price)

    async def _in_order(self, share: LoopShare) -> AsyncIterator[tuple[_Place, dict[int, list[int]]]]:
        places, runs = chain.from_iterable(self._parts), list[list[_Place]]()
        while run := sorted(islice(places, _RUN_LENGTH)):
            runs.append(run)
            await share.pause()
        before: _Place | None = None
        by_price: dict[int, list[int]] = {}
        for place in merge(*runs):
            if place[:-1] != before:
                if before is not None:
                    yield before, by_price
                before, by_price = place[:-1], {}
            by_price[int(place[-1])] = self._parts[hash(place) % _NUM_PARTS][place]
            await share.pause()
        if before is not None:
            yield before, by_price

    def list_of(self, rows: Sequence[msgspec.Raw], *, has_more: bool) -> UsageList:
        """`rows`: encoded one by one, which many at once would hold the event loop for."""
        query = self._query
        return UsageList(
            start=_iso(query.start),
            end=_iso(query.end),
            currency=self.currency,
            data=rows,  # type: ignore[arg-type]  # encoded already
            total=self._filled(UsageRow(), self._total),
            has_more=has_more,
        )

    @property
    def currency(self) -> str | None:
        return None if self._prices is None else self._prices.currency

    def _row(self, place: _Place, by_price: Mapping[int, Sequence[int]]) -> UsageRow:
        row, values = UsageRow(), iter(place)
        for name in self._query.by:
            for field in _FIELDS[name]:
                setattr(row, field, next(values))
        return self._filled(row, by_price)

    def _filled(self, row: UsageRow, by_price: Mapping[int, Sequence[int]]) -> UsageRow:
        sums = dict.fromkeys(NUMBERS, 0)
        with localcontext(_EXACT):
            amount = Decimal(0)
            for price_number, counted in by_price.items():
                numbers = dict(zip(NUMBERS, counted, strict=True))
                for name, number in numbers.items():
                    sums[name] += number
                price = self._known_prices[price_number]
                if price is not None:
                    amount += price.amount(numbers)
            num_charged = sums["prompt_tokens"] - sums["cached_tokens"] + sums["output_tokens"]
            num_again = max(sums["recomputed_tokens"], sums.pop("computed_tokens") - num_charged)
            for name, number in (sums | {"recomputed_tokens": num_again}).items():
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


def csv_head() -> str:
    """The names of what `csv_line` writes."""
    return _line([*UsageRow.__struct_fields__, "currency"])


def csv_line(row: UsageRow, currency: str | None) -> str:
    return _line([*(_cell(getattr(row, name)) for name in UsageRow.__struct_fields__), currency])


def _line(cells: Sequence[object]) -> str:
    file = io.StringIO()
    csv.writer(file, lineterminator="\n").writerow(cells)
    return file.getvalue()


def _cell(value: object) -> object:
    """A text that a spreadsheet would take for a formula is shown as text."""
    return f"'{value}" if isinstance(value, str) and value[:1] in ("=", "+", "-", "@", "\t") else value


def _iso(time: datetime) -> str:
    return f"{time.date().isoformat()}T{time.hour:02}:00:00Z"
