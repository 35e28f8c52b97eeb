"""Options from a file, and what of them may change while motet runs."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import click
import msgspec
import pytest
from click.testing import CliRunner

from motet.cluster.commands import foreground
from motet.cluster.commands.serve_command import RereadableCommand, options_of, reread_options, serve, take_defaults
from motet.cluster.config import MotetConfig
from motet.cluster.launch.launch import updated
from motet.cluster.launch.local_serve import free_ports
from motet.cluster.settings.setting_field import ConfigError, Count, Pairs, Setting, SettingGroup
from motet.tests.rigs.running_motet import DEMO
from motet.tests.rigs.setting_options import OPTIONS


class Few(SettingGroup, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A few."""

    count: Annotated[Count, Setting("How many.", flags=("count", "number"))] = 1
    keys: Annotated[tuple[tuple[str, str], ...], Pairs("A=B"), Setting("Which.", flags=("key",))] = ()
    flag: Annotated[bool, Setting("Whether.")] = False


class Options(msgspec.Struct):
    few: Few


def run(file: Path, *arguments: str, then: str | None = None) -> tuple[Any, list[dict[str, Any]]]:
    """The options at first, and the options after the file was changed to `then`."""
    seen: list[dict[str, Any]] = []

    @click.command(cls=RereadableCommand)
    @click.option("--replace", is_flag=True)
    @click.pass_context
    def command(context: click.Context, /, **given: Any) -> None:
        seen.append(given)
        if then is not None:
            file.write_text(then)
            try:
                seen.append(reread_options(context))
            except click.ClickException as error:
                click.echo(error.format_message())

    command.params += [config_option(), *options_of(Options)]
    return CliRunner().invoke(command, ["--config", str(file), *arguments]), seen


def test_the_file_is_before_the_defaults_and_after_the_command_line(tmp_path: Path) -> None:
    file = tmp_path / "options.toml"
    file.write_text('number = 5\nkey = ["a=1", "b=2"]\nflag = true\n')
    (options,) = run(file)[1]
    assert (options["count"], options["keys"], options["flag"]) == (5, (("a", "1"), ("b", "2")), True)
    (options,) = run(file, "--count", "7", "--key", "c=3")[1]
    assert (options["count"], options["keys"], options["flag"]) == (7, (("c", "3"),), True)


def test_what_has_become_a_constant_is_taken_with_a_warning(tmp_path: Path) -> None:
    file = tmp_path / "options.toml"
    file.write_text("count = 5\ndrain = 9\n")
    result, (options,) = run(file, "--upload-idle", "3")
    assert (options["count"], options.keys() & {"drain", "upload_idle"}) == (5, set())
    for warning in ("drain is a constant since 0.1.0: 5 s;", "upload-idle is a constant since 0.1.0: 60 s;"):
        assert f"Warning: setting {warning} remove it\n" in result.stderr
    assert "upload-idle" not in CliRunner().invoke(serve, ["--help"]).output


def test_it_is_read_again(tmp_path: Path) -> None:
    file = tmp_path / "options.toml"
    file.write_text("number = 5\nflag = true\n")
    _, (_, again) = run(file, "--key", "c=3", then="count = 6\n")
    assert (again["count"], again["keys"], again["flag"]) == (6, (("c", "3"),), False)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("size = 5\n", "options.toml: there is no setting size. docs/settings.md lists all.\n"),
        ("numbr = 5\n", "there is no setting numbr. Did you mean number? docs/settings.md lists all.\n"),
        ("config = 'other'\n", "config is an option of one start, not a setting: give --config on the command line"),
        ("replace = true\n", "replace is an option of one start, not a setting"),
        ("no-flag = true\n", "there is no setting no-flag: write flag = false"),
        ("[serve]\ncount = 5\n", "[serve] is a table: write settings as keys at the top of the file"),
        ("count = 5\nnumber = 5\n", "count and number are the same setting: write one of them"),
        ("count =\n", "cannot be read"),
        ("count = 'many'\n", "'many': a whole number from 1 is accepted"),
    ],
)
def test_what_is_wrong_is_reported_at_first_and_after_a_change(tmp_path: Path, text: str, problem: str) -> None:
    file = tmp_path / "options.toml"
    file.write_text(text)
    result, seen = run(file)
    assert result.exit_code == 2
    assert problem in result.stderr
    assert seen == []
    file.write_text("")
    result, seen = run(file, then=text)
    assert problem in result.stdout
    assert len(seen) == 1


def test_objectives_are_a_list_of_tenants_and_seconds(tmp_path: Path) -> None:
    option = next(one for one in serve.params if "--latency-objective" in one.opts)
    command = RereadableCommand("serve", params=[config_option(), option], callback=lambda **_: None)
    file = tmp_path / "options.toml"

    def read(*arguments: str) -> Any:
        context = command.make_context("serve", ["--config", str(file), *arguments])
        return context.params["latency_objectives_s"]

    file.write_text('latency-objective = ["acme=2.5", "zoo=10"]\n')
    assert read() == (("acme", 2.5), ("zoo", 10.0))
    assert read("--latency-objective", "acme=1") == (("acme", 1.0),)
    for same in ('"acme=2.5"', "{acme = 2.5}", '{acme = "2.5"}', '[["acme", 2.5]]'):
        file.write_text(f"latency-objective = {same}\n")
        assert read() == (("acme", 2.5),)
    for bad in ('"acme"', '"=2"', '"acme=2s"', '"acme="', "3"):
        file.write_text(f'latency-objective = ["zoo=.5", {bad}]\n')
        shown = re.escape(repr(bad.strip('"') if '"' in bad else 3))
        accepted = rf"^{shown}: TENANT=SECONDS \(for example acme=2\.5\) is accepted$"
        with pytest.raises(click.BadParameter, match=accepted):
            read()


@pytest.mark.parametrize(
    ("line", "arguments", "is_on"),
    [
        ("", (), True),
        ("prefix-cache = false", (), False),
        ("prefix-cache = 0", (), False),
        ("prefix-cache = false", ("--prefix-cache",), True),
        ("prefix-cache = true", ("--no-prefix-cache",), False),
    ],
)
def test_a_switch_of_the_file(tmp_path: Path, line: str, arguments: tuple[str, ...], is_on: bool) -> None:
    option = next(one for one in serve.params if one.name == "prefix_cache")
    command = RereadableCommand("serve", params=[config_option(), option], callback=lambda **_: None)
    file = tmp_path / "options.toml"
    file.write_text(f"{line}\n")
    assert command.make_context("serve", ["--config", str(file), *arguments]).params["prefix_cache"] is is_on


class StandInDeployment:
    """Hangs up once for each line that it writes into the file."""

    url = "http://127.0.0.1:1"

    def __init__(self, file: Path, lines: tuple[str, ...]) -> None:
        self.updates: list[MotetConfig] = []
        self._file, self._lines, self._first = file, lines, file.read_text()

    def update(self, wanted: MotetConfig) -> None:
        self.updates.append(wanted)

    def wait(self, on_hangup: Callable[[], None]) -> None:
        for line in self._lines:
            self._file.write_text(f"{self._first}{line}\n")
            on_hangup()


BAD_LINES = (
    'prefix-cache = "perhaps"',
    "prefix-cache = [true]",
    "prefix-cache = 2",
    "latency-objective = 5",
    'cache-path = "~nosuchuser/x"',
    "threads = [1]",
    "max-queue-wait = 1979-05-27",
    "key = 5",
    "pool-bytes =",
)


def test_a_bad_value_ends_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "motet.toml"
    file.write_text(f"port = {free_ports(1)[0]}\ndevice = 'cpu'\n")
    deployment = StandInDeployment(file, (*BAD_LINES, "prefix-cache = 0"))
    monkeypatch.setattr(foreground, "deployed", lambda *_, **__: nullcontext(deployment))
    result = CliRunner().invoke(serve, [str(DEMO / "base"), "--config", str(file), "--data-dir", str(tmp_path)])
    assert (result.exit_code, result.exception) == (0, None)
    said = result.stdout.splitlines()[-len(BAD_LINES) - 1 :]
    assert [one.startswith("not updated: ") for one in said] == [*[True] * len(BAD_LINES), False], said
    assert [one.memory.prefix_cache for one in deployment.updates] == [False]


def config_option() -> click.Option:
    return click.Option(["--config"], type=click.Path(path_type=Path), is_eager=True, callback=take_defaults)


@pytest.fixture
def running(tmp_path: Path) -> MotetConfig:
    return MotetConfig.of(model_path=DEMO / "base", data_dir=tmp_path, redis_url="unix:///embedded")


def test_a_default_that_is_written_down_is_no_change(running: MotetConfig) -> None:
    wanted = MotetConfig.of(model_path=DEMO / "base", data_dir=running.serving.data_dir, host="127.0.0.1")
    assert updated(running, wanted, max_gangs=1).listen_host == running.listen_host == "127.0.0.1"


def test_what_may_change_changes_and_the_embedded_redis_stays(running: MotetConfig) -> None:
    objectives_s = (("acme", 2.0),)
    wanted = running.replaced(pool_bytes=1 << 20, max_gangs=3, latency_objectives_s=objectives_s, redis_url=None)
    assert updated(running, wanted, max_gangs=3) == wanted.replaced(redis_url="unix:///embedded", gangs_beside=1)


@pytest.mark.parametrize(
    "change",
    [
        {"port": 8001},
        {"dtype": "float32"},
        {"name": "other"},
        {"tensor_parallel": 2},
        {"keys": (("acme", "secret-key"),)},
        {"redis_url": "redis://:secret-word@elsewhere"},
        {"data_dir": Path("/elsewhere")},
    ],
)
def test_what_only_a_restart_changes_is_refused_by_its_name(running: MotetConfig, change: dict[str, Any]) -> None:
    (key,) = change
    with pytest.raises(ConfigError, match=rf"^{OPTIONS[key]} = .*only a restart changes this") as refused:
        updated(running, running.replaced(**change), max_gangs=1)
    assert "secret" not in str(refused.value)


def test_another_number_of_gangs_replaces_none(running: MotetConfig) -> None:
    running = running.replaced(max_gangs=4)
    fewer = updated(running, running.replaced(max_gangs=2), max_gangs=4)
    assert (fewer.scaling_policy.max_gangs, fewer.gangs_beside) == (2, 4)
    assert fewer.engine == running.engine
    assert updated(fewer, running.replaced(max_gangs=3, gangs_beside=None), max_gangs=4).engine == running.engine


def test_there_is_no_room_for_more_gangs_than_at_the_start(running: MotetConfig) -> None:
    with pytest.raises(ConfigError, match="--max-gangs = 3: at most 2 is accepted until a restart"):
        updated(running, running.replaced(max_gangs=3), max_gangs=2)
