"""The images' Dockerfiles, held to the tree, to the product and to each other. No image is made here."""

from __future__ import annotations

import fnmatch
import importlib.util
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import click
import pytest

from motet.cluster.commands.cli import main
from motet.kernels.native import build
from motet.tests.rigs.dockerfile import Instruction, instructions, variables
from motet.tests.rigs.image_variables import image_variables

ROOT = Path(__file__).resolve().parents[2]
IMAGES = ROOT / "deploy" / "images"
DOCKERFILES = sorted(IMAGES.glob("*.Dockerfile"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
EDGE_PROGRAM = "/opt/motet/bin/motet-haproxy"
HADOLINT = Path(sys.executable).parent / "hadolint"
OWN_VARIABLES = {
    "PATH": "/opt/motet/bin:/usr/local/bin:/usr/local/sbin:/usr/bin:/usr/sbin:/bin:/sbin",
    "HF_HOME": "/var/cache/motet/huggingface",
    "MOTET_SLOW_KERNELS": "refuse",
    "PYTHONUNBUFFERED": "1",
    "TRITON_HOME": "/var/cache/motet",
    "XDG_CACHE_HOME": "/var/cache",
}
# Which GPUs a container sees is up to the runtime: by NVIDIA_VISIBLE_DEVICES=all a pod that asks for none would see
# those of others.
NVIDIAS_VARIABLES = {"NVIDIA_DRIVER_CAPABILITIES": "compute,utility"}

each_image = pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.stem)


def copied(found: list[Instruction]) -> list[str]:
    """Paths of the checkout that are copied into any stage."""
    copies = [one.words for one in found if one.name == "COPY"]
    return [word for words in copies if not words[0].startswith("--from") for word in words[:-1]]


def is_left_out(path: str) -> bool:
    """What .dockerignore says of a path: the last line that fits it, or a folder above it, counts."""
    parts = path.split("/")
    above = {"/".join(parts[:count]) for count in range(1, len(parts) + 1)}
    left_out = False
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        if not line or line.startswith("#"):
            continue
        pattern = line.removeprefix("!")
        if pattern.startswith("**/"):
            fits = any(fnmatch.fnmatch(part, pattern[3:]) for part in parts)
        else:
            fits = any(fnmatch.fnmatch(one, pattern) for one in above)
        if fits:
            left_out = not line.startswith("!")
    return left_out


def hadolint(path: Path) -> str:
    ran = subprocess.run([HADOLINT, "--no-color", path], capture_output=True, text=True, check=False)
    assert ran.returncode in (0, 1), ran.stderr
    return ran.stdout


def test_there_are_two_images() -> None:
    assert [path.stem for path in DOCKERFILES] == ["cpu", "cuda"]


@each_image
def test_dockerfiles_are_linted(path: Path, tmp_path: Path) -> None:
    assert hadolint(path) == ""
    planted = tmp_path / "Dockerfile"
    planted.write_text(path.read_text().replace("rm -rf /var/lib/apt/lists/*", "sudo true"))
    assert "DL3004" in hadolint(planted) and "DL3009" in hadolint(planted)


@each_image
def test_the_base_image_is_an_argument_with_a_tag(path: Path) -> None:
    found = instructions(path)
    (argument,) = [one.rest for one in found if one.name == "ARG"]
    name, _, image = argument.partition("=")
    assert re.fullmatch(r"docker\.io/library/python:3\.11\.\d+-slim-bookworm", image)
    assert {one.words[0] for one in found if one.name == "FROM"} == {f"${{{name}}}"}
    assert re.search(r"^python=3\.11\b", (ROOT / "scripts" / "lock").read_text(), re.MULTILINE)


@each_image
def test_what_is_copied_is_there_and_is_all_that_is_needed(path: Path) -> None:
    sources = copied(instructions(path))
    assert [one for one in sources if not (ROOT / one).exists() or is_left_out(one)] == []
    setuptools = PROJECT["tool"]["setuptools"]
    packages = {package.split(".")[1] for package in setuptools["packages"] if "." in package}
    files = {"pyproject.toml", "__init__.py", PROJECT["project"]["readme"], *PROJECT["project"]["license-files"]}
    files |= set(setuptools["package-data"]["motet"])
    examples = {"examples/demo/base", "examples/demo/adapters"}
    assert set(sources) == packages | files | examples | {f"deploy/images/requirements-{path.stem}.lock"}


def test_nothing_else_goes_to_the_builder() -> None:
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    sent = {one for one in tracked.splitlines() if not is_left_out(one)}
    wanted = tuple(one for path in DOCKERFILES for one in copied(instructions(path)))
    assert [one for one in sent if not any(one == source or one.startswith(f"{source}/") for source in wanted)] == []
    for secret in (
        ".git/config",
        ".venv/bin/python",
        ".motet/operator_key",
        "tests/conftest.py",
        "build/sbom-cpu.json",
    ):
        assert is_left_out(secret)
    assert is_left_out("cluster/__pycache__/config.pyc")


@each_image
def test_variables_are_those_of_the_product(path: Path) -> None:
    own = OWN_VARIABLES | (NVIDIAS_VARIABLES if path.stem == "cuda" else {})
    assert variables(instructions(path)) == {**image_variables(EDGE_PROGRAM), **own}


def test_serve_reads_the_variables_that_are_set() -> None:
    """A version of Ray that calls one otherwise fails here."""
    ray = importlib.util.find_spec("ray")
    assert ray is not None and ray.origin is not None
    text = (Path(ray.origin).parent / "serve" / "_private" / "constants.py").read_text()
    names = [name for name in image_variables(EDGE_PROGRAM) if name.startswith("RAY_SERVE_")]
    assert len(names) >= 9
    assert [name for name in names if f'"{name}"' not in text] == []


@each_image
def test_manifests_say_the_same(path: Path) -> None:
    """A pod's variable goes before the image's: so it must not say something else."""
    said = variables(instructions(path))
    text = "\n".join(one.read_text() for one in (ROOT / "deploy").rglob("*.yaml"))
    for name, value in re.findall(r"name: (\w+), value: \"?([^\"}\n]+)\"?}", text):
        assert name not in image_variables(EDGE_PROGRAM) or value == said[name], name


@each_image
def test_the_programs_that_are_named_are_there(path: Path) -> None:
    found = instructions(path)
    commands = [command for one in found if one.name == "RUN" for command in one.commands]
    programs = {command[0] for command in commands if command[0].startswith("/opt/motet/bin/")}
    assert programs == {"/opt/motet/bin/pip", "/opt/motet/bin/motet"}
    assert PROJECT["project"]["scripts"]["motet"] == "motet.cluster.commands.cli:main"
    (edge,) = [command for command in commands if command[0].endswith("/motet")]
    assert main.commands[edge[1]].make_context(edge[1], edge[2:]).params["path"] == Path(EDGE_PROGRAM)
    trial = next(command for command in commands if command[:3] == ["python", "-P", "-m"])
    assert trial[3] == f"motet.{Path(build.__file__).relative_to(ROOT).with_suffix('').as_posix().replace('/', '.')}"
    (entry,), (default,) = ([one.words for one in found if one.name == name] for name in ("ENTRYPOINT", "CMD"))
    assert entry == ["motet"]
    given = main.commands[default[0]].make_context(default[0], default[1:]).params
    assert given["path_or_id"] == "/opt/motet/examples/base" and str(given["data_dir"]) == "/var/lib/motet"


def test_a_wrong_command_would_be_seen() -> None:
    with pytest.raises(click.UsageError):
        main.commands["serve"].make_context("serve", ["/opt/motet/examples/base", "--data-folder", "/data"])


@each_image
def test_the_kernels_can_be_compiled_at_run_time(path: Path) -> None:
    """The last stage has a compiler that `kernels.native.build` knows, and tries it as the user that will serve."""
    found = instructions(path)
    last = max(one.stage for one in found)
    own = [one for one in found if one.stage == last]
    installed = {word for one in own if one.name == "RUN" for command in one.commands for word in command}
    assert set(build.COMPILERS) & installed and "wget" in installed
    names = [one.name for one in own]
    trial = next(at for at, one in enumerate(own) if one.rest.startswith('["python", "-P"'))
    assert [one.words for one in own if one.name == "USER"] == [["1000:1000"]]
    assert names.index("USER") < trial < names.index("ENTRYPOINT")


def test_a_machine_without_a_compiler_is_reported(tmp_path: Path) -> None:
    tried = subprocess.run(
        [sys.executable, "-P", "-m", build.__name__],
        env={"PATH": str(tmp_path), "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert tried.returncode == 1 and "no C++ compiler was found" in tried.stderr


def test_the_images_differ_where_they_must() -> None:
    cpu, cuda = (path.read_text() for path in DOCKERFILES)
    differing = set(cuda.replace("cuda", "cpu").splitlines()) ^ set(cpu.splitlines())
    about = ("motet for nodes", "Triton", "C++ kernels are compiled at", "NVIDIA_", "XDG_CACHE_HOME", "pip install")
    assert [line for line in differing if not any(word in line for word in about)] == []


@each_image
def test_ports_are_those_of_the_api_and_of_metrics(path: Path) -> None:
    (ports,) = [one.words for one in instructions(path) if one.name == "EXPOSE"]
    assert ports == ["8000", "9400"]
