"""Runs coding agents against a motet: python -m motet.tests.clients.agents.run NODE_MODULES FOLDER.

Prints a line of JSON for each check. FOLDER has the base and the adapter of `copying_base.py`, which `motet serve`
serves. Run it in a network namespace with loopback alone (`scripts/clients --agents`): the agents have an empty
environment and a home of their own.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from motet.cluster.launch.local_serve import free_ports
from motet.tests.clients.agents.copying_base import AGAIN, CONTEXT
from motet.tests.rigs.running_motet import BASE, KEYS, running_motet

KEY: Final = KEYS["acme"]
WORD: Final = "mango-42"
KNOWN_TO_CODEX: Final = "gpt-5.5"  # the name of the adapter: for this model Codex sends a custom tool
TIMEOUT_S: Final = 300


class Agent(NamedTuple):
    """`first` and `second`: what is run with a question in the last place. `files`: of its home, by path."""

    name: str
    tool: str
    arguments: dict[str, Any]
    first: Sequence[str]
    second: Sequence[str]
    environment: dict[str, str]
    files: dict[str, str]
    makes: str = ""  # a file, by its tool


def agents(modules: Path, url: str, note: Path) -> list[Agent]:
    claude = [str(modules / "@anthropic-ai/claude-code-linux-x64/claude")]
    codex = [str(next((modules / "@openai/codex-linux-x64/vendor").glob("*/bin/codex"))), "exec"]
    opencode = [str(modules / "opencode-linux-x64-baseline/bin/opencode"), "run"]
    qwen = ["node", str(modules / "@qwen-code/qwen-code/cli.js"), "--auth-type", "openai"]
    codex_options = ["--skip-git-repo-check", "--sandbox", "danger-full-access"]
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": f"{url}/v1", "apiKey": KEY},
        "models": {BASE: {"limit": {"context": CONTEXT, "output": 4096}}},
    }
    opencode_file = {
        "model": f"motet/{BASE}",
        "small_model": f"motet/{BASE}",
        "autoupdate": False,
        "share": "disabled",
        "provider": {"motet": provider},
    }

    def codex_file(model: str) -> dict[str, str]:
        return {
            ".codex/config.toml": f'model = "{model}"\nmodel_provider = "motet"\n'
            '[model_providers.motet]\nname = "motet"\n'
            f'base_url = "{url}/v1"\nenv_key = "MOTET_KEY"\nwire_api = "responses"\n'
        }

    patch = f"*** Begin Patch\n*** Add File: {note.parent}/patched.txt\n+The word is {WORD}.\n*** End Patch\n"
    return [
        Agent(
            "Claude Code",
            "Read",
            {"file_path": str(note)},
            [*claude, "-p"],
            [*claude, "-p", "--continue"],
            {
                "ANTHROPIC_BASE_URL": url,
                "ANTHROPIC_API_KEY": KEY,
                "ANTHROPIC_MODEL": BASE,
                "ANTHROPIC_SMALL_FAST_MODEL": BASE,
                "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            },
            {},
        ),
        Agent(
            "Codex",
            "exec_command",
            {"cmd": "cat note.txt"},
            [*codex, *codex_options],
            [*codex, *codex_options, "resume", "--last"],
            {"MOTET_KEY": KEY},
            codex_file(BASE),
        ),
        Agent(
            "Codex, patches",
            "apply_patch",
            {"input": patch},
            [*codex, *codex_options],
            [*codex, *codex_options, "resume", "--last"],
            {"MOTET_KEY": KEY},
            codex_file(KNOWN_TO_CODEX),
            "patched.txt",
        ),
        Agent(
            "opencode",
            "read",
            {"filePath": str(note)},
            opencode,
            [*opencode, "--continue"],
            {"OPENCODE_DISABLE_MODELS_FETCH": "1", "OPENCODE_DISABLE_LSP_DOWNLOAD": "1"},
            {".config/opencode/opencode.json": json.dumps(opencode_file)},
        ),
        Agent(
            "Qwen Code",
            "read_file",
            {"file_path": str(note)},
            [*qwen, "-p"],
            [*qwen, "--continue", "-p"],
            {"OPENAI_API_KEY": KEY, "OPENAI_BASE_URL": f"{url}/v1", "OPENAI_MODEL": BASE},
            {},
        ),
    ]


def run_agent(agent: Agent, folder: Path, home: Path) -> Iterator[dict[str, Any]]:
    """Its checks, with what went wrong in each; empty: nothing."""
    for path, text in agent.files.items():
        (home / path).parent.mkdir(parents=True, exist_ok=True)
        (home / path).write_text(text)
    environment = {"HOME": str(home), "PATH": "/usr/local/bin:/usr/bin:/bin", "TERM": "dumb", **agent.environment}
    question = f"Use the tool {agent.tool} with {json.dumps(agent.arguments)} now."
    for check, command in (("tool", [*agent.first, question]), ("resumed", [*agent.second, AGAIN])):
        started_s = time.monotonic()
        try:
            done = subprocess.run(
                command,
                cwd=folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=TIMEOUT_S,
                check=False,
            )
            is_right = done.returncode == 0 and f"The word is {WORD}." in done.stdout
            is_right = is_right and (folder / agent.makes).exists()
            wrong = "" if is_right else f"{done.returncode}: {done.stdout[-300:]} {done.stderr[-300:]}"
        except subprocess.TimeoutExpired:
            wrong = f"it took more than {TIMEOUT_S} s"
        seconds = round(time.monotonic() - started_s, 1)
        yield {"library": agent.name, "check": check, "wrong": wrong, "seconds": seconds}


def main() -> int:
    modules, trained = (Path(argument).resolve() for argument in sys.argv[1:])
    num_wrong = 0
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        port = free_ports(1)[0]
        with running_motet(folder / "data", port, base=trained / "base", pool_bytes="512MiB") as motet:
            motet.upload(KNOWN_TO_CODEX, trained / "adapter").raise_for_status()
            for number, agent in enumerate(agents(modules, motet.url, folder / "work" / "note.txt")):
                work, home = folder / "work", folder / f"home{number}"
                work.mkdir(exist_ok=True)
                (work / "note.txt").write_text(f"The word is {WORD}.\n")
                home.mkdir()
                for line in run_agent(agent, work, home):
                    num_wrong += bool(line["wrong"])
                    print(json.dumps(line), flush=True)
    return 1 if num_wrong else 0


if __name__ == "__main__":
    sys.exit(main())
