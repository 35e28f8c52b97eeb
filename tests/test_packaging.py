"""What is installed beside the Python files."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from importlib.util import find_spec
from pathlib import Path

from motet.benchmarks.papers.__main__ import MEASURED, VIRTUAL
from motet.tests.rigs.patience import PATIENCE_S

ROOT = Path(__file__).resolve().parent.parent
SETUPTOOLS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]


def test_files_that_are_not_python_are_shipped() -> None:
    shipped = {
        path.relative_to(ROOT)
        for package, patterns in SETUPTOOLS["package-data"].items()
        for pattern in patterns
        for path in ROOT.joinpath(*package.split(".")[1:]).glob(pattern)
    }
    product = {package.split(".")[1] for package in SETUPTOOLS["packages"] if "." in package}
    needed = {
        Path("py.typed"),
        *(path.relative_to(ROOT) for path in (ROOT / "kernels" / "cpp").iterdir()),
        *(path.relative_to(ROOT) for part in product for path in (ROOT / part).rglob("*.lua")),
    }
    assert shipped == needed


def test_no_process_that_imports_ray_builds_a_grammar_for_nothing() -> None:
    """Ray imports jsonschema, which imports this where it is installed: a second of CPU for each of its processes.

    Extras of jsonschema bring it. A tool that wants them is installed apart, as `scripts/sbom` does.
    """
    assert find_spec("rfc3987_syntax") is None, "remove it: .venv/bin/python -m pip uninstall rfc3987-syntax"


# Imports each module whose name it is given where further packages cannot be imported, and prints those that fail.
IMPORTS = """
import importlib, sys
from importlib.abc import MetaPathFinder

closed, names = set(sys.argv[1].split(",")), sys.argv[2:]

class Closed(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in closed:
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Closed())
for name in names:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        print(name, error)
"""
# That use other programs or Triton, which the tests' environment has, as docs/benchmarks.md says.
IN_THE_TESTS_ENVIRONMENT = {
    "bases",
    "device_idle",
    "hostile",
    "loop",
    "mixed_steps",
    "papers.forks",
    "structured",
    "tool_calls",
    "vs_peft",
}


def test_documented_benchmarks_load_in_the_environment_that_the_readme_makes() -> None:
    text = "".join(page.read_text() for page in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md")))
    names = {one.replace("/", ".") for one in re.findall(r"python benchmarks/([a-z_0-9/]+)\.py", text)}
    names |= set(re.findall(r"python -m motet\.benchmarks\.([a-z_0-9.]*[a-z_0-9])", text))
    names = {name for name in names if not name.startswith("gpu.")}  # docs/gpu.md says what these need
    names |= {f"papers.{name}" for name in (*VIRTUAL, *MEASURED)}
    assert len(names) > 40
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    further = {re.split(r"[<>=;]", one)[0].lower() for extra in extras.values() for one in extra} - {
        "jsonschema"
    }  # Ray brings it
    closed = {module for module, of in packages_distributions().items() if {one.lower() for one in of} <= further}
    assert {"highspy", "peft", "openai", "pytest"} <= closed
    command = [sys.executable, "-c", IMPORTS, ",".join(closed), *(f"motet.benchmarks.{name}" for name in sorted(names))]
    ran = subprocess.run(command, capture_output=True, text=True, check=True, timeout=PATIENCE_S)
    failed = {line.split()[0].removeprefix("motet.benchmarks.") for line in ran.stdout.splitlines()}
    assert failed == IN_THE_TESTS_ENVIRONMENT, ran.stdout
    page = (ROOT / "docs" / "benchmarks.md").read_text().partition("\n## ")[0]
    assert all(f"`{name}`" in page for name in IN_THE_TESTS_ENVIRONMENT)
