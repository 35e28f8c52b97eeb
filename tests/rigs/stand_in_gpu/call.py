"""One call of an ATen operation, by the names of its arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch


@dataclass(frozen=True)
class Signature:
    name: str  # without its overload: "index_put_"
    arguments: tuple[str, ...]
    written: tuple[str, ...]  # arguments that the operation changes


@cache
def signature_of(func: Any) -> Signature:
    arguments = func._schema.arguments
    written = tuple(a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write)
    if is_collective(func):
        written = (arguments[0].name,)  # what torch's schemas of collectives do not say
    return Signature(func._schema.name.rpartition("::")[2], tuple(a.name for a in arguments), written)


def is_collective(func: Any) -> bool:
    return bool(func.namespace == "c10d")


class Call:
    """An operation and what it is given."""

    __slots__ = ("args", "func", "given", "kwargs", "name", "tensors", "written")

    def __init__(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.func, self.args, self.kwargs = func, args, kwargs
        signature = signature_of(func)
        self.name = signature.name
        self.given: dict[str, Any] = dict(zip(signature.arguments, args, strict=False)) | kwargs
        self.tensors = [x for x in leaves(self.given.values()) if isinstance(x, torch.Tensor)]
        written = [self.given.get(name) for name in signature.written]
        self.written = [x for x in leaves(written) if isinstance(x, torch.Tensor)]

    def mapped(self, change: Callable[[Any], Any]) -> Call:
        """The same call with each argument changed, those in lists too."""
        kwargs = {name: mapped(change, value) for name, value in self.kwargs.items()}
        return Call(self.func, tuple(mapped(change, value) for value in self.args), kwargs)

    def __call__(self) -> Any:
        return self.func(*self.args, **self.kwargs)


def leaves(values: Iterable[Any]) -> list[Any]:
    """All that is in lists and tuples; as fast as the many calls of a step need it."""
    found: list[Any] = []
    for value in values:
        if isinstance(value, (list, tuple)):
            found += leaves(value)
        else:
            found.append(value)
    return found


def mapped(change: Callable[[Any], Any], value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)([mapped(change, each) for each in value])
    return change(value)
