"""The page of all settings, made of their schema.

.venv/bin/python -m motet.tests.rigs.made_settings_page docs/settings.md
"""

from __future__ import annotations

import sys
from itertools import groupby
from pathlib import Path

from motet.cluster.settings.setting_field import SettingField, fields_of
from motet.cluster.settings.settings import SERVES_OPTIONS, Settings

INTRODUCTION = """\
# Settings

This page is made of the schema in `cluster/settings/`. To change it, change the schema, then run
`.venv/bin/python -m motet.tests.rigs.made_settings_page docs/settings.md`.

Each setting is an option of `motet serve` (`--max-num-sequences 64`) and a key of its TOML file (`--config FILE`, with
`max-num-sequences = 64`). The command line overrides an environment variable, that the file, and the file the default.
Sizes are bytes, or numbers with KiB, MiB, GiB or TiB (`"2GiB"`). What can be repeated on the command line is a list in
the file: `latency-objective = ["acme=2", "zoo=0.5"]`. `--prefix-cache` is a switch: `--no-prefix-cache`, in the file
`prefix-cache = false`. `--config`, `--replace` and `--wait-for-nodes` apply to one start and are no settings.

The last column: a *live* setting changes with a [rolling update](updates.md) of `motet serve`, others need a restart.
In an [application](scaling/application.md) of a Ray cluster, *args*: it is a key of `args`, where a change replaces all
replicas; *router*, *gang*: also of that deployment's `user_config`, which replaces nothing; *Serve*: options of Serve
change it; *elsewhere*: `args` refuses it, and the message says where it belongs.
"""
SHORTER = (("a size (bytes, or a number with KiB, MiB, GiB or TiB)", "size"), ("a number of ", ""))


def settings_page(schema: type[Settings]) -> str:
    """Markdown."""
    sections = [INTRODUCTION]
    for heading, fields in groupby(fields_of(schema), key=lambda field: field.heading):
        rows = [_row(field) for field in fields]
        columns = ("setting, environment variable", "accepted", "default", "meaning", "changes")
        head = f"| {' | '.join(columns)} |\n|{' --- |' * len(columns)}\n"
        sections.append(f"## {heading}\n\n{head}" + "".join(rows))
    return "\n".join(sections)


def _row(field: SettingField) -> str:
    names = ", ".join(f"`{name}`" for name in (*(f"--{flag}" for flag in field.flags), field.mark.env) if name)
    accepted = field.accepted
    for words, shorter in SHORTER:
        accepted = accepted.replace(words, shorter)
    change = ("live, " if field.mark.change == "live" else "") + _way_to_change(field)
    cells = (names, accepted, field.shown_default, field.mark.help, change)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


def _way_to_change(field: SettingField) -> str:
    if field.mark.not_in_args:
        return "elsewhere"
    if field.mark.live_in is not None:
        return f"args, {field.mark.live_in}"
    return "args, Serve" if field.name in SERVES_OPTIONS else "args"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(settings_page(Settings))
