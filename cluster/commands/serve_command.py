"""`motet serve`."""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from ..client.key_file import read_keys
from ..progress_display import ProgressDisplay
from ..progress_log import step
from ..settings.flags import GroupedCommand, options_of
from ..settings.settings import Settings
from .config_file import RereadableCommand, reread_options, take_defaults
from .secret_arguments import settings_with_secrets

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
                given = reread_options(context)
            finally:
                restore_environment(before)
            for name in LAUNCH_OPTIONS:
                del given[name]
            given["keys"] = (*given["keys"], *keys_of_file) or settings["keys"]
            wanted = MotetConfig.from_environment(model_path=model_path, **given)
            check_sizes(wanted)
            deployment.update(wanted)
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
