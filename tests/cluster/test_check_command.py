"""`motet check`: what would fail in a cluster is found before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from motet.cluster.commands.cli import main
from motet.cluster.tools.file_problems import UnknownFile, file_problems

POLICY = {"policy_function": "motet.cluster.replicas.autoscaler:GangAutoscaler"}


def serve_of(args: dict[str, Any] | None = None, **gang: Any) -> dict[str, Any]:
    application = {
        "name": "motet",
        "import_path": "motet.cluster.serve_application:build",
        "route_prefix": "/",
        "args": {"model": "/models/base", **(args or {})},
        "deployments": [{"name": "gang", **gang}],
    }
    return {"applications": [application]}


def ray_service(serve: dict[str, Any], pods: int = 2, **upgrade: Any) -> str:
    container = {"name": "ray", "image": "motet"}
    template = {"spec": {"containers": [container], "restartPolicy": "Never"}}
    group = {"groupName": "gangs", "minReplicas": 1, "maxReplicas": pods, "template": template, "rayStartParams": {}}
    cluster = {
        "rayVersion": "2.60.0",
        "enableInTreeAutoscaling": True,
        "headGroupSpec": {"template": template, "rayStartParams": {}},
        "workerGroupSpecs": [group],
    }
    spec: dict[str, Any] = {"serveConfigV2": yaml.safe_dump(serve), "rayClusterConfig": cluster}
    if upgrade:
        options = {"gatewayClassName": "istio", "intervalSeconds": 60, **upgrade}
        spec["upgradeStrategy"] = {"type": "NewClusterWithIncrementalUpgrade", "clusterUpgradeOptions": options}
    service = {"apiVersion": "ray.io/v1", "kind": "RayService", "metadata": {"name": "motet"}, "spec": spec}
    return yaml.safe_dump_all([service, {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "motet"}}])


def scaling(least: int, most: int, **settings: Any) -> dict[str, Any]:
    policy = {**POLICY, "policy_kwargs": {"settings": settings}}
    return {"autoscaling_config": {"min_replicas": least, "max_replicas": most, "policy": policy}}


def test_what_would_work_has_no_problem() -> None:
    assert file_problems(ray_service(serve_of(**scaling(1, 2)))) == []
    assert file_problems(yaml.safe_dump(serve_of(num_replicas=2))) == []
    assert file_problems('min-gangs = 1\nmax-gangs = 2\nlatency-objective = ["acme=2"]\n', is_toml=True) == []


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (ray_service(serve_of({"max-num-sequence": 4})), "did you mean max-num-sequences?"),
        (ray_service(serve_of({"pool-bytes": "much"})), "pool-bytes"),
        (ray_service(serve_of({"min-gangs": 3, "max-gangs": 2})), "min-gangs"),
        (ray_service(serve_of(**scaling(3, 2))), "min_replicas, 3, is more than max_replicas, 2"),
        (ray_service(serve_of(**scaling(1, 2, **{"pool-presure": 1}))), "did you mean pool-pressure?"),
        (ray_service(serve_of(**scaling(1, 2, name="x"))), "set it in args"),
        (ray_service(serve_of(autoscaling_config={"min_replicas": 1, "max_replicas": 2})), "policy_function"),
        (ray_service(serve_of(user_config={"tensor-parallel": 2})), "do not take this over"),
        (ray_service(serve_of(num_replicas=4)), "4 gangs, and there are at most 2 pods"),
        (ray_service(serve_of(), stepSizePercent=60, maxSurgePercent=50), "stepSizePercent is more than"),
        (ray_service(serve_of(), pods=0), "minReplicas 1 and maxReplicas 0"),
        (yaml.safe_dump(serve_of({"redis-url": "redis://:secret@r"})), "redis-url"),
        ("kind: RayService\nspec: {}\n", "not complete"),
    ],
)
def test_what_would_fail_is_named(text: str, said: str) -> None:
    found = file_problems(text)
    assert any(said in one for one in found), found
    assert not any("secret@" in one for one in found)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("pool-byte = '1GiB'", "did you mean pool-bytes?"),
        ("min-gangs = 3\nmax-gangs = 2", "min-gangs"),
        ("scale-to-zero-after = 1", "scaling windows"),
    ],
)
def test_settings_of_a_file_are_checked_too(text: str, said: str) -> None:
    (problem,) = file_problems(text, is_toml=True)
    assert said in problem


@pytest.mark.parametrize("text", ["", "kind: Service", "a: [", "- 1"])
def test_what_is_nothing_of_motet_is_no_success(text: str) -> None:
    with pytest.raises(UnknownFile):
        file_problems(text)


def test_the_command_says_it_and_ends_with_it(tmp_path: Path) -> None:
    path = tmp_path / "motet.toml"
    path.write_text("max-gangs = 2\n")
    good = CliRunner().invoke(main, ["check", str(path)])
    assert (good.exit_code, good.output) == (0, "nothing was found that would fail\n")
    bad = CliRunner().invoke(main, ["check", "-"], input=ray_service(serve_of(num_replicas=4)))
    assert bad.exit_code == 1 and "at most 2 pods" in bad.output
    none = CliRunner().invoke(main, ["check", "-"], input="kind: Service\n")
    assert none.exit_code == 1 and "neither a RayService" in none.output
