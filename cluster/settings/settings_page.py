"""The page of all settings, made of their schema.

.venv/bin/python -m motet.cluster.settings.settings_page docs/settings.md
"""

from __future__ import annotations

import sys
from itertools import groupby
from pathlib import Path

import msgspec

from .setting_field import SettingField, fields_of
from .settings import Settings

INTRODUCTION = """\
# Settings

This page is made of the schema in `cluster/settings/`. To change it, change the schema, then run
`.venv/bin/python -m motet.cluster.settings.settings_page docs/settings.md`.

Each setting is an option of `motet serve` (`--max-num-sequences 64`) and a key of its TOML file (`--config FILE`, with
`max-num-sequences = 64`). The command line comes before an environment variable, that before the file, and the file
before the default. Sizes are whole numbers of bytes or text such as `"2GiB"`. What can be repeated on the command line
is a list in the file: `latency-objective = ["acme=2", "zoo=0.5"]`. `--prefix-cache` is a switch: `--no-prefix-cache` on
the command line, `prefix-cache = false` in the file.

`--config`, `--replace` and `--wait-for-nodes` are about one start and no settings: `motet serve --help` tells of them.

"Live" marks what a [rolling update](updates.md) changes while motet serves; the rest takes a restart.
"""


def settings_page(schema: type[msgspec.Struct]) -> str:
    """Markdown."""
    sections = [INTRODUCTION]
    for heading, fields in groupby(fields_of(schema), key=lambda field: field.group):
        rows = [_row(field) for field in fields]
        head = "| setting | accepted | default | live | what it is |\n| --- | --- | --- | --- | --- |\n"
        sections.append(f"## {heading}\n\n{head}" + "".join(rows))
    return "\n".join(sections)


def _row(field: SettingField) -> str:
    flags = ", ".join(f"`--{flag}`" for flag in field.flags)
    live = "live" if field.mark.change == "live" else ""
    what = field.mark.help + (f" Environment variable: `{field.mark.env}`." if field.mark.env else "")
    cells = (flags, field.accepted, field.shown_default, live, what)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(settings_page(Settings))
