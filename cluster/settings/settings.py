"""All settings of motet: the one place for their names, types, bounds and defaults.

The options of `motet serve` and their help (`flags.py`), the keys of its file, the rule of updates (`update_rule.py`),
docs/settings.md (`settings_page.py`) and every check of a single value are derived from here. A part's own config
dataclass repeats no default and no bound: `cluster/config.py` fills it, field by field, with the settings of the same
names. What must hold between two settings is checked in the part's config or in `cluster/config.py`.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Self

import msgspec

from .access import Access
from .batching import Batching
from .memory import Memory
from .placement import Placement
from .requests import Requests
from .scaling import Scaling
from .serving import Serving
from .setting_field import groups_of
from .timeouts import Timeouts


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """All settings in their groups, in the order of the help: `settings.batching.max_num_sequences`."""

    serving: Serving = msgspec.field(default_factory=Serving)
    memory: Memory = msgspec.field(default_factory=Memory)
    batching: Batching = msgspec.field(default_factory=Batching)
    scaling: Scaling = msgspec.field(default_factory=Scaling)
    placement: Placement = msgspec.field(default_factory=Placement)
    access: Access = msgspec.field(default_factory=Access)
    requests: Requests = msgspec.field(default_factory=Requests)
    timeouts: Timeouts = msgspec.field(default_factory=Timeouts)

    @classmethod
    def of(cls, **values: Any) -> Self:
        """From values by the settings' names, without their groups: `Settings.of(max_num_sequences=64)`.

        Other fields of a subclass are accepted as well. Raises ConfigError, and TypeError for the name of a group.
        """
        by_group, others = _by_group(cls, values)
        kinds = groups_of(cls)
        groups: dict[str, Any] = {name: kinds[name](**given) for name, given in by_group.items()}
        return cls(**others, **groups)

    def replaced(self, **values: Any) -> Self:
        """A copy with other values, which are given as to `of`."""
        by_group, others = _by_group(type(self), values)
        replace = msgspec.structs.replace
        return replace(self, **others, **{name: replace(getattr(self, name), **by_group[name]) for name in by_group})

    def value(self, name: str) -> Any:
        """The value of the setting with this name, or of another attribute of a subclass."""
        group = _groups_by_setting(type(self)).get(name)
        return getattr(self if group is None else getattr(self, group), name)


@cache
def _groups_by_setting(schema: type[Settings]) -> dict[str, str]:
    return {name: group for group, kind in groups_of(schema).items() for name in kind.__struct_fields__}


def _by_group(schema: type[Settings], values: dict[str, Any]) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    """The settings among `values` by their groups, and the rest."""
    groups = _groups_by_setting(schema)
    by_group: dict[str, dict[str, Any]] = {}
    others: dict[str, Any] = {}
    if misplaced := values.keys() & groups_of(schema).keys():
        raise TypeError(f"{', '.join(sorted(misplaced))}: a group of settings, not a setting")
    for name, value in values.items():
        (by_group.setdefault(groups[name], {}) if name in groups else others)[name] = value
    return by_group, others
