"""Settings: where they come from, and the errors for bad ones."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from motet.cluster.config import MotetConfig
from motet.cluster.settings.setting_field import ConfigError
from motet.tests.rigs.setting_options import OPTIONS


@pytest.fixture
def paths(tmp_path: Path) -> dict[str, Any]:
    model_path = tmp_path / "tiny"
    model_path.mkdir()
    (model_path / "config.json").write_text("{}")
    return {"model_path": model_path, "data_dir": tmp_path / "data"}


def test_defaults(paths: dict[str, Any]) -> None:
    config = MotetConfig.from_environment({}, **paths)
    assert config.serving.name == "tiny"
    assert config.access.redis_url is None
    assert config.url == "http://127.0.0.1:8000"
    assert config.store_path == paths["data_dir"] / "store"


def test_the_parts_get_what_was_set(paths: dict[str, Any]) -> None:
    config = MotetConfig.of(**paths, name="base", dtype="float32", pool_bytes=123, max_model_len=7, max_upload_bytes=9)
    assert (config.engine.dtype, config.engine.pool_bytes, config.engine.max_model_len) == ("float32", 123, 7)
    assert config.engine.store_path == config.store_path
    assert (config.router.model_name, config.router.max_upload_bytes) == ("base", 9)
    patient = MotetConfig.of(**paths, max_queue_wait_s=0.0, max_gangs=3, max_waiting_sequences=5)
    assert (patient.admission.max_queue_wait_s, patient.admission.max_gangs) == (0.0, 3)
    objectives_s = (("acme", 2.0),)
    assert MotetConfig.of(**paths, latency_objectives_s=objectives_s).admission.latency_objectives_s == objectives_s
    assert (patient.leader.max_waiting_sequences, patient.leader.max_waiting_tokens) == (5, 4 << 20)


def test_what_is_shown_of_settings_has_no_secret(paths: dict[str, Any]) -> None:
    secrets: dict[str, Any] = {
        "keys": (("acme", "hush-1"),),
        "operator_key": "hush-2",
        "redis_url": "redis://:hush-3@localhost",
    }
    reported = MotetConfig.of(**paths, **secrets, latency_objectives_s=(("acme", 2.0),), max_queue_wait_s=3.0).written
    assert (
        "hush" not in str(reported)
        and reported["max-queue-wait"] == 3.0
        and reported["latency-objective"] == ["acme=2.0"]
    )
    assert msgspec.json.decode(msgspec.json.encode(reported)) == reported


def test_tokens_need_an_audience(paths: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="--oidc-issuers needs --oidc-audience"):
        MotetConfig.of(**paths, oidc_issuers="https://id.example")
    both = MotetConfig.of(**paths, oidc_issuers="https://id.example", oidc_audience="motet")
    assert (both.oidc.oidc_issuers, both.oidc.oidc_audience) == ("https://id.example", "motet")


def test_the_number_of_gangs(paths: dict[str, Any]) -> None:
    assert MotetConfig.of(**paths).scaling_policy.is_fixed
    two = MotetConfig.of(**paths, min_gangs=2)
    assert (two.scaling_policy.min_gangs, two.scaling_policy.max_gangs, two.sequence_wait_s) == (
        2,
        2,
        two.timeouts.gang_wait_s,
    )
    none = MotetConfig.of(**paths, min_gangs=0, max_tokens_per_step=10)
    assert (none.scaling_policy.max_gangs, none.scaling_policy.queued_tokens_per_gang) == (1, 160)
    assert none.sequence_wait_s == none.scaling_policy.start_grace_s == none.timeouts.cold_start_wait_s
    assert none.router.scales_from_zero
    with pytest.raises(ValueError, match="--min-gangs = 3: at most --max-gangs, which is 2"):
        MotetConfig.of(**paths, min_gangs=3, max_gangs=2)


def test_what_does_not_hold_between_two_settings_is_reported_with_their_options(paths: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"^--kv-disk-bytes needs --kv-host-bytes above 0: pages reach the disk"):
        MotetConfig.of(**paths, kv_disk_bytes=1 << 30, kv_host_bytes=0)
    with pytest.raises(
        ValueError, match=r"^--scale-to-zero-after = 5\.0: at least two scaling windows, which are 10 s"
    ):
        MotetConfig.of(**paths, scale_to_zero_after_s=5.0)


@pytest.mark.parametrize(
    ("given", "url"),
    [(None, "redis://environment"), ("redis://given", "redis://given")],
)
def test_redis_url_of_the_environment(paths: dict[str, Any], given: str | None, url: str) -> None:
    config = MotetConfig.from_environment({"REDIS_URL": "redis://environment"}, **paths, redis_url=given)
    assert config.access.redis_url == url


def test_an_empty_variable_is_no_value(paths: dict[str, Any]) -> None:
    assert MotetConfig.from_environment({"REDIS_URL": ""}, **paths).access.redis_url is None


def test_where_compiled_kernels_are_kept(paths: dict[str, Any], tmp_path: Path) -> None:
    config = MotetConfig.from_environment({"XDG_CACHE_HOME": str(tmp_path)}, **paths)
    assert config.engine.cache_path == tmp_path / "motet"
    for ignored in ({}, {"XDG_CACHE_HOME": ""}, {"XDG_CACHE_HOME": "relative"}):
        assert MotetConfig.from_environment(ignored, **paths).engine.cache_path is None


@pytest.mark.parametrize(
    ("host", "url"),
    [("0.0.0.0", "http://127.0.0.1:8000"), ("::1", "http://[::1]:8000"), ("10.0.0.7", "http://10.0.0.7:8000")],
)
def test_url(paths: dict[str, Any], host: str, url: str) -> None:
    assert MotetConfig.of(**paths, host=host).url == url


@pytest.mark.parametrize(
    ("key", "value", "accepted"),
    [
        ("port", 0, "1 to 65535"),
        ("port", 65536, "1 to 65535"),
        ("num_threads", 10**10, "1 to 1024"),
        ("host", "", "address"),
        ("max_waiting_sequences", 0, "a whole number from 1"),
        ("max_queue_wait_s", -1.0, "a number of seconds from 0"),
        ("min_gangs", -1, "a whole number from 0"),
        ("min_gangs", 1.5, "a whole number from 0"),
        ("max_gangs", 0, "a whole number from 1"),
        ("max_gangs", 2.5, "a whole number from 1"),
        ("queued_tokens_per_gang", 0, "a whole number from 1"),
        ("pool_pressure", 1.5, "a number above 0 and at most 1"),
        ("scale_down_after_s", -1.0, "a number of seconds from 0"),
        ("scale_to_zero_after_s", 1.0, "at least two scaling windows"),
        ("cold_start_wait_s", float("nan"), "a number of seconds from 0"),
        ("num_routers", 1.5, "a whole number from 1"),
        ("gang_wait_s", -1.0, "a number of seconds from 0"),
        ("router_drain_s", float("nan"), "a number of seconds from 0"),
        ("pool_bytes", 0, "from 1 is accepted"),
        ("dtype", "float16", "float32 or bfloat16 is accepted"),
        ("max_upload_bytes", -1, "KiB, MiB, GiB or TiB) from 1"),
        ("redis_url", "localhost:6379", "redis://"),
        ("redis_url", "http://[", "redis://"),
    ],
)
def test_a_bad_value_is_named(paths: dict[str, Any], key: str, value: Any, accepted: str) -> None:
    with pytest.raises(ValueError) as caught:
        MotetConfig.of(**paths, **{key: value})
    assert str(caught.value).startswith(f"{OPTIONS[key]} = {value!r}: ")
    assert accepted in str(caught.value)


@pytest.mark.parametrize(
    ("objectives_s", "problem"),
    [
        ([("a b", 1.0)], r"'a b=1': tenant 'a b'"),
        ([("acme", 1.0), ("acme", 2.0)], "'acme=2': acme has another one already; one is accepted"),
        ([("zoo", 1.0), ("acme", 0.0)], "'acme=0': a positive number of seconds is needed"),
    ],
)
def test_a_bad_objective_is_named(paths: dict[str, Any], objectives_s: list[tuple[str, float]], problem: str) -> None:
    with pytest.raises(ValueError, match=f"^--latency-objective = {problem}"):
        MotetConfig.of(**paths, latency_objectives_s=tuple(objectives_s))


def test_a_folder_without_a_model(paths: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model_path = .*config\.json"):
        MotetConfig.of(model_path=tmp_path / "nothing", data_dir=paths["data_dir"])


def test_a_password_is_not_repeated(paths: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        MotetConfig.of(**paths, redis_url="http://:secret@host:6379")
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    "url",
    [
        "redis://:Secret/Part@h",
        "redis://:Secret#Part@h:6379/0",
        "rediss://user:Secret?Part@h",
        "redis://user:1234/Secret@h",  # what stands before the "/" could be a port
        "redis://:1234#Secret@h",
        "redis://:Secret",
        "unix://:Secret/Part@/run/redis.sock",
    ],
)
def test_a_password_that_is_cut_is_refused_and_not_repeated(paths: dict[str, Any], url: str) -> None:
    with pytest.raises(ConfigError, match="percent-encode the password") as caught:
        MotetConfig.of(**paths, redis_url=url)
    assert not {"Secret", "Part", "1234"} & {*re.findall(r"\w+", str(caught.value))}


@pytest.mark.parametrize(
    "url",
    [
        "redis://",
        "redis://:Sec%2Fret%23@h:6379/0",
        "rediss://user:se:cr@et@[::1]:6380/1?ssl_cert_reqs=none",
        "unix:///run/redis.sock?db=1",
        "unix://:secret@/run/a@b.sock",
    ],
)
def test_urls_that_redis_understands(paths: dict[str, Any], url: str) -> None:
    assert MotetConfig.of(**paths, redis_url=url).access.redis_url == url


@pytest.mark.parametrize(
    "keys",
    [(("a/b", "long-enough"),), (("", "long-enough"),), (("acme", ""),), (("acme", "my secret"),)],
)
def test_bad_keys(paths: dict[str, Any], keys: tuple[tuple[str, str], ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        MotetConfig.of(**paths, keys=keys)
    assert caught.value.key == "--key"
    assert "my secret" not in str(caught.value)


def test_one_key_for_two_tenants(paths: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="given to acme"):
        MotetConfig.of(**paths, keys=(("acme", "the-same-key"), ("globex", "the-same-key")))


def test_a_step_has_the_size_of_its_device(paths: dict[str, Any]) -> None:
    """And a pool on CPUs is shared with the workers of all gangs of this machine; those of a cluster are not known."""
    on_cpu = MotetConfig.of(**paths, device="cpu", max_gangs=3, tensor_parallel=2).engine
    assert (on_cpu.max_tokens_per_step, on_cpu.max_num_sequences, on_cpu.pool_sharers) == (512, 128, 6)
    joined = MotetConfig.of(**paths, device="cuda", address="auto", gang_num_gpus=1.0, max_gangs=3)
    assert (joined.engine.max_tokens_per_step, joined.leader.max_num_sequences) == (2048, 256)
    assert joined.engine.pool_sharers is None and "weights" in joined.engine.reasons["max-tokens-per-step"]
    on_gpus_of_ray = MotetConfig.of(**paths, address="auto", gang_num_gpus=1.0)
    assert on_gpus_of_ray.step_limits.max_tokens_per_step == 2048
    assert on_gpus_of_ray.scaling_policy.queued_tokens_per_gang == 16 * 512  # as the autoscaler has it
    set_ = MotetConfig.of(**paths, device="cuda", max_num_sequences=5)
    assert set_.step_limits.reasons["max-num-sequences"] == "as the settings say"
