"""The mark that makes a struct's field a setting, and the units that values are written in."""

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
    live_in: Part | None = None  # whose replicas take another value over as they run; None: new ones replace them
    not_in_args: str = ""  # why no argument of the Serve application, and what says it there; empty: it is one
    flags: tuple[str, ...] = ()  # long options without dashes; empty: one, made of the field's name
    unset: str = ""  # what stands for None, or for an empty text or list, in the help
    env: str = ""  # environment variable that says it where the command line does not
    secret: bool = False  # never repeated in a message
    check: Callable[[Any], Refusal | None] | None = None  # what types and bounds cannot say


@dataclass(frozen=True)
class Unit:
    """In a field's annotation: how its values are written."""

    metavar: str
    accepted: str = ""  # where the type does not say it


@dataclass(frozen=True)
class Pairs(Unit):
    """A list whose elements are written as NAME=VALUE, and may be repeated on the command line."""

    example: str = ""
    split_last: bool = False  # at the last "=", as a name may hold some


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
