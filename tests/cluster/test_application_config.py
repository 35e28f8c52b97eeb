"""What an application takes as its arguments, and as settings of replicas that run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from motet.cluster.application.application_config import application_config, live_values, user_config_of, written_value
from motet.cluster.serve_application import build
from motet.cluster.settings.setting_field import ConfigError, Part, fields_of
from motet.cluster.settings.settings import SERVES_OPTIONS, Settings, way_to_change

MODEL = {"model": "/models/base"}
SECRETS = {"key": "acme=s3cret", "operator-key": "s3cret", "redis-url": "redis://:s3cret@host"}


def refused(**given: Any) -> str:
    with pytest.raises(ValueError) as error:
        application_config(MODEL | {key.replace("_", "-"): value for key, value in given.items()}, {})
    return str(error.value)


def test_arguments_have_the_keys_and_the_values_of_the_configuration_file() -> None:
    args = {
        **MODEL,
        "pool-bytes": "2GiB",
        "max-num-sequences": 64,
        "prefix-cache": False,
        "latency-objective": ["acme=2.5", "zoo=1"],
        "resource": "nvidia.com/mig-1g.10gb=1",
        "data-dir": "/shared",
    }
    config = application_config(json.loads(json.dumps(args)), {})
    assert (config.memory.pool_bytes, config.batching.max_num_sequences, config.memory.prefix_cache) == (
        2 << 30,
        64,
        False,
    )
    assert config.batching.latency_objectives_s == (("acme", 2.5), ("zoo", 1.0))
    assert config.placement.gang_resources == (("nvidia.com/mig-1g.10gb", 1.0),)
    assert (config.model_path, config.serving.name, config.hub_id) == (Path("/models/base"), "base", None)


def test_what_has_become_a_constant_is_taken_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    assert application_config(MODEL | {"drain": 9}, {}) == application_config(MODEL, {})
    assert live_values("router", {"upload-idle": 3}) == {}
    assert [record.getMessage() for record in caplog.records] == [
        "args: setting drain is a constant since 0.1.0: 5 s; remove it",
        "user_config of router: setting upload-idle is a constant since 0.1.0: 60 s; remove it",
    ]


def test_a_hub_id_is_where_every_node_downloads_it_to() -> None:
    config = application_config({"model": "someone/model"}, {"MOTET_DATA_DIR": "/shared"})
    assert (config.hub_id, config.model_path) == ("someone/model", Path("/shared/models/someone--model"))
    assert config.serving.data_dir == Path("/shared")


@pytest.mark.parametrize("model", [None, "", 3, "./base", "~/base", "a/b/c"])
def test_a_model_that_nodes_could_not_find_is_refused(model: Any) -> None:
    with pytest.raises(ConfigError, match=r"args: model = .*the same on all nodes, or a hub id is needed"):
        application_config({"model": model}, {})


def test_what_is_wrong_is_named_with_what_is_right() -> None:
    assert refused(max_num_sequnces=3) == (
        "args: max-num-sequnces = 3: there is no such setting. did you mean max-num-sequences? "
        "docs/settings.md lists all"
    )
    assert refused(max_num_sequences="x") == "args: max-num-sequences = 'x': a whole number from 1 is accepted"
    assert "write prefix-cache: false" in refused(no_prefix_cache=True)
    assert "gangs is the same setting" in refused(gangs=1, min_gangs=1)
    assert "at most --max-gangs, which is 1" in refused(min_gangs=3, max_gangs=1)


@pytest.mark.parametrize("key", SECRETS)
def test_a_secret_is_refused_and_not_repeated(key: str) -> None:
    message = refused(**{key: SECRETS[key]})
    assert "folder of secrets" in message
    assert "s3cret" not in message
    assert "s3cret" not in refused(**{key.replace("-", "_") + "s": SECRETS[key]})  # of a key that is mistyped neither


@pytest.mark.parametrize("key", ["host", "port", "address", "max-connections", "trusted-proxies"])
def test_what_others_say_is_refused(key: str) -> None:
    field = next(field for field in fields_of(Settings) if key in field.flags)
    assert refused(**{key: 1}).endswith(field.mark.not_in_args)


def test_secrets_of_the_environment_stay_there() -> None:
    environ = {"MOTET_KEYS": "acme=s3cret", "MOTET_OPERATOR_KEY": "s3cret", "REDIS_URL": "redis://:s3cret@host"}
    assert "s3cret" not in repr(application_config(MODEL, environ))


def test_building_twice_gives_the_same() -> None:
    """It is Serve's to call it as often as it likes; neither model nor data folder are there."""
    routers, again = (build(MODEL | {"min-gangs": 1, "max-gangs": 3})._bound_deployment for _ in range(2))
    assert repr(routers.init_args[0]) == repr(again.init_args[0])
    assert routers.version == again.version
    assert routers.init_args[1] is None  # each node has its secrets


def test_every_setting_has_one_way_to_change_it() -> None:
    for field in fields_of(Settings):
        assert way_to_change(field)
        assert not (field.mark.not_in_args and field.mark.live_in)
        assert field.mark.live_in is None or field.mark.change == "live"
        if field.mark.secret:
            assert field.mark.not_in_args
    assert set(SERVES_OPTIONS) <= {field.name for field in fields_of(Settings)}


@pytest.mark.parametrize("part", ["router", "gang"])
def test_live_settings_are_read_as_they_were_written(part: Part) -> None:
    config = application_config(MODEL | {"latency-objective": ["acme=2.5"], "max-body-bytes": "1MiB"}, {})
    written = json.loads(json.dumps(user_config_of(part, config)))
    values = live_values(part, written)
    assert values == {name: config.value(name) for name in values}
    assert written == {field.flags[0]: written_value(values[field.name]) for field in live_in(part)}
    assert live_values(part, {}) == {}


def live_in(part: Part) -> list[Any]:
    return [field for field in fields_of(Settings) if field.mark.live_in == part]


def test_a_key_in_the_wrong_place_is_refused_with_the_right_one() -> None:
    for part, key, way in (
        ("router", "max-waiting-sequences", "user_config of gang"),
        ("gang", "max-queue-wait", "user_config of router"),
        ("gang", "pool-bytes", "belongs into args"),
        ("gang", "max-gangs", "max_replicas"),
        ("router", "redis-url", "folder of secrets"),
    ):
        with pytest.raises(ConfigError, match=f"user_config of {part}: {key} = .*{way}"):
            live_values(part, {key: 1})  # type: ignore[arg-type]
