"""The engine's messages where msgspec is not installed: the same classes as plain dataclasses.

An engine in one process encodes nothing, so it needs msgspec for its `Struct` alone. This lets the benchmark run on a
machine that has torch and Triton and nothing else; a gang or a server cannot run this way.
"""

from __future__ import annotations

import copy
import importlib.util
import inspect
import sys
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any


class Struct:
    """A base class whose subclasses are dataclasses; of msgspec's options it keeps `frozen` and `kw_only`."""

    def __init_subclass__(cls, frozen: bool = False, kw_only: bool = False, **_: Any) -> None:
        for name in inspect.get_annotations(cls):
            value = cls.__dict__.get(name)
            if isinstance(value, list | dict) or (value is not None and type(value).__hash__ is None):
                setattr(cls, name, field(default_factory=lambda value=value: copy.copy(value)))  # type: ignore[misc]
        dataclass(frozen=frozen, kw_only=kw_only)(cls)


def stand_in_for_msgspec() -> bool:
    """Makes `import msgspec` work if it would not. True: it would not have."""
    if importlib.util.find_spec("msgspec") is not None:
        return False
    module = ModuleType("msgspec", __doc__)
    module.Struct = Struct  # type: ignore[attr-defined]
    structs = ModuleType("msgspec.structs")
    structs.replace = replace  # type: ignore[attr-defined]
    module.structs = structs  # type: ignore[attr-defined]
    sys.modules |= {"msgspec": module, "msgspec.structs": structs}
    return True
