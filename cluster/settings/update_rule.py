"""Which settings a running motet may change without a restart."""

from __future__ import annotations

import msgspec

from .config_error import ConfigError
from .setting_field import fields_of


def check_update(running: msgspec.Struct, wanted: msgspec.Struct) -> None:
    """Raises ConfigError for the first difference that only a restart makes.

    Marked "restart" is what says where motet listens, whose it is, how its adapters are packed, or what Ray was started
    with. A field that is no setting is the same.
    """
    settings = {field.name: field.mark for field in fields_of(type(wanted))}
    for name in wanted.__struct_fields__:
        mark = settings.get(name)
        if (mark is None or mark.change == "restart") and getattr(wanted, name) != getattr(running, name):
            shown = "…" if mark is not None and mark.secret else getattr(wanted, name)
            raise ConfigError(name, shown, "only a restart changes this")
