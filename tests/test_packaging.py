"""What is installed beside the Python files."""

from __future__ import annotations

import tomllib
from importlib.util import find_spec
from pathlib import Path

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
