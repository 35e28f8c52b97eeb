"""The chart makes what kustomize makes, and refuses values that it does not know."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from motet.tests.rigs.kube_tools import CHART, OVERLAY_NAMES, OVERLAYS, Manifest, kustomized, run_tool, templated

PRESETS = CHART / "presets"


def comparable(manifests: list[Manifest]) -> dict[str, Any]:
    """By kind and name, without what only says who made them or where they go, and with the text of Serve read."""
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
    """Lists whose order says nothing, by name."""
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
