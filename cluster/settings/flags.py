"""The command line's options, made of a schema of settings."""

from __future__ import annotations

from typing import Any

import click
import msgspec

from .setting_field import ConfigError, SettingField, fields_of
from .settings import CONSTANTS, constant_warning

OTHER_OPTIONS = "Other options"


class SettingOption(click.Option):
    """The option of one setting. What it gives is the setting's value, checked."""

    def __init__(self, field: SettingField) -> None:
        flags = [f"--{flag}" for flag in field.flags]
        if field.is_switch:
            flags = [f"{flags[0]}/--no-{field.flags[0]}"]
        details: dict[str, Any] = {"type": click.UNPROCESSED, "metavar": field.metavar}
        if field.is_switch:
            details = {"type": bool}
        elif field.is_choice:
            details = {"type": click.Choice(field.choices)}
        super().__init__(
            [field.name, *flags],
            default=field.default,
            multiple=field.is_list,
            envvar=field.mark.env or None,
            help=_help(field),
            callback=lambda context, parameter, value: _converted(field, context, parameter, value),
            **details,
        )
        self.heading = field.heading

    def type_cast_value(self, ctx: click.Context, value: Any) -> Any:
        """As it was given, by the command line or a file: the schema converts it."""
        return (() if self.multiple else None) if value is None else value


class GroupedCommand(click.Command):
    """A command whose help shows the options of settings under the headings of their groups."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        groups: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            heading = parameter.heading if isinstance(parameter, SettingOption) else OTHER_OPTIONS
            if isinstance(parameter, click.Option) and (record := parameter.get_help_record(ctx)) is not None:
                groups.setdefault(heading, []).append(record)
        other_options = groups.pop(OTHER_OPTIONS, [])
        for heading, records in (*groups.items(), (OTHER_OPTIONS, other_options)):
            with formatter.section(heading):
                formatter.write_dl(records)


def options_of(schema: type[msgspec.Struct]) -> list[click.Parameter]:
    """An option for each setting, in the schema's order, then a hidden one for each that has become a constant."""
    return [*(SettingOption(field) for field in fields_of(schema)), *(_constant_option(key) for key in CONSTANTS)]


def _constant_option(key: str) -> click.Option:
    def warn(context: click.Context, parameter: click.Parameter, value: str | None) -> None:
        if value is not None:
            click.echo(f"Warning: {constant_warning(key)}", err=True)

    return click.Option([f"--{key}"], hidden=True, expose_value=False, callback=warn)


def _help(field: SettingField) -> str:
    repeated = " May be repeated." if field.is_list else ""
    variable = f"env var: {field.mark.env}; " if field.mark.env else ""
    return f"{field.mark.help}{repeated}  [{variable}default: {field.shown_default}]"


def _converted(field: SettingField, context: click.Context, parameter: click.Parameter, value: Any) -> Any:
    try:
        return field.converted(value)
    except ConfigError as error:
        raise click.BadParameter(f"{error.value!r}: {error.accepted}", context, parameter) from error
