"""What every command that talks to a running motet takes, and how it shows errors."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec

import click

from .client import ClientError, MotetClient

P = ParamSpec("P")

DEFAULT_URL = "http://127.0.0.1:8000"
URL_VARIABLE = "MOTET_URL"
KEY_VARIABLE = "MOTET_API_KEY"


def with_client(command: Callable[Concatenate[MotetClient, P], None]) -> Callable[P, None]:
    """The command with --url and --key, called with a client. A `ClientError` becomes a message and exit code 1."""

    @click.option("--url", default=DEFAULT_URL, envvar=URL_VARIABLE, show_default=True, show_envvar=True)
    @click.option("--key", envvar=KEY_VARIABLE, show_envvar=True, help="API key of a tenant.")
    @wraps(command)
    def run(*args: P.args, **options: P.kwargs) -> None:
        url, key = str(options.pop("url")), options.pop("key")
        try:
            with MotetClient(url, None if key is None else str(key)) as client:
                command(client, *args, **options)
        except ClientError as error:
            raise click.ClickException(str(error)) from error

    return run
