"""`motet scale`: RayService, RayCluster and Serve agree afterwards, and nothing changes that replaces a process.

The last tests run KubeRay's own reconcilers, where `scripts/kuberay` has built them.
"""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

from motet.cluster.commands.cli import main
from motet.cluster.tools.file_problems import serve_config
from motet.tests.rigs.kube_tools import OVERLAYS, ROOT, Manifest, kustomized, only

RECONCILERS = ROOT / ".venv" / "kuberay" / "reconcilers"
RECONCILERS_TIMEOUT_S = 60.0

# Stands for kubectl with a cluster: objects are files, and a patch changes them as RFC 6902 says.
KUBECTL = """
import json, pathlib, sys
folder = pathlib.Path({folder!r})
assert sys.argv[1:3] == ["--namespace", "motet"], sys.argv
verb, kind, name, *others = sys.argv[3:]
path = folder / f"{{kind}}-{{name}}.json"
if not path.exists():
    sys.exit(f'Error from server (NotFound): {{kind}} "{{name}}" not found')
found = json.loads(path.read_text())
if verb == "get":
    print(json.dumps(found))
elif verb == "patch":
    for one in json.loads(others[others.index("--patch") + 1]):
        *way, last = one["path"].split("/")[1:]
        at = found
        for key in way:
            at = at[int(key)] if isinstance(at, list) else at[key]
        if one["op"] == "test":
            assert at[last] == one["value"], one
        else:
            at[last] = one["value"]
    path.write_text(json.dumps(found))
    with (folder / "order").open("a") as order:
        print(kind, file=order)
    print(f"{{kind}}/{{name}} patched")
"""


class Cluster:
    """A RayService as an overlay has it, with the RayCluster that KubeRay has made of it."""

    def __init__(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, overlay: str, change: Callable[[Manifest], object]
    ) -> None:
        self.folder = folder
        service = copy.deepcopy(only(kustomized(OVERLAYS / overlay), "RayService"))
        change(service)
        service["status"] = {"activeServiceStatus": {"rayClusterName": "motet-abcde"}}
        cluster = {
            "kind": "RayCluster",
            "metadata": {"name": "motet-abcde"},
            "spec": copy.deepcopy(service["spec"]["rayClusterConfig"]),
        }
        self.put("rayservice-motet", service)
        self.put("raycluster-motet-abcde", cluster)
        program = folder / "kubectl"
        program.write_text(f"#!{sys.executable}\n{KUBECTL.format(folder=str(folder))}")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")

    def put(self, name: str, manifest: Any) -> None:
        (self.folder / f"{name}.json").write_text(json.dumps(manifest))

    @property
    def service(self) -> Any:
        return json.loads((self.folder / "rayservice-motet.json").read_text())

    @property
    def cluster(self) -> Any:
        return json.loads((self.folder / "raycluster-motet-abcde.json").read_text())

    @property
    def order(self) -> list[str]:
        return (self.folder / "order").read_text().split()

    def scale(self, *options: str) -> Result:
        return CliRunner().invoke(main, ["scale", *options])

    def bounds(self, group: str) -> list[tuple[int, int]]:
        """In the RayService and in the RayCluster."""
        both = (self.service["spec"]["rayClusterConfig"], self.cluster["spec"])
        groups = [next(one for one in spec["workerGroupSpecs"] if one["groupName"] == group) for spec in both]
        return [(one["minReplicas"], one["maxReplicas"]) for one in groups]

    def deployment(self, name: str) -> Any:
        (application,) = serve_config(self.service)["applications"]
        return next(one for one in application["deployments"] if one["name"] == name)

    @property
    def what_restarts(self) -> list[Any]:
        """What KubeRay starts a cluster for, and Serve processes: all but the numbers."""
        service = self.service["spec"]
        config = yaml.safe_load(service.pop("serveConfigV2"))
        for deployment in config["applications"][0].pop("deployments"):
            assert deployment.keys() <= {"name", "num_replicas", "autoscaling_config"}
            if "autoscaling_config" in deployment:  # of which a change of the bounds alone replaces nothing
                scaling = deployment["autoscaling_config"]
                config[deployment["name"]] = {
                    k: v for k, v in scaling.items() if k not in ("min_replicas", "max_replicas")
                }
        spec = self.cluster["spec"]
        for group in (*service["rayClusterConfig"]["workerGroupSpecs"], *spec["workerGroupSpecs"]):
            for key in ("replicas", "minReplicas", "maxReplicas"):
                group.pop(key)
        return [service, config, spec]


Make = Callable[..., Cluster]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    return lambda overlay="high-availability", change=lambda _: None: Cluster(tmp_path, monkeypatch, overlay, change)


def without_autoscaler(service: Manifest) -> None:
    """Eight gangs, in so many pods."""
    service["spec"]["rayClusterConfig"].pop("enableInTreeAutoscaling")
    service["spec"]["rayClusterConfig"]["workerGroupSpecs"][1].update(replicas=8, minReplicas=8, maxReplicas=8)
    config = serve_config(service)
    config["applications"][0]["deployments"][1] = {"name": "gang", "num_replicas": 8}
    service["spec"]["serveConfigV2"] = yaml.safe_dump(config)


def test_two_gangs_become_four_of_at_most_twelve(make: Make) -> None:
    cluster = make()
    before = cluster.what_restarts
    ended = cluster.scale("--gangs", "4", "--max-gangs", "12", "--routers", "3")
    assert ended.exit_code == 0, ended.output
    assert cluster.bounds("gangs") == [(4, 12)] * 2
    assert cluster.bounds("routers") == [(3, 6)] * 2  # twice as many as before, for an update
    scaling = cluster.deployment("gang")["autoscaling_config"]
    assert (scaling["min_replicas"], scaling["max_replicas"]) == (4, 12)
    assert cluster.deployment("router")["num_replicas"] == 3
    assert cluster.what_restarts == before
    assert cluster.order == ["raycluster", "rayservice"]


def test_eight_fixed_gangs_become_twelve(make: Make) -> None:
    cluster = make(change=without_autoscaler)
    before = cluster.what_restarts
    ended = cluster.scale("--gangs", "12")
    assert ended.exit_code == 0, ended.output
    assert cluster.bounds("gangs") == [(12, 12)] * 2
    assert cluster.cluster["spec"]["workerGroupSpecs"][1]["replicas"] == 12
    assert cluster.deployment("gang") == {"name": "gang", "num_replicas": 12}
    assert cluster.what_restarts == before


def test_fewer_gangs_end_before_their_pods(make: Make) -> None:
    cluster = make()
    assert cluster.scale("--gangs", "1", "--max-gangs", "4").exit_code == 0
    assert cluster.bounds("gangs") == [(1, 4)] * 2
    assert cluster.order == ["rayservice", "raycluster"]


def several_groups(service: Manifest) -> None:
    groups = service["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    groups.append({**copy.deepcopy(groups[1]), "groupName": "gangs-spot", "minReplicas": 0, "maxReplicas": 4})
    config = serve_config(service)
    config["applications"][0]["deployments"][1]["autoscaling_config"]["max_replicas"] = 12
    service["spec"]["serveConfigV2"] = yaml.safe_dump(config)


def numbers_in_args(service: Manifest) -> None:
    config = serve_config(service)
    config["applications"][0]["args"]["max-gangs"] = 8
    del config["applications"][0]["deployments"]
    service["spec"]["serveConfigV2"] = yaml.safe_dump(config)


@pytest.mark.parametrize(
    ("change", "options", "said"),
    [
        (None, (), "give --gangs, --max-gangs or --routers"),
        (None, ("--gangs", "9"), "at least 9 gangs and at most 8"),
        (None, ("--gangs", "0"), "to or from 0 gangs"),
        (None, ("--gangs", "3", "--name", "other"), "not found"),
        (None, ("--gangs", "3", "--group", "spot"), "no group of pods spot"),
        (without_autoscaler, ("--gangs", "4"), "would end any pod"),
        (without_autoscaler, ("--max-gangs", "12"), "need Ray's autoscaler"),
        (several_groups, ("--gangs", "3"), "gangs, gangs-spot"),
        (numbers_in_args, ("--gangs", "3"), "args say how many"),
    ],
)
def test_what_cannot_be_taken_over_is_said_and_nothing_changes(
    make: Make, change: Callable[[Manifest], object] | None, options: tuple[str, ...], said: str
) -> None:
    cluster = make(change=change or (lambda _: None))
    ended = cluster.scale(*options)
    assert ended.exit_code != 0 and said in ended.output, ended.output
    assert not (cluster.folder / "order").exists()


def test_of_several_groups_the_named_one_grows(make: Make) -> None:
    cluster = make(change=several_groups)
    assert cluster.scale("--max-gangs", "16", "--group", "gangs-spot").exit_code == 0
    assert (cluster.bounds("gangs"), cluster.bounds("gangs-spot")) == ([(2, 8)] * 2, [(0, 8)] * 2)


@pytest.mark.parametrize(
    ("status", "said"),
    [
        ({}, "no cluster of this RayService serves yet"),
        (
            {"activeServiceStatus": {"rayClusterName": "a"}, "pendingServiceStatus": {"rayClusterName": "b"}},
            "an upgrade is under way",
        ),
    ],
)
def test_only_a_service_with_one_cluster_is_scaled(make: Make, status: dict[str, Any], said: str) -> None:
    cluster = make()
    cluster.put("rayservice-motet", {**cluster.service, "status": status})
    ended = cluster.scale("--gangs", "3")
    assert ended.exit_code == 1 and said in ended.output


def test_a_dry_run_shows_and_changes_nothing(make: Make) -> None:
    cluster = make()
    ended = cluster.scale("--gangs", "3", "--dry-run")
    assert ended.exit_code == 0 and "raycluster motet-abcde" in ended.output and '"value": 3' in ended.output
    assert not (cluster.folder / "order").exists()


# With KubeRay's reconcilers.


class Reconciled(Cluster):
    """A RayService of which KubeRay's reconcilers make all else."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Manifest], object]) -> None:
        super().__init__(folder, monkeypatch, "high-availability", change)
        (folder / "raycluster-motet-abcde.json").unlink()
        service = self.service
        del service["status"]
        service["metadata"]["uid"] = "0"
        for group in service["spec"]["rayClusterConfig"]["workerGroupSpecs"]:
            group["numOfHosts"] = 1  # the API server fills in what the CRD says
        self.put("rayservice-motet", service)
        for one in kustomized(OVERLAYS / "high-availability"):
            if one["kind"] == "ServiceAccount":
                self.put(f"serviceaccount-{one['metadata']['name']}", one)
        self.settle()

    def settle(self) -> None:
        """Until KubeRay changes nothing more."""
        command = [str(RECONCILERS), str(self.folder)]
        ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=RECONCILERS_TIMEOUT_S)
        assert ended.returncode == 0 and "Invalid" not in ended.stderr, ended.stderr

    @property
    def cluster(self) -> Any:
        (path,) = self.folder.glob("raycluster-*.json")
        return json.loads(path.read_text())

    @property
    def served(self) -> Any:
        """What Serve was given last."""
        (path,) = self.folder.glob("serve-*.json")
        return json.loads(path.read_text())

    def pods(self, group: str) -> set[str]:
        """The ids of those of a group."""
        found = [json.loads(path.read_text())["metadata"] for path in self.folder.glob("pod-*.json")]
        return {one["uid"] for one in found if one["labels"]["ray.io/group"] == group}


@pytest.fixture
def reconciled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Reconciled]:
    if not RECONCILERS.exists():
        pytest.skip("KubeRay's reconcilers are not built: scripts/kuberay builds them")
    return lambda change=lambda _: None: Reconciled(tmp_path, monkeypatch, change)


@pytest.mark.parametrize(
    ("change", "options", "before", "after"),
    [(None, ("--gangs", "4", "--max-gangs", "12"), 2, 4), (without_autoscaler, ("--gangs", "12"), 8, 12)],
)
def test_kuberay_adds_pods_serve_is_given_the_numbers_and_no_pod_is_restarted(
    reconciled: Callable[..., Reconciled],
    change: Callable[[Manifest], object] | None,
    options: tuple[str, ...],
    before: int,
    after: int,
) -> None:
    found = reconciled(change or (lambda _: None))
    gangs, others = found.pods("gangs"), found.pods("routers") | found.pods("headgroup")
    assert (len(gangs), len(others)) == (before, 3)
    cluster, (application,) = found.cluster["metadata"]["uid"], found.served["applications"]
    ended = found.scale(*options)
    assert ended.exit_code == 0, ended.output
    found.settle()
    assert found.cluster["metadata"]["uid"] == cluster, "a second cluster"
    assert found.pods("gangs") > gangs and len(found.pods("gangs")) == after
    assert found.pods("routers") | found.pods("headgroup") == others
    assert found.bounds("gangs")[0] == found.bounds("gangs")[1]
    assert found.served["applications"] == serve_config(found.service)["applications"]
    assert found.served["applications"][0]["args"] == application["args"]
    assert found.deployment("gang").get("num_replicas", after) == after


def test_kuberay_leaves_a_change_of_the_pods_numbers_in_the_service_alone(
    reconciled: Callable[..., Reconciled],
) -> None:
    """Why `motet scale` changes the RayCluster as well."""
    found = reconciled()
    gangs, service = found.pods("gangs"), found.service
    service["spec"]["rayClusterConfig"]["workerGroupSpecs"][1].update(replicas=4, minReplicas=4, maxReplicas=12)
    found.put("rayservice-motet", service)
    found.settle()
    assert found.pods("gangs") == gangs and found.bounds("gangs") == [(4, 12), (2, 8)]
