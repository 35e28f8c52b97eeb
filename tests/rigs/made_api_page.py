"""The tables of docs/api.md, made anew from the routes of the rig's app, which are all that a router has.

.venv/bin/python -m motet.tests.rigs.made_api_page docs/api.md
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from motet.adapters.administration.administration import Administration
from motet.adapters.registry.registry import connect
from motet.router.openapi.api_page import with_tables
from motet.router.openapi.document import openapi_document
from motet.tests.rigs.router_rig import RouterRig, text_service


def made_page(page: str, folder: Path) -> str:
    """The page as it should be. `folder`: an empty one."""
    administration = Administration.of(connect("redis://127.0.0.1:1"))  # nobody asks it anything
    rig = RouterRig(folder, text_service(), administration)
    return with_tables(page, openapi_document(rig.app.state.routes))


if __name__ == "__main__":
    path = Path(sys.argv[1])
    with tempfile.TemporaryDirectory() as folder:
        path.write_text(made_page(path.read_text(), Path(folder)))
