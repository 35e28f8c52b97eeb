"""`motet serve`, and how its options and the keys of its file follow from the settings."""

from __future__ import annotations

import os
import secrets
import sys
import tomllib
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import click
import msgspec
from rich.console import Console

from ..client.client_options import KEY_VARIABLE, read_keys
from ..progress import ProgressDisplay, step
from ..settings.setting_field import ConfigError, SettingField, fields_of
from ..settings.settings import CONSTANTS, Settings, constant_warning

# The command line's options, made of a schema of settings.

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


# A command's settings from a TOML file. The command line and the environment take precedence.

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
            document = tomllib.load(file)
    except (OSError, ValueError) as error:
        raise click.BadParameter(f"{path} cannot be read: {error}", context, parameter) from error
    try:
        context.default_map = _defaults(document, context.command.params)
    except ValueError as error:
        raise click.BadParameter(f"{path}: {error}", context, parameter) from error
    return path


def _defaults(document: dict[str, Any], parameters: list[click.Parameter]) -> dict[str, Any]:
    """The file's values by the names of their settings. Raises ValueError for a key that is not a setting."""
    options = {
        flag: parameter
        for parameter in parameters
        if isinstance(parameter, SettingOption)
        for flag in _keys(parameter.opts)
    }
    defaults: dict[str, Any] = {}
    keys: dict[str, str] = {}
    for key, value in document.items():
        if (warning := constant_warning(key)) is not None:
            click.echo(f"Warning: {warning}", err=True)
            continue
        if key not in options:
            raise ValueError(_why_no_setting(key, value, options, parameters))
        name = options[key].name
        assert name is not None
        if name in keys:
            raise ValueError(f"{keys[name]} and {key} are the same setting: write one of them")
        keys[name], defaults[name] = key, value
    return defaults


def _why_no_setting(key: str, value: Any, options: dict[str, SettingOption], parameters: list[click.Parameter]) -> str:
    if any(key in _keys(parameter.opts) for parameter in parameters):
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


# Secrets that were typed as arguments, moved to where other users of the machine do not see them.
#
# Everybody may read the arguments of every process. So a program that was started with a key among them starts itself
# again at once, in the same process, with the key in its environment, which only its owner may read.


def hide_secrets() -> None:
    """Returns if there was nothing to hide; else restarts the program."""
    options = settings_with_secrets() if {"serve", "doctor"} & set(sys.argv[1:2]) else {"--key": KEY_VARIABLE}
    public_arguments, variables = without_secrets(sys.argv[1:], options)
    if not variables:
        return
    print(
        f"Warning: what is typed as an argument shows in lists of processes and in the shell's history; motet has "
        f"hidden it, but a file or {' and '.join(variables)} never shows",
        file=sys.stderr,
        flush=True,
    )
    interpreter_arguments = sys.orig_argv[: len(sys.orig_argv) - len(sys.argv) + 1]
    os.execve(sys.executable, [*interpreter_arguments, *public_arguments], os.environ | variables)


def settings_with_secrets() -> dict[str, str]:
    """Options of `motet serve` whose values are secrets, and the variables that say the same."""
    return {field.option: field.mark.env for field in fields_of(Settings) if field.mark.secret}


def without_secrets(arguments: Sequence[str], options: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
    """The arguments without these options, and what the options' variables must be instead.

    An option that is given more than once is a list, which a variable holds with spaces between.

    >>> without_secrets(["serve", "--key", "acme=s", "--key=zoo=t", "--port", "80"], {"--key": "MOTET_KEYS"})
    (['serve', '--port', '80'], {'MOTET_KEYS': 'acme=s zoo=t'})
    """
    public_arguments: list[str] = []
    variable_values: dict[str, list[str]] = {}
    iterator = iter(arguments)
    for argument in iterator:
        option, has_value, value = argument.partition("=")
        if argument == "--":
            public_arguments += [argument, *iterator]
        elif argument in options and (following := next(iterator, None)) is not None:
            variable_values.setdefault(options[argument], []).append(following)
        elif has_value and option in options:
            variable_values.setdefault(options[option], []).append(value)
        else:
            public_arguments.append(argument)
    return public_arguments, {variable: " ".join(values) for variable, values in variable_values.items()}


DEFAULT_TENANT = "default"
LAUNCH_OPTIONS = ("path_or_id", "config_path", "key_file", "replace", "wait_for_nodes")  # of the start; no settings


class ServeCommand(GroupedCommand, RereadableCommand):
    """With an option for each setting."""


@click.command(cls=ServeCommand)
@click.argument("path_or_id")
@click.option(
    "--config",
    "config_path",
    type=click.Path(dir_okay=False, path_type=Path),
    is_eager=True,
    callback=take_defaults,
    help="A TOML file of options (max-num-sequences = 64). SIGHUP reads it again and rolls out what has changed.",
)
@click.option(
    "--key-file",
    type=click.Path(dir_okay=False, allow_dash=True, path_type=Path),
    help="A file of tenants' API keys, a line TENANT=KEY for each; - is standard input.",
)
@click.option("--replace", is_flag=True, help="With --address: delete a motet that runs there first.")
@click.option("--wait-for-nodes", is_flag=True, help="With --address: no error where no node has room yet.")
@click.pass_context
def serve(
    context: click.Context,
    /,
    path_or_id: str,
    config_path: Path | None,
    key_file: Path | None,
    replace: bool,
    wait_for_nodes: bool,
    **settings: Any,
) -> None:
    """Serve a base and its tenants' adapters. PATH_OR_ID is a folder in Hugging Face format or a hub id.

    A gang is a copy of the base on one or more workers, a router is the HTTP front of all gangs, and KV is what the
    base keeps of each token that it has read.

    With --address it becomes an application of a running Ray cluster, and Ctrl-C deletes that again, and no more.
    Prints "ready URL" once it can serve a token, and runs until Ctrl-C. With --config, SIGHUP reads the file again and
    replaces routers and gangs whose settings have changed, while they serve; then it prints "updated", or why not.
    """
    # Loaded here because the other commands do without; the port comes before what takes long to load.
    from ..launch.local_serve import LOOPBACK, check_port_is_free, restore_environment, set_environment

    if settings["address"] is None:
        try:
            check_port_is_free(settings["host"] or LOOPBACK, settings["port"])
        except ValueError as error:
            raise click.ClickException(str(error)) from error
    from ..application.model_source import ModelUnavailable, resolve_model
    from ..config import MotetConfig
    from ..launch.launch import LaunchError
    from ..launch.preflight import check_data_dir, check_settings, check_sizes
    from .foreground import deployed

    console = Console(stderr=True)
    if settings["address"] is None and (replace or wait_for_nodes):
        raise click.UsageError("--replace and --wait-for-nodes are about a running cluster: give its --address")
    data_dir = settings["data_dir"]
    keys_of_file = read_keys(key_file)
    settings["keys"] = (*settings["keys"], *keys_of_file)
    # They are read; processes that are started from here get them otherwise, or need them not.
    secret_variables = {name: os.environ.pop(name) for name in settings_with_secrets().values() if name in os.environ}
    made_keys = () if settings["keys"] else ((DEFAULT_TENANT, secrets.token_urlsafe(24)),)
    settings["keys"] = settings["keys"] or made_keys
    try:
        check_data_dir(data_dir)
        with ProgressDisplay(console) as progress:
            model_path = resolve_model(path_or_id, data_dir / "models", progress)
            with step(progress, "checking the settings"):
                config = MotetConfig.from_environment(model_path=model_path, **settings)
                warnings = check_settings(config)
    except (ModelUnavailable, ValueError) as error:
        raise click.ClickException(str(error)) from error
    for warning in warnings:
        click.echo(f"Warning: {warning}", err=True)

    def update() -> None:
        try:
            before = set_environment(secret_variables)
            try:
                new_options = reread_options(context)
            finally:
                restore_environment(before)
            for name in LAUNCH_OPTIONS:
                del new_options[name]
            new_options["keys"] = (*new_options["keys"], *keys_of_file) or settings["keys"]
            new_config = MotetConfig.from_environment(model_path=model_path, **new_options)
            check_sizes(new_config)
            deployment.update(new_config)
        except click.ClickException as error:
            click.echo(f"not updated: {error.format_message()}")
        except (LaunchError, ValueError) as error:
            click.echo(f"not updated: {error}")
        else:
            click.echo("updated")

    with deployed(config, console, replace=replace, wait_for_nodes=wait_for_nodes) as deployment:
        for tenant, key in made_keys:
            click.echo(f"key of tenant {tenant}: {key}")
        click.echo(f"ready {deployment.url}")
        deployment.wait(None if config_path is None else update)


serve.params += options_of(Settings)
