"""The commands of docs/install.md: those that need no cluster are run, the others are run dry."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from motet.cluster.settings.settings import Settings
from motet.tests.rigs.kube_tools import ROOT, run_tool, templated, tool
from motet.tests.rigs.manifest_checks import problems
from motet.tests.whole.test_docs_commands import COMMAND_TIMEOUT_S, Block, blocks, has_lines

PAGE = "docs/install.md"
TO_RUN = [block for block in blocks(PAGE) if block.why_not_run is None]
NOT_RUN = [block for block in blocks(PAGE) if block.why_not_run is not None]


@pytest.fixture(scope="module")
def person(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a user who has a copy of `deploy/` in the folder HOME, and kubectl and helm."""
    home = tmp_path_factory.mktemp("home")
    shutil.copytree(ROOT / "deploy", home / "deploy")
    programs = home / "bin"
    programs.mkdir()
    for name in ("kubectl", "helm"):
        (programs / name).symlink_to(tool(name))
    path = f"{programs}:{os.environ['PATH']}"
    return os.environ | {"HOME": str(home), "PATH": path, "KUBECONFIG": str(home / "none")}


def run(text: str, person: dict[str, str]) -> str:
    assert shutil.which("openssl"), "the page's commands need openssl"
    ended = subprocess.run(
        ["bash", "-eo", "pipefail", "-c", text],
        capture_output=True,
        text=True,
        cwd=person["HOME"],
        env=person,
        timeout=COMMAND_TIMEOUT_S,
    )
    assert ended.returncode == 0, f"{text}\n{ended.stdout}\n{ended.stderr}"
    return ended.stdout


def commands_of(block: Block) -> Iterator[list[str]]:
    for line in block.text.replace("\\\n", " ").splitlines():
        if words := shlex.split(line, comments=True):
            yield words


def test_what_needs_no_cluster_works(person: dict[str, str]) -> None:
    assert len(TO_RUN) >= 3
    for block in TO_RUN:
        printed = run(block.text, person)
        assert printed.strip(), block.text
        if block.output is not None:
            assert has_lines(block.output, printed), f"{block.text}\n{printed}"


def test_what_creates_something_is_understood(person: dict[str, str]) -> None:
    """By kubectl, which does not ask a cluster for that. It finds the files that the page had the person make."""
    run(TO_RUN[0].text, person)
    created: dict[str, str] = {}
    for line in (line for block in NOT_RUN for line in block.text.splitlines()):
        if line.startswith("kubectl create "):
            created[run(f"{line} --dry-run=client --output name", person).strip()] = line
    assert {"namespace/motet", "secret/motet", "secret/motet-redis"} <= created.keys()


def test_secrets_of_the_page_are_those_that_motet_reads(person: dict[str, str]) -> None:
    from motet.cluster.application.secret_files import secrets_of_this_node

    run(TO_RUN[0].text, person)
    made = Path(person["HOME"]) / "motet-secrets"
    mounted = Path(person["HOME"]) / "mounted"
    mounted.mkdir(exist_ok=True)
    create = next(
        words
        for block in NOT_RUN
        for words in commands_of(block)
        if words[:5] == ["kubectl", "create", "secret", "generic", "motet"]
    )
    for name in (Path(word).name for word in create if word.startswith("~/")):
        shutil.copy(made / name, mounted / name)
    secrets = secrets_of_this_node({"MOTET_SECRETS_DIR": str(mounted)})
    assert secrets.redis_url == f"redis://:{(made / 'password').read_text()}@motet-redis:6379/0"
    assert [tenant for tenant, _ in secrets.keys or ()] == ["acme"] and secrets.operator_key
    assert all((made / name).stat().st_mode & 0o077 == 0 for name in os.listdir(made))


def test_folders_and_presets_that_a_command_names_are_there() -> None:
    named = [
        word for block in blocks(PAGE) for words in commands_of(block) for word in words if word.startswith("deploy/")
    ]
    assert len(named) > 5
    assert [one for one in named if not (ROOT / one).exists() and "/ours" not in one] == []


def test_manifests_and_values_of_the_page_are_valid(tmp_path: Path) -> None:
    """The job that fills the volume of the model mounts the claim that the chart makes; the values make an ingress."""
    texts = re.findall(r"^```yaml\n(.*?)^```$", (ROOT / PAGE).read_text(), re.M | re.S)
    found = [yaml.safe_load(text) for text in texts]
    (job,) = (one for one in found if one.get("kind") == "Job")
    assert list(problems([job])) == []
    (volume,) = job["spec"]["template"]["spec"]["volumes"]
    (values,) = (one for one in found if "ingress" in one)
    path = tmp_path / "values.yaml"
    path.write_text(yaml.safe_dump(values))
    made = templated("--values", str(path))
    assert list(problems(made)) == []
    claims = [one["metadata"]["name"] for one in made if one["kind"] == "PersistentVolumeClaim"]
    assert volume["persistentVolumeClaim"]["claimName"] in claims
    (ingress,) = (one for one in made if one["kind"] == "Ingress")
    size = ingress["metadata"]["annotations"]["nginx.ingress.kubernetes.io/proxy-body-size"]
    assert int(size.removesuffix("g")) << 30 > Settings().requests.max_upload_bytes  # and what the form adds
    chart = yaml.safe_load((ROOT / "deploy" / "helm" / "motet" / "Chart.yaml").read_text())
    oldest = chart["kubeVersion"].removeprefix(">=").removesuffix(".0-0")
    assert f"**Kubernetes** {oldest} or newer" in (ROOT / PAGE).read_text()


@pytest.mark.parametrize("program", ["kubectl", "helm"])
def test_options_of_what_is_not_run_exist(program: str) -> None:
    for block in NOT_RUN:
        for words in commands_of(block):
            if words[0] != program or words[1] == "port-forward":
                continue
            words = words[: words.index("--")] if "--" in words else words  # the rest is motet's
            verb = list(iter_verbs(words))
            known = run_tool(program, *verb, "--help").stdout + run_tool(program, "options", check=False).stdout
            options = {word.partition("=")[0] for word in words if word.startswith("-") and word != "-"}
            assert [one for one in options if not re.search(rf"(^|[\s,]){re.escape(one)}\b", known)] == [], words


ENDS = ("install", "uninstall", "apply", "delete", "exec", "logs", "get", "label", "namespace", "template")
VERBS = [*ENDS, "repo", "add", "create", "secret", "generic"]


def iter_verbs(words: list[str]) -> Iterator[str]:
    """`create secret generic` of such a command."""
    for word in words[1:4]:
        if word not in VERBS:
            return
        yield word
        if word in ENDS:
            return
