"""`motet edge-program`: a step of making an image."""

from __future__ import annotations

from pathlib import Path

import click

from ..edge.haproxy import write_edge_program
from ..edge.serve_variables import BINARY_VARIABLE


@click.command(
    "edge-program",
    hidden=True,
    help=f"""Write the program that Ray Serve is to run for HAProxy.

    An image, or a machine that runs `ray start` itself, names it in {BINARY_VARIABLE}. Its limits are read from
    MOTET_MAX_CONNECTIONS, MOTET_MAX_CONNECTIONS_PER_SOURCE, MOTET_MAX_REQUESTS_PER_KEY, MOTET_MAX_KEYLESS_PER_SECOND
    and MOTET_TRUSTED_PROXIES whenever HAProxy starts.""",
)
@click.argument("path", type=click.Path(dir_okay=False, path_type=Path))
def edge_program(path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_edge_program(path)
    except OSError as error:
        raise click.ClickException(f"{path} cannot be written: {error.strerror}") from error
    click.echo(f"{BINARY_VARIABLE}={path.absolute()}")
