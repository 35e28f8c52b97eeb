"""The resources that processes take on their nodes, from the command line to Ray's options."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from motet.cluster.commands.serve_command import serve
from motet.cluster.config import MotetConfig
from motet.cluster.replicas.gang import interface_of
from motet.cluster.resources import Resources, actor_options
from motet.cluster.settings.setting_field import ConfigError
from motet.tests.rigs.setting_options import OPTIONS

BASE = Path(__file__).resolve().parents[2] / "examples" / "demo" / "base"
MIG = "nvidia.com/mig-1g.10gb"


def config(**given: Any) -> MotetConfig:
    return MotetConfig.of(model_path=BASE, data_dir=BASE, **given)


def test_a_bundle_names_what_is_taken() -> None:
    assert Resources(num_cpus=1, num_gpus=0.5, custom=((MIG, 2.0),)).bundle == {"CPU": 1, "GPU": 0.5, MIG: 2.0}
    assert Resources().bundle == {}


def test_an_actor_takes_its_bundle_and_nothing_by_default() -> None:
    assert actor_options({"CPU": 1, "GPU": 0.5, MIG: 2.0}) == {"num_cpus": 1, "num_gpus": 0.5, "resources": {MIG: 2.0}}
    assert actor_options({}) == {"num_cpus": 0}  # Ray's default would be another one


def test_a_gang_of_one_is_leader_and_worker() -> None:
    assert config(gang_num_gpus=1.0, gang_resources=((MIG, 1.0),)).gang_bundles == ({"CPU": 1.0, "GPU": 1.0, MIG: 1.0},)


def test_a_leader_of_several_takes_none_of_the_devices() -> None:
    made = config(tensor_parallel=2, gang_num_gpus=1.0)
    assert made.gang_bundles == ({"CPU": 0.1}, {"CPU": 1.0, "GPU": 1.0}, {"CPU": 1.0, "GPU": 1.0})
    assert made.num_cpus_of_a_gang == pytest.approx(2.1)


@pytest.mark.parametrize(
    ("key", "value", "accepted"),
    [
        ("gang_num_gpus", 1.5, "a share of one GPU"),
        ("gang_num_gpus", -1.0, "a number from 0"),
        ("gang_num_gpus", float("inf"), "a number from 0"),
        ("gang_resources", (("GPU", 1.0),), "one of Ray's own"),
        ("gang_resources", ((MIG, 0.0),), "a number from 0.0001"),
        ("gang_resources", ((MIG, float("nan")),), "a number from 0.0001"),
        ("gang_resources", ((MIG, 1.5),), "a whole number"),
        ("gang_resources", ((MIG, 1.0), (MIG, 2.0)), "more than once"),
        ("gang_resources", ((" x", 1.0),), "not a name of a resource"),
        ("router_resources", (("CPU", 1.0),), "one of Ray's own"),
        ("gang_labels", (("zone", "east,west"),), "KEY=VALUE"),
        ("gang_labels", (("zone", "a"), ("zone", "b")), "more than once"),
        ("strategy", "anywhere", "strict-pack, pack or spread is accepted"),
        ("strategy", "spread", "a gang of one worker"),
        ("address", "ray://head:10001", "Ray Client is not supported"),
        ("address", "head", "HOST:PORT"),
        ("address", "head:port", "HOST:PORT"),
        ("address", "head:70000", "HOST:PORT"),
    ],
)
def test_a_bad_value_is_named(key: str, value: Any, accepted: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config(**{key: value})
    assert str(caught.value).startswith(f"{OPTIONS[key]} = {value!r}: ")
    assert accepted in str(caught.value)


@pytest.mark.parametrize("address", [None, "auto", "10.0.0.1:6379", "[fd00::1]:6379", "head.example:1"])
def test_addresses(address: str | None) -> None:
    assert config(address=address).placement.address == address


def test_on_a_cluster_the_front_is_for_others_too() -> None:
    given = {"model_path": BASE, "data_dir": BASE, "host": None}
    assert MotetConfig.from_environment({}, **given).listen_host == "127.0.0.1"
    assert MotetConfig.from_environment({}, **given, address="auto").listen_host == "0.0.0.0"
    assert MotetConfig.from_environment({}, **{**given, "host": "::"}, address="auto").listen_host == "::"


def test_amounts_and_labels_of_the_command_line() -> None:
    resource, label = (next(one for one in serve.params if flag in one.opts) for flag in ("--resource", "--node-label"))
    context = click.Context(serve)

    def read(option: click.Parameter, *texts: str) -> Any:
        return option.process_value(context, texts)

    assert read(resource, f"{MIG}=1", "a=b=0.5") == ((MIG, 1.0), ("a=b", 0.5))
    assert read(label, "zone=east") == (("zone", "east"),)
    for bad in (MIG, "=1", f"{MIG}=one"):
        with pytest.raises(click.BadParameter, match="NAME=AMOUNT"):
            read(resource, bad)
    for bad in ("zone", "zone=", "=east"):
        with pytest.raises(click.BadParameter, match="KEY=VALUE"):
            read(label, bad)


@pytest.mark.parametrize("flag", ["--replace", "--wait-for-nodes"])
def test_what_is_about_a_cluster_needs_its_address(flag: str, tmp_path: Path) -> None:
    result = CliRunner().invoke(serve, [str(BASE), "--data-dir", str(tmp_path), flag])
    assert result.exit_code == 2
    assert "give its --address" in result.output


def test_the_interface_of_an_address() -> None:
    assert interface_of("127.0.0.1") in ("lo", "lo0")
    assert interface_of("192.0.2.77") is None
