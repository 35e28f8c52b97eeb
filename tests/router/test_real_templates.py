"""Chats have the tokens of transformers by real chat templates, and docs/templates.md has the table.

They are not in this repository: `scripts/templates` puts them into .venv. They cost half a minute of CPU: each has a
tokenizer of its own.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from motet.tests.rigs.made_templates_page import TRANSFORMERS, differences, made_page, real_templates

PAGE = Path(__file__).resolve().parents[2] / "docs" / "templates.md"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not real_templates(), reason="scripts/templates has not been run"),
]


@pytest.mark.parametrize("name", real_templates())
async def test_every_chat_has_the_tokens_of_transformers(name: str) -> None:
    _, found = await differences(real_templates()[name])
    assert [case for case, outcome in found.items() if outcome == "other"] == []


async def test_the_page_is_up_to_date() -> None:
    page = PAGE.read_text()
    if f"With transformers {TRANSFORMERS}." not in page:
        pytest.skip("another version of transformers may refuse in other words")
    assert await made_page(page) == page, (
        "run .venv/bin/python -m motet.tests.rigs.made_templates_page docs/templates.md"
    )
