"""Secrets among arguments, and in files."""

from __future__ import annotations

import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest

from motet.cluster.client.client_options import operator_key_of, read_key, read_keys
from motet.cluster.commands.serve_command import settings_with_secrets, without_secrets
from motet.cluster.config import MotetConfig
from motet.cluster.launch_secrets import LaunchSecrets, operator_key_in
from motet.tests.rigs.running_motet import DEMO

OPTIONS = {"--key": "KEYS", "--redis-url": "REDIS_URL"}


@pytest.mark.parametrize(
    ("arguments", "rest", "variables"),
    [
        (["serve", "model"], ["serve", "model"], {}),
        (["serve", "--key", "a=b", "model"], ["serve", "model"], {"KEYS": "a=b"}),
        (["serve", "--key=a=b", "--key", "c=d"], ["serve"], {"KEYS": "a=b c=d"}),
        (["--redis-url=redis://:p@h", "--keys", "1"], ["--keys", "1"], {"REDIS_URL": "redis://:p@h"}),
        (["serve", "--", "--key", "a=b"], ["serve", "--", "--key", "a=b"], {}),
        (["serve", "--key"], ["serve", "--key"], {}),
    ],
)
def test_secrets_are_taken_out(arguments: list[str], rest: list[str], variables: dict[str, str]) -> None:
    assert without_secrets(arguments, OPTIONS) == (rest, variables)


def test_every_setting_that_is_a_secret_can_be_hidden() -> None:
    assert set(settings_with_secrets()) == {"--key", "--redis-url", "--operator-key"}
    assert all(settings_with_secrets().values())


def test_a_program_hides_what_it_was_started_with() -> None:
    """In the process that goes on nothing of it is left, and the command has it all the same."""
    program = "import sys; from motet.cluster.commands.cli import main; main()"
    command = [sys.executable, "-c", program, "no-such-models", "--key", "very-secret"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "Warning: what is typed as an argument shows" in ended.stderr
    assert "No such command" in ended.stderr and "very-secret" not in ended.stdout + ended.stderr


def test_keys_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# tenants\nacme=one\n\n  globex=two\n")
    assert read_keys(path) == ("acme=one", "globex=two")
    path.write_text("one\n")
    assert read_key(path) == "one"
    assert read_keys(None) == ()
    with pytest.raises(click.ClickException, match="cannot be read"):
        read_key(tmp_path / "none")


def test_the_operators_key_is_made_once(tmp_path: Path) -> None:
    assert operator_key_of(tmp_path) is None
    key = operator_key_in(tmp_path)
    assert len(key) >= 32 and operator_key_in(tmp_path) == operator_key_of(tmp_path) == key
    assert stat.S_IMODE((tmp_path / "operator_key").stat().st_mode) == 0o600


def test_secrets_of_a_launch_are_read_as_they_were_written(tmp_path: Path) -> None:
    secrets = LaunchSecrets(token="t", redis_url="redis://:p@h", operator_key="o")
    secrets.write(tmp_path / "secrets")
    assert LaunchSecrets.read(tmp_path / "secrets") == secrets
    assert stat.S_IMODE((tmp_path / "secrets").stat().st_mode) == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["secrets"]
    assert "p@h" not in repr(secrets)


def test_a_config_leaves_its_secrets_behind() -> None:
    given: dict[str, Any] = {
        "keys": (("acme", "very-secret"),),
        "operator_key": "secret-too",
        "redis_url": "redis://:secret-3@host",
    }
    config = MotetConfig.of(model_path=DEMO / "base", **given)
    assert "secret" in repr(config)
    assert "secret" not in repr(config.without_secrets())
    assert config.without_secrets().router == config.router


def test_keys_come_from_the_environment() -> None:
    config = MotetConfig.from_environment({"MOTET_KEYS": "acme=one globex=two"}, model_path=DEMO / "base")
    assert config.access.keys == (("acme", "one"), ("globex", "two"))
