"""The tables of docs/api.md, made anew from the routes of the rig's app, which are all that a router has.

.venv/bin/python -m motet.tests.rigs.made_api_page docs/api.md
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from motet.router.openapi_document import openapi_document
from motet.tests.rigs.all_routes import rig_with_all_routes
from motet.tests.rigs.api_tables import with_tables
from motet.tests.rigs.router_rig import text_service


def made_page(page: str, folder: Path) -> str:
    """The page as it should be. `folder`: an empty one."""
    return with_tables(page, openapi_document(rig_with_all_routes(folder, text_service()).app.state.routes))


if __name__ == "__main__":
    path = Path(sys.argv[1])
    with tempfile.TemporaryDirectory() as folder:
        path.write_text(made_page(path.read_text(), Path(folder)))
