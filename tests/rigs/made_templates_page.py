"""The table of docs/templates.md, made of the chat templates that `scripts/templates` has put into .venv.

scripts/templates
.venv/bin/python -m motet.tests.rigs.made_templates_page docs/templates.md
"""

from __future__ import annotations

import asyncio
import functools
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import transformers

from motet.router.text.chat_renderer import TemplateForms
from motet.tests.rigs.chat_cases import CASES, TemplateRig

FOLDER: Final = Path(__file__).resolve().parents[2] / ".venv" / "chat_templates"
TRANSFORMERS: Final = ".".join(transformers.__version__.split(".")[:2])
REFUSED: Final = "the model's chat template refused the messages: "
_BLOCK: Final = re.compile(r"(<!-- made: templates -->\n).*?(<!-- end -->)", re.DOTALL)
_COLUMNS: Final = (
    "template",
    "arguments",
    "lists of parts",
    "tools",
    "calls",
    "thinking",
    "equal",
    "placed",
    "refuses",
)


@functools.cache
def real_templates() -> Mapping[str, str]:
    """Templates by name; none where `scripts/templates` has not been run."""
    return {path.stem: path.read_text() for path in sorted(FOLDER.glob("*.jinja"))}


async def differences(template: str) -> tuple[TemplateForms, dict[str, str]]:
    """What motet knows of the template, and for each case: "equal", "refused" where both refuse it, "placed" where
    only the template does, or "other".
    """
    rig = TemplateRig(template)
    found = {}
    for name, case in CASES.items():
        expected, ours = rig.expected(case), await rig.ours(case)
        if isinstance(expected, str):
            # Where motet has put the system's message elsewhere, what is left is refused in other words.
            words = expected if rig.service.forms.system_places == "any" else ""
            is_same = isinstance(ours, str) and ours.startswith(f"400 {REFUSED}{words}")
            found[name] = "refused" if is_same else "other" if isinstance(ours, str) else "placed"
        else:
            found[name] = "equal" if ours == expected else "other"
    rig.close()
    return rig.service.forms, found


async def made_page(page: str) -> str:
    """The page as it should be."""
    rows = [await _row(name, template) for name, template in real_templates().items() if "_training" not in name]
    head = [f"| {' | '.join(_COLUMNS)} |", f"|{' --- |' * len(_COLUMNS)}"]
    table = "\n".join([f"With transformers {TRANSFORMERS}.", "", *head, *rows])
    return _BLOCK.sub(lambda block: f"{block[1]}\n{table}\n{block[2]}", page)


async def _row(name: str, template: str) -> str:
    forms, found = await differences(template)
    arguments = "text" if forms.arguments == "text" else "object"
    refused, placed = ([case for case, one in found.items() if one == which] for which in ("refused", "placed"))
    cells = (
        f"`{name}`",
        (arguments + (", or any text" if forms.takes_text_arguments and arguments == "object" else ""))
        if forms.shows_calls
        else "",
        "only" if not forms.roles_of_text else ", ".join(sorted(forms.roles_of_parts)),
        "shown" if forms.shows_tools else "left out",
        "shown" if forms.shows_calls else "left out",
        ", ".join(filter(None, (forms.thinking_switch, "reasoning_effort" if forms.knows_effort else ""))),
        f"{sum(outcome == 'equal' for outcome in found.values())} of {len(found) - len(refused) - len(placed)}",
        ", ".join(placed),
        ", ".join(refused),
    )
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    path = Path(sys.argv[1])
    if not real_templates():
        sys.exit("motet: there are no templates: run scripts/templates first")
    path.write_text(asyncio.run(made_page(path.read_text())))
