"""The `motet` command."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Any

import click

from ... import __version__
from ..client.client import ClientError, MotetClient, RequestRefused, ServerUnreachable
from ..client.client_options import with_client, with_operator_client
from ..client_commands.adapter_commands import adapters, aliases, canary, pin, preload, residency, unpin, versions
from ..client_commands.tenant_commands import keys, tenants, users
from ..client_commands.usage_commands import audit, limits, usage
from .cluster_commands import check, doctor, edge_program, scale
from .planning_commands import costs, mig, plan
from .serve_command import hide_secrets, serve
from .status import status_lines

# A terminal chat with the base or one of its adapters.

HELP = "/adapter NAME changes the voice, /adapter lists them, /new forgets the talk, /quit ends it."


class ChatSession:
    """One conversation. What was said goes along when the adapter changes.

    `show` is called with pieces of text as they arrive, and must not add line breaks.
    """

    def __init__(self, client: MotetClient, model: str | None, show: Callable[[str], None]) -> None:
        self._client = client
        self._show = show
        self._names = client.models()
        self.model = self._resolve(model) if model is not None else self._names[0]
        self.history: list[dict[str, str]] = []

    def run(self, lines: Iterator[str]) -> bool:
        """Answers line by line until /quit or the end of the lines. Whether nothing failed."""
        all_right = True
        self._show(f"{self._client.url}, model {self.model}. {HELP}\n")
        for line in lines:
            text = line.strip()
            try:
                if text == "/quit":
                    break
                elif text.startswith("/"):
                    self._command(*text.split(maxsplit=1))
                elif text:
                    self._answer(text)
            except ClientError as error:
                self._show(f"error: {error}\n")
                all_right = False
        return all_right

    def _command(self, command: str, argument: str = "") -> None:
        if command == "/adapter" and argument:
            self.model = self._resolve(argument)
            self._show(f"now {self.model}\n")
        elif command == "/adapter":
            self._names = self._client.models()
            self._show("  ".join(f"[{name}]" if name == self.model else name for name in self._names) + "\n")
        elif command == "/new":
            self.history.clear()
            self._show("forgotten\n")
        else:
            self._show(f"{command} is not a command. {HELP}\n")

    def _answer(self, question: str) -> None:
        """Streams the answer. A question that failed or was stopped by Ctrl-C is not kept."""
        messages = [*self.history, {"role": "user", "content": question}]
        answer = ""
        pieces = self._client.chat(self.model, messages)
        try:
            for piece in pieces:
                answer += piece.text
                self._show(piece.text)
        except KeyboardInterrupt:
            pieces.close()  # cancels at the server
            self._show(" (stopped)\n")
            return
        self._show("\n")
        self.history = [*messages, {"role": "assistant", "content": answer}]

    def _resolve(self, name: str) -> str:
        if name not in self._names:
            self._names = self._client.models()  # it may have been uploaded since
        if name not in self._names:
            raise ClientError(f"there is no model {name!r}: {', '.join(self._names)} can be chosen")
        return name


class MotetProgram(click.Group):
    """Looks after its arguments before anything else does."""

    def main(self, args: Sequence[str] | None = None, *positional: Any, **options: Any) -> Any:
        if args is None:  # as the program that a person has started
            hide_secrets()
        return super().main(args, *positional, **options)


@click.group(cls=MotetProgram, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.version_option(__version__, prog_name="motet")
def main() -> None:
    """One base model, many voices: serve LoRA fine-tunes of one base, and talk to them."""


@main.command()
@click.option("--model", help="The base's name or an adapter's; without it: the base.")
@with_client
def chat(client: MotetClient, model: str | None) -> None:
    """Talk to a running motet in the terminal."""
    conversation = ChatSession(client, model, lambda text: click.echo(text, nl=False))
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


def _typed_lines(conversation: ChatSession) -> Iterator[str]:
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
