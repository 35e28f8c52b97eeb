"""Prices of what is counted, from a file of the operators. Amounts are exact: no number here is a float.

```
currency = "EUR"

[[price]]                       # the first whose pattern fits an adapter's name counts
adapter = "legal-*"
prompt_tokens = 0.40            # for 1,000,000 of them
cached_tokens = 0.04            # of the prompts', in place of the price above
output_tokens = 1.60
kv_device_page_seconds = 0.5    # for 1,000,000 pages of KV for a second each
adapter_device_page_seconds = 1  # the same, of adapters

[[price]]
adapter = "~*"                  # all private adapters of users
output_tokens = 1.00

[[price]]
adapter = "*"                   # the base too
prompt_tokens = 0.20
```
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Context, Decimal, localcontext
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final

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
        found = tomllib.loads(path.read_text(), parse_float=Decimal)
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise PricesInvalidError(f"{path} is not TOML: {error}") from error
    unknown = found.keys() - {"currency", "price"}
    if unknown:
        raise PricesInvalidError(f"{path} has {', '.join(sorted(unknown))}: currency and [[price]] are accepted")
    currency, prices = found.get("currency"), found.get("price", [])
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
    found = {}
    for name, value in rates.items():
        if name not in _PRICED:
            raise PricesInvalidError(f"{path}: {name} of {pattern} is not counted: {', '.join(_PRICED)} are")
        is_number = isinstance(value, int | Decimal) and not isinstance(value, bool)
        if not (is_number and Decimal(value).is_finite() and value >= 0):
            raise PricesInvalidError(f"{path}: {name} of {pattern} = {value!r}: a number from 0 on is needed")
        found[name] = Decimal(value)
    return Price(pattern, found)
