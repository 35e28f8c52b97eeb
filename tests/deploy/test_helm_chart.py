"""The chart makes what kustomize makes, and refuses values that it does not know."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from motet.cluster.tools.file_problems import serve_config
from motet.tests.rigs.kube_tools import (
    CHART,
    NO_PROXY,
    OVERLAY_NAMES,
    OVERLAYS,
    Manifest,
    kustomized,
    manifests_of,
    only,
    run_tool,
    templated,
)
from motet.tests.rigs.manifest_checks import problems

PRESETS = CHART / "presets"


def comparable(manifests: list[Manifest]) -> dict[str, Any]:
    """By kind and name, without namespace and annotations, and with Serve's configuration parsed."""
    found = {}
    for manifest in manifests:
        metadata = manifest["metadata"]
        metadata.pop("namespace", None)  # helm's is that of the command
        metadata.pop("annotations", None)  # helm's own: what outlasts a release
        if manifest["kind"] == "RayService":
            manifest["spec"]["serveConfigV2"] = yaml.safe_load(manifest["spec"]["serveConfigV2"])
        elif manifest["kind"] == "ConfigMap":
            manifest["data"] = {
                name: yaml.safe_load(text) if name.endswith(".yaml") else text.strip()
                for name, text in manifest["data"].items()
            }
        found[f"{manifest['kind']} {metadata['name']}"] = in_order(manifest)
    return found


def in_order(part: Any) -> Any:
    """With lists whose order means nothing sorted by name."""
    if isinstance(part, dict):
        return {key: in_order(value) for key, value in part.items()}
    if not isinstance(part, list):
        return part
    inner = [in_order(one) for one in part]
    named = all(isinstance(one, dict) and "name" in one and not {"image", "op"} & one.keys() for one in inner)
    return sorted(inner, key=lambda one: str(one["name"] + one.get("mountPath", ""))) if named else inner


@pytest.mark.parametrize("name", OVERLAY_NAMES)
def test_the_chart_makes_the_same_as_kustomize(name: str) -> None:
    chart, overlay = comparable(templated("--values", str(PRESETS / f"{name}.yaml"))), kustomized(OVERLAYS / name)
    wanted = comparable(overlay)
    assert chart.keys() == wanted.keys()
    for one, manifest in wanted.items():
        assert chart[one] == manifest, one


def test_there_is_a_preset_for_each_overlay() -> None:
    assert sorted(path.stem for path in PRESETS.iterdir()) == OVERLAY_NAMES


def test_the_chart_is_clean() -> None:
    linted = run_tool("helm", "lint", "--strict", *NO_PROXY, str(CHART))
    assert "WARNING" not in linted.stdout and "ERROR" not in linted.stdout, linted.stdout


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ("gangz.replicas=2", "gangz"),
        ("gangs.replica=2", "replica"),
        ("gangs.replicas=two", "gangs/replicas"),
        ("settings.redis-url=redis://r", "redis-url"),
        ("settings.operator-key=x", "operator-key"),
        ("redis.address=redis://:password@r:6379", "redis/address"),
        ("trustedProxies=[ingress]", "trustedProxies"),
        ("incrementalUpgrade.stepSizePercent=200", "stepSizePercent"),
    ],
)
def test_a_value_that_is_none_is_refused_by_name(given: str, named: str) -> None:
    ended = run_tool("helm", "template", str(CHART), "--set", given, check=False)
    assert ended.returncode != 0 and named in ended.stderr, ended.stderr


def test_a_head_that_comes_back_needs_to_know_the_redis() -> None:
    given = (*NO_PROXY, "--set", "headRecovery=true,redis.embedded=false")
    ended = run_tool("helm", "template", str(CHART), *given, check=False)
    assert ended.returncode != 0 and "redis.address" in ended.stderr


def test_whose_addresses_count_has_to_be_decided() -> None:
    """Behind a proxy that motet does not know all clients have one address, and share the limits of one client."""
    ended = run_tool("helm", "template", str(CHART), check=False)
    assert ended.returncode != 0 and "trustedProxies is needed" in ended.stderr


def test_another_name_and_live_settings_pass_every_check() -> None:
    values = ["image.pullSecrets={registry}", "trustedProxies={10.0.0.0/8,fd00::/8}"]
    values += ["liveSettings.gang.max-waiting-sequences=64", "liveSettings.router.max-queue-wait=30"]
    rendered = run_tool("helm", "template", "blue", str(CHART), "--set", ",".join(values)).stdout
    manifests = manifests_of(rendered)
    assert list(problems(manifests)) == []
    assert rendered.count('{name: MOTET_TRUSTED_PROXIES, value: "10.0.0.0/8,fd00::/8"}') == 3
    assert all(one["metadata"]["name"].split("-")[0] == "blue" for one in manifests)
    (application,) = serve_config(only(manifests, "RayService"))["applications"]
    assert application["deployments"] == [
        {"name": "router", "num_replicas": 1, "user_config": {"max-queue-wait": 30}},
        {"name": "gang", "num_replicas": 1, "user_config": {"max-waiting-sequences": 64}},
    ]
