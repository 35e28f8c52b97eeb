"""What messages call a setting."""

from __future__ import annotations

from motet.cluster.settings.setting_field import fields_of
from motet.cluster.settings.settings import Settings

OPTIONS = {field.name: field.option for field in fields_of(Settings)}  # by the name of the field
