"""A command's settings from a TOML file. The command line and the environment take precedence."""

from __future__ import annotations

import tomllib
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import click

from ..settings.flags import SettingOption

_ARGUMENTS = "motet.arguments"


class RereadableCommand(click.Command):
    """A command whose options can be read again later, because a file that they come from has changed."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.meta[_ARGUMENTS] = tuple(args)
        return super().parse_args(ctx, args)


def reread_options(context: click.Context) -> dict[str, Any]:
    """The options as they would be if the command were run now. Raises ClickException."""
    command, arguments = context.command, list(context.meta[_ARGUMENTS])
    with command.make_context(context.info_name, arguments, parent=context.parent) as read_again:
        return read_again.params


def take_defaults(context: click.Context, parameter: click.Parameter, path: Path | None) -> Path | None:
    """A click callback of an eager option: the file's values become defaults. A key is an option without its dashes."""
    if path is None:
        return None
    try:
        with path.open("rb") as file:
            found = tomllib.load(file)
    except (OSError, ValueError) as error:
        raise click.BadParameter(f"{path} cannot be read: {error}", context, parameter) from error
    try:
        context.default_map = _defaults(found, context.command.params)
    except ValueError as error:
        raise click.BadParameter(f"{path}: {error}", context, parameter) from error
    return path


def _defaults(found: dict[str, Any], parameters: list[click.Parameter]) -> dict[str, Any]:
    """The file's values by the names of their settings. Raises ValueError for a key that is not a setting."""
    options = {flag: one for one in parameters if isinstance(one, SettingOption) for flag in _keys(one.opts)}
    defaults: dict[str, Any] = {}
    keys: dict[str, str] = {}
    for key, value in found.items():
        if key not in options:
            raise ValueError(_why_no_setting(key, value, options, parameters))
        name = options[key].name
        assert name is not None
        if name in keys:
            raise ValueError(f"{keys[name]} and {key} are the same setting: write one of them")
        keys[name], defaults[name] = key, value
    return defaults


def _why_no_setting(key: str, value: Any, options: dict[str, SettingOption], parameters: list[click.Parameter]) -> str:
    if any(key in _keys(one.opts) for one in parameters):
        return f"{key} is an option of one start, not a setting: give --{key} on the command line"
    for flag, option in options.items():
        if key in _keys(option.secondary_opts):
            return f"there is no setting {key}: write {flag} = false"
    if isinstance(value, dict):
        return f"[{key}] is a table: write settings as keys at the top of the file"
    close = get_close_matches(key.replace("_", "-"), options, n=1)
    meant = f"Did you mean {close[0]}? " if close else ""
    return f"there is no setting {key}. {meant}docs/settings.md lists all."


def _keys(flags: list[str]) -> list[str]:
    return [flag.removeprefix("--") for flag in flags if flag.startswith("--")]
