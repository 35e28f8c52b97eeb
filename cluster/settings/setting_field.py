"""Settings, as the annotations of struct fields describe them, and groups of settings."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import msgspec
from msgspec import Meta

# Counts of bytes as people write them: 512MiB, 2GiB, 1073741824.

UNITS = {"": 1, "b": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}


def parse_byte_size(text: str) -> int:
    """The number of bytes. Raises ValueError that says what is accepted."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", text.strip().lower())
    unit = UNITS.get(match[2]) if match else None
    if match is None or unit is None:
        raise ValueError(
            f"{text!r} is not a size: an integer of bytes, or a number with KiB, MiB, GiB or TiB, is accepted"
        )
    num_bytes = int(float(match[1]) * unit) if "." in match[1] else int(match[1]) * unit
    if num_bytes < 1 and "." in match[1]:
        raise ValueError(f"{text!r} is not a size: it must be 0, or at least one byte")
    return num_bytes


def format_byte_size(num_bytes: int) -> str:
    """Three digits and a binary unit: 1.50 MiB."""
    size, unit = float(num_bytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{num_bytes} B" if unit == "B" else f"{size:.3g} {unit}"


def shortest_byte_size(num_bytes: int) -> str:
    """The same number as a person writes it, exactly: 1GiB, 1536MiB, 17."""
    unit = next(
        (unit for unit in ("TiB", "GiB", "MiB", "KiB") if num_bytes and not num_bytes % UNITS[unit.lower()]), ""
    )
    return f"{num_bytes // UNITS[unit.lower()]}{unit}"


# What is said of a setting that cannot be taken.


class ConfigError(ValueError):
    """A setting is not acceptable; the message names the key, the value and what would be accepted."""

    def __init__(self, key: str, value: object, accepted: str) -> None:
        super().__init__(f"{key} = {value!r}: {accepted}")
        self.key, self.value, self.accepted = key, value, accepted

    def __reduce__(self) -> tuple[type[ConfigError], tuple[str, object, str]]:
        return type(self), (self.key, self.value, self.accepted)


# The annotation that makes a struct's field a setting, and the units of values.

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
Folder = Annotated[Path, Unit("FOLDER", "a folder")]


@dataclass(frozen=True)
class SettingField:
    """One setting: its name, its heading in the help, its type with bounds, its default, and its mark."""

    name: str  # of the struct's field
    heading: str
    type: Any  # as annotated
    default: Any
    mark: Setting

    @property
    def flags(self) -> tuple[str, ...]:
        """Long options without dashes, the documented one first. They are also the keys of the file."""
        if self.mark.flags:
            return self.mark.flags
        name = self.name.removeprefix("num_")
        return (name.removesuffix("_s" if not name.endswith("_per_s") else "").replace("_", "-"),)

    @property
    def option(self) -> str:
        """The option's name in messages."""
        return f"--{self.flags[0]}"

    @property
    def unit(self) -> Unit | None:
        return next((part for part in _parts(self.type) if isinstance(part, Unit)), None)

    @property
    def choices(self) -> tuple[str, ...]:
        """Words that are accepted besides the other values of the type."""
        return tuple(word for part in _parts(self.type) if get_origin(part) is Literal for word in get_args(part))

    @property
    def is_choice(self) -> bool:
        """Whether only `choices` are accepted."""
        return get_origin(_without_marks(self.type)) is Literal

    @property
    def is_switch(self) -> bool:
        return _without_marks(self.type) is bool

    @property
    def is_list(self) -> bool:
        return isinstance(self.unit, Pairs)

    @property
    def metavar(self) -> str:
        if self.is_choice:
            return "|".join(self.choices)
        unit = "TEXT" if self.unit is None else self.unit.metavar
        return "|".join((unit, *self.choices))

    @property
    def accepted(self) -> str:
        """Its valid values, for "… is accepted" in messages and for the docs."""
        if self.is_switch:
            return "true or false"
        if self.is_choice:
            return _listed(self.choices)
        if isinstance(self.unit, Pairs):
            return f"{self.unit.metavar} (for example {self.unit.example})"
        unit = "" if self.unit is None else self.unit.accepted
        return _listed((*self.choices, unit or self._accepted_number() or "text"))

    @property
    def shown_default(self) -> str:
        return self.mark.unset if self.default in (None, "", ()) and self.mark.unset else self.written(self.default)

    def written(self, value: Any) -> str:
        """A value as it is written in a file."""
        if self.unit is BYTES and isinstance(value, int):
            return shortest_byte_size(value)
        if isinstance(value, bool):
            return str(value).lower()
        if isinstance(value, float):
            return f"{value:g}"
        if isinstance(value, tuple):
            return ", ".join("=".join(map(str, pair)) for pair in value) or "none"
        return "none" if value is None else str(value)

    def display_text(self, value: Any) -> object:
        """A value as it is shown in a message."""
        if self.mark.secret:
            return "…"
        return self.written(value) if self.unit is BYTES or isinstance(value, Path) else value

    def converted(self, value: Any) -> Any:
        """The setting's value from text of a command line, a plain value of TOML or JSON, or a value of its type.

        Raises ConfigError.
        """
        setting: Any
        if isinstance(self.unit, Pairs):
            setting = self._pairs(value, self.unit)
        elif (
            isinstance(self.unit, Texts)
            and isinstance(value, list)
            and all(isinstance(element, str) for element in value)
        ):
            setting = ",".join(value)
        else:
            setting = self._convert(self._from_text(value), self.type, value)
        if isinstance(setting, float) and not math.isfinite(setting):
            raise self._refused(value)
        if self.mark.check is not None and (refusal := self.mark.check(setting)) is not None:
            text, accepted = refusal
            raise ConfigError(self.option, text, accepted)
        return setting

    def _from_text(self, value: Any) -> Any:
        number = _number(self.type)
        if not isinstance(value, str) or number is None or value in self.choices:
            return value
        try:
            return parse_byte_size(value) if self.unit is BYTES else _read_number(number, value)
        except ValueError:
            raise self._refused(value) from None

    def _pairs(self, value: Any, unit: Pairs) -> tuple[Any, ...]:
        """A list of one pair may be given as the pair."""
        kind = get_args(_without_marks(self.type))[0]
        pairs = value.items() if isinstance(value, Mapping) else (value,) if isinstance(value, str) else value
        if not isinstance(pairs, Iterable):
            raise self._refused(value)
        return tuple(self._pair(pair, kind, unit) for pair in pairs)

    def _pair(self, source: Any, kind: Any, unit: Pairs) -> Any:
        pair = source
        if isinstance(source, str):
            name, _, value = source.rpartition("=") if unit.split_last else source.partition("=")
            pair = (name, value) if name and value else None
        match pair, get_args(kind):
            case [name, str(text)], (_, number) if number is float:
                try:
                    pair = (name, _read_number(float, text))
                except ValueError:
                    raise self._refused(source) from None
        return self._convert(pair, kind, source)

    def _convert(self, source: Any, kind: Any, original: Any) -> Any:
        try:
            return msgspec.convert(source, kind, strict=False, dec_hook=_make_path)
        except (msgspec.ValidationError, OverflowError):
            raise self._refused(original) from None

    def _refused(self, value: object) -> ConfigError:
        return ConfigError(self.option, "…" if self.mark.secret else value, f"{self.accepted} is accepted")

    def _accepted_number(self) -> str:
        kind = {int: "a whole number", float: "a number"}.get(_number(self.type))
        if kind is None:
            return ""
        if self.unit is BYTES:
            kind = "a size (bytes, or a number with KiB, MiB, GiB or TiB)"
        elif self.unit is SECONDS:
            kind = "a number of seconds"
        low, above, high = (_bound(self.type, name) for name in ("ge", "gt", "le"))
        lower = "" if low is None else f" from {low:g}"
        more = "" if above is None else f" above {above:g}"
        upper = "" if high is None else f" to {high:g}" if low is not None else f" and at most {high:g}"
        return kind + lower + more + upper


class SettingGroup(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings under one heading: the first line of the subclass's docstring, without its full stop.

    An invalid value raises ConfigError, so all values of an existing object are valid.
    """

    def __post_init__(self) -> None:
        for field in _fields_of_group(type(self)):
            msgspec.structs.force_setattr(self, field.name, field.converted(getattr(self, field.name)))


@cache
def groups_of(schema: type[msgspec.Struct]) -> dict[str, type[SettingGroup]]:
    """The groups that a struct is composed of, by the names of its fields. Its other fields are left out."""
    types = {field.name: field.type for field in msgspec.structs.fields(schema)}
    return {name: kind for name, kind in types.items() if isinstance(kind, type) and issubclass(kind, SettingGroup)}


@cache
def fields_of(schema: type[msgspec.Struct]) -> tuple[SettingField, ...]:
    """All settings of a struct's groups, in the order of their definition."""
    return tuple(field for group in groups_of(schema).values() for field in _fields_of_group(group))


@cache
def _fields_of_group(group: type[SettingGroup]) -> tuple[SettingField, ...]:
    heading = (group.__doc__ or group.__name__).splitlines()[0].rstrip(".")
    fields = []
    for field in msgspec.structs.fields(group):
        mark = next((part for part in _parts(field.type) if isinstance(part, Setting)), None)
        assert mark is not None, f"{group.__name__}.{field.name} is not annotated with a Setting"
        fields.append(SettingField(field.name, heading, field.type, field.default, mark))
    return tuple(fields)


def _parts(annotation: Any) -> tuple[Any, ...]:
    """The types that an annotation consists of, and their marks, at any depth but not inside of lists."""
    if get_origin(annotation) is Annotated:
        return (*_parts(annotation.__origin__), *annotation.__metadata__)
    if get_origin(annotation) in (Literal, tuple, None):
        return (annotation,)
    return tuple(part for argument in get_args(annotation) for part in _parts(argument))


def _without_marks(annotation: Any) -> Any:
    return _without_marks(annotation.__origin__) if get_origin(annotation) is Annotated else annotation


def _number(annotation: Any) -> Any:
    return next((part for part in _parts(annotation) if part in (int, float)), None)


def _read_number(kind: Any, text: str) -> float:
    """As Python reads it; a whole number also as 1e3 or 3.0. Raises ValueError."""
    if kind is float:
        return float(text)
    try:
        return int(text)
    except ValueError:
        return float(text)  # the schema refuses one that is not whole


def _bound(annotation: Any, name: str) -> float | None:
    marks = [part for part in _parts(annotation) if isinstance(part, Meta)]
    return next((bound for mark in marks if (bound := getattr(mark, name)) is not None), None)


def _make_path(kind: type, value: Any) -> Any:
    """An absolute path: `~` is the user's home, and relative paths are below the working directory."""
    if kind is not Path or not isinstance(value, str | Path) or not str(value):
        raise msgspec.ValidationError("a path is needed")
    try:
        path = Path(value).expanduser()
    except RuntimeError as error:
        raise msgspec.ValidationError(str(error)) from error  # ~name of a user that does not exist
    return path if path.is_absolute() else path.resolve()


def _listed(words: tuple[str, ...]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"
