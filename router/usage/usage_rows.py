"""Sums of the ledger as rows of an answer: grouped, priced, sorted."""

from __future__ import annotations

import csv
import io
import tomllib
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from decimal import Context, Decimal, localcontext
from fnmatch import fnmatchcase
from heapq import merge
from itertools import chain, islice
from pathlib import Path
from typing import Any, Final, Literal, get_args

import msgspec

from ...adapters.errors import AdapterInvalid
from ...adapters.names import check_tenant
from ...adapters.registry.ledger.entry import NUMBERS, Group
from ...adapters.registry.ledger.ledger import HOURS_KEPT_DAYS, Sum
from ..http.errors import invalid_value
from ..http.loop_turns import LoopShare

# Prices of what is counted, from a file of the operators. Amounts are exact: no number here is a float.
#
# ``` currency = "EUR"
#
# [[price]] # the first whose pattern fits an adapter's name counts adapter = "legal-*" prompt_tokens = 0.40 # for
# 1,000,000 of them cached_tokens = 0.04 # of the prompts', in place of the price above output_tokens = 1.60
# kv_device_page_seconds = 0.5 # for 1,000,000 pages of KV for a second each adapter_device_page_seconds = 1 # the
# same, of adapters
#
# [[price]] adapter = "~*" # all private adapters of users output_tokens = 1.00
#
# [[price]] adapter = "*" # the base too prompt_tokens = 0.20 ```

_PER: Final = 1_000_000
_PRICED: Final = {  # what a price is called, what is counted, and how many of that are one of what is priced
    "requests": ("requests", 1),
    "prompt_tokens": ("prompt_tokens", 1),
    "cached_tokens": ("cached_tokens", 1),
    "output_tokens": ("output_tokens", 1),
    "kv_device_page_seconds": ("kv_device_page_ms", 1000),
    "adapter_device_page_seconds": ("adapter_device_page_ms", 1000),
}
_PRIVATE: Final = "~(other)"  # what private adapters are added up as
_EXACT: Final = Context(prec=60)


class PricesInvalidError(ValueError):
    """`str()` names what is wrong in the file and what would be right."""


@dataclass(frozen=True)
class Price:
    pattern: str  # of adapters' names, with * and ?
    per_million: Mapping[str, Decimal]  # by what is priced

    def amount(self, numbers: Mapping[str, int]) -> Decimal:
        """The exact cost of this usage."""
        with localcontext(_EXACT):
            amount = Decimal(0)
            for name, rate in self.per_million.items():
                counted, per_one = _PRICED[name]
                number = numbers.get(counted, 0)
                if name == "prompt_tokens" and "cached_tokens" in self.per_million:
                    number -= numbers.get("cached_tokens", 0)
                amount += number * rate / (_PER * per_one)
            return amount


@dataclass(frozen=True)
class Prices:
    currency: str
    prices: Sequence[Price]

    def price_of(self, adapter: str) -> Price | None:
        """The price of an adapter, or of the base. None: it costs nothing.

        Private adapters have one price: after two months their rows are added up, which must not change amounts.
        """
        name = _PRIVATE if adapter.startswith("~") else adapter
        return next((price for price in self.prices if fnmatchcase(name, price.pattern)), None)


def read_prices(path: Path) -> Prices:
    """Raises PricesInvalidError, and OSError for a file that cannot be read."""
    try:
        document = tomllib.loads(path.read_text(), parse_float=Decimal)
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise PricesInvalidError(f"{path} is not TOML: {error}") from error
    unknown = document.keys() - {"currency", "price"}
    if unknown:
        raise PricesInvalidError(f"{path} has {', '.join(sorted(unknown))}: currency and [[price]] are accepted")
    currency, prices = document.get("currency"), document.get("price", [])
    if not (isinstance(currency, str) and currency.isalpha()):
        raise PricesInvalidError(f'{path}: currency = {currency!r}: letters are needed, like "EUR"')
    if not (isinstance(prices, list) and all(isinstance(price, dict) for price in prices)):
        raise PricesInvalidError(f"{path}: each price begins with a line [[price]]")
    return Prices(currency, [_price(path, price) for price in prices])


def _price(path: Path, entry: Mapping[str, Any]) -> Price:
    rates = {name: value for name, value in entry.items() if name != "adapter"}
    pattern = entry.get("adapter")
    if not (isinstance(pattern, str) and pattern):
        raise PricesInvalidError(f"{path}: a price has adapter = {pattern!r}: a name, or a pattern like * is needed")
    if pattern.startswith("~") and not fnmatchcase(_PRIVATE, pattern):
        message = "the private adapters of all users have one price: ~* is needed"
        raise PricesInvalidError(f"{path}: a price has adapter = {pattern!r}: {message}")
    amounts = {}
    for name, value in rates.items():
        if name not in _PRICED:
            raise PricesInvalidError(f"{path}: {name} of {pattern} is not counted: {', '.join(_PRICED)} are")
        is_number = isinstance(value, int | Decimal) and not isinstance(value, bool)
        if not (is_number and Decimal(value).is_finite() and value >= 0):
            raise PricesInvalidError(f"{path}: {name} of {pattern} = {value!r}: a number from 0 on is needed")
        amounts[name] = Decimal(value)
    return Price(pattern, amounts)


# What a request for usage asks for.

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
    accepted = [dimension for dimension in get_args(Dimension) if for_operators or dimension != "tenant"]
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
    max_days = HOURS_KEPT_DAYS if query.needs_hours else _MOST_DAYS
    if not timedelta(0) < end - start <= _DAY * max_days:
        hint = " (whole days may be more)" if query.needs_hours else ""
        raise invalid_value(
            "from", f"the time from 'from' to 'to' must be more than none, and {max_days} days at most{hint}."
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


def _count(params: Mapping[str, str], name: str, default: int, minimum: int, maximum: int) -> int:
    text = params.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdigit() and len(text) <= 10 and minimum <= int(text) <= maximum):
        raise invalid_value(name, f"{text[:20]!r} is not a whole number from {minimum} to {maximum}.")
    return int(text)


MAX_SUMS: Final = 500_000  # that an answer is made of: some 200 MB
_RUN_LENGTH: Final = 500  # of what is sorted in one piece
_NUM_PARTS: Final = 64
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
    "hour": lambda tenant, entry: (_iso(entry.start),),
    "day": lambda tenant, entry: (entry.start.date().isoformat(),),
    "tenant": lambda tenant, entry: (tenant,),
    "adapter": lambda tenant, entry: (entry.group.adapter, entry.group.version, entry.group.digest),
    "key": lambda tenant, entry: (entry.group.key_id,),
    "user": lambda tenant, entry: (entry.group.user,),
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
        self, query: UsageQuery, prices: Prices | None, view: Callable[[Group], Group | None] = lambda group: group
    ) -> None:
        """`view`: a group as the caller may see it; None: the caller may not."""
        self._query, self._prices, self._view = query, prices, view
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
        for entry in sums:
            if not query.start <= entry.start < query.end:
                continue
            price = self._price_of.get(entry.group.adapter)
            if price is None:
                price = self._learn_price(entry.group.adapter)
            group = self._view(entry.group)
            if group is None:
                continue
            if group is not entry.group:
                entry = replace(entry, group=group)
            place = (*(value for name in query.by for value in _VALUES[name](tenant, entry)), price)
            part = self._parts[hash(place) % _NUM_PARTS]
            numbers = part.get(place)
            if numbers is None:
                numbers = part[place] = [0] * len(NUMBERS)
                self.num_sums += 1
            total = self._total[price]
            for index, number in enumerate(entry.numbers[: len(numbers)]):
                numbers[index] += number
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
