"""`motet serve`."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from .byte_size import byte_size_value
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


@click.command()
@click.argument("path_or_id")
@click.option("--name", default="", help="The base's name in requests. Default: the name of its folder.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen at; 0.0.0.0 is all.")
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
    callback=byte_size_value,
    help="Memory for adapters that wait to be used.",
)
@click.option("--max-num-sequences", default=128, show_default=True, help="Sequences that run at once.")
@click.option("--max-tokens-per-step", default=512, show_default=True, help="Tokens computed in one step.")
@click.option("--max-model-len", type=int, help="Longest prompt and completion. Default: the model's.")
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
@click.option("--threads", "num_threads", default=1, show_default=True, help="Threads of the compute library.")
def serve(path_or_id: str, data_dir: Path, keys: tuple[tuple[str, str], ...], **settings: Any) -> None:
    """Serve a base and its tenants' adapters. PATH_OR_ID is a folder in Hugging Face format or a hub id.

    Prints "ready URL" once it can serve a token, and runs until Ctrl-C.
    """
    # Loaded here because they bring torch or the hub with them, which the other commands do without.
    from .config import MotetConfig
    from .foreground import deployed
    from .model_source import ModelUnavailable, resolve_model
    from .preflight import check_data_dir, check_settings

    console = Console(stderr=True)
    data_dir = data_dir.expanduser().resolve()
    given_keys = keys or ((DEFAULT_TENANT, secrets.token_urlsafe(24)),)
    try:
        check_data_dir(data_dir)
        with ProgressDisplay(console) as progress:
            model_path = resolve_model(path_or_id, data_dir / "models", progress)
        config = MotetConfig.from_environment(model_path=model_path, data_dir=data_dir, keys=given_keys, **settings)
        warnings = check_settings(config)
    except (ModelUnavailable, ValueError) as error:
        raise click.ClickException(str(error)) from error
    for warning in warnings:
        click.echo(f"Warning: {warning}", err=True)
    with deployed(config, console) as deployment:
        if not keys:
            click.echo(f"key of tenant {DEFAULT_TENANT}: {given_keys[0][1]}")
        click.echo(f"ready {config.url}")
        deployment.wait()
