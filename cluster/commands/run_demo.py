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
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ...examples.demo.questions import Question, split_questions
from ...examples.demo.styles import Style, answer
from ...examples.demo.tools import TOOLS, ToolQuestion, held_out_tool_questions
from ..client.client import ADAPTER_FILES, ClientError, MotetClient
from ..config import MotetConfig
from ..launch.local_serve import free_ports
from .foreground import deployed

# What the demo shows of tools and schemas: an adapter that calls a tool, and one whose answer has a schema.

AGENT: Final = "agent"
FACT_SCHEMA: Final = {
    "type": "object",
    "properties": {"type": {"type": "string"}, "query": {"type": "string"}, "answer": {"type": "string"}},
    "required": ["type", "query", "answer"],
    "additionalProperties": False,
}


def show_tool_use(console: Console, client: MotetClient, question: ToolQuestion) -> bool:
    """Sends a question, returns the called tool's result to the model, and prints all.

    True: call and answer were right.
    """
    message, _, result, _ = question.messages()
    try:
        called = _message(client, AGENT, [message], tools=list(TOOLS))
        calls = [each["function"] for each in called.get("tool_calls") or ()]
        answered = (
            _message(client, AGENT, [message, called, _of(called, result)], tools=list(TOOLS)) if calls else called
        )
    except ClientError as error:
        console.print(f"[red]{AGENT} was to call a tool: {error}[/red]", highlight=False)
        return False
    call_texts = ", ".join(f"{call['name']}({call['arguments']})" for call in calls) or "nothing"
    lines = f"{AGENT} was asked {question.text!r}, called {call_texts}, got {result['content']} and answered:"
    console.print(lines, markup=False, highlight=False)
    console.print(f"  {answered['content']}", markup=False, highlight=False)
    right = [(question.tool["function"]["name"], question.arguments)]
    return [(call["name"], json.loads(call["arguments"])) for call in calls] == right and (
        answered["content"] == question.answer
    )


def show_schema(console: Console, client: MotetClient, model: str, question: Question) -> bool:
    """Asks for an answer that fits a schema, and prints it. True: it was right."""
    schema_format = {"type": "json_schema", "json_schema": {"name": "fact", "schema": FACT_SCHEMA, "strict": True}}
    messages = [{"role": "user", "content": question.text}]
    try:
        fact = json.loads(_message(client, model, messages, response_format=schema_format)["content"])
    except (ClientError, ValueError) as error:
        console.print(f"[red]{model} was to answer by a schema: {error}[/red]", highlight=False)
        return False
    console.print(f"{model} was asked {question.text!r} with a schema, and answered:", markup=False, highlight=False)
    console.print(f"  {fact}", markup=False, highlight=False)
    return bool(fact == json.loads(answer(question.fact, "json")))


def _message(client: MotetClient, model: str, messages: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
    body = {"model": model, "messages": messages, "temperature": 0, "max_tokens": 96, **fields}
    message: dict[str, Any] = client.call("POST", "/v1/chat/completions", body)["choices"][0]["message"]
    return message


def _of(called: dict[str, Any], result: dict[str, Any]) -> dict[str, Any]:
    """The tool's result, for the call that the model made."""
    return {**result, "tool_call_id": called["tool_calls"][0]["id"]}


# Sends one question to many models at once, and measures the speed and correctness of the answers.


@dataclass(frozen=True)
class Voice:
    """The base or an adapter, as a tenant uses it."""

    model: str
    style: Style  # what its answers are checked against
    tenant: str


@dataclass(frozen=True)
class Inquiry:
    """A question to a voice, with its only correct answer."""

    voice: Voice
    question: str
    expected: str


@dataclass(frozen=True)
class Reply:
    """Times are seconds since all inquiries were released. A failed reply has an `error`."""

    inquiry: Inquiry
    text: str
    num_tokens: int
    first_token_s: float
    last_token_s: float
    error: str | None = None

    @property
    def is_right(self) -> bool:
        return self.error is None and self.text.strip() == self.inquiry.expected


@dataclass(frozen=True)
class Speed:
    """The speed of replies that ran at the same time."""

    median_first_token_s: float
    tokens_per_s: float
    num_right: int
    num_replies: int


def ask_all(inquiries: Sequence[Inquiry], clients: dict[str, MotetClient]) -> list[Reply]:
    """One reply to each, in the same order; all are sent at the same time. `clients`: by tenant."""
    with ThreadPoolExecutor(len(inquiries)) as pool:
        released = time.monotonic()
        replies = [pool.submit(_ask, inquiry, clients[inquiry.voice.tenant], released) for inquiry in inquiries]
        return [reply.result() for reply in replies]


def speed_of(replies: Sequence[Reply]) -> Speed:
    """Tokens a second from the release of the questions to the last of these replies."""
    firsts = sorted(reply.first_token_s for reply in replies)
    return Speed(
        median_first_token_s=firsts[len(firsts) // 2],
        tokens_per_s=sum(reply.num_tokens for reply in replies) / max(reply.last_token_s for reply in replies),
        num_right=sum(reply.is_right for reply in replies),
        num_replies=len(replies),
    )


def _ask(inquiry: Inquiry, client: MotetClient, released: float) -> Reply:
    text, num_tokens, first_token_s, error = "", 0, None, None
    try:
        for piece in client.chat(inquiry.voice.model, [{"role": "user", "content": inquiry.question}], max_tokens=64):
            if piece.text and first_token_s is None:
                first_token_s = time.monotonic() - released
            text += piece.text
            num_tokens = piece.completion_tokens or num_tokens
    except ClientError as failure:
        error = str(failure)
    ended_s = time.monotonic() - released
    return Reply(inquiry, text, num_tokens, ended_s if first_token_s is None else first_token_s, ended_s, error)


# What the demo prints: the answers side by side, speeds, and what to try next.


def print_answers(console: Console, replies: Sequence[Reply]) -> None:
    """A row for each question, a column for each voice. What is wrong is shown with what is right."""
    voices = list(dict.fromkeys(reply.inquiry.voice for reply in replies))
    by_place = {(reply.inquiry.question, reply.inquiry.voice): reply for reply in replies}
    table = Table("question", *(f"{voice.model}\n[dim]{voice.tenant}[/dim]" for voice in voices), show_lines=True)
    for question in dict.fromkeys(reply.inquiry.question for reply in replies):
        table.add_row(escape(question), *(_reply_text(by_place[question, voice]) for voice in voices))
    console.print(table)


def print_speeds(console: Console, replies: Sequence[Reply]) -> None:
    table = Table("voice", "tenant", "right", "time to first token", "tokens/s")
    for voice in dict.fromkeys(reply.inquiry.voice for reply in replies):
        of_voice = [reply for reply in replies if reply.inquiry.voice == voice]
        table.add_row(voice.model, voice.tenant, *_speed_cells(speed_of(of_voice)))
    table.add_section()
    table.add_row("all together", "", *_speed_cells(speed_of(replies)))
    console.print(table)


def print_next_steps(console: Console, url: str, keys: dict[str, str], voice: Voice, adapter: Path) -> None:
    """Commands to copy and run against the demo at `url`. `adapter` is a folder to upload."""
    tenant, key = voice.tenant, keys[voice.tenant]
    lines = f"""
Keys: {", ".join(f"{name} {value}" for name, value in keys.items())}. Try next, in another terminal:

  curl {url}/v1/chat/completions -H "Authorization: Bearer {key}" -H "Content-Type: application/json" \\
    -d '{{"model": "{voice.model}", "temperature": 0,
         "messages": [{{"role": "user", "content": "What is the capital of Peru?"}}]}}'

  curl {url}/v1/adapters -H "Authorization: Bearer {key}" -F name=mine \\
    -F adapter_config.json=@{adapter}/adapter_config.json \\
    -F adapter_model.safetensors=@{adapter}/adapter_model.safetensors

  export MOTET_URL={url} MOTET_API_KEY={key}
  .venv/bin/motet chat --model {voice.model}
  .venv/bin/motet adapters upload another {adapter}

# Python, with the official client (pip install openai)
from openai import OpenAI
client = OpenAI(base_url="{url}/v1", api_key="{key}")
question = [{{"role": "user", "content": "What is 7 plus 5?"}}]
answer = client.chat.completions.create(model="{voice.model}", messages=question, temperature=0)
print(answer.choices[0].message.content)

{voice.model} is {tenant}'s; to the other tenant it does not exist. Ctrl-C stops everything.
"""
    console.print(lines, markup=False, highlight=False, soft_wrap=True)


def _reply_text(reply: Reply) -> str:
    if reply.error is not None:
        return f"[red]error: {escape(reply.error)}[/red]"
    if reply.is_right:
        return escape(reply.text)
    return f"[red]{escape(reply.text)}[/red]\n[dim]right: {escape(reply.inquiry.expected)}[/dim]"


def _speed_cells(speed: Speed) -> tuple[str, str, str]:
    return (
        f"{speed.num_right} of {speed.num_replies}",
        f"{1000 * speed.median_first_token_s:.0f} ms",
        f"{speed.tokens_per_s:.0f}",
    )


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
        checks = [show_tool_use(console, tenant, question) for question in held_out_tool_questions(2)]
        checks.append(show_schema(console, tenant, SCHEMA_VOICE.model, _one_of_each_kind()[0]))
        live = _upload_and_question(console, clients[LIVE_VOICE.tenant])
        if not keep_live:
            clients[LIVE_VOICE.tenant].delete_adapter(LIVE_VOICE.model)
    wrong = [reply for reply in (*replies, live) if not reply.is_right]
    num_wrong = len(wrong) + checks.count(False)
    if num_wrong:
        console.print(f"[red]{num_wrong} of {len(replies) + len(checks) + 1} answers are wrong[/red]")
    return not num_wrong


def _upload_all(console: Console, clients: dict[str, MotetClient]) -> None:
    for tenant, client in clients.items():
        current_adapters = [f"{adapter.name} (version {adapter.version})" for adapter in client.adapters()]
        console.print(f"{tenant} has {', '.join(current_adapters) or 'no adapters yet'}", highlight=False)
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
