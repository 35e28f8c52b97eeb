"""What Python files of the checkout import of each other."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def module_of(path: Path, root: Path = ROOT) -> str:
    return ".".join(("motet", *path.relative_to(root).with_suffix("").parts))


def file_of(module: str, root: Path = ROOT) -> Path | None:
    """The file of a module of motet; None if there is none of that name."""
    package, *parts = module.split(".")
    path = root.joinpath(*parts).with_suffix(".py") if parts else root / "__init__.py"
    return path if package == "motet" and path.is_file() else None


def imported_modules(source: str, module: str) -> Iterator[str]:
    """Absolute names of all that `module` imports, at any depth; `from x import y` gives x.y."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = module.split(".")[: -node.level] if node.level else []
            origin = ".".join([*parts, *([node.module] if node.module else [])])
            yield from (f"{origin}.{alias.name}" for alias in node.names)
