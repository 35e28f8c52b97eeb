"""What the demo prints: the answers side by side, speeds, and what to try next."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from .voices import Reply, Speed, Voice, speed_of


def print_answers(console: Console, replies: Sequence[Reply]) -> None:
    """A row for each question, a column for each voice. What is wrong is shown with what is right."""
    voices = list(dict.fromkeys(reply.inquiry.voice for reply in replies))
    by_place = {(reply.inquiry.question, reply.inquiry.voice): reply for reply in replies}
    table = Table("question", *(f"{voice.model}\n[dim]{voice.tenant}[/dim]" for voice in voices), show_lines=True)
    for question in dict.fromkeys(reply.inquiry.question for reply in replies):
        table.add_row(escape(question), *(_shown(by_place[question, voice]) for voice in voices))
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


def _shown(reply: Reply) -> str:
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
