"""Measures of the product's source: how much of it there is, and how much of it one request runs through.

`python -m motet.tests.rigs.house_figures` prints those of the source alone.
"""

from __future__ import annotations

import ast
import json
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from types import FrameType

from motet.tests.rigs.imports import ROOT, imported_modules, module_of

PRODUCT = ("kernels", "adapters", "workers", "router", "cluster")
CODE = {".py", ".lua", ".h", ".cpp"}
SHORT_LINES = 60
_COMPREHENSIONS = ("<listcomp>", "<setcomp>", "<dictcomp>")
# Participles and adverbs say that something happened; a name says what it is.
FORBIDDEN_NAMES = frozenset(
    {
        "found",
        "held",
        "given",
        "known",
        "kept",
        "wanted",
        "shown",
        "begun",
        "sent",
        "own",
        "most",
        "least",
        "one",
        "others",
        "here",
        "lately",
        "coming",
        "alike",
        "unseen",
        "passed",
        "brought",
        "apart",
        "left",
        "rest",
        "what",
        "asked",
        "gone",
        "taken",
        "made",
    }
)


@cache
def sources(root: Path = ROOT) -> Mapping[Path, str]:
    """The product's source by path: Python, Lua and C++."""
    paths = sorted(path for top in PRODUCT for path in (root / top).rglob("*") if path.suffix in CODE)
    return {path: path.read_text() for path in paths}


def num_lines(*suffixes: str) -> int:
    """Docstrings and blank lines count: they are read too."""
    return sum(text.count("\n") for path, text in sources().items() if path.suffix in suffixes)


def _trees() -> Iterator[tuple[Path, ast.Module]]:
    yield from ((path, ast.parse(text)) for path, text in sources().items() if path.suffix == ".py")


def defined_names(tree: ast.AST) -> Iterator[str]:
    """Variables, attributes, parameters, functions and classes at each place where they get a value."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name


def forbidden_names() -> Counter[str]:
    """How often each of `FORBIDDEN_NAMES` is defined, underscores around it aside."""
    names = (name.strip("_") for _, tree in _trees() for name in defined_names(tree))
    return Counter(name for name in names if name in FORBIDDEN_NAMES)


def repeated_class_names() -> list[str]:
    """Public names that several classes have."""
    counts = Counter(
        node.name
        for _, tree in _trees()
        for node in tree.body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    return sorted(name for name, count in counts.items() if count > 1)


def importers() -> dict[str, set[str]]:
    """By module of the product, those that import it."""
    graph: dict[str, set[str]] = {module_of(path): set() for path, _ in _trees()}
    for path, _ in _trees():
        module = module_of(path)
        for imported in imported_modules(sources()[path], module):
            target = next((name for name in (imported, imported.rpartition(".")[0]) if name in graph), None)
            if target is not None and target != module:
                graph[target].add(module)
    return graph


def short_parts() -> list[str]:
    """Files of under `SHORT_LINES` lines whose only importer lies in the same folder: parts of that importer."""
    lines = {module_of(path): text.count("\n") for path, text in sources().items() if path.suffix == ".py"}
    return sorted(
        module
        for module, others in importers().items()
        if lines[module] < SHORT_LINES
        and len(others) == 1
        and next(iter(others)).rpartition(".")[0] == module.rpartition(".")[0]
    )


def file_cycle() -> tuple[str, ...]:
    """Modules that import each other in a ring when they are loaded; empty: there are none."""
    graph: dict[str, set[str]] = {module_of(path): set() for path, _ in _trees()}
    for path, tree in _trees():
        module = module_of(path)
        loaded = ast.Module([node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)], [])
        for imported in imported_modules(ast.unparse(loaded), module):
            target = next((name for name in (imported, imported.rpartition(".")[0]) if name in graph), None)
            if target is not None:
                graph[module].add(target)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return tuple(error.args[1])
    return ()


@dataclass
class Trace:
    """The files of the product that ran, and the functions, each with its file.

    Comprehensions of lists, sets and dictionaries are no functions: since Python 3.12 they are part of another one.
    """

    files: set[str] = field(default_factory=set)
    functions: set[tuple[str, str]] = field(default_factory=set)

    def note(self, frame: FrameType, event: str, _argument: object) -> None:
        if event == "call":
            code = frame.f_code
            if (path := _product_path(code.co_filename)) is not None and code.co_name not in _COMPREHENSIONS:
                self.files.add(path)
                self.functions.add((path, code.co_qualname if sys.version_info >= (3, 11) else code.co_name))


@cache
def _product_path(filename: str) -> str | None:
    path = filename.removeprefix(f"{ROOT}/")
    return path if path != filename and path.startswith(tuple(f"{top}/" for top in PRODUCT)) else None


@contextmanager
def traced() -> Iterator[Trace]:
    """Traces this thread, and those that begin meanwhile."""
    trace = Trace()
    threading.setprofile(trace.note)
    sys.setprofile(trace.note)
    try:
        yield trace
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def source_figures() -> dict[str, int]:
    return {
        "product_lines": num_lines(*CODE),
        "product_files": len(sources()),
        "lua_lines": num_lines(".lua"),
        "forbidden_names": forbidden_names().total(),
        "repeated_class_names": len(repeated_class_names()),
        "short_parts": len(short_parts()),
    }


if __name__ == "__main__":
    print(json.dumps(source_figures(), indent=2))
    print(json.dumps({"names": forbidden_names().most_common(), "classes": repeated_class_names()}, indent=None))
    print("\n".join(short_parts()))
