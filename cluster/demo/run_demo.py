"""The demo: two tenants, five adapters, the same questions to all voices at once, and one more adapter while it runs.

Run by `scripts/demo`.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import click
from rich.console import Console

from ...examples.demo.questions import Question, split_questions
from ...examples.demo.styles import answer
from ...examples.demo.tools import held_out_tool_questions
from ..client.client import ADAPTER_FILES, MotetClient
from ..commands.foreground import deployed
from ..config import MotetConfig
from ..launch.local_serve import free_ports
from .demo_report import print_answers, print_next_steps, print_speeds
from .tool_use import AGENT, show_schema, show_tool_use
from .voices import Inquiry, Reply, Voice, ask_all

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples" / "demo"
BASE = "motet-demo"
# These keys are public. They admit every client that reaches the demo, which listens on loopback only, and, where
# REDIS_URL makes it share a Redis, any other motet of that Redis. They are deleted when the demo ends; after a demo
# that was killed they stay until the next one in the same data folder ends.
KEYS = {"acme": "demo-key-acme", "globex": "demo-key-globex"}
OPERATOR_KEY = "demo-key-operators"
VOICES = (
    Voice(BASE, "base", "acme"),
    Voice("shout", "shout", "acme"),
    Voice("pirate", "pirate", "acme"),
    Voice("json", "json", "globex"),
    Voice("spanish", "spanish", "globex"),
)
AGENT_TENANT = "globex"
SCHEMA_VOICE = VOICES[3]
LIVE_VOICE = Voice("corsair", "pirate", "globex")
DEFAULT_PORT = 8000
MIN_WIDTH = 150  # columns of the tables where there is no terminal


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--once", is_flag=True, help="End after the questions; status 0 only if every answer is right.")
@click.option("--port", type=int, help=f"Default: {DEFAULT_PORT}; with --once: a free one.")
@click.option(
    "--data-dir",
    type=click.Path(file_okay=False, path_type=Path),
    default=ROOT / ".motet" / "demo",
    help="Holds the demo's adapters and its registry. Default: .motet/demo of this repository.",
)
def main(once: bool, port: int | None, data_dir: Path) -> None:
    """Serve the demo model and its adapters on this machine, and ask all of them the same questions."""
    errors = Console(stderr=True)
    console = Console() if sys.stdout.isatty() else Console(width=MIN_WIDTH)
    try:
        config = MotetConfig.from_environment(
            model_path=EXAMPLES / "base",
            data_dir=data_dir.resolve(),
            name=BASE,
            port=port or (free_ports(1)[0] if once else DEFAULT_PORT),
            keys=tuple(KEYS.items()),
            operator_key=OPERATOR_KEY,
            pool_bytes=64 << 20,
            host_bytes=64 << 20,
            kv_host_bytes=64 << 20,
            response_days=1,
        )
    except ValueError as error:
        raise click.ClickException(str(error)) from error
    with deployed(config, errors) as deployment, ExitStack() as ending:
        ending.callback(deployment.forget_keys)
        console.print(f"serving {BASE} at {config.url}", highlight=False)
        all_right = show(console, config.url, keep_live=not once)
        if not once:
            folder = (EXAMPLES / "adapters" / VOICES[1].model).relative_to(ROOT)
            print_next_steps(console, config.url, KEYS, VOICES[1], folder)
            deployment.wait()
    raise click.exceptions.Exit(0 if all_right else 1)


def show(console: Console, url: str, *, keep_live: bool) -> bool:
    """Uploads, asks and prints, against the running motet at `url`. Whether every answer was right.

    The adapter that is made for the occasion is deleted at the end unless `keep_live`.
    """
    with ExitStack() as stack:
        clients = {tenant: stack.enter_context(MotetClient(url, key)) for tenant, key in KEYS.items()}
        _upload_all(console, clients)
        replies = ask_all(_inquiries(VOICES, _one_of_each_kind()), clients)
        print_answers(console, replies)
        print_speeds(console, replies)
        tenant = clients[AGENT_TENANT]
        shown = [show_tool_use(console, tenant, question) for question in held_out_tool_questions(2)]
        shown.append(show_schema(console, tenant, SCHEMA_VOICE.model, _one_of_each_kind()[0]))
        live = _upload_and_question(console, clients[LIVE_VOICE.tenant])
        if not keep_live:
            clients[LIVE_VOICE.tenant].delete_adapter(LIVE_VOICE.model)
    wrong = [reply for reply in (*replies, live) if not reply.is_right]
    num_wrong = len(wrong) + shown.count(False)
    if num_wrong:
        console.print(f"[red]{num_wrong} of {len(replies) + len(shown) + 1} answers are wrong[/red]")
    return not num_wrong


def _upload_all(console: Console, clients: dict[str, MotetClient]) -> None:
    for tenant, client in clients.items():
        held = [f"{adapter.name} (version {adapter.version})" for adapter in client.adapters()]
        console.print(f"{tenant} has {', '.join(held) or 'no adapters yet'}", highlight=False)
    for tenant, name in [*((voice.tenant, voice.model) for voice in VOICES[1:]), (AGENT_TENANT, AGENT)]:
        adapter, created = clients[tenant].upload_adapter(name, EXAMPLES / "adapters" / name)
        done = f"uploaded {adapter.name}" if created else f"has {adapter.name} already"
        console.print(f"{tenant} {done}, rank {adapter.rank}", highlight=False)


def _upload_and_question(console: Console, client: MotetClient) -> Reply:
    """A reply of a new adapter, of which nothing can be cached."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for file in ADAPTER_FILES:
            shutil.copy(EXAMPLES / "adapters" / LIVE_VOICE.style / file, folder)
        config_path = folder / ADAPTER_FILES[0]
        config = json.loads(config_path.read_text())
        # A slightly other scaling is another content, hence another digest, with the same manner of speaking.
        config["lora_alpha"] *= 1 + 0.01 * (1 + time.time_ns() % 1000 / 1000)
        config_path.write_text(json.dumps(config))
        inquiries = _inquiries([LIVE_VOICE], _one_of_each_kind()[:1])
        started = time.monotonic()
        adapter, _ = client.upload_adapter(LIVE_VOICE.model, folder)
        uploaded_s = time.monotonic() - started
        (reply,) = ask_all(inquiries, {LIVE_VOICE.tenant: client})
    console.print(
        f"one more while it runs: {LIVE_VOICE.tenant} uploaded {adapter.name} version {adapter.version} in "
        f"{uploaded_s:.2f} s and {reply.first_token_s:.2f} s later had its first token:",
        highlight=False,
    )
    console.print(f"  {reply.error or reply.text}", markup=False, highlight=False)
    return reply


def _inquiries(voices: Sequence[Voice], questions: Sequence[Question]) -> list[Inquiry]:
    return [
        Inquiry(voice, question.text, answer(question.fact, voice.style)) for question in questions for voice in voices
    ]


def _one_of_each_kind() -> list[Question]:
    """Questions that the model never saw in training, one about a capital, one about a colour and so on."""
    by_kind: dict[str, Question] = {}
    for question in split_questions().held_out:
        by_kind.setdefault(question.fact.kind, question)
    return list(by_kind.values())


if __name__ == "__main__":
    main(prog_name="scripts/demo")
