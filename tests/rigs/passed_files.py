"""Test files that are left out while nothing has changed since they last passed.

Each depends on one part alone, costs minutes, and gives the same result every time. `tests/passed.json` holds for each
a digest of all its sources and the dependencies with which they passed. Only a run in which every test of the file
passed writes there (`passing_runs.py`); commit it with the change. `scripts/test` leaves such files out, and
`scripts/test --all` leaves out none.
"""

from __future__ import annotations

import ast
import hashlib
import json
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import packages_distributions, version
from pathlib import Path

from motet.kernels.native.build import COMPILERS
from motet.tests.rigs.imports import ROOT, file_of, imported_modules, module_of

RECORD = "tests/passed.json"
TEST_TOOLS = {"pytest", "hypothesis"}  # run the tests, and are not what they test
# The kernels in C++ have code of their own for processors with these.
CPU_FEATURES = ("avx", "avx2", "fma", "avx512f", "avx512bw", "avx512vl", "avx512_bf16")


@dataclass(frozen=True)
class Covered:
    """Test files that may be left out.

    `tests`: a glob. `also`: globs of what they read or run without importing it. `is_native`: they run compiled C++, so
    the compiler and the processor are among their dependencies.
    """

    tests: str
    also: tuple[str, ...] = ()
    is_native: bool = False


COVERED = (
    Covered("tests/interpreted/test_*.py", also=("tests/interpreted/conftest.py",)),
    Covered("tests/kernels/test_triton*.py", also=("tests/kernels/compiled.md",)),
    Covered(
        "tests/kernels/test_first_run.py",
        also=("benchmarks/gpu/*.py", "examples/demo/base/*", "examples/demo/adapters/*/*", "kernels/cpp/*"),
        is_native=True,
    ),
    Covered("tests/kernels/test_native*.py", also=("tests/kernels/conftest.py", "kernels/cpp/*"), is_native=True),
    Covered(
        "tests/kernels/test_sanitizers.py",
        also=("tests/kernels/conftest.py", "kernels/cpp/*", "tests/kernels/test_native*.py"),
        is_native=True,
    ),
)


@dataclass(frozen=True)
class Sources:
    """What a test file depends on: files from the root, and names of imported modules that are not motet's."""

    files: tuple[str, ...]
    foreign: frozenset[str]

    def digest(self, root: Path = ROOT) -> str:
        found = hashlib.sha256()
        for file in self.files:
            content = (root / file).read_bytes()
            found.update(f"{file}\0{len(content)}\0".encode() + content)
        return found.hexdigest()[:32]


def covered_files(root: Path = ROOT) -> dict[str, Covered]:
    """All test files of `COVERED`, by their path from the root."""
    return {str(path.relative_to(root)): group for group in COVERED for path in sorted(root.glob(group.tests))}


def sources(file: str, group: Covered, root: Path = ROOT) -> Sources:
    """A test file, what it reads, and all that these import, directly or by way of others."""
    beginnings = [root / file, *(path for pattern in group.also for path in root.glob(pattern) if path.is_file())]
    files: set[Path] = set()
    foreign: set[str] = set()
    while beginnings:
        path = beginnings.pop()
        if path in files:
            continue
        files.add(path)
        if path.suffix == ".py":
            ours, others = _named_in(path, root)
            beginnings += ours
            foreign |= others
    own = foreign - sys.stdlib_module_names - TEST_TOOLS
    return Sources(tuple(sorted(str(path.relative_to(root)) for path in files)), frozenset(own))


def _named_in(path: Path, root: Path) -> tuple[list[Path], set[str]]:
    """Files of the checkout that a Python file names, and top-level names of other packages that it imports."""
    files: list[Path] = []
    foreign: set[str] = set()
    for name in _modules_named_in(path.read_text(), module_of(path, root)):
        top = name.partition(".")[0]
        beside = path.with_name(f"{top}.py")  # of a program, which imports what lies beside it
        if top == "motet":
            found = file_of(name, root) or file_of(name.rpartition(".")[0], root)
            files += [] if found is None else [found]
        elif beside.is_file() and top not in sys.stdlib_module_names:
            files.append(beside)
        else:
            foreign.add(top)
    return files, foreign


@cache
def _modules_named_in(source: str, module: str) -> frozenset[str]:
    """Modules that are imported, at any depth, or named in a text: processes are started with the names of modules."""
    texts = {node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant)}
    named = {text for text in texts if isinstance(text, str) and text.startswith("motet.")}
    return frozenset({*imported_modules(source, module), *named})


def dependencies(foreign: Iterable[str], is_native: bool) -> str:
    """The versions of what these tests use, and where they are native the compiler and the processor."""
    names = {name for module in foreign for name in _distributions().get(module, ())}
    found = [f"Python {sys.version_info.major}.{sys.version_info.minor}"]
    found += [f"{name} {version(name)}" for name in sorted(names, key=str.lower)]
    return ", ".join([*found, *(_machine() if is_native else ())])


@cache
def _distributions() -> Mapping[str, list[str]]:
    """The installed distributions by the modules that they have; reading them all takes a second."""
    return packages_distributions()


@cache
def _machine() -> tuple[str, ...]:
    compiler = next((path for name in COMPILERS if (path := shutil.which(name))), None)
    if compiler is None:
        return "no compiler", platform.machine()
    said = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    flags = next((line.split() for line in lines if line.startswith(("flags", "Features"))), [])
    features = [name for name in CPU_FEATURES if name in flags]
    return said.splitlines()[0], " ".join([platform.machine(), *features])


@dataclass
class PassedFiles:
    """The record. A file's entry has the digest of its sources, and each set of dependencies with which they passed."""

    path: Path
    entries: dict[str, tuple[str, list[str]]] = field(default_factory=dict)

    @classmethod
    def read(cls, root: Path = ROOT) -> PassedFiles:
        path = root / RECORD
        found = json.loads(path.read_text()) if path.exists() else {}
        return cls(path, {file: (entry["sources"], entry["with"]) for file, entry in found.items()})

    def why_to_run(self, file: str, digest: str, used: str) -> str | None:
        """None: it has passed so."""
        if file not in self.entries:
            return "it has not passed yet"
        passed_digest, passed_with = self.entries[file]
        if digest != passed_digest:
            return "its sources have changed since it passed"
        return None if used in passed_with else f"it has not passed with {used}"

    def add(self, passed: Mapping[str, tuple[str, str]]) -> None:
        """Notes that each file passed with sources of this digest and these dependencies, and writes the record.

        What other dependencies passed with stays while the sources are the same. Files that are gone are forgotten.
        """
        for file, (digest, used) in passed.items():
            known_digest, known = self.entries.get(file, (digest, []))
            self.entries[file] = (digest, sorted({used, *(known if known_digest == digest else ())}))
        root = self.path.parents[len(Path(RECORD).parts) - 1]
        kept = {file: self.entries[file] for file in sorted(self.entries) if (root / file).exists()}
        text = json.dumps({file: {"sources": digest, "with": used} for file, (digest, used) in kept.items()}, indent=1)
        written = self.path.with_suffix(".new")
        written.write_text(text + "\n")
        written.replace(self.path)


def standing(root: Path = ROOT) -> dict[str, tuple[str, str, str | None]]:
    """Of each covered file: the digest of its sources, its dependencies, and why it must run; None: it need not."""
    record = PassedFiles.read(root)
    found = {}
    for file, group in covered_files(root).items():
        own = sources(file, group, root)
        digest, used = own.digest(root), dependencies(own.foreign, group.is_native)
        found[file] = digest, used, record.why_to_run(file, digest, used)
    return found
