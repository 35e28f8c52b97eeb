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
    settings = {field.name: field for field in fields_of(type(wanted))}
    for name in wanted.__struct_fields__:
        field, value = settings.get(name), getattr(wanted, name)
        if (field is None or field.mark.change == "restart") and value != getattr(running, name):
            key, shown = (name, value) if field is None else (field.option, field.shown(value))
            raise ConfigError(key, shown, "only a restart changes this")
