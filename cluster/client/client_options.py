"""Options of all commands that talk to a running motet, and how these show answers and errors."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from functools import wraps
from pathlib import Path
from typing import Any, Concatenate, Final, ParamSpec

import click
from click.core import ParameterSource
from rich.console import Console
from rich.table import Column, Table

from ..launch_secrets import OPERATOR_KEY_FILE
from ..settings.settings import Settings
from .client import ClientError, MotetClient, RequestRefused

# Keys in files, as Kubernetes mounts secrets, or on standard input.


def read_keys(path: Path | None) -> tuple[str, ...]:
    """The lines TENANT=KEY of a file, or of standard input for "-"; those that are empty or begin with # say nothing.

    Raises ClickException.
    """
    if path is None:
        return ()
    lines = (line.strip() for line in _read(path).splitlines())
    return tuple(line for line in lines if line and not line.startswith("#"))


def read_key(path: Path) -> str:
    """The key that is all of a file, or of standard input for "-". Raises ClickException."""
    return _read(path).strip()


def operator_key_of(data_dir: Path) -> str | None:
    """The operators' key that a motet with this data folder has made, if it did and this user may read it."""
    try:
        return (data_dir / OPERATOR_KEY_FILE).read_text().strip()
    except OSError:
        return None


def _read(path: Path) -> str:
    try:
        with click.open_file(str(path)) as file:
            text: str = file.read()
    except (OSError, UnicodeDecodeError) as error:
        raise click.ClickException(f"the keys in {path} cannot be read: {error}") from error
    return text


P = ParamSpec("P")

KEY_FILE = click.Path(dir_okay=False, allow_dash=True, path_type=Path)
DEFAULT_URL = "http://127.0.0.1:8000"
URL_VARIABLE = "MOTET_URL"
KEY_VARIABLE = "MOTET_API_KEY"
OPERATOR_KEY_VARIABLE = "MOTET_OPERATOR_KEY"
DATA_DIR_VARIABLE = "MOTET_DATA_DIR"


def with_client(command: Callable[Concatenate[MotetClient, P], None]) -> Callable[P, None]:
    """The command with --url, --key and --key-file, called with a client of a tenant.

    One with an option --all asks for all tenants' with it, so with the operators' key unless --key gives one. A
    `ClientError` becomes a message and exit code 1.
    """

    @click.option("--url", default=DEFAULT_URL, envvar=URL_VARIABLE, show_default=True, show_envvar=True)
    @click.option("--key", envvar=KEY_VARIABLE, show_envvar=True, help="API key of a tenant.")
    @click.option("--key-file", type=KEY_FILE, help="A file that holds the key; - is standard input.")
    @wraps(command)
    def run(*args: P.args, **options: P.kwargs) -> None:
        url, key, key_file = str(options.pop("url")), options.pop("key"), options.pop("key_file")
        if isinstance(key_file, Path):
            key = read_key(key_file)
        hint = f"no key was given: set {KEY_VARIABLE}, or use --key or --key-file"
        if options.get("of_all"):
            hint = f"no operators' key was given: set {OPERATOR_KEY_VARIABLE}, or use --key or --key-file"
            source = click.get_current_context().get_parameter_source("key")
            if key_file is None and source is not ParameterSource.COMMANDLINE:
                key = os.environ.get(OPERATOR_KEY_VARIABLE) or operator_key_of(_data_dir()) or key
        _call(command, url, str(key) if key else None, hint, *args, **options)

    return run


def with_operator_client(command: Callable[Concatenate[MotetClient, P], None]) -> Callable[P, None]:
    """As `with_client`, for a command that needs the operators' key.

    If no key is given, it is read from the data folder.
    """

    @click.option("--url", default=DEFAULT_URL, envvar=URL_VARIABLE, show_default=True, show_envvar=True)
    @click.option("--key-file", type=KEY_FILE, help="A file that holds the operators' key; - is standard input.")
    @click.option(
        "--data-dir",
        type=click.Path(file_okay=False, path_type=Path),
        default=Settings().serving.data_dir,
        envvar=DATA_DIR_VARIABLE,
        show_default=True,
        show_envvar=True,
        help="Data folder of a motet on this machine; its operators' key is used if none is given.",
    )
    @wraps(command)
    def run(*args: P.args, **options: P.kwargs) -> None:
        url, key_file, data_dir = str(options.pop("url")), options.pop("key_file"), options.pop("data_dir")
        assert isinstance(data_dir, Path)
        key = os.environ.get(OPERATOR_KEY_VARIABLE) or operator_key_of(data_dir)
        if isinstance(key_file, Path):
            key = read_key(key_file)
        hint = (
            f"no operators' key was given, and {data_dir} has none that can be read: "
            f"set {OPERATOR_KEY_VARIABLE}, or use --key-file or --data-dir"
        )
        _call(command, url, key, hint, *args, **options)

    return run


def _data_dir() -> Path:
    folder = os.environ.get(DATA_DIR_VARIABLE)
    return Path(folder) if folder else Settings().serving.data_dir


def _call(
    command: Callable[Concatenate[MotetClient, P], None],
    url: str,
    key: str | None,
    hint: str,
    *args: P.args,
    **options: P.kwargs,
) -> None:
    """`hint`: what to do if the server requires a key and none was given."""
    try:
        with MotetClient(url, key) as client:
            command(client, *args, **options)
    except ClientError as error:
        if not key and isinstance(error, RequestRefused) and error.status_code == 401:
            raise click.ClickException(hint) from error
        raise click.ClickException(str(error)) from error


# How commands print what a running motet answers: JSON for machines, tables for people.

_UNLIMITED_WIDTH: Final = 10_000  # columns, where no terminal limits them

json_option = click.option("--json", "as_json", is_flag=True, help="Print the server's JSON.")


def print_json(body: Any) -> None:
    click.echo(json.dumps(body, indent=2))


def print_table(columns: Sequence[str | Column], rows: Iterable[Sequence[object]]) -> None:
    """One row a line, cut to the terminal's width if there is one. None is an empty cell."""
    table = Table(*columns, box=None, pad_edge=False)
    for row in rows:
        table.add_row(*("" if cell is None else str(cell) for cell in row))
    width = None if sys.stdout.isatty() else _UNLIMITED_WIDTH
    Console(highlight=False, markup=False, width=width).print(table)


def time_text(seconds: float | None) -> str:
    """A time as UTC; empty for None.

    >>> time_text(86_400)
    '1970-01-02 00:00:00Z'
    """
    return "" if seconds is None else datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%SZ")
