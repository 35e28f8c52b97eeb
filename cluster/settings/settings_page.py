"""The page of all settings, made of their schema.

.venv/bin/python -m motet.cluster.settings.settings_page docs/settings.md
"""

from __future__ import annotations

import sys
from itertools import groupby
from pathlib import Path

from .setting_field import SettingField, fields_of
from .settings import SERVES_OPTIONS, Settings

INTRODUCTION = """\
# Settings

This page is made of the schema in `cluster/settings/`. To change it, change the schema, then run
`.venv/bin/python -m motet.cluster.settings.settings_page docs/settings.md`.

Each setting is an option of `motet serve` (`--max-num-sequences 64`) and a key of its TOML file (`--config FILE`, with
`max-num-sequences = 64`). The command line comes before an environment variable, that before the file, and the file
before the default. Sizes are whole numbers of bytes or text such as `"2GiB"`. What can be repeated on the command line
is a list in the file: `latency-objective = ["acme=2", "zoo=0.5"]`. `--prefix-cache` is a switch: `--no-prefix-cache` on
the command line, `prefix-cache = false` in the file.

`--config`, `--replace` and `--wait-for-nodes` apply to one start only and are not settings: see `motet serve --help`.

"Live" marks what a [rolling update](updates.md) of `motet serve` changes; the rest takes a restart. The last column is
about [motet as an application](scaling/application.md), which a Ray cluster deploys by itself. There a setting is a key
of `args`, of which each change replaces all replicas. *router* or *gang*: it is also a key of that deployment's
`user_config`, which replaces nothing. *Serve*: Serve's own options of a deployment change it. *elsewhere*: `args` does
not take it, and the message says where it belongs.
"""


def settings_page(schema: type[Settings]) -> str:
    """Markdown."""
    sections = [INTRODUCTION]
    for heading, fields in groupby(fields_of(schema), key=lambda field: field.heading):
        rows = [_row(field) for field in fields]
        columns = ("setting", "accepted", "default", "live", "meaning", "application")
        head = f"| {' | '.join(columns)} |\n|{' --- |' * len(columns)}\n"
        sections.append(f"## {heading}\n\n{head}" + "".join(rows))
    return "\n".join(sections)


def _row(field: SettingField) -> str:
    flags = ", ".join(f"`--{flag}`" for flag in field.flags)
    live = "live" if field.mark.change == "live" else ""
    description = field.mark.help + (f" Environment variable: `{field.mark.env}`." if field.mark.env else "")
    cells = (flags, field.accepted, field.shown_default, live, description, _way_to_change(field))
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


def _way_to_change(field: SettingField) -> str:
    if field.mark.not_in_args:
        return "elsewhere"
    if field.mark.live_in is not None:
        return f"args, {field.mark.live_in}"
    return "args, Serve" if field.name in SERVES_OPTIONS else "args"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(settings_page(Settings))
