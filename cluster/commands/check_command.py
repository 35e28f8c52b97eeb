"""`motet check`."""

from __future__ import annotations

from typing import TextIO

import click


@click.command()
@click.argument("file", type=click.File())
def check(file: TextIO) -> None:
    """Look for what would fail in a cluster of FILE, without one.

    FILE is a rendered RayService (helm template … | motet check -), a configuration of Ray Serve, or, with a name that
    ends in .toml, one of motet serve. Wrong names and values of settings, bounds that do not go together, what
    KubeRay's operator refuses, and servers of settings that the file's NetworkPolicies close are listed, and the
    status is 1.
    """
    from ..manifests.file_problems import UnknownFile, file_problems  # loaded here: other commands do without

    try:
        problems = file_problems(file.read(), is_toml=file.name.endswith(".toml"))
    except (UnknownFile, UnicodeDecodeError) as error:
        raise click.ClickException(f"{file.name} cannot be checked: {error}") from error
    for problem in problems:
        click.echo(problem)
    if problems:
        raise click.exceptions.Exit(1)
    click.echo("nothing was found that would fail")
