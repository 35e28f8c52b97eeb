"""The schema of settings: what is made of it, and what it accepts."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Annotated, Any

import click
import msgspec
import pytest
from click.testing import CliRunner

from motet.cluster.commands.serve_command import ServeCommand, options_of, serve, take_defaults
from motet.cluster.config import part_config
from motet.cluster.scaling import ScalingConfig
from motet.cluster.settings.setting_field import (
    Bytes,
    ConfigError,
    Count,
    Setting,
    SettingGroup,
    fields_of,
    groups_of,
    parse_byte_size,
)
from motet.cluster.settings.settings import CONSTANTS, Settings, check_update
from motet.router.config import RouterConfig
from motet.tests.rigs.made_settings_page import settings_page
from motet.tests.rigs.setting_options import OPTIONS
from motet.workers.config import EngineConfig
from motet.workers.leader.served_engine import LeaderConfig

ROOT = Path(__file__).resolve().parents[2]
BASE = ROOT / "examples" / "demo" / "base"
PARTS: tuple[Any, ...] = (EngineConfig, LeaderConfig, RouterConfig, ScalingConfig)


class Experiments(SettingGroup, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Experiments."""

    new_room_bytes: Annotated[Bytes, Setting("Room for something new.", "live")] = 3 << 20
    num_novelties: Annotated[Count, Setting("So many new things.")] = 2


class Extended(Settings, frozen=True, kw_only=True):
    experiments: Experiments = msgspec.field(default_factory=Experiments)


@dataclasses.dataclass(frozen=True, kw_only=True)
class NewPart:
    new_room_bytes: int
    num_novelties: int
    folder: str


def run(file: Path, *arguments: str) -> tuple[Any, dict[str, Any]]:
    """A command with the extended schema's options, and what it was given."""
    seen: dict[str, Any] = {}
    config = click.Option(["--config"], type=click.Path(path_type=Path), is_eager=True, callback=take_defaults)
    command = ServeCommand("serve", params=[config, *options_of(Extended)], callback=lambda **given: seen.update(given))
    return CliRunner().invoke(command, ["--config", str(file), *arguments], terminal_width=120), seen


def test_a_setting_that_is_added_in_one_place_is_everywhere(tmp_path: Path) -> None:
    file = tmp_path / "options.toml"
    file.write_text('new-room-bytes = "5MiB"\n')
    shown = run(file, "--help")[0].output  # the help
    assert "Experiments:" in shown
    assert "--new-room-bytes SIZE" in shown
    assert "Room for something new.  [default: 3MiB]" in shown
    assert "--novelties NUMBER" in shown
    given = run(file)[1]  # the file, and the default
    assert (given["new_room_bytes"], given["num_novelties"]) == (5 << 20, 2)
    assert run(file, "--new-room-bytes", "6MiB", "--novelties", "4")[1]["new_room_bytes"] == 6 << 20
    assert Extended.of(new_room_bytes="7MiB").experiments.new_room_bytes == 7 << 20

    result, given = run(file, "--novelties", "0")  # the check
    assert (result.exit_code, given) == (2, {})
    assert "Invalid value for '--novelties': '0': a whole number from 1 is accepted" in result.stderr
    with pytest.raises(ConfigError, match=r"^--new-room-bytes = 0: a size .* from 1 is accepted$"):
        Extended.of(new_room_bytes=0)

    running = Extended.of()  # the rule of updates
    check_update(running, Extended.of(new_room_bytes=1))
    with pytest.raises(ConfigError, match="--novelties = 3: only a restart changes this"):
        check_update(running, Extended.of(num_novelties=3))

    page = settings_page(Extended)  # the docs
    assert "## Experiments" in page
    assert "| `--novelties` | a whole number from 1 | 2 | So many new things. | args |" in page
    assert "| `--new-room-bytes` |" in page

    part = part_config(NewPart, Extended.of(num_novelties=9), folder="here")  # and where it acts
    assert part == NewPart(new_room_bytes=3 << 20, num_novelties=9, folder="here")


def test_the_page_of_settings_is_what_the_schema_says() -> None:
    reported = "run .venv/bin/python -m motet.tests.rigs.made_settings_page docs/settings.md"
    assert (ROOT / "docs" / "settings.md").read_text() == settings_page(Settings), reported


def test_every_setting_is_an_option_and_a_key() -> None:
    options = {option.name: option for option in serve.params}
    for field in fields_of(Settings):
        assert options[field.name].opts == [f"--{flag}" for flag in field.flags]
        assert Settings().value(field.name) == field.converted(field.default)
    flags = [flag for field in fields_of(Settings) for flag in field.flags]
    assert len(flags) == len(set(flags))


def test_every_field_is_a_group_and_no_two_settings_have_one_name() -> None:
    assert tuple(groups_of(Settings)) == Settings.__struct_fields__
    names = [name for group in groups_of(Settings).values() for name in group.__struct_fields__]
    assert [field.name for field in fields_of(Settings)] == names
    assert len(names) == len(set(names))


def test_the_name_of_a_group_is_not_taken_for_a_setting() -> None:
    with pytest.raises(TypeError, match="placement: a group of settings, not a setting"):
        Settings.of(placement="spread")
    with pytest.raises(TypeError, match="batching"):
        Settings().replaced(batching=3)


def test_values_go_to_their_groups_by_name() -> None:
    made = Settings.of(port=9000, max_num_sequences="7")
    assert (made.access.port, made.batching.max_num_sequences, made.value("port")) == (9000, 7, 9000)
    assert made.access.max_connections == Settings().access.max_connections
    assert made.replaced(port="9001") == Settings.of(port=9001, max_num_sequences=7)
    with pytest.raises(ConfigError, match="--port = 0"):
        made.replaced(port=0)
    with pytest.raises(TypeError, match="pool"):
        Settings.of(pool=1)
    with pytest.raises(TypeError, match="pool"):
        made.replaced(pool=1)


def test_defaults_are_acceptable_and_shown_as_they_are_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/nowhere")
    for field in fields_of(Settings):
        made = field.converted(field.default)
        if field.default not in (None, "", ()):
            assert field.converted(field.shown_default) == made


def test_constants_are_said_to_be_what_the_parts_configs_have() -> None:
    parts = {field.name: field.default for part in PARTS for field in fields(part) if field.default is not MISSING}
    renamed = {"finished-life": "finished_s", "orphan-life": "orphan_s"}
    for key, value in CONSTANTS.items():
        if key == "max-adapter-packed-bytes":
            continue  # it follows from a setting
        name = renamed.get(key, key.replace("-", "_"))
        default = parts.pop(name if name in parts else f"{name}_s")
        number = value.removesuffix(" s")
        assert default == (parse_byte_size(number) if number.endswith("iB") else float(number)), key
    assert parts == {}


RESTART_ONLY = {
    "ledger_days",
    "ledger_spool_bytes",
    "prices_path",
    "log_format",
    "log_level",
    "metrics_port",
    "metrics_access",
    *("name", "device", "dtype", "data_dir", "cache_path", "block_size"),  # what adapters and KV are packed for
    "slow_kernels",
    *("weights_dtype", "kv_dtype", "small_sums"),
    *("address", "host", "port", "keys", "operator_key", "redis_url", "redis_max_bytes"),
    *("oidc_issuers", "oidc_audience", "oidc_algorithms", "oidc_tenant_claim", "oidc_user_claim", "oidc_scopes_claim"),
    *("max_connections", "max_connections_per_source", "max_requests_per_key", "max_keyless_per_second"),
    "trusted_proxies",
    *("num_routers", "tensor_parallel", "expert_sharding", "strategy"),
    *("gang_num_cpus", "gang_num_gpus", "gang_resources", "gang_labels", "router_resources"),
}


def test_what_only_a_restart_changes_is_known_by_name() -> None:
    """A setting that an update would pretend to change is added here, or acts in `test_application.py`."""
    assert {field.name for field in fields_of(Settings) if field.mark.change == "restart"} == RESTART_ONLY


@pytest.mark.parametrize(
    ("name", "value", "accepted"),
    [
        ("port", "8000x", "a whole number from 1 to 65535"),
        ("port", True, "a whole number from 1 to 65535"),
        ("max_num_sequences", 1.5, "a whole number from 1"),
        ("max_waiting_sequences", None, "a whole number from 1"),
        ("max_queue_wait_s", float("inf"), "a number of seconds from 0"),
        ("max_queue_wait_s", "nan", "a number of seconds from 0"),
        ("scaling_window_s", 0, "a number of seconds above 0"),
        ("host_bytes", "2GB", "a size (bytes, or a number with KiB, MiB, GiB or TiB) from 0"),
        ("prefix_cache", "perhaps", "true or false"),
        ("strategy", "anywhere", "strict-pack, pack or spread"),
        ("num_threads", "many", "auto or a whole number from 1 to 1024"),
        ("data_dir", "", "a folder"),
        ("data_dir", "~nosuchuser/x", "a folder"),
        ("max_num_sequences", "1.5", "a whole number from 1"),
        ("max_num_sequences", "9" * 5000, "a whole number from 1"),
        ("name", 5, "text"),
    ],
)
def test_a_bad_value_is_named_with_what_is_accepted(name: str, value: Any, accepted: str) -> None:
    with pytest.raises(ConfigError) as refused:
        Settings.of(**{name: value})
    assert str(refused.value) == f"{OPTIONS[name]} = {value!r}: {accepted} is accepted"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("oidc_issuers", "http://id.example"),
        ("oidc_issuers", "https://id.example,"),
        ("oidc_issuers", "https://id.example?realm=x"),
        ("oidc_algorithms", "RS256,none"),
        ("oidc_algorithms", "HS256"),
        ("oidc_algorithms", ""),
        ("oidc_tenant_claim", ""),
    ],
)
def test_tokens_that_anyone_could_make_cannot_be_requested(name: str, value: Any) -> None:
    with pytest.raises(ConfigError):
        Settings.of(**{name: value})


@pytest.mark.parametrize("origins", ["", "*", "https://a.example", "https://a.example,http://localhost:3000"])
def test_origins_are_written_as_browsers_send_them(origins: str) -> None:
    assert Settings.of(cors_origins=origins).access.cors_origins == origins


@pytest.mark.parametrize(
    "origins",
    [
        "*,https://a.example",
        "a.example",
        "https://a.example/",
        "https://A.example",
        "https://a@b.example",
        "ftp://a",
        ",",
    ],
)
def test_what_is_no_origin_is_refused(origins: str) -> None:
    with pytest.raises(ConfigError, match="origins"):
        Settings.of(cors_origins=origins)


@pytest.mark.parametrize(
    ("name", "text", "number"),
    [
        ("max_queue_wait_s", ".5", 0.5),
        ("max_queue_wait_s", "5.", 5.0),
        ("max_queue_wait_s", "+5", 5.0),
        ("port", " 5 ", 5),
        ("port", "+5", 5),
        ("port", "1e3", 1000),
        ("port", "3.0", 3),
        ("num_threads", " 2", 2),
        ("latency_objectives_s", ("acme=.5", "zoo= 5."), (("acme", 0.5), ("zoo", 5.0))),
    ],
)
def test_numbers_are_read_as_python_reads_them(name: str, text: Any, number: object) -> None:
    made = Settings.of(**{name: text}).value(name)
    assert (made, type(made)) == (number, type(number))


def test_of_several_pairs_the_bad_one_is_shown() -> None:
    with pytest.raises(ConfigError, match=r"^--latency-objective = 'zoo=x': TENANT=SECONDS"):
        Settings.of(latency_objectives_s=("acme=1", "zoo=x"))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("keys", ("acme my-secret",)),
        ("keys", "my-secret"),
        ("keys", (("acme", "my-secret "),)),
        ("redis_url", 5),
        ("redis_url", "default:my-secret@h:6379"),
        ("redis_url", "http://u:my-secret@h"),
        ("redis_url", "http://u:my-se@my-secret/x@h"),
        ("redis_url", "http://u:my-/my-secret@h"),
        ("redis_url", "http://u:p?my-secret@h"),
        ("redis_url", "x://h?password=my-secret"),
        ("redis_url", "x://h?password=a@my-secret"),
    ],
)
def test_a_secret_is_not_repeated(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"^{OPTIONS[name]} = ") as refused:
        Settings.of(**{name: value})
    assert "my-secret" not in str(refused.value)


def test_plain_values_become_settings() -> None:
    """As JSON and TOML have them: sizes and pairs as text, or as what they stand for."""
    values: dict[str, Any] = {
        "pool_bytes": "2GiB",
        "host_bytes": 0,
        "latency_objectives_s": ["acme=2", ["zoo", 0.5]],
        "keys": {"acme": "secret"},
        "num_threads": "auto",
        "gang_num_cpus": 2,
    }
    made = Settings.of(**values)
    assert (made.memory.pool_bytes, made.memory.host_bytes) == (2 << 30, 0)
    assert made.batching.latency_objectives_s == (("acme", 2.0), ("zoo", 0.5))
    assert made.access.keys == (("acme", "secret"),)
    assert type(made.placement.gang_num_cpus) is float
    assert Settings.of(**msgspec.to_builtins({name: made.value(name) for name in values})) == made


def test_commas_between_elements_may_be_a_list() -> None:
    """As people write it in YAML and TOML. Of every setting that has commas between its elements."""
    listed = {field.name: field for field in fields_of(Settings) if "with commas between them" in field.accepted}
    assert len(listed) == 6
    for field in listed.values():
        with pytest.raises(ConfigError):
            field.converted([1])
    issuers = ["https://a.example.com", "https://b.example.com"]
    assert listed["oidc_issuers"].converted(issuers) == ",".join(issuers)
    assert listed["trusted_proxies"].converted(["10.0.0.0/8"]) == listed["trusted_proxies"].converted("10.0.0.0/8")
    assert listed["oidc_issuers"].converted([]) == ""
    with pytest.raises(ConfigError, match="http://a"):
        listed["oidc_issuers"].converted(["https://b.example.com", "http://a"])


def test_settings_are_read_without_torch() -> None:
    lines = (
        "import sys",
        "import motet.cluster.commands.serve_command",
        "from motet.cluster.config import MotetConfig",
        f"config = MotetConfig.of(model_path=__import__('pathlib').Path({str(BASE)!r}), device='cpu')",
        "config.engine, config.router, config.leader, config.admission, config.gang_bundles",
        "assert 'torch' not in sys.modules and 'ray' not in sys.modules",
    )
    subprocess.run([sys.executable, "-c", "\n".join(lines)], check=True)
