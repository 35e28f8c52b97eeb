"""The `motet` command."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Any

import click

from ... import __version__
from ..client.client import MotetClient, RequestRefused, ServerUnreachable
from ..client.client_options import with_client, with_operator_client
from ..client_commands.adapter_commands import adapters, pin, preload, residency, unpin
from ..client_commands.key_commands import keys
from ..client_commands.tenant_commands import tenants
from ..client_commands.usage_commands import audit, limits, usage
from ..client_commands.user_commands import users
from ..client_commands.version_commands import aliases, canary, versions
from .chat import Chat
from .cluster_commands import check, doctor, edge_program, scale
from .planning_commands import costs, mig, plan
from .serve_command import hide_secrets, serve
from .status import status_lines


class Program(click.Group):
    """Looks after its arguments before anything else does."""

    def main(self, args: Sequence[str] | None = None, *positional: Any, **options: Any) -> Any:
        if args is None:  # as the program that a person has started
            hide_secrets()
        return super().main(args, *positional, **options)


@click.group(cls=Program, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.version_option(__version__, prog_name="motet")
def main() -> None:
    """One base model, many voices: serve LoRA fine-tunes of one base, and talk to them."""


@main.command()
@click.option("--model", help="The base's name or an adapter's; without it: the base.")
@with_client
def chat(client: MotetClient, model: str | None) -> None:
    """Talk to a running motet in the terminal."""
    conversation = Chat(client, model, lambda text: click.echo(text, nl=False))
    if not conversation.run(_typed_lines(conversation)) and not sys.stdin.isatty():
        raise click.exceptions.Exit(1)


@main.command()
@click.option(
    "--over",
    "seconds",
    type=click.FloatRange(min=0, max=60),
    default=1.0,
    show_default=True,
    metavar="SECONDS",
    help="Show rates per second, measured over this many seconds. 0: totals since the start.",
)
@with_operator_client
def status(client: MotetClient, seconds: float) -> None:
    """Show what a running motet serves and how busy it is.

    While no router is up it shows, on a node of motet, what the starts of routers and gangs wait for.
    """
    data_dir: Path = click.get_current_context().params["data_dir"]
    try:
        if (problem := client.readiness_problem()) is not None:
            click.echo(problem)
        before = client.status() if seconds else None
    except (ServerUnreachable, RequestRefused) as error:
        if isinstance(error, RequestRefused) and error.status_code != HTTPStatus.SERVICE_UNAVAILABLE:
            raise
        from .routerless_status import routerless_status  # loaded here: a motet that answers does without

        for line in status_lines(routerless_status(data_dir)):
            click.echo(line)
        raise
    time.sleep(seconds)
    for line in status_lines(client.status(), before=before, seconds=seconds):
        click.echo(line)


for _command in (
    serve,
    check,
    scale,
    costs,
    mig,
    plan,
    doctor,
    edge_program,
    adapters,
    versions,
    aliases,
    canary,
    preload,
    residency,
    pin,
    unpin,
):
    main.add_command(_command)
for _command in (limits, usage, tenants, users, keys, audit):
    main.add_command(_command)


def _typed_lines(conversation: Chat) -> Iterator[str]:
    """Typed lines, until Ctrl-D or Ctrl-C at the prompt."""
    at_terminal = sys.stdin.isatty()
    if at_terminal:
        import readline  # noqa: F401  # gives input() line editing and recall
    while True:
        try:
            yield input(f"{conversation.model}> " if at_terminal else "")
        except (EOFError, KeyboardInterrupt):
            click.echo()
            return
