"""docs/models.md says which bases are served."""

from __future__ import annotations

from motet.tests.rigs.imports import ROOT
from motet.tests.rigs.made_models_page import made_page


def test_the_page_is_that_of_the_families() -> None:
    page = (ROOT / "docs" / "models.md").read_text()
    assert page == made_page(page), "run .venv/bin/python -m motet.tests.rigs.made_models_page docs/models.md"
