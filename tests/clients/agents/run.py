"""Runs coding agents against a router: python -m motet.tests.clients.agents.run NODE_MODULES.

Prints a line of JSON for each check. The router is motet's own. In place of an engine it has a stand-in, which calls
the tool that the prompt names and says the word that the tool has found. Run it in a network namespace with loopback
alone (`scripts/clients --agents`): the agents have an empty environment and a home of their own.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from motet.tests.rigs.router_rig import BASE, RouterRig, serving, text_service, token_by_token
from motet.workers.wire.messages import SequenceRequest, SequenceUpdate

KEY: Final = "key-of-acme"
WORD: Final = "mango-42"
KNOWN_TO_CODEX: Final = "gpt-5.5"  # the name of an adapter: for this model Codex sends a custom tool
AGAIN: Final = "Say the word again."
TIMEOUT_S: Final = 120
CONTEXT: Final = 200_000  # the stand-in's tokens are short
TEMPLATE: Final = (
    "<|im_start|>system\n{% for t in tools or [] %}{{ t | tojson }}\n{% endfor %}<|im_end|>\n"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}<tool_call>\n{{ c.function | tojson }}\n</tool_call>{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_ASKED: Final = re.compile(r"Use the tool (\w+) with (\{.*?\}) now\.", re.DOTALL)
_FOUND: Final = re.compile(r"The word is ([\w-]+)")


def spoken(prompt: str) -> str:
    """What the stand-in says."""
    asked = [*_ASKED.finditer(prompt)]
    last_result = prompt.rfind("<|im_start|>tool\n")
    if asked and asked[-1].start() > last_result:
        name, arguments = asked[-1].groups()
        if arguments.startswith('{\\"'):  # opencode quotes what it is asked
            arguments = arguments.replace('\\"', '"')
        return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'
    found = _FOUND.findall(prompt[last_result:]) or _FOUND.findall(prompt)
    return f"The word is {found[-1]}." if last_result >= 0 and found else "Done."


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


def run_agent(agent: Agent, folder: Path, home: Path) -> dict[str, str]:
    """What went wrong by check; empty: nothing."""
    for path, text in agent.files.items():
        (home / path).parent.mkdir(parents=True, exist_ok=True)
        (home / path).write_text(text)
    environment = {"HOME": str(home), "PATH": "/usr/local/bin:/usr/bin:/bin", "TERM": "dumb", **agent.environment}
    asked = f"Use the tool {agent.tool} with {json.dumps(agent.arguments)} now."
    found = {}
    for check, command in (("tool", [*agent.first, asked]), ("resumed", [*agent.second, AGAIN])):
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
            found[check] = "" if is_right else f"{done.returncode}: {done.stdout[-300:]} {done.stderr[-300:]}"
        except subprocess.TimeoutExpired:
            found[check] = f"it took more than {TIMEOUT_S} s"
    return found


def main() -> int:
    modules = Path(sys.argv[1]).resolve()
    num_wrong = 0
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        rig = RouterRig(folder / "spool", text_service(TEMPLATE))
        rig.registry.add("acme", KNOWN_TO_CODEX)
        rig.dispatcher.context = CONTEXT

        def script(request: SequenceRequest) -> list[SequenceUpdate]:
            prompt = rig.text._backend.decode(request.prompt_token_ids, skip_special_tokens=False)
            return token_by_token(rig.ids(spoken(prompt)), request.sampling)

        rig.dispatcher.script = script
        with serving(rig.app) as url:
            for number, agent in enumerate(agents(modules, url, folder / "work" / "note.txt")):
                work, home = folder / "work", folder / f"home{number}"
                work.mkdir(exist_ok=True)
                (work / "note.txt").write_text(f"The word is {WORD}.\n")
                home.mkdir()
                for check, wrong in run_agent(agent, work, home).items():
                    num_wrong += bool(wrong)
                    print(json.dumps({"library": agent.name, "check": check, "wrong": wrong}), flush=True)
    return 1 if num_wrong else 0


if __name__ == "__main__":
    sys.exit(main())
