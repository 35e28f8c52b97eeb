"""The examples in docstrings are true: each docstring that has some is run by itself.

Those of the client find `client`, of a stand-in for a motet, and `folder`, an adapter.
"""

from __future__ import annotations

import doctest
import importlib
import re
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from motet.cluster.client.client import MotetClient
from motet.tests.rigs.fake_motet import KEY, running_fake
from motet.tests.rigs.house_figures import sources
from motet.tests.rigs.imports import module_of

MIN_EXAMPLES = 60
ADAPTER = Path(__file__).resolve().parents[1] / "examples" / "demo" / "adapters" / "pirate"
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def docstrings() -> Iterator[doctest.DocTest]:
    finder = doctest.DocTestFinder(exclude_empty=True)
    for path, text in sources().items():
        if path.suffix == ".py" and ">>> " in text:
            module = importlib.import_module(module_of(path))
            yield from (test for test in finder.find(module) if test.examples)


DOCSTRINGS = list(docstrings())


def test_there_are_examples_of_the_public_surface() -> None:
    assert len(DOCSTRINGS) >= MIN_EXAMPLES


@pytest.mark.parametrize("example", DOCSTRINGS, ids=lambda example: example.name)
def test_an_example_is_true(example: doctest.DocTest) -> None:
    with ExitStack() as stack:
        if re.search(r"\bclient\b", "".join(one.source for one in example.examples)):
            fake = stack.enter_context(running_fake())
            client = stack.enter_context(MotetClient(fake.url, KEY))
            example.globs |= {"client": client, "folder": ADAPTER}
        report: list[str] = []
        results = doctest.DocTestRunner(optionflags=FLAGS).run(example, out=report.append)
    assert results.failed == 0, "".join(report)
