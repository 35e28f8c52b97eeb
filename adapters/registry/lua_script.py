"""Lua scripts that Redis runs, from `.lua` files whose keys and arguments have names."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha1
from pathlib import Path
from typing import Any, Final, TypeAlias

from redis.asyncio import Redis

Argument: TypeAlias = str | bytes | int | float | None
Value: TypeAlias = Argument | Sequence[Argument]

_DECLARATION: Final = re.compile(r"-- (KEYS|ARGV|include): (.+)")
_NAME: Final = re.compile(r"[a-z]\w*(\[\])?")


class LuaScript:
    """The script in `path`, read once.

    Its first lines are comments. They declare the names under which the script finds its keys and arguments, and the
    files whose functions it uses, relative to its folder:

        -- Renames an adapter. Returns 1, or 0 if its record has changed meanwhile.
        -- include: events.lua
        -- KEYS: adapters, names
        -- ARGV: name, before, after, others[]

    `name` is then a local variable and `others`, which can only be the last one, a list of all further arguments. An
    included file declares the keys and arguments that it uses in the same way; they become the script's own.

        keys, args = script.parameters(adapters="a", names="n", name="x", before="", after="y", others=[1, 2])

    None stands for an empty string, True for 1 and False for 0. A name that is missing or unknown is a TypeError.
    """

    def __init__(self, path: Path, *, allow_oom: bool = False, no_writes: bool = False) -> None:
        """`allow_oom`: it may also write while Redis is at its bound of memory: it frees some, or takes little.

        `no_writes`: Redis refuses its writes. Of several reads that belong together, some servers refuse a MULTI at
        that bound, and none refuses such a script.
        """
        assert not (allow_oom and no_writes), "a script that does not write needs no memory"
        path = path.resolve()
        parts: dict[Path, _Part] = {}
        _collect(path, parts)
        main_part = parts[path]
        included = [part for name, part in parts.items() if name != path]
        self.name = path.name
        self.included = frozenset(parts.keys() - {path})
        self.keys = tuple(dict.fromkeys(name for part in (main_part, *included) for name in part.keys))
        scalars = dict.fromkeys(name for part in (*included, main_part) for name in part.args)
        lists = [name for name in scalars if name.endswith("[]")]
        if lists and lists != main_part.args[-1:]:
            raise ValueError(f"{path}: {lists[0]}: only the last argument of the script itself can be a list")
        self.args = tuple(name for name in scalars if name not in lists)
        self.list_arg = lists[0].removesuffix("[]") if lists else None
        flag = "allow-oom" if allow_oom else "no-writes" if no_writes else ""
        flags = (f"#!lua flags={flag}",) if flag else ()
        self.source = "\n".join((*flags, *self._bindings(), *(part.checked_body for part in included), main_part.body))
        self.sha = sha1(self.source.encode()).hexdigest()  # the name that Redis gives it
        self._names = frozenset((*self.keys, *self.args, *([self.list_arg] if self.list_arg else [])))

    def parameters(self, **values: Value) -> tuple[list[Any], list[Any]]:
        """KEYS and ARGV."""
        if values.keys() != self._names:
            missing, unknown = sorted(self._names - values.keys()), sorted(values.keys() - self._names)
            raise TypeError(f"{self.name}: missing {missing}, unknown {unknown}")
        args = [_encoded(values[name]) for name in self.args]
        if self.list_arg:
            list_values: Any = values[self.list_arg]
            args += map(_encoded, list_values)
        return [values[name] for name in self.keys], args

    def bind(self, client: Redis, keys: Mapping[str, str] | None = None) -> BoundScript:
        """The script as a function. `keys`: Redis keys by their names in scripts, those of other scripts among them."""
        return BoundScript(self, client, {name: key for name, key in (keys or {}).items() if name in self.keys})

    def _bindings(self) -> Iterator[str]:
        for names, table in ((self.keys, "KEYS"), (self.args, "ARGV")):
            if names:
                yield f"local {', '.join(names)} = {', '.join(f'{table}[{i}]' for i in range(1, len(names) + 1))}"
        if self.list_arg:  # not `unpack`, which takes no more than 8,000
            skipped = len(self.args)
            yield f"local {self.list_arg} = {{}}"
            yield f"for i = {skipped + 1}, #ARGV do {self.list_arg}[i - {skipped}] = ARGV[i] end"


class BoundScript:
    """Calls one script at one client. Redis gets its text when it does not know it yet."""

    def __init__(self, script: LuaScript, client: Redis, keys: Mapping[str, str]) -> None:
        self._parameters = script.parameters
        self._keys = keys
        self._registered: Any = client.register_script(script.source)

    async def __call__(self, *, on: Any = None, **values: Value) -> Any:
        """The script's reply. `on`: a pipeline that the call is put into, and whose `execute` has the reply."""
        keys, args = self._parameters(**self._keys, **values)
        return await self._registered(keys=keys, args=args, client=on)


@dataclass
class _Part:
    """One file."""

    keys: list[str] = field(default_factory=list)
    args: list[str] = field(default_factory=list)
    includes: list[str] = field(default_factory=list)
    body: str = ""

    @property
    def checked_body(self) -> str:
        """The body as others include it: a script need not use all of its functions."""
        return f"-- luacheck: push ignore 211 431\n{self.body}\n-- luacheck: pop"


def _collect(path: Path, parts: dict[Path, _Part]) -> None:
    """Adds the parts of a file, those that it includes first."""
    part = _Part(body=path.read_text().rstrip())
    for line in part.body.splitlines():
        if not line.startswith("--"):
            break
        if declaration := _DECLARATION.fullmatch(line):
            kind, names = declaration.groups()
            {"KEYS": part.keys, "ARGV": part.args, "include": part.includes}[kind].extend(names.split(", "))
    for name in (*part.keys, *part.args):
        if not _NAME.fullmatch(name):
            raise ValueError(f"{path}: {name!r} is not the name of a key or an argument, such as num_bytes or others[]")
    for include in part.includes:
        included = (path.parent / include).resolve()
        if included not in parts:
            _collect(included, parts)
    parts[path] = part


def _encoded(value: Value) -> Value:
    if value is None:
        return ""
    return int(value) if isinstance(value, bool) else value
