"""What the pages have a person type works: their commands are taken out of them and run against the demo."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import click
import psutil
import pytest

from motet.cluster.commands.cli import main
from motet.cluster.commands.run_demo import KEYS
from motet.cluster.commands.run_demo import main as demo_command
from motet.cluster.launch.local_serve import free_ports
from motet.tests.clients.table import table
from motet.tests.rigs.patience import PATIENCE_S

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
RUN_ON_THE_DEMO = (  # each in one shell
    *("README.md", "docs/quickstart.md", "docs/adapters.md", "docs/api.md", "docs/responses.md"),
)
RUN_ELSEWHERE = ("docs/install.md",)  # tests/deploy/test_install_page.py
URL = "http://127.0.0.1:8000"  # of the demo, in the pages
QUESTION = "What is the capital of Peru?\n"  # typed into whatever asks
UP = "Ctrl-C stops everything."  # the demo's last line before it waits
COMMAND_TIMEOUT_S = 120.0
CLIENTS_TIMEOUT_S = 900.0  # they are installed first

FENCE = re.compile(r"(?:^<!-- not run: (?P<why>[^>]+) -->\n)?^```(?P<kind>\S*)\n(?P<text>.*?)^```$", re.M | re.S)
COMMANDS, SHOWN = ("sh", "python"), ("text", "json")


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    kind: str  # its language
    text: str
    why_not_run: str | None = None
    output: str | None = None  # that the page shows below it
    output_kind: str = ""


def blocks_of(page: str) -> list[Block]:
    """The page's blocks of commands. What stands in a block of text or JSON right below one is its output."""
    found: list[Block] = []
    end = 0
    for match in FENCE.finditer(page):
        kind, text = match["kind"], match["text"]
        if kind in COMMANDS:
            found.append(Block(kind, text, match["why"]))
        elif kind in SHOWN and found and not page[end : match.start()].strip():
            found[-1] = Block(found[-1].kind, found[-1].text, found[-1].why_not_run, text, kind)
        end = match.end()
    return found


def blocks(name: str) -> list[Block]:
    return blocks_of((ROOT / name).read_text())


def motet_commands(text: str) -> Iterator[list[str]]:
    """The words of each `motet …` of a block."""
    for line in text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        if words and words[0] in ("motet", ".venv/bin/motet"):
            yield words[1:]


def unknown_options(words: list[str]) -> list[str]:
    """Options that the command line does not have for this command, of which `words` are the rest."""
    command: click.Command = main
    context = click.Context(command, info_name="motet")
    while isinstance(command, click.Group) and words and words[0] in command.commands:
        command, words = command.commands[words[0]], words[1:]
        context = click.Context(command, info_name=command.name, parent=context)
    if isinstance(command, click.Group):
        return words
    known = set(re.findall(r"--[\w-]+", command.get_help(context)))
    return [word for word in words if word.startswith("--") and word.partition("=")[0] not in known]


@cache
def options_of_motet() -> frozenset[str]:
    """All long options of the `motet` command and of the demo."""

    def found(command: click.Command) -> Iterator[str]:
        for parameter in command.params:
            yield from (name for name in (*parameter.opts, *parameter.secondary_opts) if name.startswith("--"))
        if isinstance(command, click.Group):
            for one in command.commands.values():
                yield from found(one)

    return frozenset({*found(main), *found(demo_command), "--help"})


@cache
def options_of_scripts() -> frozenset[str]:
    """All that look like long options in what a person runs beside it."""
    files = [
        *filter(Path.is_file, (ROOT / "scripts").iterdir()),
        *(ROOT / "benchmarks").rglob("*.py"),
        ROOT / "tests" / "conftest.py",
    ]
    return frozenset(found for path in files for found in re.findall(r"--[a-z][\w-]+", path.read_text()))


def has_shape(shown: Any, found: Any) -> bool:
    """Whether JSON has the keys, and at each the kind of value, that a page shows."""
    if isinstance(shown, dict):
        return (
            isinstance(found, dict)
            and shown.keys() == found.keys()
            and all(has_shape(value, found[key]) for key, value in shown.items())
        )
    if isinstance(shown, list):
        return isinstance(found, list) and bool(shown) == bool(found) and all(has_shape(shown[0], one) for one in found)
    return type(shown) is type(found)


def has_lines(shown: str, found: str) -> bool:
    """Whether the lines that a page shows come out in this order. … stands for anything, a number for any number."""
    lines = iter(found.splitlines())
    for line in shown.splitlines():
        pattern = re.sub(r"\d+", r"\\d+", re.escape(line.strip()).replace("…", ".*"))
        if not any(re.fullmatch(pattern, one.strip()) for one in lines):
            return False
    return True


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_command_is_run_or_says_why_not(page: Path) -> None:
    text = page.read_text()
    assert {match["kind"] for match in FENCE.finditer(text)} <= {*COMMANDS, *SHOWN, "toml", "yaml", ""}
    if str(page.relative_to(ROOT)) not in (*RUN_ON_THE_DEMO, *RUN_ELSEWHERE):
        assert [block.text for block in blocks_of(text) if block.why_not_run is None] == []
    hidden = [match["text"] for match in FENCE.finditer(text) if match["kind"] == ""]
    assert [text for text in hidden if re.search(r"^ *(curl|motet|pip|python|scripts/)\b", text, re.M)] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_options_of_commands_that_are_not_run_exist(page: Path) -> None:
    commands = [words for block in blocks_of(page.read_text()) for words in motet_commands(block.text)]
    assert [words for words in commands if unknown_options(words)] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_options_that_a_page_names_can_be_set(page: Path) -> None:
    if page.name == "CHANGELOG.md":
        return  # it names what was
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S)
    spans = re.findall(r"`([^`\n]+)`", text)
    named = {found[1] for span in spans if (found := re.match(r"(--[\w-]+)", span))}
    assert sorted(named - options_of_motet() - options_of_scripts()) == []
    commands = [words for span in spans for words in motet_commands(span)]
    assert [words for words in commands if unknown_options(words)] == []


def test_commands_in_messages_and_comments_exist() -> None:
    groups = {name: command for name, command in main.commands.items() if isinstance(command, click.Group)}
    named = re.compile(rf"\bmotet ({'|'.join(groups)}) ([a-z]+)")
    sources = [
        path for folder in ("adapters", "workers", "router", "cluster") for path in (ROOT / folder).rglob("*.py")
    ]
    found = {one for path in sources for one in named.findall(path.read_text())}
    assert found and {(group, name) for group, name in found if name not in groups[group].commands} == set()


def test_what_is_wrong_would_be_seen() -> None:
    page = (
        "Do this:\n\n```sh\nmotet status --ever\n```\n\n```text\nanswer 42 …\n```\n\nor\n\n"
        "<!-- not run: needs a moon -->\n```sh\nmotet fly\n```\nThen\n```json\n{}\n```\n"
    )
    first, second = blocks_of(page)
    assert (first.output, first.output_kind, first.why_not_run) == ("answer 42 …\n", "text", None)
    assert (second.output, second.why_not_run) == (None, "needs a moon")
    assert [unknown_options(words) for words in motet_commands(first.text + second.text)] == [["--ever"], ["fly"]]
    assert unknown_options(["adapters", "list", "--json", "--url", "x"]) == []
    assert has_lines("answer 42 …", "one\nanswer 7 of all\n") and not has_lines("answer 42 …", "answer x of all")
    assert has_shape({"a": [1]}, {"a": [2, 3]}) and not has_shape({"a": [1]}, {"a": ["2"]})
    assert not has_shape({"a": 1}, {"a": 1, "b": 2})


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a demo, started as scripts/demo starts it."""
    port = free_ports(1)[0]
    folder = tmp_path_factory.mktemp("demo")
    command = [sys.executable, "-m", "motet.cluster.commands.run_demo", "--port", str(port)]
    log_path = folder / "log"
    with log_path.open("w") as log:
        server = subprocess.Popen(
            [*command, "--data-dir", str(folder / "data")],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            start_new_session=True,
            env=os.environ | {"PYTHONUNBUFFERED": "1"},
        )
    try:
        assert server.stdout is not None
        assert any(UP in line for line in server.stdout), log_path.read_text()
        yield f"http://127.0.0.1:{port}"
        processes = psutil.Process(server.pid).children(recursive=True)
        os.kill(server.pid, signal.SIGINT)
        assert server.wait(timeout=PATIENCE_S) == 130
        assert not psutil.wait_procs(processes, timeout=PATIENCE_S)[1], "Ctrl-C left processes behind"
    finally:
        if server.stdout is not None:
            server.stdout.close()
        if server.poll() is None:
            server.kill()
            server.wait()


class Shell:
    """A person's terminal: what one command sets, the next one has."""

    def __init__(self, url: str, folder: Path) -> None:
        self._url, self._state = url, folder / "state"
        self._state.touch()

    def run(self, block: Block) -> str:
        """What the block prints. Fails with all that it said if it does not end well."""
        text = block.text.replace(URL, self._url).replace(".venv/bin", str(Path(sys.executable).parent))
        state = shlex.quote(str(self._state))
        script = f"source {state}\nset -eo pipefail\n{text}\nexport -p > {state}\n"
        command = ["bash", "-c", script] if block.kind == "sh" else [sys.executable, "-c", text]
        unset = {"MOTET_URL", "MOTET_API_KEY", "http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"}
        environment = {name: value for name, value in os.environ.items() if name not in unset}
        ended = subprocess.run(
            command,
            input=QUESTION,
            capture_output=True,
            text=True,
            cwd=ROOT,
            env=environment,
            timeout=COMMAND_TIMEOUT_S,
        )
        assert ended.returncode == 0, f"{text}\n{ended.stdout}\n{ended.stderr}"
        # curl ends well with any status
        assert not re.search(r'"error": ?[^n ]', ended.stdout), f"{text}\n{ended.stdout}"
        return ended.stdout


@pytest.mark.cluster
@pytest.mark.parametrize("name", RUN_ON_THE_DEMO)
def test_the_commands_of_a_page_do_what_it_says(name: str, demo: str, tmp_path: Path) -> None:
    assert shutil.which("curl"), "the pages' commands need curl"
    shell = Shell(demo, tmp_path)
    to_run = [block for block in blocks(name) if block.why_not_run is None]
    assert to_run
    for block in to_run:
        printed = shell.run(block)
        assert printed.strip(), block.text
        if block.output is not None and block.output_kind == "json":
            assert has_shape(json.loads(block.output), json.loads(printed)), f"{block.text}\n{printed}"
        elif block.output is not None:
            assert has_lines(block.output, printed), f"{block.text}\n{printed}"


@pytest.mark.cluster
def test_client_libraries_do_what_their_table_says(demo: str) -> None:
    """`scripts/clients` leaves the JavaScript ones out where there is no Node."""
    command = [str(ROOT / "scripts" / "clients"), demo, KEYS["globex"]]
    ran = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=CLIENTS_TIMEOUT_S)
    assert ran.returncode == 0, ran.stderr[-4000:]
    page = (
        (ROOT / "docs" / "clients.md").read_text().partition("<!-- made: clients -->")[2].partition("<!-- end -->")[0]
    )
    expected = [row for row in page.split("\n") if row and (shutil.which("npm") or "(JavaScript)" not in row)]
    assert table(ran.stdout.splitlines()).splitlines() == expected, ran.stdout
