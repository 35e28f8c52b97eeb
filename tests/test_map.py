"""The pages name what is there: folders, files, links and anchors."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from motet.tests.rigs.imports import ROOT

PRODUCT = ("kernels", "adapters", "workers", "router", "cluster")
TOP_FOLDERS = (*PRODUCT, "benchmarks", "docs", "examples", "scripts", "tests")
MAP = ROOT / "docs" / "map.md"
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md")])
CURRENT = [page for page in PAGES if page.name != "CHANGELOG.md"]  # a changelog names what was
CODE = {".py", ".cpp", ".h"}

PATH = re.compile(rf"(?<![\w./-])(?:{'|'.join(TOP_FOLDERS)})/[\w./*-]*[\w/*]")
FILE = re.compile(r"`([\w*-]+(?:/[\w*-]+)*\.(?:py|h|cpp|md|svg))`")
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)|!\[[^\]]*\]\(([^)\s]+)\)|<img[^>]*\bsrc=\"([^\"]+)\"")
HEADING = re.compile(r"^#{1,6} +(.*?) *$", re.MULTILINE)
FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


def named_paths(text: str) -> Iterator[str]:
    """Paths from the checkout's root that a page names, and files that it names without a folder."""
    for found in PATH.finditer(text):
        before = text[max(0, found.start() - 2) : found.start()]
        if "](" not in before:  # a link is relative to its page
            yield found.group()
    yield from (found.group(1) for found in FILE.finditer(text))


def is_there(name: str) -> bool:
    """Whether a file or folder is called so: from the root, or, without a folder, anywhere of ours."""
    if "/" in name:
        return any(ROOT.glob(name.rstrip("/")))
    return any(any((ROOT / folder).rglob(name)) for folder in TOP_FOLDERS) or any(ROOT.glob(name))


def anchors(text: str) -> set[str]:
    """What GitHub calls the headings of a page."""
    found: set[str] = set()
    for heading in HEADING.findall(FENCED.sub("", text)):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-")
        found.add(slug if slug not in found else f"{slug}-1")
    return found


def dead_links(page: Path) -> list[str]:
    dead = []
    for groups in LINK.findall(FENCED.sub("", page.read_text())):
        target = next(group for group in groups if group)
        if re.match(r"[a-z]+:", target):
            continue  # of another site
        name, _, anchor = target.partition("#")
        found = (page.parent / name).resolve() if name else page
        if not found.exists() or (anchor and anchor not in anchors(found.read_text())):
            dead.append(target)
    return dead


def product_folders() -> set[str]:
    """Folders of the product that hold code."""
    return {
        f"{path.parent.relative_to(ROOT)}/"
        for top in PRODUCT
        for path in (ROOT / top).rglob("*")
        if path.suffix in CODE
    }


def mapped_folders(text: str) -> list[str]:
    """The first cell of each row of the map's tables."""
    return re.findall(r"^\| `([\w/]+/)` \|", text, re.MULTILINE)


def test_the_map_has_every_folder_once() -> None:
    mapped = mapped_folders(MAP.read_text())
    assert len(mapped) == len(set(mapped))
    assert product_folders() - set(mapped) == set()


def test_the_map_is_one_page() -> None:
    assert len(MAP.read_text().splitlines()) <= 180


@pytest.mark.parametrize("page", CURRENT, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_names_is_there(page: Path) -> None:
    assert [name for name in named_paths(page.read_text()) if not is_there(name)] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    assert dead_links(page) == []


def test_the_readme_leads_to_every_page() -> None:
    """To a page of a sub-folder by way of the page beside that folder."""
    linked = {ROOT / "README.md"}
    new = set(linked)
    while new:
        page = new.pop()
        for groups in LINK.findall(page.read_text()):
            name = next(group for group in groups if group).partition("#")[0]
            found = (page.parent / name).resolve()
            if name.endswith(".md") and found.is_file() and found not in linked:
                linked.add(found)
                new.add(found)
    assert [page.name for page in PAGES if page not in linked and ROOT / "examples" not in page.parents] == []


def test_what_is_missing_would_be_seen(tmp_path: Path) -> None:
    text = (
        "See `kernels/nowhere.py`, kernels/none/ in a drawing, and `no_such_file.py`.\n`kernels/backend.py` is there."
    )
    wrong = [name for name in named_paths(text) if not is_there(name)]
    assert sorted(set(wrong)) == ["kernels/none/", "kernels/nowhere.py", "no_such_file.py"]
    page = tmp_path / "page.md"
    page.write_text("# A `b` & c\n[gone](none.md) [here](#a-b--c) [not here](#d) [site](https://example.org)\n")
    assert dead_links(page) == ["none.md", "#d"]
    assert mapped_folders("| `kernels/` | x |\n| `kernels/gpu/` | y |\n| other | `cluster/` |\n") == [
        "kernels/",
        "kernels/gpu/",
    ]
