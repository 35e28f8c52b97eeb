"""Secrets as files of a folder and as variables."""

from __future__ import annotations

from pathlib import Path

import pytest

from motet.cluster.application.secret_files import SECRETS_VARIABLE, secrets_of_this_node
from motet.cluster.settings.setting_field import ConfigError

URL = "redis://:s3cret@host:6379"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """As Kubernetes mounts a Secret: names that are links into a folder that begins with dots."""
    versions = tmp_path / "..2026_11_22"
    versions.mkdir()
    (tmp_path / "..data").symlink_to(versions.name)
    for name, text in {"redis-url": f"{URL}\n", "keys": "# all\nacme=one\n\nzoo=two\n"}.items():
        (versions / name).write_text(text)
        (tmp_path / name).symlink_to(f"..data/{name}")
    return tmp_path


def test_a_mounted_secret_is_read(folder: Path) -> None:
    secrets = secrets_of_this_node({SECRETS_VARIABLE: str(folder)})
    assert secrets.redis_url == URL
    assert secrets.keys == (("acme", "one"), ("zoo", "two"))
    assert (secrets.operator_key, secrets.token) == (None, None)
    assert "s3cret" not in repr(secrets)
    (folder / "operator-key").write_text("op\n")
    (folder / "cluster-token").write_text("token\n")
    secrets = secrets_of_this_node({SECRETS_VARIABLE: str(folder)})
    assert (secrets.operator_key, secrets.token) == ("op", "token")


def test_variables_do_as_well() -> None:
    environ = {"REDIS_URL": URL, "MOTET_KEYS": "acme=one zoo=two", "MOTET_OPERATOR_KEY": "op"}
    secrets = secrets_of_this_node(environ)
    assert (secrets.redis_url, secrets.operator_key) == (URL, "op")
    assert secrets.keys == (("acme", "one"), ("zoo", "two"))
    assert secrets_of_this_node({"REDIS_URL": URL}).keys is None


def test_a_file_and_a_variable_that_differ_are_an_error(folder: Path) -> None:
    same = {SECRETS_VARIABLE: str(folder), "REDIS_URL": URL, "MOTET_KEYS": "acme=one zoo=two"}
    assert secrets_of_this_node(same).redis_url == URL
    with pytest.raises(ConfigError, match=r"redis-url = '…': REDIS_URL is set differently") as error:
        secrets_of_this_node(same | {"REDIS_URL": "redis://:other@host"})
    assert "s3cret" not in str(error.value) and "other" not in str(error.value)


def test_what_is_wrong_is_named_and_not_repeated(folder: Path) -> None:
    environ = {SECRETS_VARIABLE: str(folder)}
    for name, text, problem in (
        ("redis_url", URL, "there is no such secret: redis-url, operator-key, keys, cluster-token are known"),
        ("keys", "s3cret", r"TENANT=KEY .* is accepted"),
        ("keys", "acme=s3cret\nzoo=s3cret", "each needs its own"),
        ("redis-url", "http://s3cret@host", "redis://"),
        ("redis-url", "redis://:s3cret/s3cret@host", "percent-encode the password"),
        ("cluster-token", "", "printable ASCII"),
        ("operator-key", "s3cret s3cret", "printable ASCII"),
    ):
        path = folder / name
        before = path.read_text() if path.exists() else None
        path.write_text(text)
        with pytest.raises(ConfigError, match=problem) as error:
            secrets_of_this_node(environ)
        assert "s3cret" not in str(error.value)
        path.unlink() if before is None else path.write_text(before)
    with pytest.raises(ConfigError, match="an application needs a Redis"):
        secrets_of_this_node({})
    with pytest.raises(ConfigError, match="a readable folder"):
        secrets_of_this_node({SECRETS_VARIABLE: str(folder / "none")})
