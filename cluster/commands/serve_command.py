"""`motet serve`."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from ..byte_size import byte_size_or_none_value, byte_size_value
from ..progress_log import step
from ..resources import PLACEMENTS
from .config_file import RereadableCommand, reread_options, take_defaults
from .progress import ProgressDisplay

DATA_DIR_VARIABLE = "MOTET_DATA_DIR"
DEFAULT_DATA_DIR = "~/.local/share/motet"
DEFAULT_TENANT = "default"


def tenant_keys(
    context: click.Context, parameter: click.Parameter, values: tuple[str, ...]
) -> tuple[tuple[str, str], ...]:
    """A click callback: each TENANT=KEY as a pair."""
    pairs = tuple((tenant, key) for tenant, _, key in (value.partition("=") for value in values))
    if not all(tenant and key for tenant, key in pairs):
        raise click.BadParameter("TENANT=KEY is needed, for example acme=a-long-secret", context, parameter)
    return pairs


def tenant_seconds(
    context: click.Context, parameter: click.Parameter, values: tuple[str, ...]
) -> tuple[tuple[str, float], ...]:
    """A click callback: each TENANT=SECONDS as a pair."""
    pairs = []
    for value in values:
        tenant, _, seconds = value.partition("=")
        try:
            pairs.append((tenant, float(seconds)))
        except ValueError:
            tenant = ""
        if not tenant:
            message = f"{value!r}: TENANT=SECONDS is needed, for example acme=2.5"
            raise click.BadParameter(message, context, parameter)
    return tuple(pairs)


def amounts(
    context: click.Context, parameter: click.Parameter, values: tuple[str, ...]
) -> tuple[tuple[str, float], ...]:
    """A click callback: each NAME=AMOUNT as a pair. A name may hold slashes and dots, as those of MIG slices do."""
    pairs = []
    for value in values:
        name, _, amount = value.rpartition("=")
        try:
            pairs.append((name, float(amount)))
        except ValueError:
            name = ""
        if not name:
            message = f"{value!r}: NAME=AMOUNT is needed, for example nvidia.com/mig-1g.10gb=1"
            raise click.BadParameter(message, context, parameter)
    return tuple(pairs)


def labels(context: click.Context, parameter: click.Parameter, values: tuple[str, ...]) -> tuple[tuple[str, str], ...]:
    """A click callback: each KEY=VALUE as a pair."""
    pairs = tuple((key, label) for key, _, label in (value.partition("=") for value in values))
    if not all(key and label for key, label in pairs):
        raise click.BadParameter("KEY=VALUE is needed, for example accelerator=l4", context, parameter)
    return pairs


@click.command(cls=RereadableCommand)
@click.argument("path_or_id")
@click.option(
    "--config",
    "config_path",
    type=click.Path(dir_okay=False, path_type=Path),
    is_eager=True,
    callback=take_defaults,
    help="A TOML file of options (max-num-sequences = 64). SIGHUP reads it again and rolls out what has changed.",
)
@click.option("--name", default="", help="The base's name in requests. Default: the name of its folder.")
@click.option("--host", help="Address to listen at; 0.0.0.0 is all. Default: 127.0.0.1, and with --address 0.0.0.0.")
@click.option("--port", default=8000, show_default=True)
@click.option(
    "--device",
    type=click.Choice(["auto", "cpu", "cuda"]),
    default="auto",
    show_default=True,
    help="What gangs compute on. auto: an NVIDIA GPU for each worker where there is one.",
)
@click.option("--dtype", type=click.Choice(["float32", "bfloat16"]), default="bfloat16", show_default=True)
@click.option(
    "--data-dir",
    type=click.Path(file_okay=False, path_type=Path),
    default=DEFAULT_DATA_DIR,
    envvar=DATA_DIR_VARIABLE,
    show_default=True,
    show_envvar=True,
    help="Holds adapters, the registry and downloaded models.",
)
@click.option("--key", "keys", multiple=True, metavar="TENANT=KEY", callback=tenant_keys, help="May be repeated.")
@click.option(
    "--pool-bytes",
    default="1GiB",
    show_default=True,
    callback=byte_size_value,
    help="Memory for KV cache and adapters.",
)
@click.option(
    "--host-bytes",
    default="4GiB",
    show_default=True,
    callback=byte_size_or_none_value,
    help="Memory for adapters that wait to be used. 0: none, each is read from the data folder.",
)
@click.option(
    "--kv-host-bytes",
    default="1GiB",
    show_default=True,
    callback=byte_size_or_none_value,
    help="Memory for KV that has no room among the pages, taken as it is needed. 0: none.",
)
@click.option(
    "--kv-disk-bytes",
    default="0",
    show_default=True,
    callback=byte_size_or_none_value,
    help="Disk, in the data folder, for KV that has no room there either. 0: none.",
)
@click.option("--max-num-sequences", default=128, show_default=True, help="Sequences that run at once.")
@click.option(
    "--max-waiting-sequences",
    default=4096,
    show_default=True,
    help="Sequences that wait for their first token in one gang; more are refused.",
)
@click.option(
    "--max-queue-wait",
    "max_queue_wait_s",
    default=60.0,
    show_default=True,
    metavar="SECONDS",
    help="A request that would have to wait longer for its turn is refused at once. 0: none is.",
)
@click.option(
    "--latency-objective",
    "latency_objectives_s",
    multiple=True,
    metavar="TENANT=SECONDS",
    callback=tenant_seconds,
    help="A tenant's request whose first token would come later, for the queue, is refused at once. May be repeated.",
)
@click.option("--max-tokens-per-step", default=512, show_default=True, help="Tokens computed in one step.")
@click.option("--max-model-len", type=int, help="Longest prompt and completion. Default: the model's.")
@click.option(
    "--prefix-cache/--no-prefix-cache",
    default=True,
    show_default=True,
    help="Whether requests of a tenant that begin alike share their KV.",
)
@click.option(
    "--min-gangs",
    "--gangs",
    "min_gangs",
    default=1,
    show_default=True,
    help="Copies of the base, each with its own memory. 0: none while nobody asks.",
)
@click.option("--max-gangs", type=int, help="More copies under load, up to so many. Default: as --min-gangs.")
@click.option(
    "--queued-tokens-per-gang",
    type=int,
    help="More prompt tokens that wait call for more gangs. Default: 16 times --max-tokens-per-step.",
)
@click.option(
    "--scale-down-after",
    "scale_down_after_s",
    default=60.0,
    show_default=True,
    metavar="SECONDS",
    help="Fewer gangs must have been enough for so long.",
)
@click.option(
    "--scale-to-zero-after",
    "scale_to_zero_after_s",
    default=300.0,
    show_default=True,
    metavar="SECONDS",
    help="Nobody must have asked for so long.",
)
@click.option(
    "--scaling-window",
    "scaling_window_s",
    default=5.0,
    show_default=True,
    metavar="SECONDS",
    help="The load is averaged over so long.",
)
@click.option(
    "--tensor-parallel", default=1, show_default=True, help="Workers that hold one copy of the base together."
)
@click.option(
    "--expert-sharding",
    type=click.Choice(["tensor", "expert"]),
    default="tensor",
    show_default=True,
    help="What they share of a mixture of experts: the features of each expert, or the experts.",
)
@click.option(
    "--max-upload-bytes",
    default="2GiB",
    show_default=True,
    callback=byte_size_value,
    help="Largest adapter_model.safetensors that is accepted.",
)
@click.option(
    "--address",
    metavar="HOST:PORT|auto",
    help="Serve on this running Ray cluster, of which this machine is a node. Default: a private one on this machine.",
)
@click.option("--routers", "num_routers", default=1, show_default=True, help="HTTP fronts, spread over the nodes.")
@click.option("--gang-num-cpus", default=1.0, show_default=True, help="Ray's CPUs that each worker of a gang takes.")
@click.option("--gang-num-gpus", default=0.0, show_default=True, help="Ray's GPUs, or a share of one, likewise.")
@click.option(
    "--resource",
    "gang_resources",
    multiple=True,
    metavar="NAME=AMOUNT",
    callback=amounts,
    help="A custom resource that each worker of a gang takes. May be repeated.",
)
@click.option(
    "--node-label",
    "gang_labels",
    multiple=True,
    metavar="KEY=VALUE",
    callback=labels,
    help="A label that the nodes of a gang must have. May be repeated.",
)
@click.option(
    "--placement",
    type=click.Choice(PLACEMENTS),
    default="strict-pack",
    show_default=True,
    help="The workers of a gang: all on one node, on as few as there is room, or on as many as there are.",
)
@click.option(
    "--router-resource",
    "router_resources",
    multiple=True,
    metavar="NAME=AMOUNT",
    callback=amounts,
    help="A custom resource that each router takes. May be repeated.",
)
@click.option("--replace", is_flag=True, help="With --address: delete a motet that runs there first.")
@click.option("--wait-for-nodes", is_flag=True, help="With --address: no error where no node has room yet.")
@click.option("--threads", "num_threads", default=1, show_default=True, help="Threads of the compute library.")
@click.pass_context
def serve(
    context: click.Context,
    /,
    path_or_id: str,
    config_path: Path | None,
    data_dir: Path,
    keys: tuple[tuple[str, str], ...],
    replace: bool,
    wait_for_nodes: bool,
    **settings: Any,
) -> None:
    """Serve a base and its tenants' adapters. PATH_OR_ID is a folder in Hugging Face format or a hub id.

    With --address it becomes an application of a running Ray cluster, and Ctrl-C deletes that again, and no more.
    Prints "ready URL" once it can serve a token, and runs until Ctrl-C. With --config, SIGHUP reads the file again and
    replaces routers and gangs whose settings have changed, while they serve; then it prints "updated", or why not.
    """
    # Loaded here because the other commands do without; the port comes before what takes long to load.
    from ..launch.local_serve import LOOPBACK, check_port_is_free

    if settings["address"] is None:
        try:
            check_port_is_free(settings["host"] or LOOPBACK, settings["port"])
        except ValueError as error:
            raise click.ClickException(str(error)) from error
    from ..config import MotetConfig
    from ..launch.launch import LaunchError
    from ..launch.model_source import ModelUnavailable, resolve_model
    from ..launch.preflight import check_data_dir, check_settings, check_sizes
    from .foreground import deployed

    console = Console(stderr=True)
    data_dir = data_dir.expanduser().resolve()
    if settings["address"] is None and (replace or wait_for_nodes):
        raise click.UsageError("--replace and --wait-for-nodes are about a running cluster: give its --address")
    given_keys = keys or ((DEFAULT_TENANT, secrets.token_urlsafe(24)),)
    try:
        check_data_dir(data_dir)
        with ProgressDisplay(console) as progress:
            model_path = resolve_model(path_or_id, data_dir / "models", progress)
            with step(progress, "checking the settings"):
                config = MotetConfig.from_environment(
                    model_path=model_path, data_dir=data_dir, keys=given_keys, **settings
                )
                warnings = check_settings(config)
    except (ModelUnavailable, ValueError) as error:
        raise click.ClickException(str(error)) from error
    for warning in warnings:
        click.echo(f"Warning: {warning}", err=True)

    def update() -> None:
        try:
            given = reread_options(context)
            del given["path_or_id"], given["config_path"], given["replace"], given["wait_for_nodes"]
            given |= {"data_dir": given["data_dir"].expanduser().resolve(), "keys": given["keys"] or given_keys}
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
        if not keys:
            click.echo(f"key of tenant {DEFAULT_TENANT}: {given_keys[0][1]}")
        click.echo(f"ready {deployment.url}")
        deployment.wait(None if config_path is None else update)
