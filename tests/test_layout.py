"""The arrows between the folders, and what keeps a file easy to find."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from motet.tests.rigs.imports import ROOT, imported_modules, module_of

LEVELS = {"kernels": 0, "adapters": 0, "workers": 1, "router": 2, "cluster": 3}
SEEN_BY_ROUTER = ("motet.workers.wire",)  # all of `workers` that `router` may import
DEMO = "motet.examples"  # facts and questions; imports nothing of motet and only `cluster` drives it
EMPTY_NAMES = {"utils", "util", "common", "misc", "helpers", "base"}
NOT_OURS = {"build", "dist", "__pycache__"}
PATH_OF_A_MACHINE = re.compile(r"/(?:home|Users)/[a-z]\w*/|/roo[t]/|[A-Z]:\\Users\\")


def our_files(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.iterdir()):
        if path.name in NOT_OURS or path.name.startswith(".") or path.name.endswith(".egg-info"):
            continue
        if path.is_dir():
            yield from our_files(path)
        else:
            yield path


FILES = list(our_files(ROOT))
PRODUCT = [path for path in FILES if path.suffix == ".py" and path.relative_to(ROOT).parts[0] in LEVELS]
SPLIT_FOLDERS = {  # folders that have sub-folders
    ".".join(("motet", *path.relative_to(ROOT).parts[:depth]))
    for path in PRODUCT
    for depth in range(1, len(path.relative_to(ROOT).parts) - 1)
}


def room_of(module: str) -> str:
    """What must not be in a cycle: a folder without sub-folders, or a module that lies beside sub-folders."""
    folder = module.rpartition(".")[0]
    return module if folder in SPLIT_FOLDERS else folder


def relative(paths: list[Path]) -> list[str]:
    return [str(path.relative_to(ROOT)) for path in paths]


def is_within(imported: str, module: str) -> bool:
    return imported == module or imported.startswith(module + ".")


def forbidden(module: str, imported: str) -> str | None:
    """Why `module` may not import `imported`; None if it may."""
    if not is_within(imported, "motet"):
        return None
    importer, target = module.split(".")[1], imported.split(".")[1]
    if is_within(imported, DEMO):
        return None if importer == "cluster" else "only cluster drives the demo"
    if target not in LEVELS or target == importer:
        return None  # of the root (`__version__`), or of its own folder
    if LEVELS[target] >= LEVELS[importer]:
        return f"{importer} is not above {target}"
    if importer == "router" and target == "workers" and not any(is_within(imported, seen) for seen in SEEN_BY_ROUTER):
        return f"router may import {' and '.join(SEEN_BY_ROUTER)} only"
    return None


def test_there_is_something_to_look_at() -> None:
    assert {path.relative_to(ROOT).parts[0] for path in PRODUCT} == set(LEVELS)


def test_imports_run_downwards() -> None:
    wrong = [
        f"{path.relative_to(ROOT)} imports {imported}: {why}"
        for path in PRODUCT
        for imported in imported_modules(path.read_text(), module_of(path))
        if (why := forbidden(module_of(path), imported))
    ]
    assert not wrong, "\n".join(wrong)


def arrows(modules: Mapping[str, str]) -> dict[str, set[str]]:
    """Which rooms each room imports, of the source of each module."""
    graph: dict[str, set[str]] = {room_of(module): set() for module in modules}
    for module, source in modules.items():
        for imported in imported_modules(source, module):
            target = next((name for name in (imported, imported.rpartition(".")[0]) if name in modules), None)
            if target is not None and room_of(target) != room_of(module):
                graph[room_of(module)].add(room_of(target))
    return graph


def cycle_in(graph: Mapping[str, set[str]]) -> tuple[str, ...]:
    """Rooms that import each other in a ring; empty: there are none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return tuple(error.args[1])
    return ()


def test_rooms_do_not_import_each_other_in_a_ring() -> None:
    assert cycle_in(arrows({module_of(path): path.read_text() for path in PRODUCT})) == ()


def test_a_ring_would_be_seen() -> None:
    sources = {
        "motet.workers.memory.pool": "from ..scheduling.growing_sequence import GrowingSequence",
        "motet.workers.scheduling.growing_sequence": "def late():\n    from .. import engine",
        "motet.workers.scheduling.plan": "",
        "motet.workers.engine": "from .memory import pool",
    }
    assert set(cycle_in(arrows(sources))) == {
        "motet.workers.memory",
        "motet.workers.scheduling",
        "motet.workers.engine",
    }
    assert cycle_in(arrows(sources | {"motet.workers.engine": "from .scheduling import plan"})) != ()
    assert cycle_in(arrows(sources | {"motet.workers.engine": "import torch"})) == ()


def test_every_folder_of_the_product_is_installed() -> None:
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    code = [path for path in FILES if path.suffix in (".py", ".cpp") and path.relative_to(ROOT).parts[0] in LEVELS]
    assert sorted(listed) == sorted({"motet", *(module_of(path.parent) for path in code)})


def test_tests_lie_where_what_they_test_lies() -> None:
    folders = {path.parent.name for path in FILES if path.name.startswith("test_") and path.suffix == ".py"}
    assert folders == {*LEVELS, "tests", "deploy", "whole", "interpreted", "hostile"}


def test_the_demo_data_imports_nothing_of_the_product() -> None:
    wrong = [
        f"{path.relative_to(ROOT)} imports {imported}"
        for path in FILES
        if path.suffix == ".py" and path.relative_to(ROOT).parts[0] == "examples"
        for imported in imported_modules(path.read_text(), module_of(path))
        if is_within(imported, "motet") and not is_within(imported, DEMO)
    ]
    assert not wrong, "\n".join(wrong)


def test_product_code_imports_relatively() -> None:
    wrong = []
    for path in PRODUCT:
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module or ""]
            wrong += [f"{path.relative_to(ROOT)} imports {name}" for name in names if is_within(name, "motet")]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("module", "source", "allowed"),
    [
        ("motet.workers.models.decoder", "from ...kernels import lora", True),
        ("motet.workers.models.decoder", "from ..memory.pool import Pool", True),
        ("motet.workers.engine", "from ..router.text.text import Text", False),
        ("motet.kernels.lora", "from ..adapters.packing.layout import AdapterLayout", False),
        ("motet.adapters.store.store", "from ..packing.layout import AdapterLayout", True),
        ("motet.adapters.store.store", "import motet.workers.config", False),
        ("motet.router.text.text", "from ...workers.wire import messages", True),
        ("motet.router.text.text", "from ...workers.wire.messages import Frame", True),
        ("motet.router.text.text", "from ...workers.plan import StepPlan", False),
        ("motet.router.http.auth", "from ...workers.config import EngineConfig", False),
        ("motet.router.text.text", "def late():\n    from ...cluster import launch", False),
        ("motet.router.text.text", "from ... import __version__", True),
        ("motet.cluster.commands.run_demo", "from ...examples.demo import questions", True),
        ("motet.router.text.text", "from ...examples.demo import questions", False),
    ],
)
def test_the_rule_itself(module: str, source: str, allowed: bool) -> None:
    reasons = [forbidden(module, imported) for imported in imported_modules(source, module)]
    assert (reasons == [None]) is allowed


def test_only_the_root_is_a_package_with_an_init_file() -> None:
    assert relative([path for path in FILES if path.name == "__init__.py"]) == ["__init__.py"]


def test_names_say_what_is_inside() -> None:
    assert relative([path for path in FILES if path.stem.strip("_") in EMPTY_NAMES]) == []


def test_no_file_names_a_path_of_one_machine() -> None:
    wrong = []
    for path in FILES:
        try:
            text = path.read_text()
        except UnicodeDecodeError:
            continue  # weights
        if PATH_OF_A_MACHINE.search(text) or str(ROOT) in text:
            wrong.append(path)
    assert relative(wrong) == []


def test_tests_that_start_ray_are_where_they_are_looked_for() -> None:
    """`scripts/test` runs those of these folders alone (`WITH_RAY` in `scripts/run_tests.py`)."""
    mark = "mark." + "cluster"
    marked = {path.parent.name for path in ROOT.glob("tests/**/*.py") if mark in path.read_text()}
    assert marked == {"hostile", "whole"}
