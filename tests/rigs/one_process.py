"""One router and one engine in one process, without Ray and Redis: `python -m motet.tests.rigs.one_process`.

For debuggers and profilers: a breakpoint anywhere from the route to the kernels stops it all. The demo's base and
adapters are served at that port, with the key `key-of-acme`. Uploads and quotas are stand-ins.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch
import uvicorn

from motet.router.text.text import TextService
from motet.tests.rigs.engine_dispatcher import EngineDispatcher, app_of
from motet.tests.rigs.engine_rig import Stock
from motet.tests.rigs.imports import ROOT

DEMO = ROOT / "examples" / "demo"


def main() -> None:
    torch.set_num_threads(1)
    adapters = {folder.name: folder for folder in sorted((DEMO / "adapters").iterdir())}
    with tempfile.TemporaryDirectory() as scratch:
        stock = Stock.make(DEMO / "base", adapters, Path(scratch) / "store", block_size=16)
        with stock.engine(num_pages=2000) as rig:
            app = app_of(EngineDispatcher(rig), stock, *adapters, text=TextService.from_folder(DEMO / "base"))
            uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]) if len(sys.argv) > 1 else 8123, lifespan="off")


if __name__ == "__main__":
    main()
