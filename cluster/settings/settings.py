"""All settings of motet, in plain values: the one place where their names, types, bounds and defaults stand.

From here come the options of `motet serve` and their help (`flags.py`), the keys of its file, what a rolling update may
change (`update_rule.py`), docs/settings.md (`settings_page.py`), and every check of a single value. A part's own config
dataclass repeats no default and no bound: `cluster/config.py` fills it, field by field, with the settings of the same
names. What holds between two settings is checked where both meet, in the part's config or in `cluster/config.py`.

To add a setting: a field in the group that it belongs to, and a field of the same name in the config of the part that
reads it.
"""

from __future__ import annotations

from .patience import Patience


class Settings(Patience, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The last of the chain of groups, and so all of them."""
