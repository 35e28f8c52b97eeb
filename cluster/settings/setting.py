"""The annotation that makes a struct's field a setting, and the units of values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta

Change = Literal["live", "restart"]
Part = Literal["router", "gang"]  # a deployment of the Serve application
Refusal = tuple[object, str]  # the value as it may be shown, and what would be accepted


@dataclass(frozen=True)
class Setting:
    """In a field's annotation: this field is a setting."""

    help: str  # a sentence or two, for `motet serve --help` and docs/settings.md
    change: Change = "restart"  # "live": a rolling update may change it while motet serves
    live_in: Part | None = None  # whose running replicas apply a new value; None: they are replaced
    not_in_args: str = ""  # why it is no argument of the Serve application, and how to set it there; empty: it is one
    flags: tuple[str, ...] = ()  # long options without dashes; empty: one, derived from the field's name
    unset: str = ""  # how the help shows None, or an empty text or list
    env: str = ""  # environment variable for it, which the command line overrides
    secret: bool = False  # never repeated in a message
    check: Callable[[Any], Refusal | None] | None = None  # for rules beyond types and bounds


@dataclass(frozen=True)
class Unit:
    """In a field's annotation: how its values are written."""

    metavar: str
    accepted: str = ""  # if the type does not describe it


@dataclass(frozen=True)
class Texts(Unit):
    """Text with commas between its elements, which may also be given as a list of them."""


@dataclass(frozen=True)
class Pairs(Unit):
    """A list whose elements are written as NAME=VALUE, and may be repeated on the command line."""

    example: str = ""
    split_last: bool = False  # at the last "=", since a name may contain some


BYTES = Unit("SIZE")
SECONDS = Unit("SECONDS")

Bytes = Annotated[int, Meta(ge=1), BYTES]
BytesOrNone = Annotated[int, Meta(ge=0), BYTES]
Seconds = Annotated[float, Meta(ge=0), SECONDS]
PositiveSeconds = Annotated[float, Meta(gt=0), SECONDS]
Count = Annotated[int, Meta(ge=1), Unit("NUMBER")]
CountOrNone = Annotated[int, Meta(ge=0), Unit("NUMBER")]
Threads = Annotated[int, Meta(ge=1, le=1024), Unit("NUMBER")]  # more than any machine has cores
Share = Annotated[float, Meta(gt=0, le=1), Unit("SHARE")]
Amount = Annotated[float, Meta(ge=0), Unit("NUMBER")]
PositiveAmount = Annotated[float, Meta(gt=0), Unit("NUMBER")]
Folder = Annotated[Path, Unit("FOLDER", "a folder")]
