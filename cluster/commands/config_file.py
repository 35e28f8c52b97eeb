"""Options of a command from a TOML file, where the command line and the environment do not give them."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import click

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
    """A click callback of an eager option: the file's keys, long options without dashes, are defaults of the others."""
    if path is None:
        return None
    try:
        with path.open("rb") as file:
            found = tomllib.load(file)
    except (OSError, ValueError) as error:
        raise click.BadParameter(f"{path} cannot be read: {error}", context, parameter) from error
    names = {
        option.removeprefix("--"): one.name
        for one in context.command.params
        for option in one.opts
        if option.startswith("--") and one is not parameter
    }
    if unknown := sorted(found.keys() - names.keys()):
        message = f"{path} has {', '.join(unknown)}: known are {', '.join(sorted(names))}"
        raise click.BadParameter(message, context, parameter)
    context.default_map = {names[key]: value for key, value in found.items()}
    return path
